"""What a step costs by hand: launches and latencies of 1 s, memory and links of 1 byte/s, doubles."""

from __future__ import annotations

import pytest
import torch

from autopar.core.graph import Graph, Ref
from autopar.core.placement import Layout, R, Shard
from autopar.core.program import Program
from autopar.cost.operators.prices import Prices
from autopar.cost.program.host import FORWARD_CALL_SECONDS
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.program.step import StepCost
from autopar.planning.asked.request import Request
from autopar.planning.report import report
from autopar.results.plan.plan import Plan
from autopar.runtime.parameters.gradient_buckets import BUCKET_BYTES
from autopar.sharding.strategies import find_atoms
from autopar.solve.program.solution import Solution
from autopar.solve.stages.step import unstaged
from tests.cost.operators.test_prices import anew, priced
from tests.forced_programs import force_factors
from tests.proof.models import Script

aten = torch.ops.aten
S = Shard(0)


def test_a_step_is_the_sum_of_what_its_program_does() -> None:
    """Four samples of 3 numbers through a layer of 5, by halves, and their sum."""
    s = Script()
    made = s.linear(s.user(4, 3), 5)
    loss = s.call(aten.sum.default, Ref(made))
    graph = s.graph(loss)
    prices = priced(graph, find_atoms(graph))
    found = PricedProgram(prices, force_factors(graph, prices.dims, {made: "n0", loss: "d0"})).cost
    cut, total = 1 + 2 * 48, (1 + 2 * 8) + (2 + 8)  # of the samples; of the loss
    linear, summed = 1 + 48 + 120 + 80, 1 + 80 + 8
    assert found.forward == cut + linear + summed + total
    kept = 1e-3 * 48  # breaks ties
    assert found.backward == pytest.approx((1 + 80 + 48 + 120) + (1 + 8 + 80) + kept)
    assert found.sync == pytest.approx((2 + 1) * 120 / BUCKET_BYTES + 120 + 2 * 120)
    assert found.update == 2 * (4 * 120 + 4)
    used = anew(priced(graph, find_atoms(graph)), training=False)
    alone = PricedProgram(used, force_factors(graph, used.dims, {made: "n0", loss: "d0"})).cost
    calls = 2 * FORWARD_CALL_SECONDS
    assert alone == StepCost(forward=found.forward, backward=0, sync=0, update=0, calls=calls)


def test_what_is_done_once_is_not_repeated() -> None:
    cost = StepCost(forward=1, backward=2, sync=10, update=20)
    assert cost.micro_batch == 3
    assert cost.of(4) == 4 * 3 + 10 + 20
    assert cost.weighted(0.5) == 3 + 5 + 10
    assert cost.weighted(1.0) == cost.of(1)


# -- what several take ------------------------------------------------------------------------------------


def of_operators(graph: Graph, prices: Prices, program: Program) -> tuple[float, float]:
    """Seconds of the operators alone, forward and backward."""
    found = [prices.operator(item, program.strategies[item.name]) for item in graph.operators]
    return sum(price.forward for price in found), sum(price.backward for price in found)


def planned(graph: Graph, prices: Prices, program: Program) -> Plan:
    priced = PricedProgram(prices, program)
    solution = Solution(priced, 1.0, 1.0, "forced", priced)
    step = unstaged(solution, 1)
    return report(step, prices.cluster, [], None, Request())


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_a_conversion_that_several_take_is_paid_once(consumers: int) -> None:
    """A tensor of 8 x 6 doubles is made in halves and taken whole: a gather, and a cut on the way back."""
    s = Script()
    half = s.call(aten.neg.default, Ref(s.user(8, 6, grad=True)))
    takers = [s.call(aten.relu.default, Ref(half)) for _ in range(consumers)]
    total = takers[0]
    for taker in takers[1:]:
        total = s.call(aten.add.Tensor, Ref(total), Ref(taker))
    graph = s.graph(s.call(aten.sum.default, Ref(total)))
    prices = priced(graph, find_atoms(graph))
    program = force_factors(graph, prices.dims, {half: "d0"})
    found, own = PricedProgram(prices, program).cost, of_operators(graph, prices, program)
    cut, gather = 1 + 2 * 192, 1 + 192
    assert found.forward == own[0] + cut + gather  # the user's tensor is cut first
    assert found.backward == pytest.approx(own[1] + gather + cut)
    plan = planned(graph, prices, program)
    paid = {layer.name: layer.communication for layer in plan.layers}
    assert [paid[item.name] for item in graph.operators[:2]] == [cut + gather, gather + cut]
    assert sum(paid.values()) == 2 * (cut + gather)
    assert plan.communication_seconds == pytest.approx(sum(paid.values()), abs=1)  # and what breaks ties


def test_the_way_that_two_conversions_have_in_common_is_paid_once() -> None:
    """On 2 x 2 ranks: eight rows of 6 doubles in quarters, taken in halves by one and whole by another."""
    s = Script()
    made = s.call(aten.neg.default, Ref(s.user(8, 6, grad=True)))
    halves, whole = (s.call(aten.relu.default, Ref(made)) for _ in range(2))
    loss = s.call(aten.sum.default, Ref(s.call(aten.add.Tensor, Ref(halves), Ref(whole))))
    graph = s.graph(loss)
    prices = priced(graph, find_atoms(graph), ranks=(2, 2))
    quarters: dict[str, Layout] = {graph.inputs[0].name: (S, S)}
    program = force_factors(graph, prices.dims, {made: "d0", halves: "d0 -"}, stored=quarters)
    assert {move.target for move in program.moves[made]} == {(S, R), (R, R)}
    found, own = PricedProgram(prices, program).cost, of_operators(graph, prices, program)
    to_halves, to_whole, back_to_halves, back_to_quarters = 1 + 96, 1 + 192, 1 + 2 * 192, 1 + 2 * 96
    join = to_whole, back_to_halves  # of what is made in halves and added whole
    assert found.forward == own[0] + to_halves + to_whole + join[0]
    assert found.backward == pytest.approx(own[1] + back_to_halves + back_to_quarters + join[1])


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_weight_that_several_take_is_summed_and_updated_once(layers: int) -> None:
    """Of 3 x 3 doubles, 72 bytes."""
    s = Script()
    weight, made = s.weight(3, 3), [s.user(4, 3)]
    for _ in range(layers):
        made.append(s.call(aten.linear.default, Ref(made[-1]), Ref(weight)))
    loss = s.call(aten.sum.default, Ref(made[-1]))
    graph = s.graph(loss)
    prices = priced(graph, find_atoms(graph))
    program = force_factors(graph, prices.dims, {**dict.fromkeys(made[1:], "n0"), loss: "d0"})
    found, plan = PricedProgram(prices, program).cost, planned(graph, prices, program)
    cut, total, sync = 1 + 2 * 48, (1 + 2 * 8) + (2 + 8), (2 + 1) * 72 / BUCKET_BYTES + 72 + 2 * 72
    assert found.sync == pytest.approx(sync)
    assert found.update == 2 * (4 * 72 + 4)
    assert sum(layer.communication for layer in plan.layers) == pytest.approx(cut + sync)
    assert plan.communication_seconds == pytest.approx(cut + total + sync, abs=1)  # and what breaks ties


def test_a_weight_in_shards_that_two_take_whole_is_gathered_and_scattered_once() -> None:
    """Of 4 x 4 doubles, 128 bytes, for the batch in halves, by every micro-batch."""
    s = Script()
    weight, x = s.weight(4, 4), s.user(4, 4)
    first, second = (s.call(aten.linear.default, Ref(x), Ref(weight)) for _ in range(2))
    loss = s.call(aten.sum.default, Ref(s.call(aten.add.Tensor, Ref(first), Ref(second))))
    graph = s.graph(loss)
    prices = priced(graph, find_atoms(graph))
    factors = dict.fromkeys((first, second), "n0") | {
        graph.operators[2].results[0] or "": "d0",
        loss: "d0",
    }
    program = force_factors(graph, prices.dims, factors, stored={weight: (S,)})
    found, own = PricedProgram(prices, program).cost, of_operators(graph, prices, program)
    cut, gather, total = 1 + 2 * 64, 1 + 64, (1 + 2 * 8) + (2 + 8)
    assert found.forward == own[0] + cut + gather + total
    assert found.backward == pytest.approx(own[1] + gather)  # to scatter the sum of gradients takes as long
    assert found.sync == 0
    assert found.update == 2 * (4 * 64 + 4)
