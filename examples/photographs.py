"""Photographs restored by a U-Net: noise is taken out of scikit-learn's two sample photographs.

    image ─ block ─────────────────── skip ─────────────────── cat ─ block ─ 1x1 ─ + image
              └ stride 2 ─ block ────── skip ────── cat ─ block ┘ transposed
                             └ stride 2 ─ ... ─ block ┘ transposed

The photographs are 427 x 640, so a level may have an odd number of rows: a transposed
convolution is told which size it inverts (427 -> 214 -> 427).

    python examples/photographs.py
    autopar plan examples/photographs.py:unet_full --cluster local:4
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, repeat

import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

NOISE = 0.1  # standard deviation, of a pixel range of 0 to 1
SEED = 0
WIDTH = 16
LEVELS = 3


@dataclass
class Restoration:
    """What a training step gives: the images and their mean squared error."""

    restored: Tensor
    loss: Tensor


torch.export.register_dataclass(Restoration)


class Block(nn.Sequential):
    """Two convolutions, each with batch norm and ReLU."""

    def __init__(self, channels_in: int, channels: int) -> None:
        layers: list[nn.Module] = []
        for size in (channels_in, channels):
            layers += [
                nn.Conv2d(size, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """`levels` halvings of the image, with `width` channels at full size and twice as many per level."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        channels = [width << level for level in range(levels + 1)]
        steps = list(pairwise(channels))
        self.first = Block(3, width)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in steps)
        self.encode = nn.ModuleList(Block(b, b) for _, b in steps)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 3, stride=2, padding=1) for a, b in reversed(steps))
        self.decode = nn.ModuleList(Block(2 * a, a) for a, _ in reversed(steps))
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, image: Tensor, target: Tensor | None = None) -> Tensor | Restoration:
        """Restore [n, 3, h, w]; with a `target` of the same shape, also give the loss."""
        maps = [self.first(image)]
        for down, encode in zip(self.down, self.encode, strict=True):
            maps.append(encode(down(maps[-1])))
        x = maps.pop()
        for up, decode in zip(self.up, self.decode, strict=True):
            skip = maps.pop()
            x = decode(torch.cat([up(x, output_size=skip.shape[-2:]), skip], dim=1))
        restored = image + self.last(x)
        return restored if target is None else Restoration(restored, F.mse_loss(restored, target))


def unet(width: int = WIDTH, levels: int = LEVELS) -> UNet:
    """A freshly initialised U-Net."""
    return UNet(width, levels)


def photographs() -> Tensor:
    """Both photographs, [2, 3, 427, 640], from 0 to 1."""
    images = torch.stack([torch.tensor(image) for image in load_sample_images().images])
    return images.permute(0, 3, 1, 2).float() / 255


def crops(height: int = 107, width: int = 160) -> Tensor:
    """Four neighbouring crops from the middle of each photograph, [8, 3, height, width]."""
    images = photographs()
    top, left = images.shape[2] // 2 - height, images.shape[3] // 2 - width
    middle = images[:, :, top : top + 2 * height, left : left + 2 * width]
    quarters: Tensor = middle.unflatten(2, (2, height)).unflatten(4, (2, width))
    return quarters.permute(0, 2, 4, 1, 3, 5).flatten(0, 2).contiguous()


def noisy(clean: Tensor) -> dict[str, Tensor]:
    """The model's inputs: the images with noise, always the same, and the clean ones."""
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(SEED))
    return {"image": clean + NOISE * noise, "target": clean}


def unet_full() -> tuple[UNet, dict[str, Tensor]]:
    """TARGET: both photographs at full size."""
    return unet(), noisy(photographs())


def unet_crops() -> tuple[UNet, dict[str, Tensor]]:
    """TARGET: eight crops of 107 x 160."""
    return unet(), noisy(crops())


def batches() -> Iterator[dict[str, Tensor]]:
    """Both photographs, over and over."""
    return repeat(noisy(photographs()))


if __name__ == "__main__":
    from train import Task, main

    sys.exit(main(__file__, Task(unet, batches, num_steps=6, rate=0.05, tolerance=1e-4)))
