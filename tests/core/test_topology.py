"""Topologies as cluster files say them: what is read, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cluster import ClusterSpec, Link
from autopar.core.topology import MOST_JOINED_NODES, Topology, TopologyKind
from autopar.errors import InputError

TOML = """
[cluster]
nodes = 8
devices_per_node = 2
[links.inter]
bandwidth = "1GB/s"
latency = "1us"
"""
CIRCUITS = "circuits = [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7]]"


def read(tmp_path: Path, words: str, text: str = TOML) -> ClusterSpec:
    path = tmp_path / "cluster.toml"
    path.write_text(text + words, encoding="utf-8")
    return ClusterSpec.from_toml(path)


@pytest.mark.parametrize(
    ("words", "wanted", "told"),
    [
        ('topology = "ring"', Topology(TopologyKind.RING, 8), "ring of 8"),
        (
            'topology = "torus"\nsizes = [2, 4]',
            Topology(TopologyKind.TORUS, 8, sizes=(2, 4)),
            "torus of 2 x 4",
        ),
        (
            'topology = "fat tree"\nsizes = [4, 2]\noversubscription = 2',
            Topology(TopologyKind.FAT_TREE, 8, sizes=(4, 2), oversubscription=2.0),
            "fat tree of 4 x 2, 2 to 1",
        ),
        (
            'topology = "loop"\nshortcuts = [2, 4]',
            Topology(TopologyKind.LOOP, 8, shortcuts=(2, 4)),
            "loop of 8 with shortcuts 2, 4",
        ),
        (
            f'topology = "switch"\n{CIRCUITS}',
            Topology(TopologyKind.SWITCH, 8, circuits=tuple((node, node + 1) for node in range(7))),
            "switch with 7 circuits",
        ),
    ],
)
def test_a_file_says_how_links_are_laid(tmp_path: Path, words: str, wanted: Topology, told: str) -> None:
    found, plain = read(tmp_path, words), read(tmp_path, "")
    assert found == replace(plain, topology=wanted) and plain.topology is None
    assert str(found) == f"{plain} ({told})"


@pytest.mark.parametrize(
    ("words", "where", "found"),
    [
        ('topology = "mesh"', "topology", '\'mesh\', wanted one of "ring", "torus"'),
        ("topology = 3", "topology", "3, wanted one of"),
        ("sizes = [8]", "topology", "nothing"),
        ('topology = "torus"', "sizes", "nothing"),
        ('topology = "torus"\nsizes = [3, 3]', "sizes", "3 x 3 = 9, wanted sizes whose product is 8 nodes"),
        ('topology = "fat tree"\nsizes = [4, 4]', "sizes", "4 x 4 = 16"),
        ('topology = "torus"\nsizes = "8"', "sizes", "'8'"),
        ('topology = "torus"\nsizes = [8, 0]', "sizes", "0"),
        ('topology = "ring"\nsizes = [8]', "sizes", "sizes of a ring"),
        (
            'topology = "torus"\nsizes = [8]\noversubscription = 2',
            "oversubscription",
            "oversubscription of a",
        ),
        ('topology = "fat tree"\nsizes = [8]\noversubscription = 0.5', "oversubscription", "0.5"),
        ('topology = "loop"\nshortcuts = [1]', "shortcuts", "1, wanted nodes further on, from 2 to 7"),
        ('topology = "loop"\nshortcuts = [8]', "shortcuts", "8"),
        ('topology = "switch"\ncircuits = [[0, 1], [2, 3]]', "circuits", "no way from node 0 to node 2"),
        ('topology = "switch"\ncircuits = [[0, 8]]', "circuits", "[0, 8], wanted two nodes of 0 to 7"),
        ('topology = "switch"\ncircuits = [[3, 3]]', "circuits", "[3, 3]"),
        ('topology = "switch"\ncircuits = [[0, true]]', "circuits", "[0, True]"),
        ('topology = "switch"\ncircuits = 5', "circuits", "5"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_line(
    tmp_path: Path, words: str, where: str, found: str
) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, words)
    assert f"links.inter.{where}: found {found}" in str(caught.value)
    line = str(caught.value).partition(", line ")[2].partition(":")[0]
    assert int(line) >= TOML.count("\n") - 2


def test_a_topology_is_told_beside_other_violations(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"2 violations.*sizes of a ring.*links\.inter\.latency"):
        read(tmp_path, 'topology = "ring"\nsizes = [2]', TOML.replace('latency = "1us"\n', ""))


def test_unlike_groups_have_no_topology(tmp_path: Path) -> None:
    groups = TOML.replace("[cluster]", '[[groups]]\nname = "all"\ndevice = "v100"').replace(
        "[links.inter]", '[links.intra]\nbandwidth = "1GB/s"\nlatency = "1us"\n[links.inter]'
    )
    assert read(tmp_path, "", groups).topology is None
    with pytest.raises(InputError, match=r"links\.inter\.topology: found an unknown key"):
        read(tmp_path, 'topology = "ring"', groups)


def test_stages_keep_the_topology_where_they_span_nodes(tmp_path: Path) -> None:
    whole = read(tmp_path, 'topology = "ring"')
    assert whole.stage(2).topology == whole.topology and whole.stage(2).nodes == 4
    assert whole.stage(8).topology is None
    with pytest.raises(InputError, match="found a ring between 8 nodes, wanted one between the 16 nodes"):
        whole.shaped(16, 2)


def test_circuits_lead_both_ways() -> None:
    assert Topology(TopologyKind.SWITCH, 3, circuits=((2, 1), (1, 0))).circuits == ((2, 1), (1, 0))


def test_topologies_made_in_python_are_checked() -> None:
    with pytest.raises(InputError, match=r"sizes: found nothing = 1, wanted sizes whose product is 4"):
        Topology(TopologyKind.TORUS, 4)
    with pytest.raises(InputError, match=r"circuits: found no way from node 0 to node 1"):
        Topology(TopologyKind.SWITCH, 2)
    with pytest.raises(InputError, match="topology: found 1,025 nodes"):
        Topology(TopologyKind.RING, MOST_JOINED_NODES + 1)
    ring = Topology(TopologyKind.RING, 3)
    with pytest.raises(InputError, match=r"links\.inter\.topology: found a ring between 3 nodes"):
        ClusterSpec(nodes=2, devices_per_node=1, inter=Link(0.0, 1.0), topology=ring)
