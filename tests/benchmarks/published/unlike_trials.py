"""Published trials of a pipeline on unlike devices, each row's own plan priced.

python -m tests.benchmarks.published.unlike_trials FILE.csv
python -m tests.benchmarks.published.unlike_trials FILE.csv --slow-node 3 --json

The file's rows are trials of GPT-2 (24 blocks, hidden size 1,024, sequences of 1,024, 32 a step) on 16 GPUs,
with degrees, micro-batch and cut; what it doesn't say is assumed:

    like        4 nodes of 4 T4s, 50 Gbit/s between nodes
    unlike      a node of 4 T4s, whose ranks come first (the cuts give it less than the like cluster's first
                node has), then 3 nodes of 4 V100s; 10 Gbit/s between nodes
    ranks       pipeline first, then data, then tensor: four neighbours lie on a node
    layers      30: the embedding, a reshape, 24 blocks, a reshape, a norm, the head, the loss
    blocks      of a Llama with as many multiply-adds (a gated inner size of 8/3 of the hidden one), in half
                precision, recomputed in backward; 1F1B
    gradients   in half precision, summed over data-parallel ranks after the last backward, through one card a
                node; the tied embedding between the first stage and the last
    messages    between stages by every rank of a group, through the same card

A stage computes as fast as its slowest device. The stack's constants lie within bounds and are fitted by
least squares of log(predicted / published): to the like rows alone, by which the unlike ones are predicted;
and for the unlike ones also to all rows but the one that is predicted. Rows that ran out of memory or hung
are left out.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from autopar.cluster import ClusterSpec, DescribedDevice, Link
from autopar.core.schedule import ScheduleKind
from autopar.core.timeline import StageCost
from autopar.cost.machine.collectives import seconds as collective_seconds
from autopar.errors import AutoparError, InputError
from autopar.schedules.in_flight import scheduled
from autopar.schedules.simulate_many import step_seconds
from tests.benchmarks.published.fitting import STEP, TOLERATED, Place
from tests.benchmarks.published.pieces import Exchanges, Pieces, price
from tests.benchmarks.published.prediction import together
from tests.benchmarks.published.runs import Shape
from tests.benchmarks.published.score import regret, spearman
from tests.benchmarks.published.stack import BLOCK, EMBED, HEAD, RankPieces

LIKE, UNLIKE = "homogeneous", "het_cluster"
GPT = Shape(1024, 24, 16, 16, 2736, 50304, 1024, tied=True)
BATCH, PER_NODE, NODES = 32, 4, 4
FIRST_BLOCK, HEAD_LAYER, LAYERS = 2, 28, 30
# Dense peaks of half precision and bandwidths of memory, of NVIDIA's data sheets.
V100 = DescribedDevice((("bf16", 125e12), ("fp16", 125e12), ("fp32", 15.7e12)), 900e9)
T4 = DescribedDevice((("bf16", 65e12), ("fp16", 65e12), ("fp32", 8.1e12)), 320e9)
DEVICES = {"v100": V100, "t4": T4}
MOVED_FOR_WEIGHT = 40.0  # bytes that the optimizer reads and writes, master weights and moments included
CARDS = {LIKE: 50e9 / 8, UNLIKE: 10e9 / 8}  # bytes/s between nodes


@dataclass(frozen=True, slots=True)
class Trial:
    """A row: `theirs` are the seconds that its publishers' model predicts; None ran out of memory or hung."""

    cluster: str
    samples: int
    tp: int
    dp: int
    pp: int
    cut: tuple[int, ...]
    theirs: float
    seconds: float | None

    @property
    def micro_batches(self) -> int:
        return BATCH // (self.samples * self.dp)


@dataclass(frozen=True, slots=True)
class TrialStack:
    """Constants of the stack that ran the trials; `card` is the part of a card's rate that it reaches."""

    pace: float = 1.5  # of products, for one of autopar's
    moves: float = 1.5  # of what moves memory, likewise
    host: float = 3e-3  # seconds of the host for a block and micro-batch, forward and backward
    exchange: float = 3e-4  # seconds of an exchange among tensor-parallel ranks beside its bytes
    inside: float = 6e9  # bytes/s among T4s of a node; V100s have NVLink
    card: float = 0.6
    message: float = 1e-3  # seconds of a message between stages beside its bytes
    fixed: float = 0.1  # a step


BOUNDED: dict[str, tuple[float, float]] = {
    "pace": (0.7, 4.0),
    "moves": (0.7, 4.0),
    "host": (1e-3, 2e-2),
    "exchange": (2e-5, 5e-3),
    "inside": (2e9, 12e9),
    "card": (0.2, 1.0),
    "message": (1e-4, 2e-2),
    "fixed": (0.0, 0.3),
}
NVLINK = 40e9  # bytes/s among V100s of a node
FORWARD = 0.25  # of the host's seconds, where backward recomputes


def read(path: Path) -> list[Trial]:
    """The file's rows; raises InputError for one that can't be."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [_trial(row) for row in csv.DictReader(file)]
    except (OSError, KeyError, ValueError) as cause:
        raise InputError(
            where=str(path),
            found=f"{type(cause).__name__}: {cause}",
            wanted="experiment,micro_batch,tp,dp,pp,cut,predicted_by_its_model_s,measured_s",
            remedy="give the published table",
        ) from cause


def _trial(row: dict[str, str]) -> Trial:
    measured = float(row["measured_s"])
    samples, tp, dp, pp = (int(row[name]) for name in ("micro_batch", "tp", "dp", "pp"))
    cut = tuple(map(int, row["cut"].split(",")))
    theirs, went = float(row["predicted_by_its_model_s"]), math.isfinite(measured)
    return Trial(row["experiment"], samples, tp, dp, pp, cut, theirs, measured if went else None)


@dataclass(slots=True)
class TrialPredictor:
    """Predicts trials; `slow_node` is where the T4s of the unlike cluster are."""

    slow_node: int = 0
    _pieces: dict[object, Pieces] = field(default_factory=dict)

    def seconds(self, trials: Sequence[Trial], stack: TrialStack) -> list[float]:
        """Seconds of a step of each trial."""
        found: list[float] = self.all_seconds(trials, [stack])[0].tolist()
        return found

    def all_seconds(self, trials: Sequence[Trial], stacks: Sequence[TrialStack]) -> NDArray[np.float64]:
        """Seconds of a step [stack, trial]; trials of one schedule are simulated together."""
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, trial in enumerate(trials):
            alike[trial.pp, trial.micro_batches].append(number)
        found = np.zeros((len(stacks), len(trials)))
        for (ranks, count), numbers in alike.items():
            kind = ScheduleKind.ONE_F_ONE_B if count >= ranks else ScheduleKind.GPIPE
            costs = together([self.stages(trials[number], each) for each in stacks for number in numbers])
            simulated = step_seconds(scheduled(kind, ranks, 1, count), costs)
            found[:, numbers] = np.reshape(simulated, (len(stacks), len(numbers)))
        return found

    def kind(self, trial: Trial, ranks: range) -> str:
        """The slowest kind of device among the ranks."""
        nodes = {rank // PER_NODE for rank in ranks}
        return "t4" if trial.cluster == LIKE or self.slow_node in nodes else "v100"

    def pieces(self, kind: str, samples: int, tp: int) -> Pieces:
        """Those of a group that shares layers; remembered."""
        key = kind, samples, tp
        if key not in self._pieces:
            links = Link(5e-6, NVLINK)
            cluster = ClusterSpec(devices_per_node=tp, device=kind, described=DEVICES[kind], intra=links)
            self._pieces[key] = price(GPT, samples, cluster)
        return self._pieces[key]

    def stages(self, trial: Trial, stack: TrialStack) -> list[StageCost]:
        """What every stage costs."""
        size, found = trial.dp * trial.tp, list[StageCost]()
        for number, stage in enumerate(stages_of(trial.cut)):
            ranks = range(number * size, (number + 1) * size)
            kind = self.kind(trial, ranks)
            pieces = self.pieces(kind, trial.samples, trial.tp)
            inside = Link(0.0, NVLINK if kind == "v100" else stack.inside)
            forward, backward = passes(stage, pieces, trial.tp, inside, stack)
            weights = stage.total(pieces, "weights") - _tied(stage, pieces)
            last = number == trial.pp - 1
            send = 0.0 if last else message(trial, ranks, pieces, inside, stack)
            found.append(
                StageCost(
                    forward=forward,
                    input_gradient=backward,
                    weight_gradient=0.0,
                    send_output=send,
                    send_gradient=found[-1].send_output if found else 0.0,
                    sync=self.sums(trial, ranks, weights, inside, stack, ends=last or number == 0),
                    update=stack.fixed + MOVED_FOR_WEIGHT * weights / DEVICES[kind].bandwidth,
                    state=0,
                    kept=0,
                    working=0,
                )
            )
        return found

    def sums(
        self, trial: Trial, ranks: range, weights: float, inside: Link, stack: TrialStack, *, ends: bool
    ) -> float:
        """Seconds of a stage's gradient sums: within its nodes, then through a card a node; a tied table's
        between the first stage and the last where these are apart."""
        nodes, card = spanned(ranks), stack.card * CARDS[trial.cluster]
        near = min(trial.dp, PER_NODE // trial.tp)
        nbytes = 2 * weights  # of a tensor-parallel rank
        within = 2 * (near - 1) / near * nbytes / inside.bandwidth
        between = 2 * (nodes - 1) / nodes * nbytes * trial.tp / card
        table = 2 * GPT.table_weights / card if ends and trial.pp > 1 else 0.0
        return within + between + table


def spanned(ranks: range) -> int:
    """Nodes on which the ranks lie."""
    return len({rank // PER_NODE for rank in ranks})


def passes(
    stage: RankPieces, pieces: Pieces, tp: int, inside: Link, stack: TrialStack
) -> tuple[float, float]:
    """Seconds of a micro-batch forward, and backward with what is recomputed."""

    def work(end: str) -> float:
        own = stack.pace * stage.total(pieces, f"products{end}") + stack.moves * stage.total(
            pieces, f"moves{end}"
        )
        shared = sum(
            count * _exchanged(getattr(piece, f"exchanges{end}"), tp, inside, stack)
            for piece, count in stage.parts(pieces)
        )
        return own + shared

    host, ahead = stage.counts[BLOCK] * stack.host, work("")
    return max(ahead, FORWARD * host), max(ahead + work("_back"), (1 - FORWARD) * host)


def _exchanged(exchanges: Exchanges, tp: int, inside: Link, stack: TrialStack) -> float:
    if tp == 1:
        return 0.0
    return sum(stack.exchange + collective_seconds(kind, nbytes, tp, inside) for kind, nbytes in exchanges)


def message(trial: Trial, ranks: range, pieces: Pieces, inside: Link, stack: TrialStack) -> float:
    """Seconds of what a stage sends to the next: each rank the whole, through its node's card if that is on
    another."""
    nbytes = pieces[BLOCK].leaving
    crosses = ranks[-1] // PER_NODE != (ranks[-1] + 1) // PER_NODE
    if not crosses:
        return stack.message + nbytes / inside.bandwidth
    return stack.message + nbytes * min(len(ranks), PER_NODE) / (stack.card * CARDS[trial.cluster])


def _tied(stage: RankPieces, pieces: Pieces) -> float:
    """Weights that count twice where the embedding and the head are one stage's."""
    return pieces[EMBED].weights if stage.counts[EMBED] and stage.counts[HEAD] else 0.0


@cache
def stages_of(cut: tuple[int, ...]) -> tuple[RankPieces, ...]:
    """The pieces of each stage of a cut."""
    found = []
    for start, stop in zip(cut, cut[1:], strict=False):
        layers = range(start, stop)
        blocks = len([layer for layer in layers if FIRST_BLOCK <= layer < FIRST_BLOCK + GPT.layers])
        ends = int(HEAD_LAYER in layers), int(LAYERS - 1 in layers)
        found.append(RankPieces((int(0 in layers), blocks, *ends)))
    return tuple(found)


# -- the stack's constants -------------------------------------------------------------------------------


def fit(
    predictor: TrialPredictor, trials: Sequence[Trial], start: TrialStack = TrialStack(), rounds: int = 40
) -> TrialStack:
    """The constants that fit the trials best, sought from `start`."""
    published = np.log([trial.seconds or 1.0 for trial in trials])

    def errors(place: Place) -> Place:
        return np.asarray(np.log(predictor.all_seconds(trials, [at(place)])[0]) - published)

    def slopes(place: Place) -> Place:
        steps = np.where(place > 0.5, -STEP, STEP)
        moved = [place, *(place + step * unit for step, unit in zip(steps, np.eye(len(place)), strict=True))]
        here, *others = np.log(predictor.all_seconds(trials, [at(each) for each in moved]))
        return np.stack([(other - here) / step for other, step in zip(others, steps, strict=True)], axis=1)

    found = least_squares(
        errors,
        place_of(start),
        jac=slopes,
        bounds=(0, 1),
        loss="soft_l1",
        f_scale=TOLERATED,
        max_nfev=rounds,
    )
    return at(found.x)


def at(place: Place) -> TrialStack:
    """The constants at a place within their bounds."""
    values = zip(BOUNDED.items(), place.tolist(), strict=True)
    return TrialStack(**{name: low + (high - low) * part for (name, (low, high)), part in values})


def place_of(stack: TrialStack) -> Place:
    """Where constants lie within their bounds, a little inside."""
    rows = [(getattr(stack, name) - low) / (high - low) for name, (low, high) in BOUNDED.items()]
    return np.asarray(np.clip(rows, 1e-3, 1 - 1e-3))


# -- scores ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrialScore:
    """Of one guesser on the rows of one cluster."""

    whose: str
    cluster: str
    rows: int
    rank: float
    median_error: float
    regret: float


def score(whose: str, trials: Sequence[Trial], guesses: Sequence[float]) -> TrialScore:
    """Spearman's correlation, the median of |predicted / published - 1|, and what the best guess loses."""
    published = [trial.seconds or 0.0 for trial in trials]
    errors = [abs(guess / seconds - 1) for guess, seconds in zip(guesses, published, strict=True)]
    lost = 1 / (1 - regret(zip(published, guesses, strict=True))) - 1
    rank = spearman(published, guesses)
    return TrialScore(whose, trials[0].cluster, len(trials), rank, median(errors), lost)


def scores(trials: Sequence[Trial], predictor: TrialPredictor) -> Iterator[TrialScore]:
    """All guessers on both clusters; says on stderr what was fitted."""
    going = [trial for trial in trials if trial.seconds is not None]
    like = [trial for trial in going if trial.cluster == LIKE]
    other = [trial for trial in going if trial.cluster == UNLIKE]
    known = fit(predictor, like)
    print(f"fitted to like rows: {known}", file=sys.stderr)
    for rows in (like, other):
        yield score("their model", rows, [trial.theirs for trial in rows])
        yield score("constants by hand", rows, predictor.seconds(rows, TrialStack()))
    yield score("each from other like rows", like, left_out(predictor, like, [], known))
    yield score("from like rows alone", other, predictor.seconds(other, known))
    everything = fit(predictor, going, known)
    print(f"fitted to all rows: {everything}", file=sys.stderr)
    yield score("each from all other rows", other, left_out(predictor, other, like, everything))


def left_out(
    predictor: TrialPredictor, rows: Sequence[Trial], beside: Sequence[Trial], start: TrialStack
) -> list[float]:
    """Each row predicted by constants fitted without it."""
    found = []
    for number, row in enumerate(rows):
        others = [*rows[:number], *rows[number + 1 :], *beside]
        found += predictor.seconds([row], fit(predictor, others, start, rounds=6))
    return found


def table(found: Sequence[TrialScore]) -> Table:
    """The scores as text."""
    shown = Table("", "cluster", "rows", "Spearman", "error, median", "regret", title="Published trials")
    for each in found:
        figures = f"{each.rank:.3f}", f"{each.median_error:.1%}", f"{each.regret:.1%}"
        shown.add_row(each.whose, each.cluster, str(each.rows), *figures)
    return shown


def main(
    file: Annotated[Path, typer.Argument(help="the published table")],
    slow_node: Annotated[int, typer.Option(min=0, max=NODES - 1, help="where the unlike node is")] = 0,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Predict published trials of like and of unlike devices, and say how well."""
    try:
        found = list(scores(read(file), TrialPredictor(slow_node)))
    except AutoparError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    if as_json:
        print(json.dumps({"rows": [asdict(each) for each in found]}))
    else:
        Console(width=120).print(table(found))


assert set(BOUNDED) == {each.name for each in fields(TrialStack)}

if __name__ == "__main__":
    typer.run(main)
