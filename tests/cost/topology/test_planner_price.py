"""The planner's exchanges between nodes: by the topology where there is one, and else as before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.cluster import ClusterSpec, Link
from autopar.core.costs import Collective, DeviceModel
from autopar.core.mesh import Mesh
from autopar.core.topology import Topology, TopologyKind
from autopar.cost.machine import collectives, nccl
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.devices import device_model
from autopar.cost.machine.model import CostModel, network_of
from autopar.cost.operators.exchanges import Exchanges
from autopar.cost.topology.price import NodeGroup, seconds

TOY = DeviceModel("cpu", "cpu", ((torch.float32, 1.0),), bandwidth=1e30, launch_seconds=1.0)
NEAR, FAR = Link(1.0, 10.0), Link(7.0, 1.0)
PLAIN = ClusterSpec(nodes=4, devices_per_node=2, intra=NEAR, inter=FAR)
RING = Topology(TopologyKind.RING, 4)
KINDS = list(Collective)


def exchanges(cluster: ClusterSpec, device: DeviceModel = TOY, *shape: int) -> Exchanges:
    return Exchanges(cluster, Mesh(shape or (4, 2)), CostModel(device, {}, CollectiveTable({})))


@pytest.mark.parametrize("kind", KINDS)
def test_between_nodes_the_best_algorithm_counts(kind: Collective) -> None:
    group = NodeGroup(RING, 4, 1, NEAR, FAR)
    found = exchanges(replace(PLAIN, topology=RING))
    assert found.collective(kind, 4000, (0,)) == pytest.approx(seconds(kind, 4000, group))
    whole = NodeGroup(RING, 4, 2, NEAR, FAR)
    assert found.collective(kind, 4000, (0, 1)) == pytest.approx(seconds(kind, 4000, whole))


@pytest.mark.parametrize("kind", KINDS)
def test_within_a_node_and_without_a_topology_nothing_changes(kind: Collective) -> None:
    plain, laid = exchanges(PLAIN), exchanges(replace(PLAIN, topology=RING))
    assert laid.collective(kind, 4000, (1,)) == plain.collective(kind, 4000, (1,))
    assert plain.collective(kind, 4000, (0,)) == pytest.approx(collectives.seconds(kind, 4000, 4, FAR))
    gpus = replace(PLAIN, device="h100")
    nccl_seconds = nccl.seconds(kind, 4000, nccl.RankGroup(4, 4, NEAR, FAR))
    if nccl_seconds is not None:
        assert exchanges(gpus, device_model("h100", None)).collective(kind, 4000, (0,)) == nccl_seconds


def test_cpus_also_copy_what_they_sum() -> None:
    slow = replace(TOY, bandwidth=10.0)
    laid = replace(PLAIN, topology=RING)
    more = exchanges(laid, slow).collective(Collective.ALL_REDUCE, 4000, (0,))
    less = exchanges(laid).collective(Collective.ALL_REDUCE, 4000, (0,))
    assert more - less == pytest.approx(collectives.copied(Collective.ALL_REDUCE, 4000, 4) / 10)


def test_a_narrow_tree_makes_sums_between_nodes_dearer() -> None:
    def takes(oversubscription: float) -> float:
        tree = Topology(TopologyKind.FAT_TREE, 4, sizes=(2, 2), oversubscription=oversubscription)
        return exchanges(replace(PLAIN, topology=tree)).collective(Collective.ALL_REDUCE, 10**6, (0,))

    assert takes(1.0) < takes(8.0) < takes(64.0)


def test_a_stage_of_some_nodes_is_priced_beside_the_others() -> None:
    narrow = Topology(TopologyKind.FAT_TREE, 4, sizes=(4,))
    stage = replace(PLAIN, topology=narrow).stage(2)
    assert stage.nodes == 2
    group = NodeGroup(narrow, 2, 1, NEAR, FAR)
    found = exchanges(stage, TOY, 2, 2).collective(Collective.ALL_REDUCE, 1000, (0,))
    assert found == pytest.approx(seconds(Collective.ALL_REDUCE, 1000, group))


def test_measurements_of_another_topology_are_of_another_network() -> None:
    settings = [network_of(replace(PLAIN, topology=each)) for each in (None, RING)]
    assert settings[0] == network_of(PLAIN) != settings[1]
    assert "ring of 4" in settings[1].fingerprint


@pytest.mark.parametrize(("nodes", "shape"), [(8, (2, 4)), (3, (2, 3))])
def test_groups_of_nodes_that_are_no_runs_take_the_links_price(nodes: int, shape: tuple[int, int]) -> None:
    """As of meshes by hand: nodes 0 and 4 aren't neighbours, and 2 of 3 nodes leave one over."""
    cluster = replace(PLAIN, nodes=nodes, devices_per_node=6 // nodes or 1)
    laid = replace(cluster, topology=Topology(TopologyKind.RING, nodes))
    for kind in KINDS:
        price = exchanges(laid, TOY, *shape).collective(kind, 4000, (0,))
        assert price == exchanges(cluster, TOY, *shape).collective(kind, 4000, (0,))
