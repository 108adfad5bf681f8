"""Handwritten digits read by a VGG-like net: cheap convolutions, then large fully connected layers.

Most of the work lies in the convolutions, most of the weights in the fully connected layers: the
first wants its batch split, the second its weights.

    python examples/digits.py
    autopar plan examples/digits.py:digits --cluster local:4
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

NUM_CLASSES = 10
BATCH = 256
SEED = 0


def convolutions(channels_in: int, channels: int) -> list[nn.Module]:
    """Two convolutions with batch norm and ReLU, then a pool that halves the image."""
    layers: list[nn.Module] = []
    for size in (channels_in, channels):
        layers += [nn.Conv2d(size, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return [*layers, nn.MaxPool2d(2)]


def vgg(*, side: int = 8, channels: int = 1, width: int = 64, hidden: int = 2048) -> nn.Sequential:
    """A net for square images of `side` pixels; its first fully connected layer has
    2 width (side / 4)^2 inputs."""
    return nn.Sequential(
        *convolutions(channels, width),
        *convolutions(width, 2 * width),
        nn.Flatten(),
        nn.Linear(2 * width * (side // 4) ** 2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, NUM_CLASSES),
    )


def batches(size: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Images [size, 1, 8, 8] from 0 to 1 and labels [size], without end and always in the same order."""
    data = load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(data.target)
    generator = torch.Generator().manual_seed(SEED)
    while True:
        order = torch.randperm(len(labels), generator=generator)
        for chosen in order.split(size)[: len(labels) // size]:
            yield images[chosen], labels[chosen]


def digits() -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """TARGET: 256 digits; the loss is outside the model."""
    return vgg(), next(batches()), F.cross_entropy


if __name__ == "__main__":
    from train import Task, main

    task = Task(vgg, batches, num_steps=10, rate=0.01, tolerance=1e-4, loss_fn=F.cross_entropy)
    sys.exit(main(__file__, task))
