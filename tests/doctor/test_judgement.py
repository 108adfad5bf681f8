"""What is wrong with facts that are made up, a fault at a time, and the remedy of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.cluster import ClusterSpec, Link
from autopar.core.device_groups import DeviceGroup, GroupLink
from autopar.doctor.judgement import of_machines, of_meeting
from autopar.doctor.meeting import Meeting, TimedLink, pairs_of
from autopar.doctor.rank_facts import RankFacts
from autopar.results.explanation.examination import Finding, State

SOUND = RankFacts(
    rank=0,
    host="a",
    autopar="1",
    torch="2",
    python="3",
    device="a CPU",
    gpus=0,
    nccl=None,
    cores=8,
    threads=2,
    memory=16 * 10**9,
    free_memory=8 * 10**9,
    shared_memory=8 * 10**9,
    open_files=65_536,
    most_open_files=65_536,
)
CLUSTER = ClusterSpec(devices_per_node=4, memory=2 * 10**9, intra=Link(latency=1e-6, bandwidth=1e9))
TOLD = Link(latency=1e-6, bandwidth=1e9)
TWO_NODES = ClusterSpec(nodes=2, devices_per_node=2, device="cpu", intra=TOLD, inter=TOLD)


def ranks(**changed: Any) -> list[RankFacts]:
    """Four ranks, of which the last is otherwise."""
    four = [replace(SOUND, rank=rank) for rank in range(4)]
    return [*four[:3], replace(four[3], **changed)]


def not_well(findings: Any) -> list[Finding]:
    return [finding for finding in findings if finding.state is not State.OK]


def test_sound_machines_are_well() -> None:
    assert not not_well(of_machines(ranks(), CLUSTER))
    assert not not_well(of_meeting(Meeting(0, 1.0, tuple(ranks()), backend="gloo"), CLUSTER))


@pytest.mark.parametrize(
    ("changed", "state", "what", "remedy"),
    [
        ({"gpus": 1}, State.OK, "", ""),
        ({"device": "another"}, State.WARN, "devices", "write [[groups]]"),
        ({"cores": 2}, State.WARN, "cores", "fewer ranks"),
        ({"cores": 4}, State.WARN, "cores", "OMP_NUM_THREADS=1"),
        ({"memory": 4 * 10**9}, State.WRONG, "memory", "memory = 1000000000"),
        ({"free_memory": 10**9}, State.WARN, "memory", "end what else runs"),
        ({"free_memory": None}, State.OK, "", ""),
        ({"shared_memory": 64 << 20}, State.WARN, "shared memory", "--shm-size"),
        ({"shared_memory": None}, State.WARN, "shared memory", "num_workers=0"),
        ({"open_files": 256}, State.WARN, "open files", "ulimit -n 1088"),
        ({"open_files": 256, "most_open_files": 512}, State.WARN, "open files", "hard limit"),
        ({"open_files": -1}, State.OK, "", ""),
    ],
)
def test_a_fault_is_found_with_its_remedy(
    changed: dict[str, Any], state: State, what: str, remedy: str
) -> None:
    found = not_well(of_machines(ranks(**changed), CLUSTER))
    if state is State.OK:
        assert not found
        return
    (finding,) = found
    assert (finding.state, finding.what) == (state, what) and remedy in finding.remedy


def test_a_cluster_of_gpus_needs_as_many_on_every_node() -> None:
    gpus = ClusterSpec(devices_per_node=4, device="h100")
    with_gpus = [replace(each, gpus=4, nccl="2.29") for each in ranks()]
    assert not not_well(of_machines(with_gpus, gpus))
    (finding,) = not_well(of_machines([*with_gpus[:3], replace(with_gpus[3], gpus=2)], gpus))
    assert finding.state is State.WRONG and "rank 3 sees 2 GPUs" in finding.found


@pytest.mark.parametrize("name", ["autopar", "torch", "python"])
def test_versions_that_differ_are_wrong(name: str) -> None:
    meeting = Meeting(0, 1.0, tuple(ranks(**{name: "9"}, host="b")), backend="gloo")
    (finding,) = not_well(of_meeting(meeting, CLUSTER))
    assert finding.state is State.WRONG and "rank 3 on b has 9" in finding.found


def test_ranks_that_did_not_come_are_named() -> None:
    (finding,) = not_well(of_meeting(Meeting(0, 2.0, (SOUND,), missing=(1, 3)), CLUSTER))
    assert finding.state is State.WRONG and "2 of 4" in finding.found and "1, 3" in finding.found


def test_what_torch_says_of_the_network_is_told() -> None:
    meeting = Meeting(0, 2.0, tuple(ranks()), backend="gloo", failed="gloo: connection refused")
    (finding,) = not_well(of_meeting(meeting, CLUSTER))
    assert finding.what == "network" and "GLOO_SOCKET_IFNAME" in finding.remedy


@pytest.mark.parametrize(("bandwidth", "well"), [(0.4e9, True), (0.2e9, False)])
def test_a_link_far_slower_than_the_cluster_says_is_told(bandwidth: float, well: bool) -> None:
    timed = TimedLink((0, 2), True, Link(latency=1e-4, bandwidth=bandwidth))
    meeting = Meeting(0, 1.0, tuple(ranks()), links=(timed,), backend="gloo")
    assert bool(not_well(of_meeting(meeting, TWO_NODES))) is not well


def test_rank_0_times_a_neighbour_and_other_nodes() -> None:
    assert pairs_of(6, 2) == [((0, 1), False), ((0, 2), True), ((0, 4), True)]
    assert pairs_of(2, 1) == [((0, 1), True)]
    assert pairs_of(1, 1) == []


STRAGGLER = (10.0, 10.2, 9.8, 4.9)


def speeds(rates: tuple[float, ...], cluster: ClusterSpec) -> Finding:
    met = Meeting(0, 1.0, tuple(ranks()), rates=rates, backend="gloo")
    return next(finding for finding in of_meeting(met, cluster) if finding.what == "speeds")


def test_a_straggler_is_named_with_the_speed_of_its_group() -> None:
    found = speeds(STRAGGLER, CLUSTER)
    assert found.state is State.WARN and "rank 3 0.49 of" in found.found
    assert "speed = 0.49" in found.remedy
    assert speeds((10.0, 10.2, 9.8, 9.5), CLUSTER).state is State.OK


def test_a_straggler_that_is_a_group_of_its_own_is_well() -> None:
    groups = [DeviceGroup("most", "cpu", devices_per_node=3), DeviceGroup("slow", "cpu", speed=0.5)]
    known = ClusterSpec.of_groups(groups, [GroupLink(("most", "slow"), TOLD, same_node=True)])
    assert speeds(STRAGGLER, known).state is State.OK
    slower = speeds((10.0, 10.2, 9.8, 2.5), known)
    assert slower.state is State.WARN and "speed = 0.25" in slower.remedy
