"""The same slow dataset through torch's loader and through minato."""

import time

import torch
from torch.utils.data import Dataset

import minato


class MostlyFast(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.2 if index % 50 == 0 else 0.001)
        return torch.tensor(index)


def epoch(name, loader):
    seen, longest_s = set(), 0.0
    start_s = asked_s = time.perf_counter()
    for batch in loader:
        longest_s = max(longest_s, time.perf_counter() - asked_s)
        seen.update(batch.tolist())
        asked_s = time.perf_counter()
    took_s = time.perf_counter() - start_s
    print(f"{name:<19} {took_s:5.2f} s, longest wait {longest_s:5.2f} s, {len(seen)} samples")


if __name__ == "__main__":
    data = MostlyFast()
    common = {"batch_size": 8, "num_workers": 2, "shuffle": True}
    epoch("torch", torch.utils.data.DataLoader(data, **common))
    epoch("minato, in order", minato.DataLoader(data, **common))
    epoch("minato, as they come", minato.DataLoader(data, **common, in_order=False))
