"""Load with processes of joblib's context, which has a pickler of its own: it sends what this module defines."""

from __future__ import annotations

from joblib.externals.loky.backend.context import get_context
from torch.utils.data import Dataset

from minato import DataLoader


class Own(Dataset[int]):
    """``dataset[i]`` is i."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


if __name__ == "__main__":
    loader = DataLoader(Own(), 3, num_workers=1, multiprocessing_context=get_context("loky"))
    print(*[batch.tolist() for batch in loader])
