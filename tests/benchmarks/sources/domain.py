"""A 3 x 3 convolution of 64 channels, batch 32, split in space on V100s: milliseconds forward + backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.core.force import Parallelism
from tests.benchmarks.sources.figures import FigureRow, FigureTable

IMAGES, CHANNELS, FLOAT_BYTES, V100_FLOPS = 32, 64, 4, 15.7e12
NVLINK = Link(5e-6, 130e9)
REASON = (
    "autopar's prices let a product 64 wide reach 0.3 of the sheet's fp32 peak; there it reached 0.5 to 0.9"
)
PUBLISHED = {  # rows: milliseconds forward and backward on 1, 2 and 4 devices
    128: ((2.56, 6.63), (1.52, 3.50), (1.23, 2.33)),
    256: ((10.02, 26.81), (5.34, 11.79), (3.11, 6.96)),
    512: ((45.15, 126.11), (20.18, 60.15), (10.65, 26.76)),
}


def roofline(rows: int, devices: int) -> float:
    """Seconds of all three products of a step at the data sheet's peak of fp32, shared by the devices."""
    flops = 2 * IMAGES * CHANNELS**2 * 9 * rows**2
    return 3 * flops / V100_FLOPS / devices


def planned(rows: int, devices: int) -> float:
    """Seconds of a step of the plan that splits space."""
    with torch.device("meta"):
        model = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        x = torch.empty(IMAGES, CHANNELS, rows, rows, requires_grad=True)
    cluster = ClusterSpec(devices_per_node=devices, device="v100", memory="32GB", intra=NVLINK)
    force: dict[str, Any] = {"force": Parallelism.DOMAIN} if devices > 1 else {}
    plan = autopar.plan(
        model, cluster, (x,), loss_fn=lambda y: y.sum(), measure=False, optimizer="sgd", **force
    )
    return plan.step_seconds


def table() -> FigureTable:
    """All images on 1, 2 and 4 devices."""
    found = [
        FigureRow(
            f"{rows} x {rows} on {devices}",
            f"{1e3 * roofline(rows, devices):.2f} ms",
            f"{1e3 * planned(rows, devices):.2f} ms",
            f"{sum(published):.2f} ms",
            REASON,
        )
        for rows, each in PUBLISHED.items()
        for devices, published in zip((1, 2, 4), each, strict=True)
    ]
    return FigureTable.of("A convolution split in space, forward + backward", "by plan: the step", found)
