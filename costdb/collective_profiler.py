"""The profiler of collectives: times one on a running process group, all ranks in step.

Every rank calls `measure_collective` with the same arguments and gets the same numbers: those of
the slowest rank. Several collectives are issued in a row and their time is shared out, so that the
barrier's own jitter doesn't count, unless one alone takes so long that it doesn't anyway. Of such rows
the lower quartile is reported: what else the machine does can only add, and with several ranks it does
so more often than not.

On CPUs a step meets an exchange cold: since the last one operators have used the caches, for its code too,
and what is sent was just written. Between two processes a sum of 4 KB took 0.04 ms in a row, 0.16 with work
in between, 0.1 in the steps of a ResNet. So there `measure_in_rounds` has exchanges take turns, with work
before each. The rank that comes last waits for nobody: the fastest rank's time counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median, quantiles
from typing import TypeAlias

import torch
import torch.distributed as dist

from autopar.core.costs import Collective
from autopar.errors import InputError
from costdb.measurement import CollectiveMeasurement
from costdb.timing import BUDGET_SECONDS, MIN_RUNS, WARM_UPS, num_runs, spread, synchronize

IN_A_ROW = 5  # collectives between two barriers
SLOW = 0.05  # seconds of one beside which a barrier's jitter, of a millisecond or so, is nothing
ROUNDS = 25  # at most, of exchanges between operators
DTYPE = torch.float32

Group: TypeAlias = "dist.ProcessGroup"


def measure_collective(
    kind: Collective,
    nbytes: int,
    group: Group,
    *,
    device: torch.device | str = "cpu",
    nodes: int = 1,
    budget: float = BUDGET_SECONDS,
    run: Callable[[], object] | None = None,
) -> CollectiveMeasurement:
    """The time (lower quartile) of one collective on `group`, the slowest rank's.

    `run` is the collective as the caller's program does it, torch's own if None.

    `nbytes` is the size of the full (gathered) tensor, the message's for send and receive, and is
    rounded up to a whole number of elements for each rank. `nodes` is recorded only.
    """
    device, size = torch.device(device), dist.get_world_size(group)
    if size < 2:
        raise InputError(
            where=f"measuring {kind.value}",
            found="a group of one rank",
            wanted="at least two ranks",
            remedy="start more processes",
        )
    share = -(-nbytes // (size * DTYPE.itemsize))  # elements of one rank's part
    run = run or _prepare(kind, group, share, device)
    first = _time(run, group, device, 1)
    row = IN_A_ROW if first < SLOW else 1  # equal on all ranks, as all times are
    for _ in range(WARM_UPS - 1):
        _time(run, group, device, row)
    rows = num_runs(_time(run, group, device, row) * row, budget)
    seconds = [_time(run, group, device, row) for _ in range(rows)]
    return CollectiveMeasurement(
        kind=kind,
        backend=str(dist.get_backend(group)),
        size=size,
        nodes=nodes,
        nbytes=share * size * DTYPE.itemsize,
        seconds=quantiles(seconds, n=4, method="inclusive")[0],
        runs=rows * row,
        spread=spread(seconds),
    )


def _time(run: Callable[[], object], group: Group, device: torch.device, row: int) -> float:
    """Seconds of one of `row` collectives, the slowest rank's: the same number on every rank."""
    dist.barrier(group)
    start = time.perf_counter()
    results = [run() for _ in range(row)]
    synchronize(device)
    slowest = torch.tensor((time.perf_counter() - start) / row, dtype=torch.float64, device=device)
    del results  # only now: a program keeps the weights that it gathers, one beside the other
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return slowest.item()


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective of `group` as programs call it; `nbytes` and `nodes` as in `measure_collective`.

    `run` is None on a rank that has no part in it; `arrive` writes what it sends, as an operator before does.
    """

    kind: Collective
    nbytes: int
    group: Group
    nodes: int
    run: Callable[[], object] | None
    arrive: Callable[[], object]


@dataclass(slots=True)
class _Timed:
    """An exchange, and this rank's seconds in each of its rounds."""

    exchange: Exchange
    seconds: list[float] = field(default_factory=list)

    def lap(self, work: Callable[[], object]) -> None:
        """Do some work and then the exchange, whose result lives until then."""
        work()
        self.exchange.arrive()
        start = time.perf_counter()
        result = self.exchange.run() if self.exchange.run else None
        self.seconds.append(time.perf_counter() - start if self.exchange.run else math.inf)
        del result

    def takes_part(self, number: int, rounds: int) -> bool:
        """Whether it runs in that round, so that its `rounds` lie evenly among all."""
        return (number + 1) * rounds // ROUNDS > number * rounds // ROUNDS

    def measurement(self) -> CollectiveMeasurement:
        """What each round took the rank that came last, on the slowest group: equal on all ranks."""
        laps = torch.tensor(self.seconds, dtype=torch.float64)
        dist.all_reduce(laps, dist.ReduceOp.MIN, self.exchange.group)
        dist.all_reduce(laps, dist.ReduceOp.MAX)
        found: list[float] = laps.tolist()
        return CollectiveMeasurement(
            kind=self.exchange.kind,
            backend=str(dist.get_backend(self.exchange.group)),
            size=dist.get_world_size(self.exchange.group),
            nodes=self.exchange.nodes,
            nbytes=self.exchange.nbytes,
            seconds=median(found),
            runs=len(found),
            spread=spread(found),
        )


def measure_in_rounds(
    exchanges: Sequence[Exchange],
    work: Callable[[], object],
    *,
    budget: float = BUDGET_SECONDS,
) -> list[CollectiveMeasurement]:
    """The median times of exchanges on CPUs, with `work` before each: round after round, each for about
    `budget` seconds beside that. Every rank of the world calls it."""
    timed = [_Timed(each) for each in exchanges]
    for _ in range(WARM_UPS):
        for each in timed:
            each.lap(work)
    first = torch.tensor([min(each.seconds[-1], budget) for each in timed], dtype=torch.float64)
    dist.all_reduce(first, dist.ReduceOp.MAX)
    counts = [max(MIN_RUNS, min(ROUNDS, int(budget / max(seconds, 1e-9)))) for seconds in first.tolist()]
    for each in timed:
        each.seconds.clear()
    for number in range(ROUNDS):
        for each, count in zip(timed, counts, strict=True):
            if each.takes_part(number, count):
                each.lap(work)
    return [each.measurement() for each in timed]


def _prepare(kind: Collective, group: Group, share: int, device: torch.device) -> Callable[[], object]:
    """The collective on its own buffers; `share` elements are one rank's part of the full tensor."""
    size = dist.get_world_size(group)
    full = torch.zeros(share * size, dtype=DTYPE, device=device)
    part, other = torch.zeros_like(full[:share]), torch.zeros_like(full[:share])
    # What one rank exchanges in an all-to-all: its own part, one piece for each rank.
    pieces = torch.zeros(-(-share // size) * size, dtype=DTYPE, device=device)
    match kind:
        case Collective.ALL_REDUCE:
            return lambda: dist.all_reduce(full, group=group)
        case Collective.ALL_GATHER:
            return lambda: dist.all_gather_into_tensor(full, part, group=group)
        case Collective.REDUCE_SCATTER:
            return lambda: dist.reduce_scatter_tensor(other, full, group=group)
        case Collective.ALL_TO_ALL:
            return lambda: dist.all_to_all_single(torch.empty_like(pieces), pieces, group=group)
        case Collective.SEND_RECV:
            return _one_way(group, full)


def _one_way(group: Group, message: torch.Tensor) -> Callable[[], object]:
    """Rank 0 sends to rank 1 and the other way in turn, so that latencies don't overlap."""
    rank, turn = dist.get_rank(group), cycle((0, 1))

    def run() -> None:
        sender = next(turn)
        if rank == sender:
            dist.send(message, group=group, group_dst=1 - sender)
        elif rank == 1 - sender:
            dist.recv(message, group=group, group_src=sender)

    return run
