"""Seconds of a step whose pipeline isn't drained."""

from __future__ import annotations

import pytest

from autopar.core.pipeline import Pipeline
from autopar.core.timeline import StageCost
from autopar.schedules.fill_bubbles import order_of
from autopar.schedules.simulate import simulate
from autopar.schedules.unflushed import unflushed_seconds


def test_the_slowest_stage_is_what_a_step_takes() -> None:
    """Forward 1 s, backward 2 s: flushed (m + K - 1) 3 s, else m 3 s; a stage of 4 s sets the pace."""
    pipeline = Pipeline(3, 4, starts=(0, 1, 2))
    equal = [StageCost(1.0, 1.0, 1.0, sync=0.5, update=0.25)] * 3
    assert unflushed_seconds(pipeline, equal) == pytest.approx(12.75)
    assert simulate(order_of(pipeline), equal).seconds == pytest.approx(18.75)
    assert unflushed_seconds(pipeline, [*equal[:2], StageCost(2.0, 1.0, 1.0)]) == pytest.approx(16.75)
