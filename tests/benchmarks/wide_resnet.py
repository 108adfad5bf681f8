"""A ResNet of bottleneck blocks with widened channels, in plain torch.

    base 640, factor 2    6.7 billion parameters: the size planned for 32 GPUs by Zheng et al., Alpa, 2022

Source: Zagoruyko and Komodakis, Wide residual networks, 2016; He et al., Deep residual learning, 2016.
"""

from __future__ import annotations

from torch import Tensor, nn

EXPANSION = 4  # channels that leave a block of width 1, by those inside it
DEPTHS = (3, 4, 6, 3)  # blocks of each stage: with the first and the last layer 50


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions around a residual; the 3 x 3 one has the stride."""

    def __init__(self, channels: int, planes: int, *, factor: int, stride: int) -> None:
        super().__init__()
        width, out = planes * factor, planes * EXPANSION
        self.first = nn.Conv2d(channels, width, 1, bias=False)
        self.norm_first = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm_second = nn.BatchNorm2d(width)
        self.third = nn.Conv2d(width, out, 1, bias=False)
        self.norm_third = nn.BatchNorm2d(out)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm_first(self.first(x)))
        h = self.relu(self.norm_second(self.second(h)))
        out: Tensor = self.relu(self.norm_third(self.third(h)) + self.shortcut(x))
        return out


def wide_resnet(*, base: int, factor: int, classes: int = 1024) -> nn.Sequential:
    """50 layers; the planes of a stage are `base`, 2 `base`, 4 `base`, 8 `base`, inner widths `factor` times
    that. Takes images [n, 3, h, w] to logits [n, classes]."""
    blocks: list[nn.Module] = []
    channels = base
    for stage, depth in enumerate(DEPTHS):
        planes = base << stage
        for block in range(depth):
            stride = 2 if stage and not block else 1
            blocks.append(Bottleneck(channels, planes, factor=factor, stride=stride))
            channels = planes * EXPANSION
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, base, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(base)),
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )
