"""What `tests.benchmarks.joint` trains: nets of the VGG family whose last blocks are deep, on square images.

Few convolutions on large images do about as much as many on small ones. Random images: only times and the
serial losses count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
Target = tuple[nn.Module, tuple[Tensor, Tensor], Callable[[Tensor, Tensor], Tensor]]


def vgg(blocks: Sequence[Sequence[int]], *, side: int, hidden: int) -> nn.Sequential:
    """A net for images [n, 3, side, side]; each block, given by its convolutions' channels, ends in a pool
    that halves them, and a layer of `hidden` features comes before the last."""
    layers: list[nn.Module] = []
    channels = 3
    for block in blocks:
        for width in block:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    features = channels * (side >> len(blocks)) ** 2
    layers += [nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)]
    return nn.Sequential(*layers)


def _target(model: nn.Module, *, side: int, batch: int) -> Target:
    return model, (torch.randn(batch, 3, side, side), torch.arange(batch) % CLASSES), F.cross_entropy


def narrow() -> Target:
    """4 images of 128 x 128; 32 channels, then 16 convolutions of 64 on 16 to 4 pixels."""
    blocks = [[32] * 2, [32] * 2, [32] * 2, [64] * 4, [64] * 6, [64] * 6]
    return _target(vgg(blocks, side=128, hidden=512), side=128, batch=4)


def wide() -> Target:
    """4 images of 64 x 64; 16 of 22 convolutions have 128 channels, on 8 and 4 pixels."""
    blocks = [[32] * 2, [64] * 2, [128] * 2, [128] * 8, [128] * 8]
    return _target(vgg(blocks, side=64, hidden=512), side=64, batch=4)


def deep_224() -> Target:
    """32 images of 224 x 224, without values; 16 of 24 convolutions on 28 and 14 pixels."""
    with torch.device("meta"):
        blocks = [[64] * 2, [128] * 2, [256] * 4, [256] * 8, [256] * 8]
        return _target(vgg(blocks, side=224, hidden=1024), side=224, batch=32)


def deep_512() -> Target:
    """8 images of 512 x 512, without values; the convolutions of `deep_224`."""
    with torch.device("meta"):
        blocks = [[64] * 2, [128] * 2, [256] * 4, [256] * 8, [256] * 8]
        return _target(vgg(blocks, side=512, hidden=1024), side=512, batch=8)


def vgg_16() -> Target:
    """32 images of 224 x 224, without values: the convolutions of Simonyan and Zisserman, 2015."""
    with torch.device("meta"):
        blocks = [[64] * 2, [128] * 2, [256] * 3, [512] * 3, [512] * 3]
        return _target(vgg(blocks, side=224, hidden=4096), side=224, batch=32)
