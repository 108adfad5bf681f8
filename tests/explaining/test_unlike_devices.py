"""Explanations of plans for unlike devices: who sets the pace, and what one more of each group would give."""

from __future__ import annotations

import torch

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.core.device_groups import DeviceGroup, GroupLink
from autopar.trace.target import Target
from tests.planning.test_shares import Net


def test_an_explanation_says_what_one_more_of_each_group_would_give() -> None:
    groups = [DeviceGroup("fast", "h100"), DeviceGroup("slow", "h100", speed=0.5)]
    cluster = ClusterSpec.of_groups(groups, [GroupLink(("fast", "slow"), Link(1e-6, 1e12), same_node=True)])
    with torch.device("meta"):
        model, batch = Net(), (torch.rand(1 << 20, 64), torch.rand(1 << 20, 64))
    target = Target(model, batch, {}, None, "")
    found = autopar.explain(target, cluster, seconds=60, measure=False, stages=1, micro_batches=1)
    assert any("sets the pace" in note for note in found.notes)
    named = {change.what: change.outcome for change in found.what_if}
    fast, slow = named["one more device of fast"], named["one more device of slow"]
    assert found.base and fast and slow
    assert fast.step_seconds < slow.step_seconds < found.base.step_seconds
