"""What may be chosen is pruned of what could only lose, by few prices."""

from __future__ import annotations

from random import Random

import pytest
import torch

from autopar.core.graph import Operator, Ref
from autopar.core.mesh import Mesh
from autopar.core.strategy import GATHERED, UNSUMMED, Strategy
from autopar.cost.operators.price import Price
from autopar.cost.operators.prices import Prices
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms, options_of, strategies_of
from autopar.solve.choices.space import undominated
from tests.proof.models import Script
from tests.solve.brute_force import chain, random_prices

aten = torch.ops.aten


def test_of_strategies_with_equal_placements_the_cheapest_stays_and_others_are_not_priced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = Script()
    same = s.call(aten.eq.Scalar, Ref(s.user(8, 8)), 0)
    made = s.call(aten.linear.default, Ref(s.user(8, 8, grad=True)), Ref(s.parameter(8, 8)))
    graph = s.graph(s.call(aten.sum.default, Ref(s.call(aten.mul.Tensor, Ref(made), Ref(same)))))
    prices = random_prices(graph, Mesh((2,)), Random(0))
    compare, product, *_ = graph.operators
    asked: list[str] = []
    price = Prices.operator

    def spy(self: Prices, operation: Operator, strategy: Strategy) -> Price:
        asked.extend(option.factor for option in strategy)
        return price(self, operation, strategy)

    monkeypatch.setattr(Prices, "operator", spy)
    offered = strategies_of(product, prices.dims)
    assert undominated(product, offered, prices) == list(offered) and not asked
    left = undominated(compare, strategies_of(compare, prices.dims), prices)
    assert set(asked) == {GATHERED, UNSUMMED}  # nothing learns there: B is R
    candidates = {
        strategy[0].factor: price(prices, compare, strategy).seconds
        for strategy in strategies_of(compare, prices.dims)
        if strategy[0].factor in asked
    }
    assert [option.factor for (option,) in left if option.factor in candidates] == [
        min(candidates, key=candidates.__getitem__)
    ]


def test_operators_of_other_sizes_share_their_strategies() -> None:
    graph = chain()
    dims = Dims(graph, find_atoms(graph), Mesh((2, 2)))
    first, *others = [item for item in graph.operators if item.target is aten.linear.default]
    assert others
    for other in others:
        assert graph.specs[other.operands[1]] != graph.specs[first.operands[1]]
        assert options_of(other, dims) is options_of(first, dims)
        assert strategies_of(other, dims) is strategies_of(first, dims)
        own = set(map(id, options_of(other, dims)))
        assert all(id(option) in own for strategy in strategies_of(other, dims) for option in strategy)
