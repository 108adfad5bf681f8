"""Explanations are differences of plans that were solved, whatever is explained."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.errors import InputError
from autopar.explaining.asked import OVER, AskedPlan
from autopar.results.explanation.explanation import Explanation, Outcome
from autopar.results.plan.plan import Plan
from autopar.trace.target import Target

NODE = ClusterSpec(devices_per_node=2, device="h100", intra=Link(latency=1e-6, bandwidth=50e9))
WHOLE: dict[str, Any] = {"measure": False, "stages": 1, "micro_batches": 1}
FORCED: dict[str, Any] = WHOLE | {"force": "batch"}
GAPS = 2e-3  # of two solved plans


class Blocks(nn.Module):
    """Equal blocks, and a head of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(1024, 4096)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def target(batch: int = 4096) -> Target:
    args = (torch.zeros(batch, 1024), torch.zeros(batch, dtype=torch.long))
    return Target(Blocks(), args, {}, F.cross_entropy, "blocks")


@cache
def plan(batch: int = 4096, **options: Any) -> Plan:
    made = target(batch)
    return autopar.plan(made.model, NODE, made.args, loss_fn=made.loss_fn, **(WHOLE | options))


@cache
def head() -> Explanation:
    return autopar.explain(target(), NODE, "head", what_if=("batch=6000", "memory=10GB"), **WHOLE)


@cache
def tight() -> Explanation:
    """Under a cap that binds, of the layer that three equal ones go with, and with an option that costs."""
    return autopar.explain(target(), NODE, "blocks.2.0", memory=cap(), force="batch", **WHOLE)


def cap() -> int:
    return round(0.9 * plan(force="batch").peak_bytes)


@pytest.mark.slow
def test_the_price_of_a_choice_is_that_of_a_plan_in_which_it_is_pinned() -> None:
    found = head()
    assert found.plan and found.base
    (layer,) = found.layers
    assert layer.chosen.outcome == found.base
    assert found.base.step_seconds == pytest.approx(found.plan.step_seconds)
    assert {each.strategy for each in (layer.chosen, *layer.others)} == {("n0",), ("o",), ("i",), (None,)}
    for choice in layer.others:
        assert choice.outcome
        price = choice.outcome.price(found.base)
        assert price >= -GAPS * found.base.step_seconds
        assert choice.outcome.least(found.base) <= price <= choice.outcome.most(found.base)
    first = layer.others[0]
    pinned = plan_with({"head": first.strategy})
    assert first.outcome and first.outcome.step_seconds == pytest.approx(pinned.step_seconds, rel=GAPS)
    steps = [each.outcome.step_seconds for each in layer.others if each.outcome]
    assert steps == sorted(steps) and layer.runner_up is first


def plan_with(pins: dict[str, Any]) -> Plan:
    made = target()
    return autopar.plan(made.model, NODE, made.args, loss_fn=made.loss_fn, force=pins, **WHOLE)


def test_a_batch_of_another_size_is_planned_as_if_it_were_passed() -> None:
    batch, memory = head().what_if
    assert batch.outcome and batch.outcome.step_seconds == pytest.approx(plan(6000).step_seconds)
    assert head().base and memory.outcome == head().base


def test_without_a_cap_memory_does_not_bind() -> None:
    assert not head().memory_binds and "No memory cap" in str(head())


@pytest.mark.long
def test_a_cap_that_binds_is_solved_without_and_with_a_little_more() -> None:
    found = tight()
    assert found.base and found.base.peak_bytes <= cap() and found.memory_binds
    without, more = (each.outcome for each in found.memory)
    assert without and without.step_seconds == pytest.approx(plan(force="batch").step_seconds)
    assert more and without.step_seconds <= more.step_seconds <= found.base.step_seconds
    assert more.peak_bytes <= cap() + cap() // 10
    assert "Memory binds: without" in str(found) and "more a device a step takes" in str(found)


@pytest.mark.slow
def test_what_an_option_costs_is_found_by_leaving_it_out() -> None:
    (force,) = (each for each in tight().options if each.what == "without --force batch")
    base = tight().base
    assert base and force.outcome and force.outcome.step_seconds <= base.step_seconds * (1 + GAPS)


@pytest.mark.slow
def test_without_time_the_plan_stands_alone_and_what_is_left_says_so() -> None:
    found = autopar.explain(target(), NODE, "head", what_if="batch=6000", memory=cap(), seconds=0, **FORCED)
    assert found.plan and found.base == Outcome.of(found.plan)
    changes = (*found.what_if, *found.memory, *found.options)
    assert {each.what for each in changes} >= {"batch=6000", "without a memory cap", "without --force batch"}
    assert all(each.outcome is None and each.reason == OVER for each in changes)
    assert found.layers[0].others == () and found.layers[0].unforced == 3
    words = str(found)
    assert "Whether memory binds isn't known" in words and "that keeps to --force" in words
    assert OVER in found.data_parallel or "This is plain data parallelism" in found.data_parallel


def test_each_other_plan_has_a_share_of_the_time_that_is_left() -> None:
    asked = AskedPlan(target(), NODE, WHOLE)
    assert asked.seconds() is None and asked.saying(time_limit=3.0).seconds() == 3.0
    late = replace(asked, until=time.monotonic() + 20)
    assert late.seconds() == pytest.approx(10, abs=1) and not late.is_over
    assert late.saying(time_limit=100.0).hurried().options["time_limit"] == pytest.approx(10, abs=1)
    assert replace(asked, until=time.monotonic()).is_over


@pytest.mark.slow
def test_equal_layers_are_pinned_together_and_ways_that_are_forbidden_say_so() -> None:
    (layer,) = tight().layers
    assert len(layer.equal) == 2  # the first block reads an input that needs no gradient
    assert all(each.outcome or each.reason for each in layer.others)


def test_words_that_say_nothing_are_refused() -> None:
    for text in ("", "batch", "batch=0", "speed=2", "batch=2,batch=3", "memory=2"):
        with pytest.raises(InputError, match="what-if"):
            autopar.explain(target(), NODE, what_if=text, **WHOLE)


@pytest.mark.long
def test_an_infeasible_plan_says_what_to_change_and_every_change_was_planned() -> None:
    found = autopar.explain(target(), NODE, memory="40MB", recompute="none", **WHOLE)
    assert found.plan is None and found.remedies and all(each.outcome for each in found.remedies)
    memory = next(change for change in found.remedies if change.what.startswith("memory="))
    least = int(memory.what.removeprefix("memory=").removesuffix("B"))
    assert memory.outcome and memory.outcome.peak_bytes <= least
    assert str(found).splitlines()[1].startswith(f"Change first: {found.remedies[0].what}")


@pytest.mark.long
def test_a_plan_with_stages_is_explained_with_its_stages() -> None:
    options = {"measure": False, "stages": 2, "micro_batches": 4}
    found = autopar.explain(target(), NODE, "head", what_if="devices=4", **options)
    assert found.base and "2 stages" in found.base.pipeline and found.plan
    assert found.base.step_seconds == pytest.approx(found.plan.step_seconds, rel=1e-6)
    assert all(each.outcome and "micro-batches" in each.outcome.pipeline for each in found.what_if)
