"""The clock of many cuts shows what the simulator shows for each."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from autopar.core.pipeline import VIRTUAL
from autopar.core.schedule import ScheduleKind
from autopar.core.timeline import StageCost
from autopar.schedules.orders import build_schedule
from autopar.schedules.simulate import simulate
from autopar.schedules.simulate_many import CutCosts, step_seconds

NAMES = ("forward", "input_gradient", "weight_gradient", "send_output", "send_gradient", "sync", "update")
CUTS = 5


@pytest.mark.parametrize("kind", ScheduleKind)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 2), (2, 4), (3, 6), (4, 8)])
def test_all_cuts_at_once_take_as_long_as_one_by_one(
    kind: ScheduleKind, ranks: int, micro_batches: int
) -> None:
    random = Random(ranks)
    stages = 2 if kind in VIRTUAL else 1
    schedule = build_schedule(kind, ranks=ranks, stages_per_rank=stages, micro_batches=micro_batches)
    for largest_hop in (0.0, 0.3, 4.0):
        costs = [
            [
                StageCost(
                    **{
                        name: random.random() * (largest_hop if "send" in name else 1.0) for name in NAMES[:5]
                    },
                    sync=random.choice((0.0, random.random() * 4)),
                    update=random.random(),
                )
                for _ in range(schedule.stages)
            ]
            for _ in range(CUTS)
        ]
        at_once = CutCosts(
            **{
                name: np.array(
                    [
                        [getattr(costs[cut][stage], name) for cut in range(CUTS)]
                        for stage in range(schedule.stages)
                    ]
                )
                for name in NAMES
            }
        )
        assert step_seconds(schedule, at_once) == pytest.approx(
            [simulate(schedule, each).seconds for each in costs], rel=1e-12
        )
