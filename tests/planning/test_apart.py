"""What few laps of measured calls scatter by, between two programs; numbers that a hand can check."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.core.costs import DeviceModel, SavedByCall
from autopar.core.graph import Call, TensorSpec
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel
from autopar.planning.apart import MEASURED, SURE, error_of, margin, noise, scatter_of
from costdb.measurement import ERROR_OF_MEDIAN, IQR, Measurement

TOY = DeviceModel("cpu", "cpu", ((torch.float32, 1.0),), bandwidth=1.0, launch_seconds=1.0)
FOUR_LAPS, STEP = 4, 100.0


def relu(length: int) -> Call:
    return Call(torch.ops.aten.relu.default, (TensorSpec((length,), torch.float32),), {})


def took(call: Call, seconds: float, deviation: float) -> Measurement:
    """A call of four laps, of so many standard deviations relatively."""
    key, spread = call.key(), IQR * deviation
    return Measurement(key, seconds, seconds, SavedByCall(), 0, None, FOUR_LAPS, spread)


def program(*calls: Call, known: dict[str, Measurement], contention: float = 1.0) -> Any:
    model = CostModel(TOY, known, CollectiveTable({}), contention=contention)
    prices = [
        SimpleNamespace(
            calls=(call,), compute=1.0, missing_seconds=0.0, interpolated_seconds=0.0, seconds=1.0
        )
        for call in calls
    ]
    names = [str(number) for number in range(len(calls))]
    return SimpleNamespace(
        prices=SimpleNamespace(model=model),
        operator_prices=prices,
        seconds=STEP,
        graph=SimpleNamespace(operators=[SimpleNamespace(name=name) for name in names]),
        program=SimpleNamespace(strategies=defaultdict(tuple)),
    )


A, B, C = relu(10), relu(20), relu(30)


def test_noise_is_the_standard_error_of_what_two_programs_measure_differently() -> None:
    known = {each.key: each for each in (took(A, 3.0, 0.2), took(B, 4.0, 0.2), took(C, 50.0, 0.9))}
    first, second = program(A, A, C, known=known), program(B, C, known=known)
    # A twice, forward and backward: 12 seconds, B 8; medians of four laps scatter by half of 1.25 deviations.
    by_hand = 0.1 * ERROR_OF_MEDIAN * (12.0**2 + 8.0**2) ** 0.5 / STEP
    assert noise(first, second) == noise(second, first) == pytest.approx(by_hand)
    assert noise(first, first) == 0.0
    shared = program(A, A, C, known=known, contention=2.0), program(B, C, known=known, contention=2.0)
    assert noise(*shared) == pytest.approx(2 * by_hand)


def test_more_laps_scatter_less_and_estimates_have_no_laps() -> None:
    many = Measurement(A.key(), 1.0, 0.0, SavedByCall(), 0, None, 100, IQR)
    few = Measurement(A.key(), 1.0, 0.0, SavedByCall(), 0, None, 1, IQR)
    assert few.noise == pytest.approx(10 * many.noise) == pytest.approx(ERROR_OF_MEDIAN)
    assert noise(program(A, known={}), program(B, known={})) == 0.0


@pytest.mark.parametrize(("deviation", "noisy"), [(0.01, False), (0.9, True)])
def test_what_scatters_by_more_than_measurements_are_off_needs_a_wider_margin(
    deviation: float, noisy: bool
) -> None:
    known = {each.key: each for each in (took(A, 3.0, deviation), took(B, 4.0, deviation))}
    first, second = program(A, A, known=known), program(B, known=known)
    assert margin(first, second) == pytest.approx(SURE * noise(first, second) if noisy else MEASURED)


def test_a_plan_of_laps_that_scatter_says_by_how_much() -> None:
    known = {each.key: each for each in (took(A, 3.0, 0.2), took(B, 4.0, 0.8))}
    scatter = scatter_of(program(A, A, B, C, known=known))  # of C nothing is known
    assert scatter == pytest.approx(IQR / 2 * (2 * 3.0 * 0.2 + 4.0 * 0.8) / (2 * 3.0 + 4.0))
    assert error_of(1.0, scatter=scatter) == scatter > MEASURED == error_of(1.0, scatter=0.001)
