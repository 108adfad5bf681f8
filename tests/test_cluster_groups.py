"""Clusters of unlike groups: read with their links, or refused with everything that is wrong in them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import LOOPBACK, ClusterSpec, Link
from autopar.core.device_groups import DeviceGroup, GroupLink, check_groups, slowest
from autopar.core.found_groups import groups_of_found
from autopar.errors import InputError

FAST, NETWORK, BETWEEN = Link(2e-6, 50e9), Link(20e-6, 5e9), Link(50e-6, 1.25e9)

TOML = """
[[groups]]
name = "fast"
device = "v100"
nodes = 3
devices_per_node = 4
memory = "32GB"

[[groups]]
name = "slow"
device = "t4"
devices_per_node = 4
flops = { fp16 = "65TFLOP/s", fp32 = "8TFLOP/s" }
bandwidth = "320GB/s"
memory = "16GB"
[groups.intra]
bandwidth = "10GB/s"
latency = "5us"

[links.intra]
bandwidth = "50GB/s"
latency = "2us"
[links.inter]
bandwidth = "5GB/s"
latency = "20us"

[[links.between]]
groups = ["fast", "slow"]
bandwidth = "10Gbit/s"
latency = "50us"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "groups.toml"
    path.write_text(text, encoding="utf-8")
    return path


def cpus(name: str, count: int = 1, **more: object) -> DeviceGroup:
    return DeviceGroup(name, "cpu", devices_per_node=count, **more)  # type: ignore[arg-type]


def tied(first: str, second: str, *, same_node: bool = True, link: Link = BETWEEN) -> GroupLink:
    return GroupLink((first, second), link, same_node)


# -- what a file says -------------------------------------------------------------------------------------


def test_groups_fill_the_ranks_one_after_the_other(tmp_path: Path) -> None:
    found = ClusterSpec.from_toml(write(tmp_path, TOML))
    assert (found.nodes, found.devices_per_node, found.device_type) == (4, 4, "cuda")
    assert found.places == ((0,),) * 12 + ((1,),) * 4
    assert found.devices == "3 x 4 v100 + 1 x 4 t4" and found.memory == 16 * 10**9
    slow = found.groups[1]
    assert slow.described is not None and slow.described.bandwidth == 320e9 and slow.inter == NETWORK
    assert pickle.loads(pickle.dumps(found)) == found


def test_an_exchange_goes_at_the_pace_of_the_slowest_link_of_its_kind(tmp_path: Path) -> None:
    found = ClusterSpec.from_toml(write(tmp_path, TOML))
    assert found.intra == Link(5e-6, 10e9) and found.inter == BETWEEN
    assert slowest([FAST, None, NETWORK]) == NETWORK and slowest([None]) is None
    assert slowest([Link(9e-6, 2e9), Link(1e-6, 1e9)]) == Link(9e-6, 1e9)


def test_alike_groups_are_a_cluster_of_like_devices() -> None:
    one, other = (DeviceGroup(name, "h100", 2, 4, intra=FAST, inter=NETWORK) for name in "ab")
    found = ClusterSpec.of_groups([one, other], [tied("a", "b", same_node=False)])
    wanted = ClusterSpec(nodes=4, devices_per_node=4, device="h100", intra=FAST, inter=BETWEEN)
    assert found == wanted and not found.groups


def test_a_straggler_shares_its_node_with_the_others() -> None:
    groups = [cpus("most", 3), cpus("straggler", speed=0.5)]
    found = ClusterSpec.of_groups(groups, [tied("most", "straggler", link=LOOPBACK)])
    assert (found.nodes, found.devices_per_node, found.inter, found.intra) == (1, 4, None, LOOPBACK)
    assert found.places == ((0,), (0,), (0,), (1,))
    assert found.devices == "1 x 3 cpu + 1 x 1 cpu at 0.5 of its speed"
    found.check_local()


def test_of_nodes_of_unlike_sizes_a_node_is_what_divides_each() -> None:
    groups = [DeviceGroup("a", "v100", devices_per_node=4), DeviceGroup("b", "a100", 2, 6, inter=NETWORK)]
    found = ClusterSpec.of_groups(groups, [tied("a", "b", same_node=False)])
    assert (found.nodes, found.devices_per_node) == (8, 2)


def test_a_rank_of_several_stages_is_of_all_their_groups(tmp_path: Path) -> None:
    found = ClusterSpec.from_toml(write(tmp_path, TOML))
    assert found.stage(4).places == ((0, 1),) * 4 and found.stage(2).places == ((0,),) * 4 + ((0, 1),) * 4
    assert found.stage(1) == found
    with pytest.raises(InputError, match="of one kind"):
        found.shaped(1, 4)


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "line", "where", "found"),
    [
        ('name = "slow"', "", 9, "groups.2.name", "nothing"),
        ('device = "v100"', "", 2, "groups.1.device", "nothing"),
        ("nodes = 3", "nodes = 0", 5, "groups.1.nodes", "0"),
        ('device = "t4"', 'device = "t4"\nspeed = 0', 12, "groups.2.speed", "0"),
        ('bandwidth = "320GB/s"\n', "", 9, "groups.2", "flops"),
        ("[groups.intra]", "[groups.inside]", 16, "groups.2.inside", "an unknown key"),
        ('["fast", "slow"]', '["fast"]', 28, "links.between.1.groups", "['fast']"),
        ('["fast", "slow"]', '["fast", "slower"]', 27, "links.between", "'slower'"),
        ('latency = "50us"', "", 27, "links.between.1.latency", "nothing"),
        ('name = "slow"', 'name = "fast"', 2, "groups", "2 groups named 'fast'"),
        ('device = "v100"', 'device = "cpu"', 2, "groups", "fast of cpu, slow of t4"),
    ],
)
def test_a_violation_names_its_line(
    tmp_path: Path, old: str, new: str, line: int, where: str, found: str
) -> None:
    assert TOML.count(old) == 1
    with pytest.raises(InputError) as caught:
        ClusterSpec.from_toml(write(tmp_path, TOML.replace(old, new)))
    assert f"line {line}: {where}: found {found}" in str(caught.value) or (
        f"line {line}, {where}: {found}" in str(caught.value)
    )


NAMES = "abcde"


@given(st.integers(2, 5), st.data())
def test_links_between_groups_are_a_tree(count: int, data: st.DataObject) -> None:
    """As many links as groups, less one, that join all: by a search of its own."""
    names = NAMES[:count]
    pairs = data.draw(st.lists(st.sampled_from(list(combinations(names, 2))), max_size=count))
    reached = {names[0]}
    for _ in names:
        reached |= {end for pair in pairs if reached & set(pair) for end in pair}
    is_tree = len(pairs) == count - 1 and reached == set(names)
    between = [tied(*pair, same_node=False) for pair in pairs]
    wrong = check_groups([cpus(name) for name in names], between)
    assert (not wrong) == is_tree and all(error.where == "links.between" for error in wrong)


def test_a_ring_and_a_group_apart_are_named() -> None:
    groups = [cpus(name) for name in "abc"]
    with pytest.raises(InputError, match="found no link between a b and c"):
        ClusterSpec.of_groups(groups, [tied("a", "b")])
    with pytest.raises(InputError, match="a ring of links, which c - a closes"):
        ClusterSpec.of_groups(groups, [tied("a", "b"), tied("b", "c"), tied("c", "a")])


def test_groups_of_one_node_follow_each_other_and_have_no_other_nodes() -> None:
    groups = [cpus("a"), cpus("b"), cpus("c")]
    with pytest.raises(InputError, match="a, c of one node apart"):
        ClusterSpec.of_groups(groups, [tied("a", "c"), tied("a", "b", same_node=False)])
    several = [cpus("a"), replace(cpus("b"), nodes=2, inter=NETWORK)]
    with pytest.raises(InputError, match="group b: found several nodes, and one shared"):
        ClusterSpec.of_groups(several, [tied("a", "b")])


def test_ranks_that_find_other_kinds_than_their_groups_are_named(tmp_path: Path) -> None:
    text = TOML.replace('"t4"', '"a100"').replace('flops = { fp16 = "65TFLOP/s", fp32 = "8TFLOP/s" }\n', "")
    found = ClusterSpec.from_toml(write(tmp_path, text.replace('bandwidth = "320GB/s"\n', "")))
    found.check_kinds(["v100"] * 12 + ["a100"] * 4)
    with pytest.raises(InputError, match="rank 13 on a v100, wanted a100 there, of group slow"):
        found.check_kinds(["v100"] * 12 + ["a100", "v100", "a100", "a100"])
    by_figures = ClusterSpec.from_toml(write(tmp_path, TOML))
    by_figures.check_kinds(["v100"] * 16)  # a name of its own says nothing


def test_one_more_of_a_group_is_a_node_or_on_one_node_a_device(tmp_path: Path) -> None:
    found = ClusterSpec.from_toml(write(tmp_path, TOML))
    larger = found.with_more(0)
    assert larger is not None and larger.places == ((0,),) * 16 + ((1,),) * 4
    assert (larger.nodes, larger.devices) == (5, "4 x 4 v100 + 1 x 4 t4")
    one = ClusterSpec.of_groups([cpus("most", 3), cpus("slow", speed=0.5)], [tied("most", "slow")])
    grown = one.with_more(1)
    assert grown is not None and grown.places == ((0,),) * 3 + ((1,),) * 2
    assert (grown.nodes, grown.devices_per_node) == (1, 5)
    groups = [replace(cpus("a", 4), nodes=2, inter=NETWORK), cpus("b", 3), cpus("c", 1, speed=0.5)]
    links = [tied("a", "b", same_node=False), tied("b", "c")]
    assert ClusterSpec.of_groups(groups, links).with_more(2) is None


@pytest.mark.parametrize(
    ("words", "found"),
    [({"speed": 0}, "speed"), ({"nodes": 0}, "nodes"), ({"devices_per_node": 1.5}, "devices_per_node")],
)
def test_a_group_that_is_none_is_refused(words: dict[str, Any], found: str) -> None:
    with pytest.raises(InputError, match=f"group a.{found}"):
        DeviceGroup("a", "cpu", **words)


def test_groups_say_memory_as_text_and_are_at_least_one() -> None:
    assert DeviceGroup("a", "h100", memory="40GB").memory == 40 * 10**9  # type: ignore[arg-type]
    with pytest.raises(InputError, match="groups: found none"):
        ClusterSpec.of_groups([])


# -- what ranks find --------------------------------------------------------------------------------------


def test_like_devices_that_follow_each_other_are_a_group() -> None:
    big, small = ("h100", 80), ("t4", 16)
    found = [big] * 8 + [big, big, small, small] + [small] * 8
    groups, between = groups_of_found(found, 4, intra=FAST, inter=NETWORK)
    assert [(each.device, each.nodes, each.devices_per_node, each.memory) for each in groups] == [
        ("h100", 2, 4, 80),
        ("h100", 1, 2, 80),
        ("t4", 1, 2, 16),
        ("t4", 2, 4, 16),
    ]
    assert [each.same_node for each in between] == [False, True, False]
    assert [each.link for each in between] == [NETWORK, FAST, NETWORK]
    cluster = ClusterSpec.of_groups(groups, between)
    assert cluster.places == ((0,),) * 8 + ((1,),) * 2 + ((2,),) * 2 + ((3,),) * 8


def test_ranks_with_unlike_gpus_detect_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(found: list[Any], mine: Any) -> None:
        found[:] = [mine, ("t4", 16 * 10**9)]

    here = ClusterSpec(devices_per_node=2, device="h100", memory=80 * 10**9)
    monkeypatch.setattr("autopar.cluster._this_machine", lambda count, nodes: here)
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert ClusterSpec.detect(environment) == here
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda value=value: value)
    monkeypatch.setattr("torch.distributed.all_gather_object", told)
    found = ClusterSpec.detect(environment)
    assert [group.device for group in found.groups] == ["h100", "t4"] and found.nodes == 1
