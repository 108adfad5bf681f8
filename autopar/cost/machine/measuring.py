"""Measures operator calls, the most important first, for as long as a budget lasts.

    portion   a b c d   both yardsticks and calls of a few seconds, in turns; other ranks run them too
    portion   e f g
    ...                 what is measured so far is in the database
    the budget is over  what is left stays an estimate

A machine that is shared, or grows warm, is faster at one time than at another. So that what is measured at
different times can be compared, seconds are those of the time when `YARDSTICKS` took what is known of them,
or else what they take first: of products by that for products, of others by that for memory, for a busy
memory hardly slows what cores compute. What is known must be of the same circumstances. Measured alone and
then beside a neighbour, yardsticks would take off what the neighbour costs. A GPU is one rank's own and has
no yardsticks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.core.graph import Call, TensorSpec
from autopar.cost.machine.flops import training_flops
from autopar.cost.machine.neighbours import Ratio
from autopar.cost.machine.threads import using_threads
from autopar.errors import CostMissingError
from autopar.runtime.compiled.fused_kernel import COMPILE_SECONDS, FUSED
from costdb import operands
from costdb.footprint import footprint
from costdb.measurement import Measurement
from costdb.profiler import TOGETHER_BYTES, measure_together

OPERATOR_BUDGET = 0.05  # seconds for one operator call, beside its warm-up
LEAST_CALL_SECONDS = 0.05  # that one takes with it, about
LONG_RUNS = 3  # of an operator that takes longer than its budget
PORTION_SECONDS = 4.0  # of calls that are measured together, about
PART = 0.5  # of what is left, that one round may take: the next may find other operators
# Timed with all that is measured: a product, and memory that is read and written.
YARDSTICKS = (
    Call(torch.ops.aten.mm.default, (TensorSpec((512, 512), torch.float32),) * 2, {}),
    Call(torch.ops.aten.neg.default, (TensorSpec((1 << 22,), torch.float32),), {}),
)
Progress = Callable[[int, int, str], None]  # done, all, what
CoRunners = Callable[[list[Call]], None]  # starts the measuring of these calls elsewhere
Keep = Callable[[Iterable[Measurement]], None]


@dataclass(slots=True)
class Budget:
    """Seconds that the measuring for one plan may still take. Holds what estimates of operators were found
    to be off by so far, too."""

    left: float = math.inf
    ratios: dict[str, list[Ratio]] = field(default_factory=dict)
    pace: float = 1.0  # seconds that measuring took by those that it was thought to

    @property
    def round(self) -> float:
        """Seconds for a round of measuring."""
        return PART * self.left

    def limit(self, seconds: float) -> None:
        """Leave no more than so many seconds."""
        self.left = min(self.left, max(0.0, seconds))

    def spend(self, seconds: float, thought: float) -> None:
        self.left = max(0.0, self.left - seconds)
        self.pace = seconds / thought if thought else self.pace


@dataclass(slots=True)
class Measuring:
    """One round: calls by their importance, each with the seconds that a run of it is estimated to take."""

    calls: Sequence[tuple[Call, float]]
    device: str  # "cpu" or "cuda"
    threads: int
    known: Mapping[str, Measurement]
    budget: Budget
    keep: Keep
    progress: Progress | None = None
    co_runners: CoRunners | None = None

    def run(self) -> tuple[dict[str, Measurement], set[str]]:
        """Measure all calls in portions. Returns measurements by key, and the keys of calls that can't
        run."""
        found: dict[str, Measurement] = {}
        refused: set[str] = set()
        first = {key: self.known[key] for key in (each.key() for each in YARDSTICKS) if key in self.known}
        waiting, allowed, done = list(self.calls), self.budget.round, 0
        while waiting:
            start = time.perf_counter()
            portion, thought = self._next(waiting, allowed)
            if not portion:
                break
            self._tell(done, portion)
            if self.co_runners:
                self.co_runners(portion)
            timed = measure_portion(portion, self.threads, self.device)
            first = {each.key(): timed[each.key()] for each in yardsticks(self.device)} | first
            new = _scaled(timed, first, portion) if yardsticks(self.device) else timed
            self.keep(new.values())
            found |= new
            refused |= {call.key() for call in portion} - new.keys()
            done += len(portion)
            seconds = time.perf_counter() - start
            self.budget.spend(seconds, thought)
            allowed -= seconds
        self._tell(done, [])
        return found, refused

    def _next(self, waiting: list[tuple[Call, float]], allowed: float) -> tuple[list[Call], float]:
        """Takes the next calls that fit a portion and what is `allowed` out of those that wait; with the
        seconds that they are thought to take."""
        room = min(PORTION_SECONDS, allowed / self.budget.pace)
        portion, rest, nbytes = list[Call](), list[tuple[Call, float]](), 0
        thought = len(yardsticks(self.device)) * LEAST_CALL_SECONDS
        for call, estimated in waiting:
            own, seconds = held_bytes(call, self.device), seconds_to_measure(call, estimated)
            alone = not portion and seconds + thought <= allowed / self.budget.pace
            if alone or (thought + seconds <= room and nbytes + own <= TOGETHER_BYTES):
                portion.append(call)
                thought, nbytes = thought + seconds, nbytes + own
            else:
                rest.append((call, estimated))
        waiting[:] = rest
        return sorted(portion, key=Call.key), thought  # so that what is alike follows each other

    def _tell(self, done: int, portion: Sequence[Call]) -> None:
        if self.progress:
            self.progress(done, len(self.calls), _named(portion) if portion else "all done")


def held_bytes(call: Call, device: str) -> int:
    """Bytes that a measured call holds: operands, and on a CPU the results and saved tensors of its forward
    pass."""
    given = sum(spec.nbytes for spec in operands.specs(call))
    if device != "cpu" or call.target is FUSED:
        return given
    try:
        found = footprint(call, device)
    except CostMissingError:  # it won't run
        return given
    new = zip(found.results, found.aliases, strict=True)
    made = sum(result.nbytes for result, alias in new if result is not None and alias is None)
    return given + made + found.saved.extra_bytes


def seconds_to_measure(call: Call, estimated: float) -> float:
    """About how long a call takes to measure, of which one run is estimated to take so many seconds."""
    compiling = COMPILE_SECONDS if call.target is FUSED else 0.0
    return compiling + max(LEAST_CALL_SECONDS, LONG_RUNS * estimated)


def yardsticks(device: str) -> tuple[Call, ...]:
    """Calls that are timed with every measurement, to tell how busy the machine is; none on a GPU, which no
    other process slows."""
    return YARDSTICKS if device == "cpu" else ()


def measure_portion(calls: Sequence[Call], threads: int, device: str) -> dict[str, Measurement]:
    """Measurements of yardsticks and calls by key, without those that cannot run."""
    with using_threads(threads):
        timed = measure_together([*yardsticks(device), *calls], device, budget=OPERATOR_BUDGET)
    return {each.key: each for each in timed}


def _scaled(
    timed: Mapping[str, Measurement], first: Mapping[str, Measurement], calls: Iterable[Call]
) -> dict[str, Measurement]:
    """Measurements scaled to the pace at which yardsticks ran `first`."""
    product, memory = (
        first[key].forward_seconds / timed[key].forward_seconds for key in (each.key() for each in YARDSTICKS)
    )
    paces = {each.key(): product if training_flops(each).forward else memory for each in calls}
    return {key: first[key] if key in first else each.scaled(paces[key]) for key, each in timed.items()}


def _named(calls: Sequence[Call]) -> str:
    others = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
    return f"{calls[0].target}{others}"
