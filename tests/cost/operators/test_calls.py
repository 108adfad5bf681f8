"""What the calls of an operator do to memory, by hand: values by number, the operands first, in doubles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.core.graph import Ref
from autopar.core.placement import Shard
from autopar.cost.operators.calls import CallMemory, CallResult, Gradient, OperatorCalls
from autopar.sharding.strategies import options_of
from tests.cost.operators.test_prices import convolved, split
from tests.proof.models import Script

aten = torch.ops.aten


def calls(script: Script, made: str, factors: str, **how: Any) -> OperatorCalls:
    prices, operation, strategy = split(script, made, factors, **how)
    return prices.calls(operation, strategy)


def test_a_product_keeps_its_factors_and_gives_a_gradient_of_each() -> None:
    """Half of 4 x 3 numbers times 5 x 3."""
    s = Script()
    (only,) = (found := calls(s, s.linear(s.user(4, 3, grad=True), 5), "n0")).calls
    assert found.results == (2,)
    assert only.takes == (0, 1)
    assert only.gives == (CallResult(2, 80),)
    assert only.saves == {0, 1} and only.own == 0
    assert only.gradients == (Gradient(0, 48), Gradient(1, 120))


def test_what_does_not_learn_has_no_gradient_and_its_partner_is_not_kept() -> None:
    s = Script()
    (only,) = calls(s, s.linear(s.user(4, 3), 5), "n0").calls
    assert only.saves == {0}
    assert only.gradients == (Gradient(1, 120),)


@pytest.mark.parametrize(
    ("target", "arguments", "factor", "nbytes", "alias", "saves"),
    [
        (aten.relu.default, (), "d0", 144, None, {1}),  # its result
        (aten.gelu.default, (), "d0", 144, None, {0}),
        (aten.view.default, ([4, 3, 3],), "d0.0", 0, 0, set()),
    ],
    ids=str,
)
def test_a_view_shares_storage_both_ways_and_what_else_there_is_has_its_own(
    target: Any, arguments: tuple[Any, ...], factor: str, nbytes: int, alias: int | None, saves: set[int]
) -> None:
    """Half of 4 x 9 numbers."""
    s = Script()
    made = s.call(target, Ref(s.user(4, 9, grad=True)), *arguments)
    prices, operation, _ = split(s, made, "-")
    option = next(each for each in options_of(operation, prices.dims) if each.operands == (Shard(0),))
    (only,) = prices.calls(operation, (option,)).calls
    assert only.gives == (CallResult(1, nbytes, alias),)
    assert only.saves == saves
    assert only.gradients == (Gradient(0, nbytes, None if alias is None else 1),)


def test_a_loss_is_written_for_each_element_before_it_is_a_mean() -> None:
    s = Script()
    made = s.call(aten.mse_loss.default, Ref(s.user(4, 9, grad=True)), Ref(s.user(4, 9)))
    assert calls(s, made, "-").calls[0].gives == (CallResult(2, 288),)


def test_a_split_convolution_keeps_what_its_own_does_and_the_neighbours_rows() -> None:
    """Three rows of 72 bytes of its own, two of its neighbours, and a kernel of 24."""
    prices, operation, strategy = convolved()
    (only,) = prices.calls(operation, strategy).calls
    assert only == CallMemory(
        takes=(0, 1),
        gives=(CallResult(2, 216),),
        saves=frozenset({0, 1}),
        own=2 * 72,
        gradients=(Gradient(0, 216), Gradient(1, 24)),
        repeats=False,
    )
