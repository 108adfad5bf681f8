"""The nets of the sources, in plain torch, and the sizes of their layers.

alexnet     Krizhevsky et al., 2012, as one column: 61 million parameters
vgg16       Simonyan and Zisserman, 2014: 138 million parameters
resnet50    He et al., 2016: 25.6 million parameters
volume_net  five 3-D convolutions and three linear layers, in the manner of CosmoFlow (Mathuriya et al.,
            2018); its sizes are ours
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.benchmarks.wide_resnet import wide_resnet

CLASSES = 1000


@dataclass(frozen=True, slots=True)
class NetLayer:
    """Elements of one sample's input and output, of the weight, and of a halo along the first space dim.

    `inputs` and `outputs` are channels or features, `positions` the places of the output, 1 of a linear
    layer, `rows` those along its first space dim. `flops` are those of one sample forward.
    """

    name: str
    x: int
    y: int
    w: int
    inputs: int
    outputs: int
    positions: int
    rows: int
    halo_x: int
    halo_y: int
    flops: int

    @property
    def is_windowed(self) -> bool:
        """Whether it is a convolution."""
        return self.positions > 1


def alexnet() -> nn.Module:
    """Images of 227 x 227."""
    sizes = (
        (3, 96, 11, 4, 0),
        (96, 256, 5, 1, 2),
        (256, 384, 3, 1, 1),
        (384, 384, 3, 1, 1),
        (384, 256, 3, 1, 1),
    )
    layers: list[nn.Module] = []
    for place, (inputs, outputs, kernel, stride, padding) in enumerate(sizes):
        layers += [nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU()]
        layers += [nn.MaxPool2d(3, 2)] if place in (0, 1, 4) else []
    return nn.Sequential(*layers, nn.Flatten(), *head(256 * 6 * 6))


def vgg16() -> nn.Module:
    """Images of 224 x 224."""
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), *head(512 * 7 * 7))


def head(features: int) -> list[nn.Module]:
    """Three linear layers, the last one of classes."""
    return [
        nn.Linear(features, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, CLASSES),
    ]


def resnet50() -> nn.Module:
    """Images of 224 x 224."""
    return wide_resnet(base=64, factor=1, classes=CLASSES)


def volume_net() -> nn.Module:
    """Volumes of 4 x 128 x 128 x 128 to four numbers."""
    layers: list[nn.Module] = []
    channels = 4
    for width in (16, 32, 64, 128, 256):
        layers += [nn.Conv3d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2)]
        channels = width
    tail = [nn.Linear(256 * 4**3, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4)]
    return nn.Sequential(*layers, nn.Flatten(), *tail)


INPUTS: Mapping[Callable[[], nn.Module], tuple[int, ...]] = {
    alexnet: (3, 227, 227),
    vgg16: (3, 224, 224),
    resnet50: (3, 224, 224),
    volume_net: (4, 128, 128, 128),
}


def on_meta(
    make: Callable[[], nn.Module], batch: int, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Tensor]:
    """A net and a batch of its inputs, without memory."""
    with torch.device("meta"):
        return make().to(dtype), torch.empty(batch, *INPUTS[make], dtype=dtype)


def layers_of(make: Callable[[], nn.Module]) -> tuple[NetLayer, ...]:
    """The convolutions and linear layers of a net, in the order in which they run."""
    model, x = on_meta(make, 1)
    found: list[NetLayer] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d | nn.Linear):
            module.register_forward_hook(
                lambda module, args, y, name=name: found.append(layer_of(name, module, args[0], y))
            )
    model(x)
    return tuple(found)


def layer_of(name: str, module: nn.Module, x: Tensor, y: Tensor) -> NetLayer:
    """Sizes of one layer, of one sample. A halo is half a kernel's rows, floor(k/2), of each side."""
    weight = module.get_parameter("weight")
    rows = weight.shape[2] // 2 if weight.ndim > 2 else 0
    return NetLayer(
        name=name,
        x=x.numel(),
        y=y.numel(),
        w=weight.numel(),
        inputs=weight.shape[1],
        outputs=weight.shape[0],
        positions=math.prod(y.shape[2:]),
        rows=y.shape[2] if y.ndim > 2 else 1,
        halo_x=rows * x.numel() // x.shape[2] if rows else 0,
        halo_y=rows * y.numel() // y.shape[2] if rows else 0,
        flops=2 * weight.numel() * math.prod(y.shape[2:]),
    )
