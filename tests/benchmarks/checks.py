"""What the checks before each program take: `python -m tests.benchmarks.checks`.

    guards of what was read, kinds of call, modes, children and hooks of modules, what ranks agree on

for 1,000 modules, with a number that changes at each call and without, and for the examples beside their
steps. To be read on a machine that does nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar.runtime.launch.launch import run_function
from autopar.trace.call.call_signature import find_loss, flatten_arguments
from autopar.trace.target import load_target

CALLS, STEPS, PROCESSES = 1000, 10, 2
MILLISECOND, SHARE = 1e-3, 0.005  # what 1,000 modules may take, and of the examples' steps
EXAMPLES = ("digits:digits", "characters:characters", "photographs:unet_crops")


@dataclass(frozen=True, slots=True)
class Figure:
    """Seconds that one thread computes for one call's checks, and for a step; waiting is not counted."""

    name: str
    modules: int
    checks: float  # median
    average: float  # with the comparisons among ranks
    step: float

    @property
    def is_met(self) -> bool:
        """Whether they keep to what they may take."""
        return self.checks <= MILLISECOND if self.modules == 1000 else self.checks <= SHARE * self.step


class Many(nn.Module):
    """1,000 modules, of which forward reads a rate."""

    rate: float

    def __init__(self) -> None:
        super().__init__()
        kinds = (nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout(0.1))
        self.layers = nn.Sequential(*(type(kind)(*_arguments(kind)) for _ in range(332) for kind in kinds))
        self.last, self.tanh, self.rate = nn.Linear(2, 2), nn.Tanh(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.tanh(self.last(self.layers(x))) * self.rate  # type: ignore[no-any-return]


def _arguments(kind: nn.Module) -> tuple[Any, ...]:
    return (2, 2) if isinstance(kind, nn.Linear) else (2,) if isinstance(kind, nn.LayerNorm) else (0.1,)


def many(*, changes: bool) -> Figure:
    """1,000 modules, whose rate changes at each call or stays."""
    model: Any = Many()
    x = torch.ones(4, 2)
    ours: Any = autopar.parallelize(
        model, autopar.ClusterSpec.local(PROCESSES), (x,), measure=False, force="batch", quiet=True
    )
    for rate in (1.0, 0.9, 0.8):
        ours.rate = rate  # the second one makes the rate an input of the program

    def change(number: int) -> None:
        if changes:
            ours.rate = 1 / (number + 2)

    for number in range(3):
        change(number)
        ours(x)
    name = "a number changes" if changes else "nothing changes"
    return _figure(name, ours, (x,), {}, change)


def example(name: str) -> Figure:
    """One of the examples, as it is planned by estimates."""
    file, _, function = name.partition(":")
    target = load_target(f"{Path(__file__).parents[2]}/examples/{file}.py:{function}")
    ours = autopar.parallelize(
        target.model,
        autopar.ClusterSpec.local(PROCESSES),
        target.args or target.kwargs,
        loss_fn=target.loss_fn,
        measure=False,
        quiet=True,
    )
    return _figure(file, ours, target.args, target.kwargs, lambda number: None)


def _figure(
    name: str, ours: Any, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[int], None]
) -> Figure:
    runner, checks, steps = ours._autopar, [], []
    for number in range(CALLS):
        change(number)
        start = time.thread_time()
        call = flatten_arguments(args, kwargs)
        runner._program(call, known=runner._agree(call))
        checks.append(time.thread_time() - start)
    for _ in range(STEPS):
        start = time.thread_time()
        output = ours(*args, **kwargs)
        loss = find_loss(output)
        (output.sum() if loss is None else loss).backward()
        steps.append(time.thread_time() - start)
    modules = sum(1 for _ in ours.modules())
    return Figure(name, modules, median(checks), mean(checks), median(steps))


def figures() -> list[Figure]:
    """All of them, on one rank."""
    torch.set_num_threads(1)
    return [many(changes=False), many(changes=True), *map(example, EXAMPLES)]


def main() -> None:
    """Print a table."""
    table = Table(
        *("model", "modules", "checks, ms (median)", "mean", "step, ms", "share", ""),
        title="Checks before a call",
    )
    for item in run_function(figures, PROCESSES)[0]:
        table.add_row(
            item.name,
            str(item.modules),
            f"{1e3 * item.checks:.3f}",
            f"{1e3 * item.average:.3f}",
            f"{1e3 * item.step:.1f}",
            f"{item.checks / item.step:.2%}",
            "met" if item.is_met else "missed",
        )
    Console().print(table)


if __name__ == "__main__":
    from tests.benchmarks.checks import main as imported  # ranks know it by its module

    imported()
