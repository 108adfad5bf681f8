"""A net whose state is ten times a device's memory: `python -m tests.benchmarks.out_of_core`.

Linear layers in float64 train by AdamW on one process, their weights, gradients and optimizer state in a part
of memory that stands for the host's. Printed are the most bytes on the device and the seconds of a step, as
the plan predicts them and as they are measured, and how far losses and weights are from the serial model's.
Seconds are medians of steps of both, in turns.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar.comparing.measured_peak import peak_bytes
from autopar.runtime.launch.launch import run_function
from autopar.units import show_bytes, show_seconds
from tests.deep_net import Deep

WIDTH, LAYERS, BATCH = 512, 48, 16
STEPS = 10
TIMES = 10  # the state in caps


def stepping(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """A function that takes a step of a model by an AdamW of its own, and gives the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def seconds_of(step: Callable[[], Tensor]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    loss = step()
    return time.perf_counter() - start, loss


def main() -> None:
    """Train both models, and print what was predicted and measured."""
    torch.manual_seed(0)
    serial = Deep(LAYERS, WIDTH).double()
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    state = 4 * sum(item.nbytes for item in serial.parameters())
    cap = state // TIMES
    ours = autopar.parallelize(
        copy.deepcopy(serial), autopar.ClusterSpec.local(1), (x,), offload="state", memory=cap, quiet=True
    )
    sides = [stepping(serial, x), stepping(ours, x)]
    turns = [[seconds_of(side) for side in sides] for _ in range(STEPS)]
    peak = peak_bytes(sides[1], [x], x.device)
    sides[0]()
    plain, spent = (median(turn[side][0] for turn in turns[2:]) for side in (0, 1))
    losses = max(float((one - other).abs()) for (_, one), (_, other) in turns)
    pairs = zip(serial.parameters(), ours.parameters(), strict=True)
    weights = max(float((one - other).detach().abs().max()) for one, other in pairs)
    plan = ours.plan
    table = Table("", "predicted", "measured")
    table.add_row("cap, state", show_bytes(cap), show_bytes(state))
    table.add_row("peak on the device", show_bytes(plan.peak_bytes), show_bytes(peak))
    table.add_row("a step", show_seconds(plan.step_seconds), show_seconds(spent))
    table.add_row("copies of it", show_seconds(plan.offload_seconds), "")
    table.add_row("a step of the serial model", "", show_seconds(plain))
    table.add_row(f"gap of {STEPS + 1} steps: loss, weights", "", f"{losses:.1e}, {weights:.1e}")
    Console().print(table)


if __name__ == "__main__":
    from tests.benchmarks import out_of_core  # by its name, under which functions pickle

    run_function(out_of_core.main, 1)
