"""Memory of ResNet-50 in half precision at batch 256, on one device.

By formula, 2 bytes for each number that training keeps: the inputs of all convolutions, norms, linear layers
and pools, each once. By plan, the predicted peak, and what of it isn't parameters, gradients or state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.results.plan.plan import Plan
from autopar.units import show_bytes
from tests.benchmarks.sources.figures import FigureRow, FigureTable
from tests.benchmarks.sources.nets import on_meta, resnet50

HALF_BATCH = 256
HALF_BYTES = 2


def saved_numbers() -> int:
    """Numbers that the backward pass of one sample reads: inputs of convolutions, norms and linear layers."""
    model, x = on_meta(resnet50, 1)
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def hook(module: nn.Module, args: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        alive.append(args[0])  # an id is one tensor's while that lives
        kept[id(args[0])] = args[0].numel()

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear | nn.MaxPool2d):
            module.register_forward_hook(hook)
    model(x)
    return sum(kept.values())


def planned() -> Plan:
    """The plan on one V100 of any memory, with momentum."""
    model, x = on_meta(resnet50, HALF_BATCH, torch.float16)
    labels = torch.empty(HALF_BATCH, dtype=torch.long, device="meta")
    cluster = ClusterSpec(devices_per_node=1, device="v100", memory="1TB")
    return autopar.plan(
        model, cluster, (x, labels), loss_fn=F.cross_entropy, measure=False, optimizer="sgd-momentum"
    )


def table() -> FigureTable:
    """The peak, and activations of it."""
    plan, formula = planned(), HALF_BYTES * HALF_BATCH * saved_numbers()
    rows = (
        FigureRow(
            "peak",
            "",
            show_bytes(plan.peak_bytes),
            "15 GB",
            "the plan counts tensors alone: no workspaces of kernels, nor what an allocator holds",
        ),
        FigureRow(
            "saved activations",
            show_bytes(formula),
            show_bytes(plan.peak_bytes - plan.state_bytes),
            "12 GB",
            "by plan all but parameters, gradients and momentum at the fullest moment; what the published "
            "ones count isn't known here",
        ),
    )
    return FigureTable.of(f"ResNet-50, fp16, batch {HALF_BATCH}, one device", "by plan", rows)
