"""A small 3D U-Net, its training step, and how well it segments the held-out box."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo.data import BACKGROUND, CLASS_NAMES, Sample, Volume


def _convolutions(*channels: int) -> nn.Sequential:
    """One 3x3x3 convolution with normalisation between each two neighbours of ``channels``."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        layers += [
            nn.Conv3d(inputs, outputs, 3, padding=1, bias=False),
            # A slow average: four patches are a poor sample of the brain's statistics.
            nn.BatchNorm3d(outputs, momentum=0.03),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Three levels, ``width`` channels at the top; input edges must be multiples of 4."""

    def __init__(self, width: int = 8, classes: int = len(CLASS_NAMES)) -> None:
        super().__init__()
        self.down = nn.MaxPool3d(2)
        self.top = _convolutions(1, width)
        self.middle = _convolutions(width, 2 * width, 2 * width)
        self.bottom = _convolutions(2 * width, 4 * width, 4 * width)
        self.up_middle = nn.ConvTranspose3d(4 * width, 2 * width, 2, stride=2)
        self.join_middle = _convolutions(4 * width, 2 * width, 2 * width)
        self.up_top = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.join_top = _convolutions(2 * width, width)
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Class scores ``(N, classes, D, H, W)`` of images ``(N, 1, D, H, W)``."""
        top = self.top(image)
        middle = self.middle(self.down(top))
        bottom = self.bottom(self.down(middle))
        middle = self.join_middle(torch.cat([self.up_middle(bottom), middle], 1))
        top = self.join_top(torch.cat([self.up_top(middle), top], 1))
        scores: Tensor = self.head(top)
        return scores


class Trainer:
    """A model with its optimiser and learning-rate schedule; a step trains it on one core.

    Args:
        seed: The same seed gives the same initial weights.
        num_steps: Length of the schedule.
    """

    cores = 1

    def __init__(self, seed: int, num_steps: int) -> None:
        torch.manual_seed(seed)
        # Channels last: about a third less time per step on a CPU.
        self.model = UNet()
        self.model.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimiser, max_lr=1e-2, total_steps=num_steps
        )

    def step(self, image: Tensor, label: Tensor) -> float:
        """Train on one batch, ``(N, D, H, W)`` each, and return the loss."""
        self.model.train()
        self.optimiser.zero_grad()
        loss = functional.cross_entropy(self.model(image.unsqueeze(1)), label.long())
        loss.backward()
        self.optimiser.step()
        self.schedule.step()
        return loss.item()

    def __call__(self, batch: Sample) -> float:
        """Train on one collated batch; returns the processor time of the step, in seconds."""
        begun_s = time.thread_time()
        self.step(torch.as_tensor(batch.image), torch.as_tensor(batch.label))
        return time.thread_time() - begun_s

    def mean_dice(self, held_out: Volume) -> float:
        """Dice score on a whole volume, averaged over grey and white matter; 1 is perfect."""
        self.model.eval()
        with torch.inference_mode():
            image = torch.from_numpy(held_out.image.copy())
            guess = self.model(image[None, None]).argmax(1)[0]
        truth = torch.from_numpy(held_out.label.copy())
        scores: list[float] = []
        for tissue in range(len(CLASS_NAMES)):
            if tissue == BACKGROUND:
                continue
            found, there = guess == tissue, truth == tissue
            overlap = int((found & there).sum())
            scores.append(2 * overlap / max(1, int(found.sum()) + int(there.sum())))
        return sum(scores) / len(scores)


def warm_up(samples: Sequence[Sample]) -> None:
    """Pay the one-time costs of a step now, or the first run alone would pay them."""
    image = torch.stack([torch.from_numpy(sample.image) for sample in samples])
    label = torch.stack([torch.from_numpy(sample.label) for sample in samples])
    trainer = Trainer(seed=0, num_steps=3)
    for _ in range(3):
        trainer.step(image, label)
