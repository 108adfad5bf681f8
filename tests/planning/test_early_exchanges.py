"""What starts early hides behind the part theta of compute, on GPUs alone, and no plan beats the bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from autopar.core.force import Parallelism
from autopar.core.gathering import ShardState
from autopar.core.mesh import Mesh
from autopar.cost.machine.devices import OVERLAP
from autopar.cost.program.early import could_hide, early_seconds
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import AutoparError
from autopar.planning import training_notes
from autopar.planning.asked.request import Request
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.search import FoundPlan, search
from autopar.units import show_seconds
from tests.planning.test_mesh_search import CLOSE, CLUSTER, PLAIN, replace_device, wide

SHARDS = {"force": Parallelism.BATCH, "shard_state": ShardState.WEIGHTS}
SPLIT = {"force": Parallelism.MODEL}


def found_for(
    *, overlap: bool = True, device: str = "h100", mesh: tuple[int, ...] = (4,), **asked: Any
) -> FoundPlan:
    request = Request(**PLAIN, mesh=Mesh(mesh), overlap=overlap, **asked)
    return search(wide(), replace_device(CLUSTER, device), request)


def problem_of(count: int) -> MeshProblem:
    """What `found_for` solves, by itself."""
    request = Request(**PLAIN, mesh=Mesh((4,)), overlap=True, micro_batches=count)
    graph, model = wide(), found_for(micro_batches=count).prices.model
    return MeshProblem(graph, Mesh((4,)), CLUSTER, model, request, None, CLUSTER.intra)


@pytest.mark.parametrize("asked", [SHARDS, SPLIT], ids=["shards", "split"])
@pytest.mark.parametrize("count", [1, 4])
def test_exposed_are_the_seconds_that_theta_of_compute_does_not_hide(
    asked: dict[str, Any], count: int
) -> None:
    found = found_for(**asked, micro_batches=count)
    cost, parts = found.step.cost, found.plan.parts
    blocking = found_for(overlap=False, **asked, micro_batches=count)
    assert cost.beside > 0 and blocking.step.cost.beside == 0
    assert found.plan.step_seconds < blocking.plan.step_seconds
    hidden = cost.hidden + count * cost.beside
    assert hidden <= OVERLAP * parts.compute * (1 + CLOSE)
    assert parts.hidden == pytest.approx(hidden)
    assert parts.total == pytest.approx(found.plan.step_seconds)
    assert cost.of(count) == pytest.approx(
        count * (cost.forward + cost.backward) + cost.sync + cost.update - hidden
    )


def test_sums_of_activations_hide_behind_gradients_of_weights_alone() -> None:
    step = found_for(**SPLIT).step
    weights = sum(price.weights for price in step.solution.priced.operator_prices)
    assert 0 < step.cost.beside <= OVERLAP * weights * (1 + CLOSE)


def test_what_is_computed_again_has_nothing_that_starts_early() -> None:
    priced = found_for(**SHARDS).step.solution.priced
    everything = ((0, len(priced.graph.operators)),)
    again = PricedProgram(priced.prices, replace(priced.program, recompute=everything))
    assert again.cost.beside == 0


@pytest.mark.parametrize("asked", [SHARDS, SPLIT], ids=["shards", "split"])
def test_on_cpus_nothing_changes(asked: dict[str, Any]) -> None:
    early, blocking = (found_for(overlap=overlap, device="cpu", **asked) for overlap in (True, False))
    assert early.step.cost == blocking.step.cost and early.step.bound == blocking.step.bound


@pytest.mark.parametrize("asked", [SHARDS, SPLIT, {}], ids=["shards", "split", "free"])
@pytest.mark.parametrize("count", [1, 4])
def test_no_placement_costs_more_by_a_row_than_its_step(asked: dict[str, Any], count: int) -> None:
    """So a solve by a row's prices bounds all placements; some come near to theirs."""
    found = found_for(**asked, micro_batches=count)
    problem = problem_of(count)
    program, near = found.plan.program, 0.0
    seconds = PricedProgram(problem.prices, program).cost.of(count)
    assert seconds == pytest.approx(found.plan.step_seconds)
    for multiplier, late in ((1.0, 0.0), (0.5, 0.0), (0.5, 0.5), (0.0, 1.0), (0.0, 0.0)):
        prices = problem.row_prices(multiplier, late)
        least = count * PricedProgram(prices, program).cost.weighted(prices.step_weight)
        assert least <= seconds * (1 + CLOSE)
        near = max(near, least)
    assert near > 0.8 * seconds


@pytest.mark.parametrize(
    ("mesh", "count"), [((4,), 1), pytest.param((2, 2), 4, marks=pytest.mark.long)], ids=str
)
def test_no_forced_plan_beats_the_bound(mesh: tuple[int, ...], count: int) -> None:
    free = found_for(mesh=mesh, micro_batches=count)
    assert free.step.bound <= free.step.seconds * (1 + CLOSE)
    states = (ShardState.AUTO, ShardState.WEIGHTS)
    tried = 0
    for force, state in product(Parallelism, states):
        try:
            forced = found_for(mesh=mesh, micro_batches=count, force=force, shard_state=state)
        except AutoparError:
            continue
        tried += 1
        assert free.step.bound <= forced.step.seconds * (1 + CLOSE)
        assert forced.step.bound <= forced.step.seconds * (1 + CLOSE)
    assert tried > 4


@pytest.mark.parametrize("count", [1, 4])
def test_a_plan_whose_exchanges_could_start_early_says_how_much_would_hide(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_notes, "MUCH", 1e-3)
    blocking = found_for(overlap=False, **SHARDS, micro_batches=count)
    priced = blocking.step.solution.priced
    early = PricedProgram(replace(priced.prices, early=True), priced.program)
    assert could_hide(priced) == pytest.approx(early_seconds(early)[1]) and could_hide(priced)
    assert could_hide(early) == 0.0 and early_seconds(priced) == (0.0, 0.0)
    (note,) = (note for note in blocking.plan.notes if "--overlap" in note)
    assert note.startswith(f"about {show_seconds(count * could_hide(priced))} of the communication")


@pytest.mark.parametrize("options", [{"overlap": True}, {"overlap": False, "device": "cpu"}])
def test_a_plan_that_would_gain_nothing_says_nothing_of_it(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_notes, "MUCH", 1e-3)
    assert not any("--overlap" in note for note in found_for(**options, **SHARDS).plan.notes)
