"""How much an optimizer keeps: known by name, measured otherwise, refused where it has no size."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, RMSprop

import autopar
from autopar.core.costs import OPTIMIZERS, OptimizerState
from autopar.errors import InputError
from autopar.planning.asked.optimizer_state import KNOWN, state_of


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_by_name_is_what_would_be_measured(name: str) -> None:
    assert state_of(name) == state_of(KNOWN[name]) == OPTIMIZERS[name]


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (Adam, 2),
        (partial(Adam, amsgrad=True), 3),
        (partial(RMSprop, lr=0.1), 1),
        (partial(RMSprop, lr=0.1, momentum=0.9, centered=True), 3),
        (Adagrad, 1),
        (lambda parameters: SGD(parameters, 0.1, momentum=0.9), 1),
    ],
)
def test_classes_and_functions_are_measured(optimizer: Any, states: int) -> None:
    assert state_of(optimizer).ratio == states


def test_of_one_that_is_made_the_largest_group_counts() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    mixed = SGD([{"params": weights[:1]}, {"params": weights[1:], "momentum": 0.9}], 0.1)
    assert state_of(mixed) == OptimizerState(1) and not mixed.state, "nothing was done to it"
    assert state_of(AdamW(weights, amsgrad=True, foreach=True)) == OptimizerState(3, 4)


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [
        ("muon", "'muon'"),
        (Adafactor, "Adafactor, which keeps"),
        (torch.optim.LBFGS, "LBFGS, which raises TypeError"),
        (lambda parameters: None, "<lambda>, which raises AttributeError"),
        (3, "3, wanted a name, a class"),
    ],
)
def test_what_has_no_size_is_refused_with_what_was_found(optimizer: Any, found: str) -> None:
    with pytest.raises(InputError, match=found):
        state_of(optimizer)


def test_a_plan_counts_the_state() -> None:
    def state(optimizer: Any) -> int:
        model, x = nn.Linear(8, 8, bias=False), torch.ones(4, 8)
        found = autopar.plan(
            model,
            autopar.ClusterSpec.local(1),
            x,
            loss_fn=lambda out: out.sum(),
            optimizer=optimizer,
            measure=False,
        )
        return found.state_bytes

    given = ("sgd", "sgd-momentum", AdamW, partial(Adam, amsgrad=True))
    assert [state(each) // (8 * 8 * 4) for each in given] == [2, 3, 4, 5]
