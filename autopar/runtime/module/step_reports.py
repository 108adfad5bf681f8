"""Tells how long steps take beside the plan's prediction, and which rank is slower than the others.

    rank 0   computes ───┤ waits ...............├ exchange     own seconds of a step: all but the waits
    rank 1   computes ──────────────────────────┤ exchange     the slow one: all wait for it

Waits are known where ranks of one machine exchange tensors of main memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from autopar.runtime.collectives.roll_call import everybody
from autopar.runtime.launch.flight_record import waited
from autopar.runtime.launch.processes import RankProcess, own_process
from autopar.runtime.module.parallel_module import ParallelModule, runner_of
from autopar.units import show_seconds

LEAST_SECONDS = 1e-9  # of a median that divides
SLOW_FACTOR = 1.5  # times the others' median; steps of one plan differ by a tenth or so


@dataclass(frozen=True, slots=True)
class StepReport:
    """Mean seconds of the last steps: as they came, as predicted, and each rank's own, without waits."""

    step: int
    seconds: float
    predicted: float
    own: tuple[float, ...]
    ranks: tuple[RankProcess, ...]

    @property
    def slow(self) -> tuple[RankProcess, ...]:
        """The ranks that take `SLOW_FACTOR` times the median of the others."""
        return tuple(
            rank for rank, times in zip(self.ranks, self._times(), strict=True) if times > SLOW_FACTOR
        )

    def _times(self) -> list[float]:
        """Each rank's own seconds as a multiple of the others' median."""
        if len(self.own) == 1:
            return [1.0]
        others = [[*self.own[:rank], *self.own[rank + 1 :]] for rank in range(len(self.own))]
        return [
            mine / max(LEAST_SECONDS, statistics.median(each))
            for mine, each in zip(self.own, others, strict=True)
        ]

    def __str__(self) -> str:
        text = (
            f"step {self.step}: {show_seconds(self.seconds)} a step, {show_seconds(self.predicted)} predicted"
        )
        for rank, times in zip(self.ranks, self._times(), strict=True):
            text += f"; {rank} takes {times:.1f} x the others' median" if rank in self.slow else ""
        return text


@dataclass(slots=True)
class StepClock:
    """Clock of a loop's steps; a step begins where the one before has ended."""

    model: nn.Module
    every: int
    _begin: float = field(default_factory=time.perf_counter)
    _waited: float = field(default_factory=waited)
    _count: int = 0

    def start(self) -> None:
        """Begin anew: what came before isn't of a step, or of the first, which makes programs."""
        self._begin, self._waited, self._count = time.perf_counter(), waited(), 0

    def tick(self, step: int) -> StepReport | None:
        """Count a step, and report every so many; collective then."""
        self._count += 1
        if self._count < self.every:
            return None
        seconds = (time.perf_counter() - self._begin) / self._count
        mine = seconds - (waited() - self._waited) / self._count
        rank = dist.get_rank() if dist.is_initialized() else 0
        told = everybody((seconds, mine, own_process(rank)))
        self.start()
        every, own, ranks = zip(*told, strict=True)
        return StepReport(step, max(every), self._predicted(), own, ranks)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within is what isn't of a step, as a save."""
        begin, before = time.perf_counter(), waited()
        yield
        self._begin += time.perf_counter() - begin
        self._waited += waited() - before

    def _predicted(self) -> float:
        models = [item for item in self.model.modules() if isinstance(item, ParallelModule)]
        return float(sum(runner_of(item).step_seconds for item in models))
