"""What a compiled program fuses moves less: launches of 1 s and memory of 1 byte/s, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import networkx as nx
import pytest
import torch

from autopar.cluster import ClusterSpec, Link
from autopar.core.costs import DeviceModel, SavedByCall
from autopar.core.graph import Call, Graph, InputKind, Operator, Ref
from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.placement import P, R, Shard
from autopar.core.strategy import Strategy
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.compute import CALL_LAUNCHES
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.fused_groups import FusedGroups, find_groups
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.runtime.compiled.fused_kernel import FUSED, function
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms, options_of
from autopar.solve.assignment.goal import Goal
from autopar.solve.assignment.search import choose
from costdb.measurement import Measurement
from costdb.profiler import measure
from tests.proof.models import Script, draw_model
from tests.solve.brute_force import BruteForce, chain, normalised, random_prices, small_space, unfolded

aten = torch.ops.aten
TOY = DeviceModel("toy", "cpu", ((torch.float64, 1.0),), bandwidth=1.0, launch_seconds=1.0)
X = 8 * 4 * 6  # bytes of a float64 tensor of 4 x 6


def priced(graph: Graph, *, model: CostModel | None = None, compiled: bool = True, ranks: int = 1) -> Prices:
    cluster = ClusterSpec(devices_per_node=ranks, intra=Link(1.0, 1.0))
    return Prices(
        graph,
        Dims(graph, find_atoms(graph), Mesh((ranks,))),
        cluster,
        model or CostModel(TOY, {}, CollectiveTable({})),
        groups=find_groups(graph) if compiled else None,
    )


def whole(prices: Prices, operation: Operator) -> Strategy:
    return (options_of(operation, prices.dims)[0],)


def seconds(prices: Prices, operators: Sequence[Operator]) -> tuple[float, float]:
    """Forward and backward of operators, unsplit."""
    found = [prices.operator(item, whole(prices, item)) for item in operators]
    return sum(each.forward for each in found), sum(each.compute - each.forward for each in found)


def by_group(graph: Graph) -> list[list[str]]:
    groups = find_groups(graph).groups.values()
    return [[item.target.overloadpacket.__name__ for item in group] for group in groups]


def activated() -> tuple[Graph, list[Operator]]:
    """A product, a chain of three operators, a product; with the operators of the chain."""
    s = Script()
    h = s.linear(s.user(4, 5), 6)
    for target in (aten.gelu.default, aten.neg.default, aten.sin.default):
        h = s.call(target, Ref(h))
    graph = s.graph(s.call(aten.sum.default, Ref(s.linear(h, 3))))
    return graph, list(graph.operators[1:4])


def residual() -> Graph:
    """A sum that a norm and, behind a product, another sum take."""
    s = Script()
    x = s.linear(s.user(4, 5), 6)
    added = s.call(aten.add.Tensor, Ref(x), Ref(s.linear(x, 6)))
    norm = s.call(aten.layer_norm.default, Ref(added), [6], Ref(s.weight(6)), Ref(s.weight(6)))
    return s.graph(s.call(aten.sum.default, Ref(s.call(aten.add.Tensor, Ref(added), Ref(s.linear(norm, 6))))))


def test_a_chain_is_launched_once_reads_what_comes_and_writes_what_leaves() -> None:
    graph, members = activated()
    assert by_group(graph) == [["gelu", "neg", "sin"], ["sum"]]
    # Backward reads the last one's gradient and what came, from which all is recomputed, and writes.
    assert seconds(priced(graph), members) == (1 + 2 * X, 1 + 3 * X)
    forward, backward = seconds(priced(graph, compiled=False), members)
    assert forward == 3 * (1 + 2 * X) and backward > 3 * (1 + 2 * X)


def test_groups_end_where_a_product_stands_between_and_what_others_need_is_written() -> None:
    graph = residual()
    assert by_group(graph) == [["add", "layer_norm"], ["add", "sum"]]
    groups = find_groups(graph)
    added, norm = graph.operators[2], graph.operators[3]
    assert groups.members[added.name].writes == (0,) and groups.members[norm.name].reads == (1, 2)
    forward, backward = seconds(priced(graph), [added, norm])
    statistics, vectors = 2 * 4 * 8, 2 * 6 * 8
    assert forward == 1 + 4 * X + vectors + statistics
    # Gradients of both results, what was summed and the weights again, and the gradients of all that was
    # read; the weights' gradients add up over rows, in sums that read twice.
    assert backward == 1 + (2 + 1 + 2 + 2) * X + 2 * vectors + statistics


def test_views_take_nothing_and_pass_what_is_inside_on() -> None:
    s = Script()
    h = s.call(aten.relu.default, Ref(s.linear(s.user(4, 5), 6)))
    h = s.call(aten.exp.default, Ref(s.call(aten.view.default, Ref(h), [2, 2, 6])))
    graph = s.graph(s.call(aten.sum.default, Ref(s.linear(h, 3))))
    assert by_group(graph)[0] == ["relu", "view", "exp"]
    prices = priced(graph)
    assert seconds(prices, graph.operators[2:3]) == (0, 0)
    assert seconds(prices, graph.operators[1:4])[0] == 1 + 2 * X


def test_what_only_later_levels_need_is_computed_there() -> None:
    s = Script()
    x = s.linear(s.user(4, 5), 6)
    early = s.call(aten.neg.default, Ref(x))
    late = s.linear(s.linear(x, 6), 6)
    graph = s.graph(s.call(aten.sum.default, Ref(s.call(aten.mul.Tensor, Ref(early), Ref(late)))))
    assert by_group(graph) == [["neg", "mul", "sum"]]


@pytest.mark.parametrize("seed", range(60))
def test_nothing_between_two_members_waits_for_what_is_outside(seed: int) -> None:
    graph = draw_model(Random(seed)).graph
    groups = find_groups(graph)
    maker = {name: item.name for item in graph.operators for name in item.results if name}
    flow = nx.DiGraph()
    flow.add_nodes_from(item.name for item in graph.operators)
    flow.add_edges_from(
        (maker[name], item.name) for item in graph.operators for name in item.operands if name in maker
    )
    for group in groups.groups.values():
        inside = {item.name for item in group}
        behind = set().union(*(nx.descendants(flow, name) for name in inside)) - inside
        before = set().union(*(nx.ancestors(flow, name) for name in inside)) - inside
        assert not behind & before


def test_a_move_between_two_members_writes_and_reads_what_the_group_would_not() -> None:
    graph, members = activated()
    between, moved = members[0].results[0], members[2].results[0]
    assert between is not None and moved is not None
    gathered = Move(0, (Shard(0),), (R,))
    summed = Move(0, (P,), (R,))
    compiled, eager = (priced(graph, compiled=each, ranks=2) for each in (True, False))
    copy = 1 + 2 * X
    assert compiled.move(between, gathered) == eager.move(between, gathered) + 2 * copy
    assert compiled.move(between, summed) == eager.move(between, summed) + copy  # nothing to do backward
    assert compiled.move(moved, gathered) == eager.move(moved, gathered)


@pytest.mark.parametrize("make", [chain, normalised], ids=lambda make: make.__name__)
def test_the_optimum_is_the_best_of_all_plans_of_compiled_programs(make: Any) -> None:
    graph, random = make(), Random(3)
    prices = replace(random_prices(graph, Mesh((3,)), random), groups=find_groups(graph))
    space = small_space(graph, prices, random, most=5, layouts=3)
    found = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9))
    assert found.seconds == pytest.approx(BruteForce(graph, prices, space).best(), rel=1e-6)
    assert found.seconds == pytest.approx(PricedProgram(prices, found.program).seconds, rel=1e-6)


def test_sums_of_gradients_hide_behind_no_compiled_backward() -> None:
    graph, _ = activated()
    assert priced(graph).overlap == 0.0


# -- groups that are measured ------------------------------------------------------------------------------


def here(measured: dict[str, Measurement] | None = None) -> CostModel:
    return CostModel(TOY, measured or {}, CollectiveTable({}), here=True)


def group_call(prices: Prices, members: Sequence[Operator]) -> Call:
    """The one call to be measured of a group's members."""
    calls = [call for item in members for call in prices.operator(item, whole(prices, item)).calls]
    (call,) = calls
    assert call.target is FUSED
    return call


def test_a_group_is_one_call_that_is_estimated_as_its_members_are() -> None:
    for graph, members in (activated(), (residual(), list(residual().operators[2:4]))):
        prices = priced(graph, model=here())
        cost = here().cost(group_call(prices, members))
        assert (cost.forward_seconds, cost.backward_seconds) == seconds(prices, members)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_groups_call_computes_what_its_members_do(ranks: int) -> None:
    graph, members = activated()
    call = group_call(priced(graph, model=here(), ranks=ranks), members)
    text, _, _, specs = call.args
    x = torch.randn(specs[0].shape, dtype=torch.float64)
    kept: list[torch.Tensor] = []
    run = function(text.replace("autopar.taken_up.default", "kept"), 1)
    run.__globals__["kept"] = lambda y, _: kept.append(y)
    run(x)
    torch.testing.assert_close(kept, [torch.sin(-torch.nn.functional.gelu(x))])


def test_what_a_group_took_is_what_its_members_take_together() -> None:
    graph, members = activated()
    call = group_call(priced(graph, model=here()), members)
    took = Measurement(call.key(), 1000.0, 2000.0, SavedByCall(), 0, None, 1, 0.0)
    prices = priced(graph, model=here({call.key(): took}))
    assert sum(seconds(prices, members)) == pytest.approx(3000.0 - sum(CALL_LAUNCHES))
    assert all(not prices.operator(item, whole(prices, item)).missing_seconds for item in members)


@pytest.mark.long
def test_a_group_is_measured_compiled() -> None:
    graph, members = activated()
    found = measure(group_call(priced(graph, model=here()), members))
    assert found.forward_seconds > 0 and found.backward_seconds > 0


# -- memory --------------------------------------------------------------------------------------------------


def peaks(graph: Graph) -> tuple[int, int, FusedGroups]:
    """Bytes kept for backward, eager and compiled, of the unsplit program."""
    found = []
    for compiled in (False, True):
        prices = priced(graph, compiled=compiled)
        random = Random(0)
        space = small_space(graph, prices, random, most=1, layouts=1)
        found.append(choose(graph, prices, space, unfolded(graph)).peak.saved)
    return found[0], found[1], find_groups(graph)


def test_what_stays_inside_a_group_is_not_kept() -> None:
    graph, _ = activated()
    eager, compiled, groups = peaks(graph)
    assert len(groups.inside) == 2
    # What comes for gelu, and what the last operator and the product behind it keep; not what sin keeps.
    assert eager == compiled + X


def test_what_stays_inside_has_no_memory_and_no_gradient() -> None:
    graph, members = activated()
    prices = priced(graph)
    first, last = (prices.calls(item, whole(prices, item)).calls[0] for item in (members[0], members[2]))
    assert [item.nbytes for item in first.gives] == [0] and [item.nbytes for item in first.gradients] == [X]
    assert [item.nbytes for item in last.gives] == [X] and [item.nbytes for item in last.gradients] == [0]
    assert first.saves == {0} and not last.saves
    needed = prices.calls(members[0], whole(prices, members[0]), needed=(0,)).calls[0]
    moved = prices.calls(members[2], whole(prices, members[2]), moved=(0,)).calls[0]
    assert [item.nbytes for item in needed.gives] == [X] and [item.nbytes for item in moved.gradients] == [X]
    assert moved.saves == {0}


def test_a_fused_loss_keeps_no_probabilities() -> None:
    s = Script()
    scores = s.linear(s.user(40, 5), 60)
    labels = s.input(InputKind.USER, torch.zeros(40, dtype=torch.int64), grad=False)
    graph = s.graph(s.call(aten.cross_entropy_loss.default, Ref(scores), Ref(labels)))
    loss = graph.operators[-1]
    for compiled in (False, True):
        prices = priced(graph, compiled=compiled)
        call = prices.calls(loss, whole(prices, loss)).calls[0]
        assert (call.own >= 8 * 40 * 60) is not compiled and (call.backward_scratch > 0) is not compiled
        assert (0 in call.saves) is compiled
