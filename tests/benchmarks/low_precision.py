"""Losses in bfloat16 beside those of serial reruns whose sums run in another order.

    python -m tests.benchmarks.low_precision                 all examples, a minute
    python -m tests.benchmarks.low_precision digits          one of them

Each example, narrower than it is, trains 20 steps of SGD in bfloat16: serially, in six reruns whose sums
run in another order (`autopar.proof.sum_order`), and by plans of each kind on two simulated ranks. Shown is
how far a loss is from the serial one at most, relative to that; so the last column is about 1 where a plan
does no more than another order of sums. `autopar verify TARGET --dtype bf16 --steps 20` shows it of one plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism
from autopar.core.outputs import Outputs
from autopar.core.precision import Precision
from autopar.core.schedule import ScheduleKind
from autopar.planning.asked.request import Request
from autopar.planning.search import search
from autopar.proof.low_precision import (
    Graphs,
    LowPrecision,
    pipeline_in_low_precision,
    program_in_low_precision,
)
from autopar.proof.processes import trace_lengths
from autopar.trace.export import trace
from autopar.trace.target import Target
from examples import characters, digits, photographs

STEPS, MICRO_BATCHES = 20, 4
CLUSTER = ClusterSpec.local(2)
KINDS: Mapping[str, Mapping[str, Any]] = {
    "batch": {"force": Parallelism.BATCH},
    "domain": {"force": Parallelism.DOMAIN},
    "filter": {"force": Parallelism.FILTER},
    "2 stages": {"stages": 2},
    f"2 stages, {MICRO_BATCHES} micro-batches": {"stages": 2, "micro_batches": MICRO_BATCHES},
}


def _digits() -> Target:
    return Target(digits.vgg(width=16, hidden=256), next(digits.batches(32)), {}, F.cross_entropy, "")


def _photographs() -> Target:
    return Target(photographs.unet(8, 2), (), photographs.noisy(photographs.crops(48, 64)), None, "")


def _characters() -> Target:
    vocabulary = len(set(characters.text()))
    model = characters.gpt(2, 64, 4, vocabulary=vocabulary, sequence=64)
    return Target(model, next(characters.batches(8, 64)), {}, None, "")


EXAMPLES: Mapping[str, Callable[[], Target]] = {
    "digits": _digits,
    "photographs": _photographs,
    "characters": _characters,
}


@dataclass(frozen=True, slots=True)
class Row:
    """What was compared of one plan."""

    example: str
    kind: str
    low: LowPrecision

    @property
    def cells(self) -> tuple[str, ...]:
        loss, spread = self.low.loss, self.low.spread
        assert loss is not None and spread is not None
        return self.example, self.kind, f"{loss:.1e}", f"{spread:.1e}", f"{loss / spread:.2f}"


def rows(example: str, steps: int = STEPS) -> Iterator[Row]:
    """One for each kind of plan, all from the same weights."""
    for kind, options in KINDS.items():
        request = Request(
            dtype=Precision.BF16,
            measure=False,
            alternatives=False,
            schedule=ScheduleKind.GPIPE,
            outputs=Outputs.GLOBAL,
            **options,
        )
        torch.manual_seed(0)
        low = _compared(EXAMPLES[example](), request, steps)
        assert low is not None
        yield Row(example, kind, low)


def _compared(target: Target, request: Request, steps: int) -> LowPrecision | None:
    autocast = request.autocast(CLUSTER)
    if request.pipeline_ranks == 1:
        traced = trace(target.model, target.args, target.kwargs, loss_fn=target.loss_fn, autocast=autocast)
        plan = search(traced.graph, CLUSTER, request).plan
        return program_in_low_precision(target, traced, plan, autocast, steps=steps)
    whole, _ = trace_lengths(target, 1, request, autocast)
    graphs = Graphs(whole, *trace_lengths(target, request.micro_batches, request, autocast))
    plan = search(graphs.first.graph, CLUSTER, request).plan
    return pipeline_in_low_precision(target, graphs, plan, autocast, steps=steps)


def main(names: list[str]) -> None:
    """Print the table of the examples that are named, or of all."""
    torch.set_num_threads(1)
    table = Table("example", "plan", "losses differ by", "reruns by", "ratio")
    for example in names or EXAMPLES:
        for row in rows(example):
            print("   ".join(row.cells), flush=True)
            table.add_row(*row.cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
