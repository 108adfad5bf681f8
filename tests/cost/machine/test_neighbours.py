"""Interpolation by hand: on a machine of 1 flop/s whose estimates of large calls are off by more."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from autopar.core.costs import DeviceModel, SavedByCall
from autopar.core.graph import Call, TensorSpec
from autopar.cost.machine.compute import estimate
from autopar.cost.machine.neighbours import Neighbours, distance, family_of, resized
from costdb.measurement import Measurement

aten = torch.ops.aten
TOY = DeviceModel("cpu", "cpu", ((torch.float32, 1.0),), bandwidth=1.0, launch_seconds=1.0)


def product(rows: int, inner: int = 64) -> Call:
    specs = TensorSpec((rows, inner), torch.float32, True), TensorSpec((inner, 64), torch.float32)
    return Call(aten.mm.default, specs, {})


def took(call: Call, forward: float, backward: float) -> Measurement:
    """A measurement of so many times the estimate."""
    guess = estimate(call, TOY)
    seconds = forward * guess.forward_seconds, backward * guess.backward_seconds
    return Measurement(call.key(), *seconds, SavedByCall(), 0, None, 5, 0.0)


def neighbours(*found: Measurement) -> Neighbours:
    return Neighbours({each.key: each for each in found}, TOY)


def test_between_two_sizes_what_estimates_are_off_by_is_between() -> None:
    known = neighbours(took(product(16), 1.2, 3.0), took(product(64), 1.5, 3.0))
    forward, backward = known.ratio(product(32)) or (0.0, 0.0)
    assert forward == pytest.approx(math.sqrt(1.2 * 1.5))  # as far from both
    assert backward == pytest.approx(3.0)


def test_the_nearer_counts_by_the_square_of_its_distance() -> None:
    known = neighbours(took(product(32), 2.0, 1.0), took(product(256), 4.0, 1.0))
    forward, _ = known.ratio(product(64)) or (0.0, 0.0)
    assert forward == pytest.approx(2 ** (4 / 5 + 2 / 5))  # one doubling and two: 4 to 1


def test_what_follows_from_far_away_is_as_uncertain_as_an_estimate() -> None:
    call = product(64)
    wide = {each.key: each for each in (took(product(512), 2.0, 1.0), took(product(4096), 2.0, 1.0))}
    known = Neighbours(wide, TOY, 6.0)
    assert known.ratio(call) == pytest.approx((2.0, 1.0)) and not known.is_near(call)
    near = Neighbours({**wide, product(16).key(): took(product(16), 2.0, 1.0)}, TOY, 6.0)
    assert near.is_near(call) and not near.is_near(product(64, 8))


@pytest.mark.parametrize(
    "other",
    [
        product(1024),  # too far
        Call(aten.mm.default, (TensorSpec((64, 64), torch.float32),) * 2, {}),  # other gradients
        Call(aten.neg.default, (TensorSpec((32, 64), torch.float32, True),), {}),
    ],
)
def test_others_are_no_neighbours(other: Call) -> None:
    assert neighbours(took(other, 2.0, 2.0)).ratio(product(64)) is None


def test_dims_that_grow_together_count_once() -> None:
    _, one = family_of(product(64, 32).key())
    _, other = family_of(product(16, 64).key())
    assert one == (64, 32, 32, 64) and distance(one, other) == 3.0
    assert distance(one, (64, 32, 32, 0)) == math.inf


@pytest.mark.parametrize(
    "call",
    [
        product(8),
        Call(aten.cat.default, ([TensorSpec((2, 3), torch.float32), TensorSpec((5, 3), torch.float32)],), {}),
        Call(
            aten.linear.default,
            (TensorSpec((4, 7, 3), torch.float32), TensorSpec((5, 3), torch.float32)),
            {"bias": TensorSpec((5,), torch.float32)},
        ),
        Call(aten.add.Scalar, (TensorSpec((), torch.float32), 1), {}),
    ],
)
def test_a_call_has_the_sizes_of_its_key(call: Call) -> None:
    family, sizes = family_of(call.key())
    assert resized(call, sizes).key() == call.key()
    doubled = resized(call, tuple(2 * size for size in sizes))
    assert family_of(doubled.key()) == (family, tuple(2 * size for size in sizes))


def test_a_neighbour_without_an_estimate_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.cost.machine import neighbours as module
    from autopar.errors import CostMissingError

    def refuse(*_: Any) -> None:
        raise CostMissingError(where="here", found="nothing", wanted="a rate", remedy="none")

    known = neighbours(took(product(16), 1.2, 3.0))
    monkeypatch.setattr(module, "estimate", refuse)
    assert known.ratio(product(32)) is None
