"""`autopar topology`: rows by hand, the best, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.cluster import ClusterSpec, Link
from autopar.comparing.topology_sums import sum_times
from autopar.core.sum_schedules import SumAlgorithm
from autopar.core.topology import Topology, TopologyKind
from autopar.errors import InputError

FILE = """
[cluster]
nodes = 4
devices_per_node = 1
[links.inter]
bandwidth = "1MB/s"
latency = "1s"
topology = "ring"
"""


def test_rows_are_the_algorithms_and_the_best_is_the_fastest() -> None:
    """Latency 1 s, 1 byte/s: three bytes more make no ring worth its steps, many do."""
    ring = Topology(TopologyKind.RING, 5)
    cluster = ClusterSpec(nodes=5, devices_per_node=1, inter=Link(1.0, 1.0), topology=ring)
    rows = {row.algorithm: row for row in sum_times(cluster, 100).rows}
    assert list(rows) == [each.value for each in SumAlgorithm]
    ring_row = rows["ring"]
    assert (ring_row.steps, ring_row.most_loaded_bytes, ring_row.seconds) == (8, 160, pytest.approx(168))
    assert rows["hierarchical"].seconds is None  # five nodes form no groups
    assert sum_times(cluster, 1).best.algorithm == "fully connected"
    assert sum_times(cluster, 10**6).best.seconds == min(
        row.seconds for row in sum_times(cluster, 10**6).rows if row.seconds is not None
    )


def test_the_command_prints_a_table_and_an_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ring.toml"
    path.write_text(FILE, encoding="utf-8")
    words = ["topology", "--cluster", str(path), "--bytes", "4MB"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "between 4 nodes" in text and "best: fully connected" in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == 4_000_000 and found["nodes"] == 4 and found["best"] == "fully connected"
    assert found["rows"][0] == {
        "algorithm": "ring",
        "steps": 6,
        "most_loaded_bytes": 6e6,
        "seconds": pytest.approx(12),
    }


def test_a_cluster_without_a_topology_is_refused() -> None:
    with pytest.raises(InputError, match=r"found 1 x 2 cpu without a topology.*topology = \"ring\""):
        sum_times(ClusterSpec(devices_per_node=2), 100)
