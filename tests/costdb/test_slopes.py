"""What calls make on the way, as torch's derivative formulas say. A float has 4 bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from autopar.core.graph import Call, TensorSpec
from autopar.sharding.rule import RULES
from costdb.slopes import Passes, Slope, _by_pattern, _observe, passes

ATEN = torch.ops.aten
N = 4 * 4 * 8  # bytes of [4, 8]


def x(*shape: int) -> TensorSpec:
    return TensorSpec(shape, torch.float32, requires_grad=True)


def call(target: Any, *args: Any) -> Call:
    return Call(target, args, {})


LABELS = TensorSpec((4,), torch.int64)

CASES = {
    "add": (call(ATEN.add.Tensor, x(4, 8), x(4, 8)), Passes(N, 0, (Slope(0, 0), Slope(0, 0)))),
    "view": (call(ATEN.view.default, x(4, 8), [8, 4]), Passes(0, 0, (Slope(0, 0),))),
    "relu": (call(ATEN.relu.default, x(4, 8)), Passes(N, N, (Slope(N),))),
    "without a derivative": (call(ATEN.floor_divide.default, x(4, 8), 2.0), Passes(N, 0, (None,))),
    "sum": (call(ATEN.sum.default, x(4, 8)), Passes(4, 0, (Slope(0, 0),))),
    # both gradients are products of x, the weight and the result's gradient
    "linear": (
        call(ATEN.linear.default, x(4, 8), x(6, 8)),
        Passes(4 * 4 * 6, N + 4 * 6 * 8, (Slope(N), Slope(4 * 6 * 8))),
    ),
    "frozen": (call(ATEN.relu.default, TensorSpec((4, 8), torch.float32)), Passes(N, 0, (None,))),
    # forward the log-probabilities, the loss and the number of labels; backward the gradient of the
    # log-probabilities lives while that of the logits is made of it
    "cross_entropy": (
        call(ATEN.cross_entropy_loss.default, x(4, 8), LABELS),
        Passes(N + 4 + 4, 2 * N, (Slope(N), None)),
    ),
    # torch has no shapes of its backward: an estimate, here a true one
    "multi_margin_loss": (
        call(ATEN.multi_margin_loss.default, x(4, 8), LABELS),
        Passes(4, N, (Slope(N), None)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_new_memory_of_both_passes(name: str) -> None:
    made, wanted = CASES[name]
    assert passes(made) == wanted


def test_a_storage_at_the_address_of_one_let_go_is_new() -> None:
    """Backward frees the number of labels, and about one time in eighty its gradient of the logits got that
    address."""
    made, wanted = CASES["cross_entropy"]
    assert {_observe(made, "cpu") for _ in range(600)} == {wanted}


def test_of_every_sample_of_a_rule_what_follows_from_other_sizes_is_what_is_observed() -> None:
    followed = 0
    for sample in itertools.chain.from_iterable(rule.samples() for rule in dict.fromkeys(RULES.values())):
        made = Call(sample.target, *torch.utils._pytree.tree_map(_described, (sample.args, sample.kwargs)))
        if (found := _by_pattern(made, "cpu")) is not None:
            followed += 1
            assert found == _observe(made, "cpu"), made.key()
    assert followed > 10


def _described(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return TensorSpec(
        tuple(leaf.shape), leaf.dtype, leaf.requires_grad or leaf.is_floating_point(), leaf.layout
    )


@pytest.mark.parametrize(
    "made",
    [
        call(ATEN.linear.default, x(64, 96), x(48, 96), x(48)),
        call(ATEN.linear.default, x(2, 64, 96), x(48, 96)),
        call(ATEN.layer_norm.default, x(64, 96), [96]),
        call(ATEN.add.Tensor, x(64, 1), x(1, 32)),
        call(ATEN.sum.default, x(64, 32)),
        CASES["cross_entropy"][0],
    ],
    ids=lambda made: str(made.target),
)
def test_calls_of_all_sizes_make_what_their_pattern_says(made: Call) -> None:
    found = _by_pattern(made, "cpu")
    assert found is None or found == _observe(made, "cpu")


def test_sizes_that_decide_what_is_made_make_a_call_one_of_its_own() -> None:
    assert _by_pattern(call(ATEN.view.default, x(4, 8), [8, 4]), "cpu") is None
    assert _by_pattern(call(ATEN.linear.default, x(4, 8), x(6, 8)), "cpu") is not None
