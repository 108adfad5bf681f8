"""How long planning takes, and how near to the best a plan is proved to be.

python -m tests.benchmarks.planning                      all five, some minutes
python -m tests.benchmarks.planning node gpt3            those whose name starts so

Models stand on the meta device, clusters on paper: nothing is run. Seconds are of one process; those of
a phase leave out the phases inside it. Of a plan with stages the programs of the first, the middle and the
last rank are written, and the bytes of their parameters are those that the plan says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Annotated, Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.errors import CheckError, InfeasibleError
from autopar.planning.asked.request import Request
from autopar.planning.planner import Planner
from autopar.results.plan.plan import Plan
from autopar.rewrite.build import build_stages
from autopar.units import show_bytes, show_seconds
from examples.characters import gpt
from tests.benchmarks.wide_resnet import wide_resnet
from tests.planning.weight_bytes import weight_bytes

PHASES = {  # the functions in which each phase happens, as their callers name them
    "trace": ("autopar.planning.planner.trace",),
    "price": ("autopar.planning.assignment_problem.build_space",),
    "write": ("autopar.solve.program.problem.Problem.__init__",),
    "solve": ("autopar.solve.assignment.search.solve", "autopar.solve.assignment.symmetry.solve"),
    "cut": ("autopar.planning.staged_step.staged",),
}
REST = "rest"
INTRA, INTER = Link(2e-6, 450e9), Link(5e-6, 50e9)
AUTO = {"stages": "auto", "micro_batches": "auto", "schedule": "auto"}


@dataclass(frozen=True, slots=True)
class Planning:
    """A model with its global batch, and the options of `autopar.plan`; `limit` is in seconds."""

    name: str
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...], Any]]
    cluster: ClusterSpec
    options: Mapping[str, Any]
    limit: float
    gap: float


@dataclass(slots=True)
class Stopwatch:
    """Wall and processor seconds of phases."""

    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    since: tuple[float, float] = (0.0, 0.0)

    def lap(self) -> None:
        """Count the seconds since the last lap for the innermost phase."""
        now = time.perf_counter(), time.process_time()
        if self.stack:
            name = self.stack[-1]
            self.wall[name] = self.wall.get(name, 0.0) + now[0] - self.since[0]
            self.cpu[name] = self.cpu.get(name, 0.0) + now[1] - self.since[1]
        self.since = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.lap()
        self.stack.append(name)
        try:
            yield
        finally:
            self.lap()
            self.stack.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return run

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the functions of `PHASES` wherever they are called."""
        with ExitStack() as patches:
            for name, places in PHASES.items():
                for place in places:
                    original = _find(place)
                    patches.enter_context(patch(place, self.timed(name, original)))
            with self.phase(REST):
                yield


def _find(place: str) -> Callable[..., Any]:
    found, _ = patch(place).get_original()
    return found  # type: ignore[no-any-return]


def transformer(
    blocks: int, hidden: int, heads: int, *, batch: int, sequence: int
) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    with torch.device("meta"):
        model = gpt(blocks, hidden, heads, vocabulary=50257, sequence=sequence)
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
    return model, (tokens, tokens), None


def megatron(blocks: int) -> dict[str, tuple[str, str]]:
    """Pins of data parallelism on the major axis and tensor parallelism on the minor one, by layer."""
    layers = {"attention.qkv": "o.1", "attention.project": "i", "mlp.0": "o", "mlp.2": "i"}
    return {
        f"blocks.{block}.{layer}": ("n0", factor)
        for block in range(blocks)
        for layer, factor in layers.items()
    }


def images(batch: int) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    with torch.device("meta"):
        model = wide_resnet(base=640, factor=2)
        x, labels = torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
    return model, (x, labels), F.cross_entropy


def cluster(nodes: int, devices: int, device: str = "h100", memory: str = "80GB") -> ClusterSpec:
    return ClusterSpec(
        nodes=nodes, devices_per_node=devices, device=device, memory=memory, intra=INTRA, inter=INTER
    )


PLANNINGS = (
    Planning(
        "two-nodes",
        partial(transformer, 4, 1024, 16, batch=8, sequence=1024),
        cluster(2, 4),
        {"mesh": "2x2x2", "stages": 1, "micro_batches": 1},
        limit=30,
        gap=0.01,
    ),
    Planning(
        "64-devices",
        partial(transformer, 24, 2048, 16, batch=512, sequence=1024),
        cluster(8, 8),
        AUTO,
        limit=20,
        gap=0.02,
    ),
    Planning(
        "gpt3",
        partial(transformer, 96, 12288, 96, batch=1536, sequence=2048),
        cluster(128, 8),
        AUTO,
        limit=120,
        gap=0.02,
    ),
    Planning(
        "pinned gpt3",
        partial(transformer, 96, 12288, 96, batch=1536, sequence=2048),
        cluster(128, 8),
        {**AUTO, "mesh": "8x8", "stages": 16, "force": megatron(96)},
        limit=120,
        gap=1.0,
    ),
    Planning(
        "wide-resnet",
        partial(images, 1536),
        cluster(4, 8, device="v100", memory="32GB"),
        AUTO,
        limit=120,
        gap=0.02,
    ),
)


def measure(planning: Planning) -> tuple[Stopwatch, Plan | InfeasibleError]:
    """Plan once; a refusal for want of memory is an answer too."""
    model, inputs, loss_fn = planning.make()
    watch = Stopwatch()
    with watch.watching():
        try:
            found = autopar.plan(model, planning.cluster, inputs, loss_fn=loss_fn, **planning.options)
        except InfeasibleError as error:
            return watch, error
    check_programs(planning, found)
    return watch, found


def check_programs(planning: Planning, plan: Plan) -> None:
    """Write the programs of three ranks; raises CheckError if their parameters are not the plan's."""
    pipeline = plan.pipeline
    if not pipeline.is_staged:
        return
    model, inputs, loss_fn = planning.make()
    planner = Planner(planning.cluster, Request(micro_batches=pipeline.micro_batches), loss_fn)
    traced = planner.trace_part(model, inputs, {}, pipeline.micro_batches, staged=True)
    last = len(plan.parameter_bytes) - 1
    for rank in (0, last // 2, last):
        nbytes = weight_bytes(build_stages(traced, plan, rank=rank, exact_random=False).stages)
        if nbytes != plan.parameter_bytes[rank]:
            raise CheckError(
                where=f"parameters of rank {rank}",
                found=f"{nbytes} bytes",
                wanted=f"{plan.parameter_bytes[rank]} bytes, as planned",
                remedy="report this model",
            )


def main(
    names: Annotated[list[str] | None, typer.Argument(help="plannings whose names start so")] = None,
) -> None:
    """Plan large models for large clusters and print what that takes."""
    chosen = [item for item in PLANNINGS if not names or any(item.name.startswith(name) for name in names)]
    if not chosen:
        raise typer.BadParameter(f"plannings: {', '.join(item.name for item in PLANNINGS)}")
    table = Table("", "wall / CPU s", "limit", *PHASES, REST, "gap", "step", "plan", title="Planning")
    for planning in chosen:
        watch, found = measure(planning)
        table.add_row(
            planning.name,
            f"{sum(watch.wall.values()):.1f} / {sum(watch.cpu.values()):.1f}",
            f"{planning.limit:.0f}",
            *(f"{watch.wall.get(name, 0.0):.1f}" for name in (*PHASES, REST)),
            *_answer(found),
        )
    Console(width=160).print(table)


def _answer(found: Plan | InfeasibleError) -> tuple[str, str, str]:
    if isinstance(found, InfeasibleError):
        least = "more" if found.least is None else show_bytes(found.least)
        return "-", "-", f"infeasible: needs {least}"
    pipeline = found.pipeline
    stages = f"{pipeline.ranks} stages, {pipeline.micro_batches} x {pipeline.schedule.value}"
    what = f"{found.mesh}{' ' + stages if pipeline.is_staged else ''}, {show_bytes(found.peak_bytes)}"
    return f"{100 * found.gap:.2f}%", show_seconds(found.step_seconds), what


if __name__ == "__main__":
    typer.run(main)
