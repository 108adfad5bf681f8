"""Published plans of an OPT-350 on like and unlike devices, each row's own plan priced; nothing is fitted.

python -m tests.benchmarks.published.sailor_plans FILE.csv
python -m tests.benchmarks.published.sailor_plans FILE.csv --json

A row has degrees, micro-batch, layers of each stage (the embedding, 24 blocks, the head) and devices of each
replica of a stage. What it doesn't say its publishers' configuration, links and engine do:

    model       hidden size 1,024, sequences of 2,048, a head of its own; attention in plain products; no
                dropout, nothing recomputed
    precision   float32; TF32 on tensor cores where devices have it, as their container multiplies
    links       bus bandwidths that they measured within nodes; 1 Gbit/s between nodes of unlike GPUs

and the rest is assumed:

    nodes       a replica of a stage is tensor-parallel on a node of its own, as Megatron splits layers
    network     a card of 200 Gbit/s for each GH200, one card a node for the others; latencies of 10 us
    messages    a part of a tensor-parallel rank each, gathered by the receiver
    schedule    1F1B; gradients in float32, summed after the last backward; Adam moves 28 bytes a weight
    memory      weights, gradients and Adam's two moments, what backward needs, and the largest operator's;
                neither CUDA's context nor kernels, nor what the stack copies beside

A stage is as slow as its slowest device and its slowest link.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from autopar.cluster import ClusterSpec, DescribedDevice, Link
from autopar.core.costs import Collective
from autopar.core.timeline import StageCost
from autopar.cost.machine.collectives import seconds as collective_seconds
from autopar.errors import AutoparError, InputError
from tests.benchmarks.published.opt import BLOCKS, opt_pins, traced_opt
from tests.benchmarks.published.pieces import Pieces, priced_pieces
from tests.benchmarks.published.prediction import most_bytes, simulated
from tests.benchmarks.published.runs import GIGA, Split
from tests.benchmarks.published.score import regret, spearman
from tests.benchmarks.published.stack import BLOCK, RankPieces

# Dense peaks and bandwidths of memory of NVIDIA's data sheets; the RTX 2080 has 11 GB, as the Ti does.
GPUS_OF_PLANS = {
    "GH-96": DescribedDevice((("fp32", 494e12),), 4e12),
    "RTX-3090": DescribedDevice((("fp32", 35.6e12),), 936e9),
    "Titan-RTX": DescribedDevice((("fp32", 16.3e12),), 672e9),
    "RTX-2080": DescribedDevice((("fp32", 13.4e12),), 616e9),
}
# Bytes/s of all-reduces on so many devices of a node, as the publishers measured them.
IN_NODE = {
    ("GH-96", 4): 250e9,
    ("RTX-3090", 2): 49.8e9,
    ("RTX-3090", 8): 5.3e9,
    ("Titan-RTX", 2): 10.8e9,
    ("Titan-RTX", 8): 24.3e9,
    ("RTX-2080", 8): 24.6e9,
}
LIKE_KIND, SLINGSHOT, GIGABIT = "GH-96", 25e9, 0.115e9  # bytes/s of a device's card, and of a node's
HOP = 10e-6  # seconds
NUMBER_BYTES, STATE_BYTES, ADAM_BYTES = 4, 16, 28  # of a weight: itself; kept; moved by the optimizer


@dataclass(frozen=True, slots=True)
class PublishedPlan:
    """A row: the devices of each stage's replicas, layers of each stage, and what was measured."""

    split: Split
    layers: tuple[int, ...]
    kinds: tuple[tuple[str, ...], ...]
    seconds: float
    sum_seconds: float
    nbytes: float

    @property
    def batch(self) -> int:
        return self.split.dp * self.split.samples * self.split.micro_batches

    @property
    def is_like(self) -> bool:
        return {kind for stage in self.kinds for kind in stage} == {LIKE_KIND}

    @property
    def rank_pieces(self) -> list[RankPieces]:
        """The pieces of each stage: the embedding is a layer, and the head."""
        last = len(self.layers) - 1
        return [
            RankPieces((int(not at), count - (not at) - (at == last), int(at == last), int(at == last)))
            for at, count in enumerate(self.layers)
        ]


def read(path: Path) -> list[PublishedPlan]:
    """The file's rows; raises InputError for one that can't be."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [_plan(row) for row in csv.DictReader(file)]
    except (OSError, KeyError, ValueError) as cause:
        raise InputError(
            where=str(path),
            found=f"{type(cause).__name__}: {cause}",
            wanted="model,pp,dp,mbs,gbs,layers_per_stage,devices,measured_s,grad_sum_s,peak_bytes of OPT-350",
            remedy="give the published table",
        ) from cause


def _plan(row: dict[str, str]) -> PublishedPlan:
    pp, dp, samples, batch = (int(row[name]) for name in ("pp", "dp", "mbs", "gbs"))
    layers = tuple(map(int, row["layers_per_stage"].split("-")))
    replicas = [[_replicas(part) for part in stage.split("|")] for stage in row["devices"].split(";")]
    kinds = tuple(tuple(kind for names, _ in stage for kind in names) for stage in replicas)
    degrees = {tp for stage in replicas for _, tp in stage}
    shape = row["model"], sum(layers), len(layers), len(kinds), {len(stage) for stage in kinds}
    if shape != ("OPT-350", BLOCKS + 2, pp, pp, {dp}) or len(degrees) > 1 or batch % (dp * samples):
        raise ValueError(f"a plan that doesn't add up: {row}")
    (tp,) = degrees
    if unknown := {(kind, tp) for stage in kinds for kind in stage} - set(IN_NODE):
        raise ValueError(f"devices without a link: {sorted(unknown)}")
    split = Split(dp, tp, pp, samples, batch // (dp * samples), zero=0)
    measured = (float(row[name]) for name in ("measured_s", "grad_sum_s", "peak_bytes"))
    return PublishedPlan(split, layers, kinds, *measured)


def _replicas(text: str) -> tuple[list[str], int]:
    """The kind of each replica's node and its degree, of `RTX-2080x8/tp8*2`."""
    devices, _, rest = text.partition("/tp")
    tp, _, count = rest.partition("*")
    kind, _, number = devices.rpartition("x")
    if number != tp:
        raise ValueError(f"{text!r}: a replica that isn't a node")
    return [kind] * int(count), int(tp)


@dataclass(slots=True)
class PlanPredictor:
    """Predicts plans; pieces are priced once."""

    _pieces: dict[tuple[str, int, int], Pieces] = field(default_factory=dict)

    def predict(self, plans: Sequence[PublishedPlan]) -> list[PlanGuess]:
        """Seconds and bytes of each."""
        costs = [self.stages(plan) for plan in plans]
        (seconds,) = simulated([plan.split for plan in plans], [costs])
        return [
            PlanGuess(each, max(stage.sync for stage in stages), most_bytes(stages, plan.split.micro_batches))
            for plan, stages, each in zip(plans, costs, seconds.tolist(), strict=True)
        ]

    def pieces(self, kind: str, samples: int, tp: int) -> Pieces:
        """Those of a node; remembered."""
        key = kind, samples, tp
        if key not in self._pieces:
            cluster = ClusterSpec(
                devices_per_node=tp, device=kind, described=GPUS_OF_PLANS[kind], intra=inside(kind, tp)
            )
            self._pieces[key] = priced_pieces(traced_opt(samples), cluster, opt_pins(), NUMBER_BYTES)
        return self._pieces[key]

    def stages(self, plan: PublishedPlan) -> list[StageCost]:
        """What every stage costs on its slowest replica."""
        split, found = plan.split, list[StageCost]()
        for number, (stage, kinds) in enumerate(zip(plan.rank_pieces, plan.kinds, strict=True)):
            own = {kind: self.pieces(kind, split.samples, split.tp) for kind in kinds}
            passes = [pass_seconds(stage, pieces, kind, split.tp) for kind, pieces in own.items()]
            pieces = own[kinds[0]]
            weights = stage.total(pieces, "weights")
            reached = plan.kinds[number + 1] if number + 1 < split.pp else ()
            slowest = min(GPUS_OF_PLANS[kind].bandwidth for kind in kinds)
            found.append(
                StageCost(
                    forward=max(ahead for ahead, _ in passes),
                    input_gradient=max(back for _, back in passes),
                    weight_gradient=0.0,
                    send_output=message(pieces[BLOCK].leaving, reached, split.tp),
                    send_gradient=found[-1].send_output if found else 0.0,
                    sync=summed(weights, kinds, split),
                    update=ADAM_BYTES * weights / slowest,
                    state=int(STATE_BYTES * weights),
                    kept=int(stage.total(pieces, "kept")),
                    working=int(stage.most(pieces, "working")),
                )
            )
        return found


@dataclass(frozen=True, slots=True)
class PlanGuess:
    """Seconds of a step and of its gradient sums, and the bytes of the fullest device."""

    seconds: float
    sum_seconds: float
    nbytes: float


def inside(kind: str, tp: int) -> Link:
    """The link of a node's devices."""
    return Link(HOP, IN_NODE[kind, tp])


def node_rate(kind: str, tp: int) -> float:
    """Bytes/s between nodes, of all ranks of a node together."""
    return tp * SLINGSHOT if kind == LIKE_KIND else GIGABIT


def pass_seconds(stage: RankPieces, pieces: Pieces, kind: str, tp: int) -> tuple[float, float]:
    """Seconds of a micro-batch forward and backward; what `pieces` regather in backward, this stack keeps."""
    link, totals = (
        inside(kind, tp),
        [stage.total(pieces, f"products{end}") + stage.total(pieces, f"moves{end}") for end in ("", "_back")],
    )
    for piece, count in stage.parts(pieces):
        regathered = sum(each is Collective.ALL_GATHER for each, _ in piece.exchanges)
        for end, exchanges in enumerate((piece.exchanges, piece.exchanges_back[regathered:])):
            totals[end] += count * sum(
                collective_seconds(each, nbytes, tp, link) for each, nbytes in exchanges
            )
    return totals[0], totals[1]


def message(nbytes: float, kinds: Sequence[str], tp: int) -> float:
    """Seconds of what a stage sends: a part from each rank, gathered on the node that receives it."""
    return max(
        (
            HOP
            + tp * nbytes / node_rate(kind, tp)
            + collective_seconds(Collective.ALL_GATHER, int(tp * nbytes), tp, inside(kind, tp))
            for kind in kinds
        ),
        default=0.0,
    )


def summed(weights: float, kinds: Sequence[str], split: Split) -> float:
    """Seconds of a stage's gradient sums: in a ring of its replicas for each tensor-parallel rank."""
    rate = min(node_rate(kind, split.tp) for kind in kinds) / split.tp
    return collective_seconds(Collective.ALL_REDUCE, int(NUMBER_BYTES * weights), split.dp, Link(HOP, rate))


# -- scores ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanScore:
    """Predicted beside measured; regret is a mean over like batches on as many devices."""

    devices: str
    rows: int
    rank: float
    median_error: float
    regret: float
    bytes_error: float
    bytes_rank: float


def scores(plans: Sequence[PublishedPlan], guesses: Sequence[PlanGuess]) -> Iterator[PlanScore]:
    """The scores on like devices, and on unlike ones."""
    for is_like, name in ((True, "GH200s alike"), (False, "unlike RTX")):
        rows = [pair for pair in zip(plans, guesses, strict=True) if pair[0].is_like is is_like]
        if len(rows) > 1:
            yield plan_score(name, rows)


def plan_score(name: str, rows: Sequence[tuple[PublishedPlan, PlanGuess]]) -> PlanScore:
    """Spearman's correlation, median errors, and what the plan that is predicted best loses."""
    batches: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for plan, guess in rows:
        batches[plan.batch, plan.split.devices].append((plan.seconds, guess.seconds))
    lost = [1 / (1 - regret(pairs)) - 1 for pairs in batches.values() if len(pairs) > 1]
    seconds = [(plan.seconds, guess.seconds) for plan, guess in rows]
    nbytes = [(plan.nbytes, guess.nbytes) for plan, guess in rows]
    return PlanScore(
        name,
        len(rows),
        spearman(*zip(*seconds, strict=True)),
        median(abs(guess / measured - 1) for measured, guess in seconds),
        fmean(lost) if lost else 0.0,
        median(abs(guess / measured - 1) for measured, guess in nbytes),
        spearman(*zip(*nbytes, strict=True)),
    )


def row_table(plans: Sequence[PublishedPlan], guesses: Sequence[PlanGuess]) -> Table:
    """Every row, predicted / measured."""
    heads = "devices", "pp x dp x tp", "batch", "seconds", "", "of sums", "", "GB", ""
    shown = Table(*heads, title="Published plans: measured, and predicted / measured")
    for plan, guess in zip(plans, guesses, strict=True):
        split = plan.split
        kinds = ", ".join(dict.fromkeys(kind for stage in plan.kinds for kind in stage))
        shown.add_row(
            kinds,
            f"{split.pp} x {split.dp} x {split.tp}",
            f"{plan.batch} by {split.samples}",
            f"{plan.seconds:.2f}",
            f"{guess.seconds / plan.seconds:.2f}",
            f"{plan.sum_seconds:.3f}",
            f"{guess.sum_seconds / plan.sum_seconds:.2f}",
            f"{plan.nbytes / GIGA:.1f}",
            f"{guess.nbytes / plan.nbytes:.2f}",
        )
    return shown


def score_table(found: Sequence[PlanScore]) -> Table:
    """The scores as text."""
    shown = Table("", "rows", "Spearman", "error, median", "regret", "error of bytes", "Spearman of bytes")
    for each in found:
        errors = f"{each.median_error:.1%}", f"{each.regret:.1%}", f"{each.bytes_error:.1%}"
        shown.add_row(each.devices, str(each.rows), f"{each.rank:.3f}", *errors, f"{each.bytes_rank:.3f}")
    return shown


def main(
    file: Annotated[Path, typer.Argument(help="the published table")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Predict published plans, and say how well."""
    try:
        plans = read(file)
        guesses = PlanPredictor().predict(plans)
    except AutoparError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    found = list(scores(plans, guesses))
    if as_json:
        print(json.dumps({"rows": [*map(asdict, guesses)], "scores": [*map(asdict, found)]}))
        return
    console = Console(width=120)
    console.print(row_table(plans, guesses))
    console.print(score_table(found))


if __name__ == "__main__":
    typer.run(main)
