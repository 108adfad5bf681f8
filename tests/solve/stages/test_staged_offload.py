"""Stages move to the host what hides in them, as much as the cap asks for, and what is said of it is true."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from autopar.core.graph import Graph
from autopar.core.offload import Offload
from autopar.core.program import Program
from autopar.core.recompute import Recompute, Segment
from autopar.core.schedule import SPLIT_BACKWARD, Schedule, ScheduleKind
from autopar.cost.operators.prices import Prices
from autopar.cost.program.offload import Movable, backward_wait, clock, forward_wait, movable
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.program.recompute import shares
from autopar.cost.stages.intervals import intervals
from autopar.errors import InfeasibleError
from autopar.schedules.in_flight import flight, scheduled
from autopar.solve.program.solution import Solution
from autopar.solve.stages.cut_search import cut_at, recomputing_bound
from autopar.solve.stages.step import Step, staged, step_weight
from tests.solve.brute_force import blocks
from tests.solve.memory.test_offload import deep, gpus, placed, prices_of
from tests.solve.memory.test_recompute import HOP, partings

CLOSE = 1e-6  # relative
WITHIN, SELDOM = 0.04, 0.15  # of the best there is: tables count what is under way at a stage's end twice
RANKS, COUNT = 2, 4
WHOLE = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED)
SHARES = (0.1, 1.0, 10.0)  # of all that could be moved, what goes over the link while forward runs

Best = list[tuple[float, int]]  # seconds and bytes


def made(graph: Graph, share: float, *, host_memory: int | None = None) -> tuple[Prices, Solution]:
    """Prices of one device of two, and the placement on it."""
    prices, program = placed(graph, gpus(1.0, count=1))
    nbytes = sum(item.nbytes for item in movable(PricedProgram(prices, program)))
    seconds = PricedProgram(prices, program).cost.forward
    prices = prices_of(graph, gpus(share * nbytes / seconds, count=1, host_memory=host_memory))
    prices.step_weight, prices.micro_batches, prices.accumulates = (
        step_weight(RANKS, COUNT),
        COUNT,
        True,
    )
    priced = PricedProgram(prices, program)
    return prices, Solution(priced, priced.seconds, priced.seconds, "optimal", priced)


def schedule_of(kind: ScheduleKind) -> Schedule:
    return scheduled(kind, RANKS, 2 if kind is ScheduleKind.INTERLEAVED or kind.is_v else 1, COUNT)


def stages(graph: Graph, starts: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return pairwise((*starts, len(graph.operators)))


def inside(items: list[Movable], start: int, stop: int) -> list[Movable]:
    return [item for item in items if start <= item.maker and item.needed <= stop]


def waits(graph: Graph, prices: Prices, program: Program, start: int, stop: int) -> float:
    """Seconds that a stage waits for what it moves."""
    known = {item.tensor: item for item in movable(PricedProgram(prices, program))}
    items = inside([known[each] for each in program.offload], start, stop)
    times, link = clock(PricedProgram(prices, program)).within(start, stop), prices.cluster.host
    assert link is not None
    return forward_wait(items, times, link) + backward_wait(items, times, link)


def caps(graph: Graph, prices: Prices, solution: Solution, schedule: Schedule, count: int) -> list[int]:
    """From what the fastest step needs down."""
    free = staged(solution, schedules=[schedule], hop=HOP, cap=None)
    assert free.cut is not None
    most = max(free.cut.rank_bytes)
    return [most - (most - free.state_bytes) * step // (count + 1) for step in range(1, count + 1)]


def sought(
    graph: Graph,
    prices: Prices,
    solution: Solution,
    schedules: list[Schedule],
    cap: int,
    *,
    recompute: Recompute = Recompute.AUTO,
    offload: Offload = Offload.AUTO,
) -> Step:
    """The best step under the cap."""
    return staged(
        solution,
        schedules=schedules,
        hop=HOP,
        cap=cap,
        recompute=recompute,
        offload=offload,
    )


def check(graph: Graph, prices: Prices, step: Step, cap: int) -> None:
    """What is said of a step is so."""
    program, cut, schedule = step.solution.program, step.cut, step.schedule
    assert cut is not None and schedule is not None
    places = range(len(graph.operators) + 1)
    exact = cut_at(
        intervals(PricedProgram(prices, program), HOP, places=places, starts=cut.starts), schedule, cut.starts
    )
    assert step.peak_bytes == max(exact.rank_bytes) <= cap
    assert step.seconds == pytest.approx(exact.seconds)
    assert step.bound <= step.seconds * (1 + CLOSE)
    items = {item.tensor for item in movable(PricedProgram(prices, program))}
    inside_stages: list[Movable] = []
    for start, stop in stages(graph, cut.starts):
        assert waits(graph, prices, program, start, stop) == 0.0
        inside_stages += inside(movable(PricedProgram(prices, program)), start, stop)
    assert items.issuperset(program.offload) and {item.tensor for item in inside_stages}.issuperset(
        program.offload
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("share", SHARES)
def test_what_is_moved_hides_in_its_stage_and_the_cap_is_kept(kind: ScheduleKind, share: float) -> None:
    graph, schedule = deep(14), schedule_of(kind)
    prices, solution = made(graph, share)
    moved = faster = 0
    for cap in caps(graph, prices, solution, schedule, 6):
        found = {}
        for offload in (Offload.NONE, Offload.AUTO):
            try:
                found[offload] = sought(graph, prices, solution, [schedule], cap, offload=offload)
            except InfeasibleError:
                continue
            check(graph, prices, found[offload], cap)
        if Offload.NONE in found:
            assert not found[Offload.NONE].solution.program.offload and Offload.AUTO in found
            faster += found[Offload.AUTO].seconds < found[Offload.NONE].seconds * (1 - CLOSE)
        if Offload.AUTO in found:
            moved += bool(found[Offload.AUTO].solution.program.offload)
    assert moved and faster or share < max(SHARES)


@pytest.mark.parametrize("kind", SPLIT_BACKWARD)
def test_schedules_that_split_backward_move_nothing(kind: ScheduleKind) -> None:
    graph, schedule = deep(14), schedule_of(kind)
    prices, solution = made(graph, 10.0)
    (cap,) = caps(graph, prices, solution, schedule, 1)
    with_whole = [schedule, schedule_of(ScheduleKind.ONE_F_ONE_B)]
    step = sought(graph, prices, solution, with_whole, cap)
    assert step.schedule is not None
    assert step.schedule.kind not in SPLIT_BACKWARD or not step.solution.program.offload


def test_the_host_has_room_for_every_micro_batch_in_flight() -> None:
    graph, schedule = deep(14), schedule_of(ScheduleKind.GPIPE)
    prices, solution = made(graph, 10.0)
    size = max(item.nbytes for item in movable(PricedProgram(prices, solution.program)))
    assert size & (size - 1) == 0  # else pinned memory takes more
    cap = caps(graph, prices, solution, schedule, 6)[0]
    for tensors in (0, 1, 3, 100):
        prices, solution = made(graph, 10.0, host_memory=max(1, tensors * COUNT * size))
        step = sought(graph, prices, solution, [schedule], cap)
        assert step.cut is not None
        known = {item.tensor: item for item in movable(PricedProgram(prices, step.solution.program))}
        items = [known[each] for each in step.solution.program.offload]
        for stage, (start, stop) in enumerate(stages(graph, step.cut.starts)):
            held = sum(item.nbytes for item in inside(items, start, stop))
            assert held * flight(schedule, stage) <= tensors * COUNT * size
        assert items if tensors == 100 else tensors or not items


def steps(
    graph: Graph, prices: Prices, program: Program, schedule: Schedule, ways: tuple[tuple[Segment, ...], ...]
) -> Best:
    """Every cut with all that can be moved, of what hides, and each of `ways` to compute parts again."""
    found: Best = []
    count = len(graph.operators)
    for start in range(1, count):
        for parts in ways:
            cut = tuple((first, stop) for first, stop in parts if not first < start < stop)
            if cut != parts:
                continue
            recomputed = replace(program, recompute=parts)
            items = movable(PricedProgram(prices, recomputed))
            own = [each for ends in stages(graph, (0, start)) for each in inside(items, *ends)]
            for number in range(len(own) + 1):
                for some in combinations(own, number):
                    each = replace(recomputed, offload=tuple(item.tensor for item in some))
                    if any(waits(graph, prices, each, *ends) for ends in stages(graph, (0, start))):
                        continue
                    table = intervals(
                        PricedProgram(prices, each), HOP, places=range(count + 1), starts=(0, start)
                    )
                    exact = cut_at(table, schedule, (0, start))
                    found.append((exact.seconds, max(exact.rank_bytes)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("share", SHARES)
def test_cut_parts_and_what_is_moved_are_about_the_best_and_the_gap_is_true(
    share: float, recomputes: bool
) -> None:
    graph, schedule = deep(2 if recomputes else 5), schedule_of(ScheduleKind.ONE_F_ONE_B)
    prices, solution = made(graph, share)
    ways = partings(len(graph.operators)) if recomputes else ((),)
    every = steps(graph, prices, solution.program, schedule, ways)
    assert prices.cluster.host is not None
    rate = prices.cluster.host.bandwidth
    spared = replace(shares(PricedProgram(prices, solution.program)), offload_rate=rate)
    table = intervals(PricedProgram(prices, solution.program), HOP, places=range(len(graph.operators) + 1))
    peaks = sorted({nbytes for _, nbytes in every})
    slower = []
    for cap in (*peaks[:2], *peaks[2 :: max(1, len(peaks) // 6)]):
        best = min(seconds for seconds, nbytes in every if nbytes <= cap)
        assert recomputing_bound(table, spared, [schedule], cap=cap) <= best * (1 + CLOSE)
        try:
            step = sought(
                graph,
                prices,
                solution,
                [schedule],
                cap,
                recompute=Recompute.AUTO if recomputes else Recompute.NONE,
            )
        except InfeasibleError:
            assert cap < 1.1 * peaks[0], "levels are few"
            continue
        check(graph, prices, step, cap)
        assert step.bound <= best * (1 + CLOSE)
        slower.append(step.seconds / best - 1)
    assert slower and max(slower) <= SELDOM
    assert sum(slower) / len(slower) <= WITHIN


def test_tables_count_what_every_stage_could_move() -> None:
    """Less than all at the ends of stages, and all of what hides where the link is fast."""
    graph = blocks(2)
    for share in (0.3, 1e9):
        prices, solution = made(graph, share)
        items = movable(PricedProgram(prices, solution.program))[:-1]  # without what backward reads first
        program = replace(solution.program, offload=tuple(item.tensor for item in items))
        places = range(len(graph.operators) + 1)
        plain = intervals(PricedProgram(prices, solution.program), HOP, places=places)
        told = intervals(PricedProgram(prices, program), HOP, places=places, starts=(0,))
        table = intervals(PricedProgram(prices, program), HOP, places=places)
        assert (told.saved <= table.saved).all() and (table.saved <= plain.saved).all()
        whole = told.saved[0, -1]
        assert whole == plain.saved[0, -1] - sum(item.nbytes for item in items)
        assert (table.saved[0, -1] == whole) == (share > 1)
