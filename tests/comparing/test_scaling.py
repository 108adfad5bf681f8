"""Plans on more and more devices: which clusters a range names, and what further devices are worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.comparing.device_ranges import clusters_of, is_range
from autopar.comparing.scaling import scale
from autopar.errors import InfeasibleError, InputError
from autopar.results.comparison.render_scaling import render_scaling
from autopar.results.comparison.scaling import Scaled, Scaling
from autopar.results.files.text import as_text
from autopar.results.plan.plan import Plan

FAST, SLOW = Link(1e-6, 450e9), Link(5e-6, 50e9)
FILE = """
[cluster]
nodes = 2
devices_per_node = 4
device = "h100"
[links.intra]
bandwidth = "450GB/s"
latency = "1us"
"""
INTER = """
[links.inter]
bandwidth = "50GB/s"
latency = "5us"
"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    cluster = ClusterSpec(devices_per_node=2, device="h100", intra=FAST)
    return autopar.plan(nn.Linear(64, 64), cluster, (torch.randn(32, 64),), measure=False)


def scaling(plan: Plan, *rows: tuple[int, float | None]) -> Scaling:
    """Rows of devices and the seconds of their plans."""
    return Scaling(
        tuple(
            Scaled(devices, "", None if seconds is None else replace(plan, step_seconds=seconds))
            for devices, seconds in rows
        )
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("local:1-8", [1, 2, 4, 8]), ("local:3-8", [3, 6, 8]), ("local:2-2", [2])],
)
def test_a_range_doubles_and_ends_with_its_last_number(text: str, wanted: list[int]) -> None:
    assert [cluster.num_devices for cluster in clusters_of(text)] == wanted


def test_devices_of_a_file_fill_a_node_first(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(FILE + INTER, encoding="utf-8")
    found = clusters_of(f"{path}:2-16")
    assert [(item.nodes, item.devices_per_node) for item in found] == [(1, 2), (1, 4), (2, 4), (4, 4)]
    assert [item.inter for item in found] == [None, None, SLOW, SLOW]
    with pytest.raises(InputError, match="6 devices, of nodes with 4.*a multiple of 4"):
        clusters_of(f"{path}:3-12")


def test_one_cluster_is_no_range_and_an_empty_range_is_refused() -> None:
    assert not is_range("local:4") and not is_range("h100.toml") and is_range("h100.toml:1-4")
    for text in ("local:4-2", "local:0-2"):
        with pytest.raises(InputError, match="a range such as 1-8"):
            clusters_of(text)


def test_efficiency_is_what_a_device_does_of_what_it_does_among_the_fewest(plan: Plan) -> None:
    found = scaling(plan, (2, 8.0), (4, 5.0), (8, 4.0))
    assert [found.speed_up(row) for row in found.rows] == [1.0, 1.6, 2.0]
    assert [found.efficiency(row) for row in found.rows] == [1.0, 0.8, 0.5]


def test_devices_are_worth_it_while_each_further_one_does_half_of_its_work(plan: Plan) -> None:
    found = scaling(plan, (1, 8.0), (2, 5.0), (4, 4.0), (8, 3.9))
    assert found.worth is found.rows[1] and found.fastest is found.rows[3]
    found = scaling(plan, (1, None), (2, 8.0), (4, 5.0))
    assert found.worth is found.rows[2] and found.efficiency(found.rows[0]) is None
    assert scaling(plan, (1, None)).worth is None


def test_where_no_further_device_does_half_of_its_work_that_is_said(plan: Plan) -> None:
    assert "no further device does half" in as_text(render_scaling(scaling(plan, (1, 8.0), (2, 7.0))))
    assert "up to 2 each further device" in as_text(render_scaling(scaling(plan, (1, 8.0), (2, 5.0))))


def test_a_cluster_without_a_plan_says_why_and_none_at_all_is_an_error(plan: Plan) -> None:
    clusters = [ClusterSpec(devices_per_node=count, device="h100", intra=FAST) for count in (1, 2)]

    def planned(cluster: ClusterSpec) -> Plan:
        if cluster.num_devices == 1:
            raise InfeasibleError(where="memory", found="3 GB", wanted="2 GB", remedy="more")
        return plan

    first, second = scale(clusters, planned).rows
    assert first.plan is None and first.reason == "3 GB; wanted 2 GB" and second.plan is plan
    with pytest.raises(InfeasibleError):
        scale(clusters[:1], planned)
