"""What follows from calls of other sizes is what a call of these sizes gives and saves."""

from __future__ import annotations

import itertools

import pytest
import torch

import costdb.footprint
from autopar.core.graph import Call, TensorSpec
from autopar.core.size_patterns import pattern_of, result_shapes
from autopar.rewrite.emit import GraphEmitter
from autopar.sharding.rule import RULES
from costdb.footprint import footprint

aten = torch.ops.aten


def spec(*shape: int, grad: bool = True) -> TensorSpec:
    return TensorSpec(shape, torch.float32, grad)


CALLS = {
    "linear": Call(aten.linear.default, (spec(64, 1024), spec(512, 1024), spec(512)), {}),
    "linear of 3 dims": Call(aten.linear.default, (spec(8, 64, 96), spec(48, 96)), {}),
    "a weight alone": Call(aten.linear.default, (spec(64, 96, grad=False), spec(48, 96)), {}),
    "bmm": Call(aten.bmm.default, (spec(6, 64, 96), spec(6, 96, 64)), {}),
    "relu": Call(aten.relu.default, (spec(64, 1024),), {}),
    "gelu": Call(aten.gelu.default, (spec(64, 64),), {"approximate": "tanh"}),
    "broadcast": Call(aten.add.Tensor, (spec(64, 1), spec(1, 32)), {}),
    "transposed": Call(aten.t.default, (spec(64, 32),), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_follows_from_other_sizes_is_what_is_observed(name: str) -> None:
    call = CALLS[name]
    found = costdb.footprint._by_pattern(call, "cpu")
    assert found == costdb.footprint._observe_without_data(call, "cpu")


def test_of_every_sample_of_a_rule_the_footprint_is_what_is_observed() -> None:
    followed = 0
    for sample in itertools.chain.from_iterable(rule.samples() for rule in dict.fromkeys(RULES.values())):
        described = torch.utils._pytree.tree_map(_described, (sample.args, sample.kwargs))
        call = Call(sample.target, *described)
        if (found := costdb.footprint._by_pattern(call, "cpu")) is not None:
            followed += 1
            assert found == costdb.footprint._observe_without_data(call, "cpu"), call.key()
    assert followed > 10


def _described(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad, leaf.layout)


@pytest.mark.parametrize(
    "call",
    [
        Call(aten.slice.Tensor, (spec(64, 32), 0, 0, 100), {}),  # a number that may be a size
        Call(aten.outer.default, (TensorSpec((2,) * 0, torch.float32), spec(3)), {}),  # which it refuses
        Call(aten.flatten.using_ints, (spec(64, 32),), {}),  # a product of sizes
        Call(aten.diagonal.default, (spec(64, 32),), {}),  # the smaller one
        Call(aten.dropout.default, (spec(64, 32), 0.5, True), {}),  # a mask that nobody sees
    ],
    ids=lambda call: str(call.target),
)
def test_where_sizes_matter_a_call_is_observed_by_itself(call: Call) -> None:
    assert costdb.footprint._by_pattern(call, "cpu") is None


def test_a_program_s_values_have_the_shapes_and_strides_of_each_call() -> None:
    for rows, columns in ((4, 6), (6, 4), (5, 5), (1, 7)):
        emitter = GraphEmitter(runs=False)
        x, weight = emitter.placeholder("x", spec(3, rows)), emitter.placeholder("w", spec(columns, rows))
        made = emitter.call(aten.linear.default, (x, weight))
        real = torch.nn.functional.linear(torch.empty(3, rows), torch.empty(columns, rows))
        assert emitter.shape(made) == real.shape and emitter.meta[made].stride() == real.stride()
        assert emitter.meta[made].requires_grad
        back = emitter.call(aten.t.default, (made,))
        assert emitter.meta[back].stride() == real.t().stride()


def test_dims_that_are_neither_a_size_nor_a_number_tell_nothing() -> None:
    assert result_shapes([(3, 5)], [(1031, 1021)]) is not None
    assert result_shapes([(3, 2)], [(1031, 2)]) is not None
    assert result_shapes([(15,)], [(1031 * 1021,)]) is None
    assert result_shapes([(3,)], [(1021,)]) is None  # the smaller of two


def test_calls_that_differ_by_which_sizes_are_equal_are_unlike() -> None:
    keys = {pattern.key for call in CALLS.values() if (pattern := pattern_of(call))}
    square = pattern_of(Call(aten.linear.default, (spec(64, 64), spec(64, 64), spec(64)), {}))
    other = pattern_of(Call(aten.linear.default, (spec(7, 33), spec(5, 33), spec(5)), {}))
    assert square is not None and square.key not in keys
    assert other is not None and other.key in keys
    assert footprint(CALLS["relu"]).saved.results == (0,)
