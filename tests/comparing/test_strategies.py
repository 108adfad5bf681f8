"""What the rows of a comparison ask for."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.cluster import ClusterSpec
from autopar.comparing.strategies import Comparer
from autopar.core.schedule import ScheduleKind, check_schedule
from autopar.errors import InputError
from autopar.planning.asked.request import Request
from autopar.trace.target import Target
from costdb.database import Database

SCHEDULES = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB1P)


@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        (6, {2, 3, 6}),  # of 1, 2, 3 and 6 samples the most up to 2, 4 and 8: once, twice and four times
        (5, {1, 5}),  # 1 and 5
        (16, {2, 4, 8}),
        (1, {1}),
    ],
)
def test_pipelines_have_about_one_two_and_four_micro_batches_for_each_stage(
    batch: int, counts: set[int], tmp_path: Path
) -> None:
    target = Target(nn.Linear(3, 3), (torch.randn(batch, 3), torch.randn(batch, 3)), {}, nn.MSELoss(), "")
    with Database.open(tmp_path / "costs.sqlite") as database:
        comparer = Comparer(target, ClusterSpec.local(2), Request(alternatives=True), database)
        asked = [(item.micro_batches, item.schedule) for item in comparer.pipelines()]
        assert {item.pipeline_ranks for item in comparer.pipelines()} == {2}
        assert not any(item.alternatives for item in comparer.pipelines())
    assert {count for count, _ in asked} == counts
    assert len(set(asked)) == len(asked)
    for count, kind in product(counts, SCHEDULES):
        assert ((count, kind) in asked) == can_run(kind, count)


def can_run(kind: ScheduleKind, micro_batches: int) -> bool:
    try:
        check_schedule(kind, ranks=2, stages_per_rank=1, micro_batches=micro_batches)
    except InputError:
        return False
    return True
