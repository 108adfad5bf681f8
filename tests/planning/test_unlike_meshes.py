"""Stages on meshes that are asked for one by one: priced by their own tables, refused where they can't be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.cluster import ClusterSpec, Link
from autopar.core.device_groups import GroupLink
from autopar.core.force import Parallelism
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.errors import InputError
from autopar.planning import unlike_meshes
from autopar.planning.asked.ask import NO_MEANS
from autopar.planning.asked.option_values import read_mesh
from autopar.planning.asked.request import Request
from autopar.planning.unlike_meshes import find_by_groups, find_unlike, parts_of
from autopar.results.plan.plan import Plan
from tests.planning.test_group_orders import BIG, LAYERS, PART, WIDTH, cluster_of, graph, layers_of

__all__ = ["graph"]  # the fixture


def planned(graph: Graph, cluster: ClusterSpec, meshes: str, **options: object) -> Plan:
    asked = read_mesh(meshes)
    assert isinstance(asked, tuple)
    request = Request(measure=False, meshes=asked, pipeline_ranks=len(asked), micro_batches=8, **options)  # type: ignore[arg-type]
    return find_unlike(graph, cluster, request)


def test_a_stage_of_more_devices_has_more_layers(graph: Graph, tmp_path: Path) -> None:
    found = planned(graph, cluster_of(1.0, 1.0, 1.0, 1.0), "1+3")
    few, many = layers_of(found)
    assert 0 < few < many and few + many == LAYERS
    assert [program.mesh for program in found.programs] == [Mesh((1,)), Mesh((3,))]
    assert len(found.parameter_bytes) == 4 and "mesh 1 + 3" in str(found) and "axis a (1 + 3)" in str(found)
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found
    document = json.loads((tmp_path / "plan.json").read_text())
    document["result"]["programs"] = document["result"]["programs"][:1]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="1 programs, 2 meshes"):
        Plan.load(tmp_path / "plan.json")


def test_a_stage_is_priced_on_its_own_group(graph: Graph) -> None:
    fast, slow = (planned(graph, cluster_of(*speeds), "1+2") for speeds in ((9.0, 1.0, 1.0), (1.0, 9.0, 9.0)))
    assert layers_of(fast)[0] > layers_of(fast)[1] and layers_of(slow)[0] < layers_of(slow)[1]


def test_each_rank_of_the_next_stage_is_sent_its_part(graph: Graph) -> None:
    found = planned(graph, cluster_of(*[1.0] * 5), "1+4", force=Parallelism.BATCH)
    seconds = pytest.approx(1e-6 + 4 * PART * WIDTH / 1e12)  # all parts together, of the rank that sends them
    assert (found.stages[0].send_output, found.stages[1].send_gradient) == (seconds, seconds)


def test_groups_of_unlike_sizes_may_be_a_stage_each(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mesh is looked at once."""
    groups = [
        replace(cluster_of(speed, 5.0).groups[0], name=name, devices_per_node=size, memory=BIG)
        for name, speed, size in (("one", 2.0, 1), ("three", 1.0, 3))
    ]
    slow = Link(1e-3, 1e9)
    cluster = ClusterSpec.of_groups(groups, [GroupLink(("one", "three"), slow)])
    request = Request(measure=False, schedule=None)
    made, problem_on = list[object](), unlike_meshes.problem_on

    def counted(*args: Any) -> unlike_meshes.StageProblem:
        made.append(args[1:3])
        return problem_on(*args)

    monkeypatch.setattr(unlike_meshes, "problem_on", counted)
    found = find_by_groups(lambda _: graph, [1, 2, 4, 8, 16], cluster, request, NO_MEANS)
    assert found is not None and found.pipeline.micro_batches == 8
    assert [mesh.num_devices for mesh in found.pipeline.meshes] == [1, 3] and len(made) == 2
    alike = cluster_of(1.0, 2.0)
    assert find_by_groups(lambda _: graph, [1, 8], alike, request, NO_MEANS) is None


def test_meshes_of_fewer_axes_get_axes_of_one_device() -> None:
    assert read_mesh("2x2+3") == (Mesh((2, 2)), Mesh((1, 3)))
    assert read_mesh("1:2+2x1") == (Mesh((1, 2), ((), (1, 2))), Mesh((2, 1)))


@pytest.mark.parametrize("meshes", ["1+2", "2+3", "1+1+1+2"])
def test_meshes_are_of_the_clusters_devices(meshes: str) -> None:
    cluster = cluster_of(1.0, 1.0, 1.0, 1.0)
    with pytest.raises(InputError, match="add up to the cluster's"):
        parts_of(cluster, read_mesh(meshes))  # type: ignore[arg-type]


def test_a_stage_lies_in_a_node_or_on_whole_ones() -> None:
    nodes = ClusterSpec(nodes=2, devices_per_node=4, inter=cluster_of(1.0, 1.0).intra)
    with pytest.raises(InputError, match="3 across nodes"):
        parts_of(nodes, [Mesh((3,)), Mesh((3,)), Mesh((2,))])
    assert [(part.nodes, part.devices_per_node) for part in parts_of(nodes, [Mesh((4,)), Mesh((4,))])] == [
        (1, 4)
    ] * 2


@pytest.mark.parametrize(
    ("options", "found"), [({"compile": True}, "--compile"), ({"pins": {"a": ("n",)}}, "pins")]
)
def test_what_such_stages_lack_is_refused(graph: Graph, options: dict[str, object], found: str) -> None:
    with pytest.raises(InputError, match=found):
        planned(graph, cluster_of(1.0, 1.0, 1.0), "1+2", **options)
