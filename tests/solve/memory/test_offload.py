"""What waits in the host's memory hides if it can, fits the cap if anything does, and costs what is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, islice
from random import Random

import pytest
import torch

from autopar.cluster import ClusterSpec, Link
from autopar.core.graph import Graph, Ref
from autopar.core.mesh import Mesh
from autopar.core.offload import Offload
from autopar.core.program import Program
from autopar.core.recompute import Recompute
from autopar.core.schedule import ScheduleKind
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.prices import Prices
from autopar.cost.program.offload import clock, movable, wait_seconds
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import InfeasibleError
from autopar.schedules.in_flight import scheduled
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.solve.assignment.goal import Goal
from autopar.solve.assignment.search import choose
from autopar.solve.choices.space import build_space
from autopar.solve.memory import offload
from autopar.solve.memory.offload import (
    fit_by_offload,
    fitted,
    moving_in_stages,
    offload_everything,
    overlapped,
)
from autopar.solve.memory.recompute import fit
from tests.proof.models import Script
from tests.solve.brute_force import (
    DEVICE,
    BruteForce,
    blocks,
    branches,
    normalised,
    random_prices,
    scores,
    small_space,
    unfolded,
)

aten = torch.ops.aten

CLOSE = 1e-6  # relative
WITHIN, SELDOM = 0.02, 0.1  # of the best there is
MESH = Mesh((2,))
MOST = 150  # placements
Way = tuple[float, float, int]  # seconds that are waited, all seconds, bytes at the peak


def deep(layers: int = 5) -> Graph:
    """Activations beside which weights are small, and more of them than are under way at once."""
    s = Script()
    x = s.linear(s.user(64, 8), 8)
    for _ in range(layers):
        x = s.call(aten.tanh.default, Ref(x))
    return s.graph(s.call(aten.sum.default, Ref(s.linear(x, 4))))


GRAPHS = (branches, scores, normalised, lambda: blocks(2), deep)


def gpus(bandwidth: float, *, count: int = 2, host_memory: int | None = None) -> ClusterSpec:
    link = Link(0.0, bandwidth)
    return ClusterSpec(devices_per_node=count, device="h100", host=link, host_memory=host_memory)


def prices_of(graph: Graph, cluster: ClusterSpec) -> Prices:
    model = CostModel(DEVICE, {}, CollectiveTable({}))
    mesh = Mesh((cluster.num_devices,))
    return Prices(graph, Dims(graph, find_atoms(graph), mesh), cluster, model)


def placed(graph: Graph, cluster: ClusterSpec) -> tuple[Prices, Program]:
    prices, folding = prices_of(graph, cluster), unfolded(graph)
    return prices, choose(graph, prices, build_space(graph, prices, folding), folding).program


def subsets(graph: Graph, prices: Prices, program: Program) -> Iterator[Program]:
    items = [item.tensor for item in movable(PricedProgram(prices, program))]
    for count in range(len(items) + 1):
        for some in combinations(items, count):
            yield replace(program, offload=some)


def bandwidths(graph: Graph, prices: Prices, program: Program) -> list[float]:
    """From links behind which nothing hides to those behind which all but the last does."""
    nbytes = sum(item.nbytes for item in movable(PricedProgram(prices, program)))
    unit = nbytes / PricedProgram(prices, program).cost.forward
    return [unit * factor for factor in (0.03, 0.3, 1.0, 3.0, 30.0)]


@pytest.mark.parametrize("make", GRAPHS)
def test_what_hides_and_fits_is_found(make: Callable[[], Graph]) -> None:
    graph = make()
    prices, program = placed(graph, gpus(1.0))
    met = 0
    for bandwidth in bandwidths(graph, prices, program):
        prices = prices_of(graph, gpus(bandwidth))
        hidden = [
            PricedProgram(prices, each).peak.nbytes
            for each in subsets(graph, prices, program)
            if sum(wait_seconds(PricedProgram(prices, each))) == 0.0
        ]
        for cap in sorted(set(hidden)):
            found = fit_by_offload(
                PricedProgram(prices, program), cap, recompute=Recompute.NONE, offload=Offload.AUTO
            )
            assert found.peak == PricedProgram(prices, found.program).peak
            assert sum(wait_seconds(PricedProgram(prices, found.program))) == found.seconds == 0.0
            assert found.peak.nbytes <= cap
            met += bool(found.program.offload)
    assert met or make is not deep


@pytest.mark.parametrize("make", GRAPHS)
def test_with_parts_it_is_no_slower_than_parts_alone_and_apart_from_them(make: Callable[[], Graph]) -> None:
    graph = make()
    prices, program = placed(graph, gpus(1.0))
    faster = both = 0
    for bandwidth in bandwidths(graph, prices, program):
        prices = prices_of(graph, gpus(bandwidth))
        peak = PricedProgram(prices, program).peak.nbytes
        least = fit(PricedProgram(prices, program), 0).peak.nbytes
        for part in range(9):
            cap = least + (peak - least) * part // 8
            alone = fit(PricedProgram(prices, program), cap)
            found = fit_by_offload(
                PricedProgram(prices, program), cap, recompute=Recompute.AUTO, offload=Offload.AUTO
            )
            assert found.peak.nbytes <= cap and found.seconds <= alone.seconds * (1 + CLOSE)
            assert found.peak == PricedProgram(prices, found.program).peak
            assert is_apart(graph, found.program)
            faster += found.seconds < alone.seconds * (1 - CLOSE)
            both += bool(found.program.offload and found.program.recompute)
    assert faster and both or make is not deep


def is_apart(graph: Graph, program: Program) -> bool:
    """Whether no operator that is recomputed takes or makes what is moved."""
    again = [item for first, stop in program.recompute for item in graph.operators[first:stop]]
    touched = {name for item in again for name in (*item.operands, *item.results)}
    return touched.isdisjoint(name for name, _ in program.offload)


def test_what_parts_take_or_make_stays() -> None:
    graph = deep()
    prices, program = placed(graph, gpus(1e30))
    offloaded = offload_everything(PricedProgram(prices, program)).program
    for first, stop in ((1, 2), (2, 4), (3, 7)):
        found = fitted(PricedProgram(prices, replace(offloaded, recompute=((first, stop),)))).program
        assert found.offload and len(found.offload) < len(offloaded.offload) and is_apart(graph, found)


def test_what_hides_in_one_direction_alone_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = deep()
    prices, program = placed(graph, gpus(1e9))
    times = clock(PricedProgram(prices, program))
    assert overlapped(PricedProgram(prices, program)).program.offload
    for shorter in (
        replace(times, forward=tuple(0.0 for _ in times.forward)),
        replace(times, backward=tuple(0.0 for _ in times.backward)),
    ):
        monkeypatch.setattr(offload, "clock", lambda *_, found=shorter: found)
        assert not overlapped(PricedProgram(prices, program)).program.offload


def test_with_one_stage_all_that_operators_make_may_be_moved_the_first_one_too() -> None:
    s = Script()
    x = s.call(aten.tanh.default, Ref(s.user(64, 8, grad=True)))  # backward reads its result
    x = s.linear(s.call(aten.tanh.default, Ref(s.linear(x, 8))), 8)
    graph = s.graph(s.call(aten.sum.default, Ref(s.call(aten.tanh.default, Ref(x)))))
    prices, program = placed(graph, gpus(1e30))
    made = {item.tensor for item in movable(PricedProgram(prices, program)) if item.maker >= 0}
    first = graph.operators[0].results[0]
    assert first in {name for name, _ in made}
    schedule = scheduled(ScheduleKind.GPIPE, 1, 1, 2)
    offloaded = [made] * len(graph.operators)
    found = moving_in_stages(
        PricedProgram(prices, program), offloaded, starts=(0,), schedule=schedule
    ).program
    assert set(found.offload) == made
    kept = [set() if place == 0 else made for place in range(len(graph.operators))]
    rest = moving_in_stages(PricedProgram(prices, program), kept, starts=(0,), schedule=schedule).program
    assert {name for name, _ in set(found.offload) - set(rest.offload)} == {first}


def test_what_both_passes_wait_for_counts() -> None:
    graph = deep()
    prices, program = placed(graph, gpus(1.0))
    unit = bandwidths(graph, prices, program)[0]  # behind which nothing hides
    prices = prices_of(graph, gpus(unit))
    program = offload_everything(PricedProgram(prices, program)).program
    forward, backward = wait_seconds(PricedProgram(prices, program))
    assert min(forward, backward) > 0
    assert fitted(PricedProgram(prices, program)).seconds == pytest.approx(forward + backward)


def test_all_is_all_and_what_does_not_hide_is_paid() -> None:
    graph = blocks(2)
    prices, program = placed(graph, gpus(1.0))
    offloaded = offload_everything(PricedProgram(prices, program)).program
    assert {*offloaded.offload} == {item.tensor for item in movable(PricedProgram(prices, program))}
    nbytes = sum(item.nbytes for item in movable(PricedProgram(prices, program)))
    plain, late = PricedProgram(prices, program).cost, PricedProgram(prices, offloaded).cost
    # At a byte a second nothing hides but what runs meanwhile.
    assert nbytes - plain.forward <= late.forward - plain.forward <= nbytes
    assert nbytes - plain.backward <= late.backward - plain.backward <= nbytes
    fast = prices_of(graph, gpus(1e30))
    assert PricedProgram(fast, offloaded).cost.micro_batch == pytest.approx(
        PricedProgram(fast, program).cost.micro_batch
    )
    assert PricedProgram(fast, offloaded).peak.saved < PricedProgram(fast, program).peak.saved


def test_the_hosts_memory_is_shared_and_not_exceeded() -> None:
    graph = blocks(2)
    prices, program = placed(graph, gpus(1.0))
    sizes = [item.nbytes for item in movable(PricedProgram(prices, program))]
    assert all(size & (size - 1) == 0 for size in sizes)  # else pinned memory takes more
    for count in range(len(sizes)):
        room = sum(sorted(sizes)[-count:]) if count else 0
        offloaded = offload_everything(
            PricedProgram(prices_of(graph, gpus(1.0, host_memory=2 * room + 1)), program)
        ).program
        sizes = [
            item.nbytes
            for item in movable(PricedProgram(prices, program))
            if item.tensor in offloaded.offload
        ]
        assert sum(sizes) == room


def test_a_copy_that_is_mostly_latency_is_not_made() -> None:
    graph = blocks(2)
    prices, program = placed(graph, gpus(1.0))
    largest = max(item.nbytes for item in movable(PricedProgram(prices, program)))
    for latency, some in ((largest, True), (largest + 1, False)):
        cluster = replace(gpus(1.0), host=Link(latency, 1.0))
        assert (
            bool(offload_everything(PricedProgram(prices_of(graph, cluster), program)).program.offload)
            is some
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize(
    "bandwidth", [pytest.param(1e5, marks=pytest.mark.long), 1e7, pytest.param(1e9, marks=pytest.mark.long)]
)
def test_placement_and_what_is_moved_together_are_about_the_best_and_the_gap_is_true(
    seed: int, bandwidth: float
) -> None:
    graph, random = deep(), Random(seed)
    prices = random_prices(graph, MESH, random)
    prices.cluster = gpus(bandwidth)
    space = small_space(graph, prices, random, most=2, layouts=1)
    known: list[Way] = []
    for _, program in islice(BruteForce(graph, prices, space).programs(), MOST):
        for each in subsets(graph, prices, program):
            waits = sum(wait_seconds(PricedProgram(prices, each)))
            peak = PricedProgram(prices, each).peak.nbytes
            known.append((waits, PricedProgram(prices, each).seconds, peak))
    peaks = sorted({nbytes for *_, nbytes in known})
    slower = []
    for cap in (*peaks[:3], *peaks[3 :: max(1, len(peaks) // 6)]):
        try:
            found = choose(
                graph, prices, space, unfolded(graph), Goal(cap=cap, gap=1e-9, offload=Offload.AUTO)
            )
        except InfeasibleError:  # only by copies that don't hide
            assert not any(nbytes <= cap for waits, _, nbytes in known if waits == 0.0)
            continue
        best = min(seconds for waits, seconds, nbytes in known if nbytes <= cap and waits == 0.0)
        assert found.peak.nbytes <= cap
        assert found.seconds == pytest.approx(PricedProgram(prices, found.program).seconds)
        assert found.seconds * (1 - found.gap) <= best * (1 + CLOSE)
        slower.append(found.seconds / best - 1)
    assert max(slower) <= SELDOM
    assert sum(slower) / len(slower) <= WITHIN


def test_the_bound_does_not_count_what_may_be_moved() -> None:
    graph = deep(12)
    cluster = gpus(1e30, count=1)
    prices, program = placed(graph, cluster)
    fastest, offloaded = (
        PricedProgram(prices, each).peak
        for each in (program, overlapped(PricedProgram(prices, program)).program)
    )
    assert fastest.saved > offloaded.nbytes
    folding = unfolded(graph)
    space = build_space(graph, prices, folding)
    found = choose(graph, prices, space, folding, Goal(cap=offloaded.nbytes, offload=Offload.AUTO))
    assert found.gap < CLOSE and found.seconds == pytest.approx(PricedProgram(prices, program).seconds)


def test_what_would_give_memory_is_said() -> None:
    graph = deep()
    prices, folding = prices_of(graph, gpus(1.0)), unfolded(graph)
    space = build_space(graph, prices, folding)

    def remedy(recompute: Recompute, offload: Offload) -> str:
        with pytest.raises(InfeasibleError) as caught:
            choose(graph, prices, space, folding, Goal(cap=10, recompute=recompute, offload=offload))
        return caught.value.remedy

    neither = remedy(Recompute.NONE, Offload.NONE)
    assert "--recompute auto" in neither and "--offload all" in neither and "more devices" in neither
    assert "--recompute" not in remedy(Recompute.AUTO, Offload.AUTO)
    assert "--offload all" not in remedy(Recompute.NONE, Offload.ALL)
    for asked, is_told in ((Offload.NONE, True), (Offload.ALL, True), (Offload.AUTO, False)):
        assert ("--offload state" in remedy(Recompute.AUTO, asked)) is is_told  # auto has tried it
    prices.cluster = replace(gpus(1.0), host=None)
    assert "links.host" in remedy(Recompute.NONE, Offload.NONE)
