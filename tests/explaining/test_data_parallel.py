"""Why not plain data parallelism is told by what was asked, or by what the search left open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import ClusterSpec
from autopar.explaining.asked import AskedPlan
from autopar.explaining.data_parallel import compared, said_of
from autopar.results.plan.plan import Plan
from tests.explaining.test_explain import target
from tests.results.plan.test_render_plan import BIG, STAGED

NODE = ClusterSpec(devices_per_node=2, device="h100")


@pytest.mark.parametrize(
    ("plan", "options", "said"),
    [
        (BIG, {"mesh": "2x2", "memory": "2GB"}, "--mesh 2x2"),
        (BIG, {"stages": 1, "micro_batches": 1}, ""),
        (STAGED, {"stages": 2, "schedule": "1f1b"}, "--stages 2, --schedule 1f1b"),
        (BIG, {"recompute": "all", "measure": False}, ""),
    ],
)
def test_options_that_keep_from_it_are_named(plan: Plan, options: dict[str, object], said: str) -> None:
    assert {*said_of(AskedPlan(target(), NODE, options), plan).split(", ")} == {*said.split(", ")}


def test_where_it_is_faster_the_sentence_says_why_it_is_not_taken() -> None:
    plan, faster = replace(BIG, step_seconds=0.1, gap=0.2), replace(BIG, step_seconds=0.09)
    assert compared(plan, faster, said="--stages 2").endswith("it isn't taken because of --stages 2.")
    assert compared(plan, faster).endswith("because the search, whose gap is 20.00%, hadn't found it.")
    tight = replace(plan, gap=0.0)
    assert compared(tight, faster).endswith("because predictions can't tell the two apart.")
    assert "isn't taken" not in compared(faster, plan)
