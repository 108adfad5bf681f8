"""What backward keeps, operator by operator, as torch's derivative formulas say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.core.costs import SavedByCall
from autopar.core.graph import Call, TensorSpec
from autopar.errors import CostMissingError
from costdb.footprint import footprint, observe, saved, saved_bytes
from costdb.operands import fill, random

ATEN = torch.ops.aten
F32, CPU = torch.float32, torch.device("cpu")


def x(*shape: int, dtype: torch.dtype = F32) -> TensorSpec:
    return TensorSpec(shape, dtype, requires_grad=dtype.is_floating_point)


def buffer(*shape: int) -> TensorSpec:
    return TensorSpec(shape, F32)


def call(target: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(target, args, kwargs)


QKV = x(2, 3, 16, 8), x(2, 3, 16, 8), x(2, 3, 16, 8)
LABELS = x(4, dtype=torch.int64)

CASES = {
    "linear": (call(ATEN.linear.default, x(4, 8), x(6, 8), x(6)), SavedByCall((0, 1))),
    "linear, frozen weight": (call(ATEN.linear.default, x(4, 8), buffer(6, 8)), SavedByCall((1,))),
    "linear, no-grad input": (call(ATEN.linear.default, buffer(4, 8), x(6, 8)), SavedByCall((0,))),
    "add": (call(ATEN.add.Tensor, x(4, 8), x(4, 8)), SavedByCall()),
    "mul": (call(ATEN.mul.Tensor, x(4, 8), x(4, 8)), SavedByCall((0, 1))),
    "relu": (call(ATEN.relu.default, x(4, 8)), SavedByCall((), (0,))),
    "gelu": (call(ATEN.gelu.default, x(4, 8)), SavedByCall((0,))),
    "softmax": (call(ATEN.softmax.int, x(4, 8), -1), SavedByCall((), (0,))),
    "view": (call(ATEN.view.default, x(4, 8), [8, 4]), SavedByCall()),
    "conv2d": (call(ATEN.conv2d.default, x(2, 3, 8, 8), x(4, 3, 3, 3), x(4)), SavedByCall((0, 1))),
    # two vectors of 3 channels: the batch's mean and inverse deviation
    "batch_norm": (
        call(
            ATEN.batch_norm.default, x(2, 3, 8, 8), x(3), x(3), buffer(3), buffer(3), True, 0.1, 1e-5, False
        ),
        SavedByCall((0, 1, 3, 4), (), 2 * 3 * 4),
    ),
    # mean and inverse deviation of each of the 4 rows
    "layer_norm": (
        call(ATEN.layer_norm.default, x(4, 8), [8], x(8), x(8)),
        SavedByCall((0, 1, 2), (), 2 * 4 * 4),
    ),
    # on CPUs the mask is scaled noise in x's dtype
    "dropout": (call(ATEN.dropout.default, x(4, 8), 0.5, True), SavedByCall((), (), 4 * 8 * 4)),
    "dropout in eval": (call(ATEN.dropout.default, x(4, 8), 0.5, False), SavedByCall()),
    # the log of the sum of exponentials, one for each of 2 x 3 x 16 queries
    "attention": (
        call(ATEN.scaled_dot_product_attention.default, *QKV),
        SavedByCall((0, 1, 2), (0,), 96 * 4),
    ),
    # log-probabilities and the total weight
    "cross_entropy": (call(ATEN.cross_entropy_loss.default, x(4, 8), LABELS), None),
    "max_pool2d": (call(ATEN.max_pool2d.default, x(2, 3, 8, 8), [2, 2]), SavedByCall((0,), (), 96 * 8)),
    "embedding": (call(ATEN.embedding.default, x(10, 8), LABELS), SavedByCall((1,))),
}


@pytest.mark.parametrize("name", [name for name, (_, wanted) in CASES.items() if wanted is not None])
def test_backward_keeps(name: str) -> None:
    subject, wanted = CASES[name]
    assert saved(subject) == wanted


@pytest.mark.parametrize("name", CASES)
def test_tensors_without_data_say_what_real_ones_do(name: str) -> None:
    subject, _ = CASES[name]
    args, kwargs, inputs = fill(subject, CPU, random(subject, CPU))
    assert footprint(subject) == observe(lambda: subject.target(*args, **kwargs), inputs)


def test_gpus_keep_a_mask_of_one_byte_an_element() -> None:
    dropout, _ = CASES["dropout"]
    assert saved(dropout, "cuda") == SavedByCall((), (), 4 * 8)


def test_gpus_keep_no_scores_of_attention_with_dropout() -> None:
    with_dropout = call(ATEN.scaled_dot_product_attention.default, *QKV, None, 0.1)
    assert saved(with_dropout, "cpu").extra_bytes > 2 * 3 * 16 * 16 * 4
    assert saved(with_dropout, "cuda") == SavedByCall((0, 1, 2), (0,), 96 * 4)


def test_a_view_shares_its_operands_storage() -> None:
    assert footprint(CASES["view"][0]).aliases == (0,)
    assert footprint(CASES["relu"][0]).aliases == (None,)


def test_a_saved_view_is_named_once_and_as_the_operand() -> None:
    x0 = torch.ones(4, requires_grad=True)
    found = observe(lambda: (x0 * x0, x0.view(2, 2)), (x0,))
    assert found.saved == SavedByCall((0,))
    found = observe(lambda: (y := x0.exp(), y.view(2, 2)), (x0,))
    assert found.saved == SavedByCall((), (0,)), "two results share the saved storage"


def test_every_result_is_described() -> None:
    parts = footprint(call(ATEN.split.Tensor, x(5, 2), 2))
    assert parts.results == (x(2, 2), x(2, 2), x(1, 2))
    assert parts.aliases == (0, 0, 0)


def test_saved_bytes_count_every_storage_once() -> None:
    linear, softmax = CASES["linear"][0], CASES["softmax"][0]
    assert saved_bytes(linear, footprint(linear)) == (4 * 8 + 6 * 8) * 4
    assert saved_bytes(softmax, footprint(softmax)) == 4 * 8 * 4
    layer_norm = CASES["layer_norm"][0]
    assert saved_bytes(layer_norm, footprint(layer_norm)) == (4 * 8 + 8 + 8 + 2 * 4) * 4


def test_a_refused_call_is_named() -> None:
    with pytest.raises(CostMissingError, match="aten.mm"):
        footprint(call(ATEN.mm.default, x(2, 3), x(2, 3)))
