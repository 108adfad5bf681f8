"""A plan by a budget of measuring: what it says is measured, and where the next plan goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.costs import DeviceModel, SavedByCall
from autopar.core.graph import Call
from autopar.cost.machine import measuring
from autopar.cost.machine.compute import estimate
from autopar.cost.machine.model import busy_setting, setting_of
from costdb.database import Database
from costdb.measurement import Measurement

TWO = ClusterSpec.local(2)
SLOW = 1e-3  # of a roofline whose calls take so long that few of them fit a budget
TOY = DeviceModel("cpu", "cpu", ((torch.float32, 1e6),), bandwidth=1e6, launch_seconds=SLOW)


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def costdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a machine whose operators take twice their estimates, whoever measures them."""
    clock = Clock()

    def timed(calls: Sequence[Call], device: str, *, budget: float) -> list[Measurement]:
        found = []
        for call in calls:
            cost = estimate(call, TOY)
            clock.now += measuring.seconds_to_measure(call, cost.forward_seconds + cost.backward_seconds)
            seconds = 2 * cost.forward_seconds, 2 * cost.backward_seconds
            found.append(Measurement(call.key(), *seconds, SavedByCall(), 0, None, 5, 0.0))
        return found

    monkeypatch.setattr(measuring, "measure_together", timed)
    monkeypatch.setattr(measuring, "time", clock)
    path = tmp_path / "costs.sqlite"
    with Database.open(path) as database:
        database.write_device(setting_of(TWO), TOY)
    return str(path)


def planned(costdb: str, **options: Any) -> autopar.Plan:
    layers: list[nn.Module] = []
    for width in (16, 24, 32, 40):
        layers += [nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16), nn.Sigmoid()]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    inputs = torch.randn(64, 16), torch.randn(64, 16)
    options = {"force": "batch"} | options
    return autopar.plan(nn.Sequential(*layers), TWO, inputs, loss_fn=loss, costdb=costdb, **options)


def count(costdb: str) -> int:
    with Database.open(costdb) as database:
        return len(database.operators(busy_setting(TWO)))


def test_without_seconds_it_is_the_plan_by_estimates(costdb: str) -> None:
    guessed, found = planned(costdb, measure=False), planned(costdb, measure_seconds=0)
    assert count(costdb) == found.measured_share == found.interpolated_share == 0
    assert replace(found, subject=None) == replace(guessed, subject=None)


@pytest.mark.slow
def test_of_a_short_budget_part_is_measured_and_the_next_plan_goes_on(costdb: str) -> None:
    shares, known = [], []
    for _ in range(4):
        found = planned(costdb, measure_seconds=3.5)
        shares.append(found.measured_share)
        known.append(count(costdb))
        assert 0 <= found.interpolated_share <= 1 - found.measured_share + 1e-9
    assert 0 < shares[0] < shares[-1] == 1 and shares == sorted(shares)
    assert known[0] < known[-1] and known == sorted(known)


@pytest.mark.slow
def test_what_is_not_measured_follows_from_what_is(costdb: str) -> None:
    """All operators take twice their estimates: so does the step, as far as they are known."""
    guessed = planned(costdb, measure=False)
    found, measured = planned(costdb, measure_seconds=2.5), planned(costdb)
    assert found.interpolated_share > 0
    assert measured.parts.compute == pytest.approx(2 * guessed.parts.compute, rel=0.01)
    assert found.parts.compute == pytest.approx(measured.parts.compute, rel=0.1)
    assert measured.error < found.error < guessed.error
    assert "interpolated from other sizes (± 6%)" in str(found)
