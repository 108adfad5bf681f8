"""Times the training steps of several contestants in turn, on all ranks in step.

    rank 0   | ours ----  | ours ======    | theirs ---  | theirs ====      | ours ...
    rank 1   | ours ----- | ours ========  | theirs ---- | theirs =====     | ours ...
             barrier      barrier          barrier       barrier

Each step starts at a barrier and its time is the slowest rank's, so that neither side profits from
what the machine does elsewhere. As in training, the step before it is the same contestant's, which is
not timed: caches and the allocator are as that left them. The processor time beside it leaves out
waiting: on a busy machine it says what the step itself costs. Contestants that run the same program
are timed once: what would set them apart is noise.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

WARM_UPS = 3  # memory is mapped, gradients and momentum are made
MOST = 3  # times the rounds asked for: short steps are cheap to time and noisy
HOPELESS = 1.5  # who warms up this much slower than the fastest that may be left out is not timed on


@dataclass(frozen=True, slots=True)
class Contestant:
    """`step` takes one training step; `predicted` is its plan's seconds; `alone` runs it on rank 0 only.
    Those whose `program` is equal, and not None, run the same."""

    step: Callable[[], object]
    predicted: float | None = None
    alone: bool = False
    program: object = None


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of every step, by contestant, all of one length; predictions; who was left out; and who
    runs the program of whom, so that their seconds are the same."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    predicted: dict[str, float | None]
    left_out: dict[str, float]
    same: dict[str, str] = field(default_factory=dict)


def compete(
    contestants: dict[str, Contestant], *, rounds: int, keep: tuple[str, ...], budget: float = 0.0
) -> Timed:
    """Time all in turn for `rounds` rounds, and for up to `MOST` times as many while they fit into
    `budget` seconds; those in `keep` are never left out."""
    same = shared(contestants)
    warm = {name: _warm_up(each) for name, each in contestants.items() if name not in same}
    warm |= {name: warm[first] for name, first in same.items()}
    hopeless = too_slow(warm, keep)
    timed: dict[str, list[float]] = {name: [] for name in warm if name not in same and name not in hopeless}
    worked: dict[str, list[float]] = {name: [] for name in timed}
    round_seconds = 2 * sum(warm[name] for name in timed)  # the same on every rank
    gc.collect()
    gc.disable()
    for _ in range(max(rounds, min(MOST * rounds, int(budget / round_seconds)))):
        for name in timed:
            _time(contestants[name])
            wall, cpu = _time(contestants[name])
            timed[name].append(wall)
            worked[name].append(cpu)
    gc.enable()
    for name, first in same.items():
        if first in timed:
            timed[name], worked[name] = timed[first], worked[first]
    return Timed(timed, worked, {name: each.predicted for name, each in contestants.items()}, hopeless, same)


def too_slow(warm: dict[str, float], keep: tuple[str, ...]) -> dict[str, float]:
    """Who is not timed on, with the seconds it took: never one of `keep`, nor the fastest of the others."""
    others = {name: seconds for name, seconds in warm.items() if name not in keep}
    limit = HOPELESS * min(others.values(), default=0.0)
    return {name: seconds for name, seconds in others.items() if seconds > limit}


def shared(contestants: dict[str, Contestant]) -> dict[str, str]:
    """Whose program an earlier contestant runs as well, and which."""
    same: dict[str, str] = {}
    firsts: list[str] = []
    for name, each in contestants.items():
        equal = [first for first in firsts if contestants[first].program == each.program]
        if each.program is not None and equal:
            same[name] = equal[0]
        else:
            firsts.append(name)
    return same


def _warm_up(contestant: Contestant) -> float:
    return median(_time(contestant)[0] for _ in range(WARM_UPS))


def _time(contestant: Contestant) -> tuple[float, float]:
    """Wall and processor seconds of one step, each the slowest rank's."""
    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    if not contestant.alone or dist.get_rank() == 0:
        contestant.step()
    laps = [time.perf_counter() - start, time.process_time() - worked]
    slowest = torch.tensor(laps, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    wall, cpu = slowest.tolist()
    return wall, cpu
