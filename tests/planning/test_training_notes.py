"""A plan says where its step trains nothing, or what backward can't start from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.planning.training_notes import weight_notes


def notes(model: nn.Module, loss_fn: Callable[..., Any]) -> str:
    x = torch.randn(8, 8)
    options: Any = {"measure": False, "stages": 1, "micro_batches": 1}
    return "\n".join(
        autopar.plan(model, autopar.ClusterSpec.local(2), (x, x), loss_fn=loss_fn, **options).notes
    )


@pytest.mark.parametrize(
    ("loss_fn", "told"),
    [
        (lambda output, y: output - y, "the loss is 8 x 8 numbers, .* return their mean or their sum"),
        (lambda output, y: (output - y).argmax(), "the loss is of int64, .* return one of floating point"),
        (lambda output, y: F.mse_loss(output.detach(), y), "no parameter that learns reaches the loss"),
    ],
)
def test_a_loss_from_which_nothing_learns_is_noted(loss_fn: Callable[..., Any], told: str) -> None:
    assert re.search(told, notes(nn.Linear(8, 8), loss_fn))


def test_a_model_without_anything_to_train_is_noted() -> None:
    assert "nothing to train: no parameter" in notes(nn.Linear(8, 8).requires_grad_(False), F.mse_loss)


def test_weights_that_are_no_numbers_are_noted() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].weight[3, 3] = float("nan")
    assert "1.weight holds NaN or infinite numbers" in notes(model, F.mse_loss)
    with torch.no_grad():
        model[0].bias[0] = -float("inf")
    assert weight_notes(model)[0].startswith("0.bias and 1 others hold")


def test_an_ordinary_step_and_weights_without_values_have_no_notes() -> None:
    assert not [word for word in ("loss", "train", "NaN") if word in notes(nn.Linear(8, 8), F.mse_loss)]
    assert weight_notes(nn.Linear(8, 8, device="meta")) == ()
