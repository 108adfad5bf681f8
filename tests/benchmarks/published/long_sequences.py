"""Published splits of long sequences: each row's own planned, beside the best without context parallelism.

python -m tests.benchmarks.published.long_sequences FILE.csv
python -m tests.benchmarks.published.long_sequences FILE.csv --shortest 131072 --longest 131072 --json
python -m tests.benchmarks.published.long_sequences FILE.csv --free 2 --longest 16384

A row's own split has its context parallelism as sequences that are split over an axis (domain), its tensor
parallelism as one of the model, and one sequence a device group in each micro-batch. Beside it stand plans
whose axes are samples and the model alone, in one, two or four stages: tensor-parallel degrees rise for as
long as that is faster. What the rows don't say is assumed:

    2 tables     Llama-2-7B of 80 GB and Llama-3.1-8B of 96 GB, both 32 layers, nodes of 8 H100s
    links        450 GB/s within a node, 50 GB/s a device between nodes
    memory       what a cap asks is computed again, all of it where the row says full; logits are whole where
                 any plan fits so, else losses run in pieces
    precision    bfloat16, where both tables have products in fp8: so gains are compared, not their seconds

`--layers` plans fewer, in memory for as many weights, and counts each as more of them: it says so. `--free`
plans so many layers without a word of how, and says whether keys of attention are split.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from autopar.cluster import ClusterSpec, Link
from autopar.core.force import Force, Parallelism
from autopar.core.gathering import ShardState
from autopar.core.graph import Graph
from autopar.core.loss_pieces import LossPieces
from autopar.core.mesh import Mesh
from autopar.core.recompute import Recompute
from autopar.errors import AutoparError, InfeasibleError, InputError, SolverError
from autopar.planning.asked.request import Auto, Request
from autopar.planning.planner import Planner
from autopar.planning.search import search
from autopar.results.plan.plan import Plan
from autopar.sharding.needed_rows import KEYS, RING
from autopar.trace.rewrites.losses_in_pieces import with_losses_in_pieces
from tests.benchmarks.published.llama import llama
from tests.benchmarks.published.pieces import traced_model
from tests.benchmarks.published.runs import Shape
from tests.benchmarks.published.score import spearman

NODE = 8  # devices
INSIDE, BETWEEN = Link(5e-6, 450e9), Link(10e-6, 50e9)  # of a device
SHAPES = {
    "Llama-2-7B": Shape(4096, 32, 32, 32, 11008, 32000, 0, tied=False),
    "Llama-3.1-8B": Shape(4096, 32, 32, 8, 14336, 128256, 0, tied=False),
}
MEMORY = {"H100": 80 * 10**9, "H100-96GB": 96 * 10**9}  # bytes
PARTS = {"DP": "dp", "FSDP": "dp", "TP": "tp", "PP": "pp", "CP": "cp"}
Gains = list[tuple[float, float]]  # published and predicted


@dataclass(frozen=True, slots=True)
class Degrees:
    """A split: devices along samples, the sequence, the model and stages."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def axes(self) -> dict[Parallelism, int]:
        """The sizes of a stage's axes by their kinds, those of one device left out."""
        sizes = {Parallelism.BATCH: self.dp, Parallelism.DOMAIN: self.cp, Parallelism.MODEL: self.tp}
        return {kind: size for kind, size in sizes.items() if size > 1} or {Parallelism.BATCH: 1}

    def __str__(self) -> str:
        named = {"PP": self.pp, "TP": self.tp, "DP": self.dp, "CP": self.cp}
        return " ".join(f"{name}{size}" for name, size in named.items() if size > 1) or "1"


@dataclass(frozen=True, slots=True)
class LongRow:
    """A row: its split, and how fast it ran, as tokens or operations; `without` context parallelism where the
    table says it too."""

    model: str
    device: str
    length: int
    sequences: int
    split: Degrees
    published: float
    without: float | None
    state: ShardState
    recompute: Recompute

    @property
    def gain(self) -> float | None:
        return None if self.without is None else self.published / self.without

    @property
    def cluster(self) -> ClusterSpec:
        devices = self.split.devices
        return ClusterSpec(
            nodes=max(1, devices // NODE),
            devices_per_node=min(devices, NODE),
            device="h100",
            memory=MEMORY[self.device],
            intra=INSIDE,
            inter=BETWEEN if devices > NODE else None,
        )

    @property
    def others(self) -> list[Degrees]:
        """Splits without context parallelism, of as much tensor parallelism or more, the least first."""
        devices, most = self.split.devices, SHAPES[self.model].heads
        degrees = [1 << power for power in range(most.bit_length())]
        found = [Degrees(dp=devices // tp, tp=tp) for tp in degrees if self.split.tp <= tp <= devices]
        return [each for each in found if self.sequences % each.dp == 0]


def read(path: Path) -> list[LongRow]:
    """The file's rows; raises InputError for one that can't be."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [_row(cells) for cells in csv.DictReader(file)]
    except (OSError, KeyError, ValueError) as cause:
        raise InputError(
            where=str(path),
            found=f"{type(cause).__name__}: {cause}",
            wanted="rows of model, device, sequence, gpus and a split such as TP4 DP8 CP4, as published",
            remedy="give the published table",
        ) from cause


def _row(cells: dict[str, str]) -> LongRow:
    is_ours = "split_with_cp" in cells
    text = cells["split_with_cp"] if is_ours else cells["split"]
    parts = re.findall(r"([A-Z]+)(\d+)", text)
    split = Degrees(**{PARTS[name]: int(size) for name, size in parts})
    length = int(cells["sequence"])
    sequences = (
        int(cells["global_batch_tokens"]) // length if is_ours else split.dp * int(cells["local_batch"])
    )
    if split.devices != int(cells["gpus"]) or sequences % split.dp or cells["model"] not in SHAPES:
        raise ValueError(f"a split that doesn't add up: {cells}")
    is_full = not is_ours and cells["recompute"] == "full"
    return LongRow(
        cells["model"],
        cells["device"],
        length,
        sequences,
        split,
        float(cells["tflops_per_gpu_best_with_cp" if is_ours else "tokens_per_s_per_gpu"]),
        float(cells["tflops_per_gpu_best_without_cp"]) if is_ours else None,
        ShardState.WEIGHTS if "FSDP" in text else ShardState.AUTO,
        Recompute.ALL if is_full else Recompute.AUTO,
    )


# -- plans -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedSplit:
    """Seconds of a step of all layers under a split, and bytes of a device of those that were planned."""

    split: str
    seconds: float
    nbytes: int


@cache
def traced(model: str, length: int, samples: int, layers: int) -> Graph:
    """The graph of a micro-batch."""
    return traced_model(*llama(replace(SHAPES[model], sequence=length), samples, layers))


def planned(row: LongRow, split: Degrees, layers: int) -> PlannedSplit | None:
    """The best plan of a split; None where none meets the cap."""
    kinds = tuple(split.axes)
    force: Force = kinds[0] if len(kinds) == 1 else kinds
    count = row.sequences // split.dp
    request = Request(
        mesh=Mesh(tuple(split.axes.values())),
        force=force,
        memory=memory_of(row, layers),
        pipeline_ranks=split.pp,
        micro_batches=count,
        shard_state=row.state,
        recompute=row.recompute,
        measure=False,
        alternatives=False,
    )
    graph = traced(row.model, row.length, split.dp, layers)
    for choice, form in ((LossPieces.NONE, graph), (LossPieces.ALL, with_losses_in_pieces(graph))):
        with contextlib.suppress(InfeasibleError, SolverError):
            plan = search(form, row.cluster, replace(request, loss_pieces=choice)).plan
            seconds = of_all_layers(plan, SHAPES[row.model].layers / layers, count)
            return PlannedSplit(str(split), seconds, plan.peak_bytes)
    return None


def memory_of(row: LongRow, layers: int) -> int:
    """The cap of so many layers: in proportion to their weights, with the embedding's and the head's."""
    shape = SHAPES[row.model]
    return int(MEMORY[row.device] * replace(shape, layers=layers).weights / shape.weights)


def of_all_layers(plan: Plan, times: float, count: int) -> float:
    """Seconds of a step of so many times as many blocks; the embedding and the head are as they are."""
    ends = count * sum(
        layer.compute + layer.communication for layer in plan.layers if not layer.module.startswith("blocks.")
    )
    ends = ends / plan.pipeline.ranks
    return ends + times * (plan.step_seconds - ends)


def best_without(row: LongRow, layers: int) -> PlannedSplit | None:
    """The best plan without context parallelism: tensor-parallel degrees rise for as long as that pays."""
    best: PlannedSplit | None = None
    for split in row.others:
        found = planned(row, split, layers)
        if best and found and found.seconds >= best.seconds:
            break
        best = found or best
    return best


@dataclass(frozen=True, slots=True)
class LongResult:
    """A row with its plan, and the best one without context parallelism where the table has such."""

    row: LongRow
    own: PlannedSplit | None
    other: PlannedSplit | None

    @property
    def gain(self) -> float | None:
        return self.other.seconds / self.own.seconds if self.own and self.other else None

    @property
    def tokens(self) -> float | None:
        """Tokens a second of a device."""
        row = self.row
        return row.sequences * row.length / row.split.devices / self.own.seconds if self.own else None


def results(rows: Sequence[LongRow], layers: int | None) -> Iterator[LongResult]:
    """The rows with context parallelism, and all of a table that has nothing beside them, one by one."""
    for row in rows:
        if row.without is None or row.split.cp > 1:
            count = layers or SHAPES[row.model].layers
            other = best_without(row, count) if row.without is not None else None
            yield LongResult(row, planned(row, row.split, count), other)


def splits_keys(row: LongRow, layers: int) -> bool:
    """Whether a plan that is free to choose, without stages, splits the keys of attention."""
    shape = replace(SHAPES[row.model], sequence=row.length)
    model, inputs = llama(shape, row.sequences, layers)
    request = Request(memory=memory_of(row, layers), measure=False, alternatives=False)
    plan = Planner(row.cluster, request).find_plan(model, inputs, {}, Auto(1, None, exactly=True))
    return any({RING, KEYS} & set(layer.strategy) for layer in plan.layers if "attention" in layer.op)


# -- what is printed -------------------------------------------------------------------------------------


def order(found: Sequence[LongResult]) -> float | None:
    """Spearman's correlation of predicted and published: of gains, or of tokens where there are none."""
    gains: Gains = [(each.row.gain, each.gain) for each in found if each.row.gain and each.gain]
    speeds: Gains = [(each.row.published, each.tokens) for each in found if each.tokens]
    pairs = gains or speeds
    return spearman(*zip(*pairs, strict=True)) if len(pairs) > 1 else None


def table_of(found: Sequence[LongResult]) -> Table:
    """The rows as text."""
    heads = ("tokens", "GPUs", "its split", "step", "without CP", "step", "gain", "published", "ratio")
    shown = Table(*heads, title="Published splits of long sequences")
    for each in found:
        row, mine, published = each.row, each.gain, each.row.gain
        own, other = (
            (plan.split, f"{plan.seconds:.2f}") if plan else ("none", "") for plan in (each.own, each.other)
        )
        ratios = f"{mine:.2f}" if mine else "", f"{published:.2f}" if published else ""
        error = f"{mine / published:.2f}" if mine and published else ""
        shown.add_row(
            f"{row.length:,}", str(row.split.devices), str(row.split), own[1], *other, *ratios, error
        )
    return shown


def main(
    file: Annotated[Path, typer.Argument(help="The published table.")],
    layers: Annotated[int | None, typer.Option(min=1, help="That are planned; all without.")] = None,
    shortest: Annotated[int, typer.Option(help="Tokens of a sequence, at least.")] = 0,
    longest: Annotated[int, typer.Option(help="Tokens of a sequence, at most.")] = 262_144,
    free: Annotated[int | None, typer.Option(min=1, help="Layers of plans that are free to choose.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As data.")] = False,
) -> None:
    """Plan the published splits of long sequences."""
    try:
        rows = [row for row in read(file) if shortest <= row.length <= longest]
        keys = {row.length: splits_keys(row, free) for row in rows} if free else {}
        found = [] if free else list(results(rows, layers))
    except AutoparError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    if as_json:
        print(json.dumps({"rows": [*map(asdict, found)], "rank": order(found), "keys": keys}, default=str))
        return
    console = Console(width=120)
    for length, split in keys.items():
        console.print(
            f"{length:,} tokens, {free} layers, a free plan: keys are {'split' if split else 'whole'}"
        )
    if found:
        console.print(table_of(found))
        console.print(f"Spearman {rank:.3f}" if (rank := order(found)) is not None else "")


if __name__ == "__main__":
    typer.run(main)
