"""What a cluster's description and its measurements come to, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.cluster import ClusterSpec, DescribedDevice, Link
from autopar.core.costs import Collective, DeviceModel, SavedByCall
from autopar.core.graph import Call, TensorSpec
from autopar.cost.machine import measuring
from autopar.cost.machine.model import CostModel, busy_setting, network_of, setting_of
from autopar.cost.machine.threads import using_threads
from costdb import device_file
from costdb.database import Database
from costdb.measurement import CollectiveMeasurement, Measurement

TOY = DeviceModel("cpu", "cpu", ((torch.float32, 1.0),), bandwidth=1.0, launch_seconds=1.0)
NEAR, FAR = Link(1.0, 1.0), Link(7.0, 1.0)


def hosts(count: int = 4, **described: float) -> ClusterSpec:
    return ClusterSpec(nodes=count, devices_per_node=1, intra=NEAR, inter=FAR, **described)


def sent(nbytes: int, seconds: float, nodes: int = 2) -> CollectiveMeasurement:
    return CollectiveMeasurement(Collective.SEND_RECV, "gloo", 2, nodes, nbytes, seconds, 5, 0.0)


@pytest.fixture
def database(tmp_path: Path) -> Database:
    """One that knows the device, so that nothing is calibrated."""
    found = Database.open(tmp_path / "costs.sqlite")
    for cluster in (hosts(), hosts(cores=0.5), hosts(cores=8)):
        found.write_device(setting_of(cluster), TOY)
    return found


@pytest.mark.parametrize(
    ("devices", "cores", "threads", "contention"),
    [(1, 0.5, 1, 2.0), (1, 8, 2, 1.0), (2, 2, 1, 1.0), (4, 2, 1, 2.0)],
)
def test_devices_of_a_node_share_its_cores(
    devices: int, cores: float, threads: int, contention: float, tmp_path: Path
) -> None:
    with using_threads(2), Database.open(tmp_path / "costs.sqlite") as database:
        cluster = ClusterSpec(nodes=2, devices_per_node=devices, cores=cores, inter=FAR)
        assert setting_of(cluster).threads == threads
        database.write_device(setting_of(cluster), TOY)
        assert CostModel.of(cluster, database).contention == contention


def test_what_is_measured_alone_is_not_what_is_measured_beside_others(database: Database) -> None:
    """One device of a node of two: the other one idles then."""
    two = ClusterSpec(nodes=1, devices_per_node=2, cores=2)
    alone = busy_setting(two.stage(2))
    assert alone != busy_setting(two)
    assert setting_of(two) not in (alone, busy_setting(two)), "old figures are of calls by themselves"
    assert busy_setting(ClusterSpec(nodes=1, devices_per_node=4, cores=2)) == busy_setting(two)


def test_cpus_of_several_nodes_are_measured_here(database: Database) -> None:
    assert CostModel.of(hosts(), database).here
    assert not CostModel.of(replace_device(hosts()), database).here


def replace_device(cluster: ClusterSpec) -> ClusterSpec:
    return replace(cluster, device="h100")


def test_collectives_between_nodes_belong_to_the_network_that_is_described(database: Database) -> None:
    slow, fast = hosts(), ClusterSpec(nodes=4, devices_per_node=1, inter=Link(7.0, 2.0))
    database.write_collectives(network_of(slow), [sent(10, 3.0)])
    assert CostModel.of(slow, database).collectives.points
    assert not CostModel.of(fast, database).collectives.points
    assert network_of(ClusterSpec.local(2)) == network_of(ClusterSpec.local(2, cores=2))


def test_what_exchanges_took_in_a_row_is_no_price_of_a_step(database: Database) -> None:
    cluster = ClusterSpec.local(2)
    database.write_collectives(setting_of(cluster), [sent(10, 3.0)])
    assert not CostModel.of(cluster, database).collectives.points


def test_hops_are_as_measured_or_else_as_described(database: Database) -> None:
    cluster = hosts()
    assert CostModel.of(cluster, database).hop(cluster, 4) == FAR
    database.write_collectives(network_of(cluster), [sent(10, 3.0), sent(110, 8.0), sent(10, 1.0, nodes=1)])
    found = CostModel.of(cluster, database).hop(cluster, 4)
    assert (found.latency, found.bandwidth) == (3.0, 20.0)  # 100 bytes more take 5 s more
    assert not found.estimated


def test_a_hop_inside_a_node_is_as_measured_inside_a_node(database: Database) -> None:
    """Of two nodes of two devices, four ranks have one hop between the nodes, which is the slowest."""
    inside = replace(hosts(1), devices_per_node=2)
    both = replace(hosts(2), devices_per_node=2)
    for cluster in (inside, both):
        database.write_device(setting_of(cluster), TOY)
        database.write_collectives(network_of(cluster), [sent(10, 3.0), sent(110, 8.0)])
        database.write_collectives(network_of(cluster), [sent(10, 1.0, nodes=1), sent(110, 2.0, nodes=1)])
    hop = CostModel.of(inside, database).hop(inside, 2)
    assert (hop.latency, hop.bandwidth) == (1.0, 100.0)
    for ranks in (2, 4):
        hop = CostModel.of(both, database).hop(both, ranks)
        assert (hop.latency, hop.bandwidth) == (3.0, 20.0)


def test_what_is_measured_while_the_machine_is_slow_counts_as_on_other_days(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's pace is made up, as no machine is slow when a test wants it."""
    pace = 1.0

    def measured(calls: Sequence[Call], device: str, *, budget: float) -> list[Measurement]:
        return [Measurement(call.key(), 2 * pace, 3 * pace, SavedByCall(), 0, None, 5, 0.0) for call in calls]

    def relu(length: int) -> Call:
        return Call(torch.ops.aten.relu.default, (TensorSpec((length,), torch.float32),), {})

    monkeypatch.setattr(measuring, "measure_together", measured)
    CostModel.of(hosts(), database).measure([relu(1)], database)
    pace = 1.5
    again = CostModel.of(hosts(), database).measure([relu(2)], database)
    for known in (again, CostModel.of(hosts(), database)):
        assert [known.cost(relu(length)).forward_seconds for length in (1, 2)] == pytest.approx([2.0, 2.0])
    assert {each.key() for each in measuring.YARDSTICKS} <= again.measured.keys()


def linear(rows: int, wide: int) -> Call:
    shapes = (8, rows, wide), (4 * wide, wide), (4 * wide,)
    operands = [TensorSpec(shape, torch.bfloat16, requires_grad=True) for shape in shapes]
    return Call(torch.ops.aten.linear.default, tuple(operands), {})


def test_a_known_gpu_costs_what_its_file_says() -> None:
    cluster = ClusterSpec(devices_per_node=8, device="h100")
    filed = CostModel.of(cluster, None)
    plain = CostModel.of(cluster, None, device_files=False)
    assert filed.of_file and not plain.measured and not plain.of_file
    key, measured = next((key, each) for key, each in filed.measured.items() if each.forward_seconds > 1e-4)
    assert measured.forward_seconds == device_file.operators_of("h100")[key].forward_seconds
    call = linear(512, 768)  # of a size that isn't in it, two doublings away
    found, guess = filed.cost(call), plain.cost(call)
    assert call.key() not in filed.measured and found.interpolated and not found.measured
    assert not filed.cost(linear(1024, 1024)).interpolated  # three: as uncertain as an estimate
    assert (
        0.3 < found.forward_seconds / guess.forward_seconds < 0.9
    )  # products are faster than data sheets say
    far = linear(8, 8)
    assert not filed.cost(far).interpolated and filed.cost(far) == plain.cost(far)


def test_a_gpu_without_a_file_and_one_described_by_hand_have_estimates_alone() -> None:
    by_hand = DescribedDevice(flops=(("bf16", 1e15),), bandwidth=3e12)
    for cluster in (
        ClusterSpec(devices_per_node=1, device="a100"),
        ClusterSpec(devices_per_node=1, device="h100", described=by_hand),
    ):
        assert not CostModel.of(cluster, None).measured


def test_a_gpu_operator_takes_its_launch_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(torch.ops.aten.relu.default, (TensorSpec((8,), torch.float32),), {})
    quick = Measurement(call.key(), 1e-6, 0.0, SavedByCall(), 0, None, 5, 0.0)
    model = replace(
        CostModel.of(ClusterSpec(devices_per_node=1, device="a100"), None), measured={call.key(): quick}
    )
    assert model.cost(call).forward_seconds == model.device.launch_seconds > quick.forward_seconds
