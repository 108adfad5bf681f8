"""Plans and explanations say whether links are measured, and that plans made before may differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.core.costs import Collective, DeviceModel
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import network_of, setting_of
from autopar.planning.links import described, link_notes
from autopar.trace.target import Target
from costdb.database import Database
from costdb.measurement import CollectiveMeasurement

NODES = ClusterSpec(nodes=2, devices_per_node=2, inter=Link(1e-4, 1e9))
MOMENT = "2026-03-04T05:06:07+00:00"


def sent(nbytes: int, seconds: float, *, nodes: int = 1, size: int = 2) -> CollectiveMeasurement:
    return CollectiveMeasurement(
        Collective.SEND_RECV, "gloo", size, nodes, nbytes, seconds, 3, 0.0, measured_at=MOMENT
    )


def test_links_are_as_measured_where_they_were_and_as_said_elsewhere() -> None:
    table = CollectiveTable.of([sent(1000, 1e-3), sent(2_001_000, 2e-3)], "gloo")
    assert "within a node 2 GB/s, 1 ms (measured); between nodes 1 GB/s, 100 us" in described(NODES, table)
    (note,) = link_notes(NODES, table)
    assert "measured on 2026-03-04 at 05:06 UTC" in note and "rest on 2.5 GB/s, 150 us (estimated)" in note
    assert not link_notes(ClusterSpec.local(1), table)  # which uses none
    assert described(NODES, CollectiveTable({})) == str(NODES) and not link_notes(NODES, CollectiveTable({}))


def test_messages_are_those_of_the_smallest_group() -> None:
    pairs = [sent(1000, 1e-3, size=3), sent(2_001_000, 2e-3, size=3), sent(1000, 5e-3, size=4)]
    table = CollectiveTable.of(pairs, "gloo")
    assert table.message(nodes=1) == (1e-3, pytest.approx(2e9))
    assert table.message(nodes=2) is None


def test_an_explanation_says_that_links_were_measured_since(tmp_path: Path) -> None:
    cluster = ClusterSpec(devices_per_node=2, cores=2)
    batch = (torch.zeros(64, 8), torch.zeros(64, dtype=torch.long))
    target = Target(nn.Linear(8, 8), batch, {}, F.cross_entropy, "net.py:net")
    with Database.open(tmp_path / "costs.db") as database:
        database.write_device(
            setting_of(cluster), DeviceModel("cpu", "cpu", ((torch.float32, 1e9),), 1e9, 1e-6)
        )
    words = {"costdb": str(tmp_path / "costs.db"), "measure": False, "stages": 1, "micro_batches": 1}
    before = autopar.explain(target, cluster, **words)
    with Database.open(tmp_path / "costs.db") as database:
        database.write_collectives(network_of(cluster), [sent(1000, 1e-3), sent(2_001_000, 2e-3)])
    after = autopar.explain(target, cluster, **words)
    assert "150 us (estimated)" in str(before) and "measured on" not in str(before)
    assert "1 ms (measured)" in str(after) and "links were measured on 2026-03-04" in str(after)
    assert after.plan is not None and after.notes == after.plan.notes[-1:]
