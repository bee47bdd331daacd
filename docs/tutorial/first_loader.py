"""The same slow dataset through torch's loader and through minato."""

import time

import torch
from torch.utils.data import Dataset

import minato


class MostlyFast(Dataset):
    def __len__(self):
        return 1600

    def __getitem__(self, index):
        time.sleep(0.25 if index % 100 == 0 else 0.001)
        return torch.tensor(index)


def epoch(name, loader):
    torch.manual_seed(0)  # the same order for each loader
    start_s = time.perf_counter()
    seen = {int(index) for batch in loader for index in batch}
    print(f"{name:<22} {time.perf_counter() - start_s:5.2f} s, {len(seen)} samples")


if __name__ == "__main__":
    data = MostlyFast()
    common = {"batch_size": 4, "num_workers": 4, "shuffle": True}
    epoch("torch", torch.utils.data.DataLoader(data, **common))
    epoch("torch, as they come", torch.utils.data.DataLoader(data, **common, in_order=False))
    epoch("minato", minato.DataLoader(data, **common))
    epoch("minato, as they come", minato.DataLoader(data, **common, in_order=False))
