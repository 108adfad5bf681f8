"""What calls make on the way, as torch's derivative formulas say. A float has 4 bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.core.graph import Call, TensorSpec
from costdb.slopes import Passes, Slope, _observe, passes

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
