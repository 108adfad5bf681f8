"""Clusters: meshes fit the links, files are read or refused with everything that is wrong in them."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import ETHERNET, LOOPBACK, ClusterSpec, DescribedDevice, Link, gpu_kind
from autopar.core.mesh import Mesh
from autopar.cost.machine.collectives import all_gather
from autopar.errors import InputError

FAST, SLOW = Link(2e-6, 450e9), Link(10e-6, 25e9)
TWO_NODES = ClusterSpec(nodes=2, devices_per_node=4, device="h100", memory="80GB", intra=FAST, inter=SLOW)

TOML = """
[cluster]
nodes = 2
devices_per_node = 4
device = "h100"
memory = "80GB"

[links.intra]
bandwidth = "450GB/s"
latency = "2us"

[links.inter]
bandwidth = "200Gbit/s"
latency = "10us"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


def shapes(spec: ClusterSpec) -> list[tuple[int, ...]]:
    return [mesh.shape for mesh in spec.meshes()]


def one_node(num_devices: int) -> ClusterSpec:
    return ClusterSpec(devices_per_node=num_devices)


# Meshes and links


def test_meshes_of_one_node_are_all_ordered_factorisations() -> None:
    assert shapes(one_node(1)) == [(1,)]
    assert shapes(one_node(7)) == [(7,)]
    assert shapes(one_node(6)) == [(6,), (2, 3), (3, 2)]
    assert shapes(one_node(8)) == [(8,), (2, 4), (4, 2), (2, 2, 2)]


def test_only_the_major_axis_leaves_a_node() -> None:
    assert shapes(TWO_NODES) == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    three_nodes = ClusterSpec(nodes=3, devices_per_node=2, inter=SLOW)
    assert shapes(three_nodes) == [(6,), (3, 2)]  # on 2x3 a minor group would be ranks 0 1 2 of nodes 0 0 1
    assert shapes(ClusterSpec(nodes=4, devices_per_node=1, inter=SLOW)) == [(4,)]


@given(st.integers(1, 6), st.integers(1, 12))
def test_meshes_hold_every_device_and_minor_axes_use_fast_links(nodes: int, per_node: int) -> None:
    spec = ClusterSpec(nodes=nodes, devices_per_node=per_node, intra=FAST, inter=SLOW)
    for mesh in spec.meshes():
        assert math.prod(mesh.shape) == nodes * per_node
        assert all(spec.link(mesh, axis) == FAST for axis in mesh.axes[1:])
    assert len(set(spec.meshes())) == len(spec.meshes())


@pytest.mark.parametrize(
    ("shape", "links"),
    [
        ((8,), [SLOW]),
        ((2, 4), [SLOW, FAST]),  # axis a joins ranks 0 4, axis b ranks 0 1 2 3
        ((4, 2), [SLOW, FAST]),  # axis a joins ranks 0 2 4 6
        ((2, 2, 2), [SLOW, FAST, FAST]),
    ],
)
def test_an_axis_uses_the_slowest_link_of_its_groups(shape: tuple[int, ...], links: list[Link]) -> None:
    mesh = Mesh(shape)
    assert [TWO_NODES.link(mesh, axis) for axis in mesh.axes] == links


def test_one_crossing_group_makes_an_axis_slow() -> None:
    spec = ClusterSpec(nodes=2, devices_per_node=3, intra=FAST, inter=SLOW)
    assert spec.link(Mesh((3, 2)), 1) == SLOW  # groups 0 1 | 2 3 | 4 5, and 2 3 crosses
    assert spec.link(Mesh((6, 1)), 1) == FAST


def test_groups_span_nodes() -> None:
    spans = {
        (shape, axes): TWO_NODES.nodes_of(Mesh(shape), axes)
        for shape, axes in (((8,), (0,)), ((2, 4), (0,)), ((2, 4), (1,)), ((4, 2), (0,)), ((4, 2), (0, 1)))
    }
    assert list(spans.values()) == [2, 2, 1, 2, 2]


@given(st.integers(1, 6), st.integers(1, 12))
def test_stages_are_counted_as_they_can_be_cut(nodes: int, per_node: int) -> None:
    spec = ClusterSpec(nodes=nodes, devices_per_node=per_node, intra=FAST, inter=SLOW)
    for count in range(1, spec.num_devices + 1):
        if count in spec.stage_counts():
            assert spec.stage(count).num_devices * count == spec.num_devices
        else:
            with pytest.raises(InputError, match="equal parts"):
                spec.stage(count)


@given(st.integers(1, 6), st.integers(1, 12))
def test_a_hop_between_ranks_uses_the_slowest_link_of_neighbours(nodes: int, per_node: int) -> None:
    """Every device of a pipeline rank sends to the one in the same place of the next rank."""
    spec = ClusterSpec(nodes=nodes, devices_per_node=per_node, intra=FAST, inter=SLOW)
    node_of = [node for node in range(nodes) for _ in range(per_node)]
    for count in spec.stage_counts()[1:]:
        size = spec.num_devices // count
        pairs = zip(node_of, node_of[size:], strict=False)
        links = [FAST if sender == receiver else SLOW for sender, receiver in pairs]
        assert len(links) == size * (count - 1)
        assert spec.hop(count) == max(links, key=lambda link: link.latency)


def test_a_world_or_mesh_of_another_size_is_refused() -> None:
    TWO_NODES.check_world(8)
    with pytest.raises(InputError, match=r"found 4, wanted 8 \(2 nodes of 4 devices\)"):
        TWO_NODES.check_world(4)
    with pytest.raises(InputError, match="found 6, wanted 8"):
        TWO_NODES.link(Mesh((2, 3)), 0)


# From code


def test_memory_may_be_text_and_replace_keeps_the_rest() -> None:
    assert TWO_NODES.memory == 80_000_000_000
    smaller = replace(TWO_NODES, memory="2GiB")  # type: ignore[arg-type]
    assert smaller.memory == 2**31
    assert smaller.inter == SLOW
    assert one_node(2).memory is None


@pytest.mark.parametrize("cores", [0, -1, "2", True, float("inf")])
def test_cores_are_a_number_above_0(cores: object) -> None:
    with pytest.raises(InputError, match=r"cluster\.cores.*above 0"):
        ClusterSpec(devices_per_node=1, cores=cores)  # type: ignore[arg-type]


def test_a_slow_network_of_small_hosts_is_described_in_its_own_units(tmp_path: Path) -> None:
    text = """
    [cluster]
    nodes = 4
    devices_per_node = 1
    cores = 0.5
    [links.inter]
    bandwidth = "200Mbit/s"
    latency = "1ms"
    """
    found = ClusterSpec.from_toml(write(tmp_path, text))
    assert (found.cores, found.inter) == (0.5, Link(1e-3, 25e6))
    assert "0.5 cores a node" in str(found)
    assert found.stage(4).cores == 0.5


def test_unknown_links_are_marked_as_estimated() -> None:
    assert one_node(2).intra == LOOPBACK
    assert one_node(2).intra.estimated
    assert "estimated" in str(one_node(2))
    assert "estimated" not in str(TWO_NODES)


def test_all_violations_of_a_spec_are_told_at_once() -> None:
    with pytest.raises(InputError) as caught:
        ClusterSpec(nodes=3, devices_per_node=0, device="", memory=-5)
    assert caught.value.found == (
        "cluster.devices_per_node: 0; cluster.device: ''; cluster.memory: -5; links.inter: nothing"
    )


@pytest.mark.parametrize(
    ("latency", "bandwidth"), [(-1.0, 1.0), (0.0, 0.0), (math.nan, 1.0), (0.0, math.nan), (0.0, math.inf)]
)
def test_a_link_needs_a_latency_and_a_bandwidth(latency: float, bandwidth: float) -> None:
    with pytest.raises(InputError):
        Link(latency, bandwidth)


def test_a_link_to_the_host_is_for_devices_with_memory_of_their_own() -> None:
    found = replace(TWO_NODES, host=Link(10e-6, 25e9), host_memory="1TB")  # type: ignore[arg-type]
    assert found.host_memory == 10**12 and TWO_NODES.host is TWO_NODES.host_memory is None
    assert str(found) == f"{TWO_NODES}; to the host 25 GB/s, 10 us"
    assert (found.stage(2).host, found.stage(2).host_memory) == (found.host, found.host_memory)
    with pytest.raises(InputError, match="links.host: found a link of CPUs .*their memory is the host's"):
        ClusterSpec(devices_per_node=2, host=Link(10e-6, 25e9))


# From TOML


def test_a_file_gives_the_same_spec_as_code(tmp_path: Path) -> None:
    path = write(tmp_path, TOML)
    assert ClusterSpec.from_toml(path) == TWO_NODES
    assert ClusterSpec.parse(str(path)) == TWO_NODES


def test_a_file_may_say_what_offload_needs(tmp_path: Path) -> None:
    host = '[links.host]\nbandwidth = "25GB/s"\nlatency = "10us"\n'
    text = TOML.replace('memory = "80GB"', 'memory = "80GB"\nhost_memory = "1TB"') + host
    wanted = replace(TWO_NODES, host=Link(10e-6, 25e9), host_memory=10**12)
    assert ClusterSpec.from_toml(write(tmp_path, text)) == wanted
    path = write(tmp_path, text.replace('"h100"', '"cpu"'))
    with pytest.raises(InputError, match=rf"{path.name}, line \d+: links.host: found a link of CPUs"):
        ClusterSpec.from_toml(path)


def test_a_short_file_takes_the_defaults(tmp_path: Path) -> None:
    assert ClusterSpec.from_toml(write(tmp_path, "[cluster]\ndevices_per_node = 3")) == one_node(3)


@pytest.mark.parametrize(
    ("old", "new", "where", "found"),
    [
        ("nodes = 2", 'nodes = "two"', "cluster.nodes", "'two'"),
        ("nodes = 2", "nodes = true", "cluster.nodes", "True"),
        ("nodes = 2", "nodes = 0", "cluster.nodes", "0"),
        ("devices_per_node = 4", "", "cluster.devices_per_node", "nothing"),
        ('memory = "80GB"', 'memory = "80"', "cluster.memory", "'80'"),
        ('memory = "80GB"', "memory = 1.5", "cluster.memory", "1.5"),
        ('device = "h100"', 'colour = "red"', "cluster.colour", "an unknown key"),
        ('"2us"', "2e-6", "links.intra.latency", "2e-06"),
        ('"450GB/s"', '"450Gb/s"', "links.intra.bandwidth", "'450Gb/s'"),
        ('"450GB/s"', '"0GB/s"', "links.intra.bandwidth", "'0GB/s'"),
        ('latency = "10us"', "", "links.inter.latency", "nothing"),
        ("[links.intra]", "[links.inner]", "links.inner", "an unknown key"),
        ("[cluster]", "[clusters]", "clusters", "an unknown key"),
        ("[links.inter]", "[links.intra.more]", "links.inter", "nothing"),
    ],
)
def test_a_violation_is_named(tmp_path: Path, old: str, new: str, where: str, found: str) -> None:
    path = write(tmp_path, TOML.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        ClusterSpec.from_toml(path)
    message = str(caught.value)
    assert str(path) in message
    assert f"{where}: {found}" in message or f"{where}: found {found}" in message


def test_all_violations_of_a_file_are_told_at_once_and_in_order(tmp_path: Path) -> None:
    text = TOML.replace("nodes = 2", 'nodes = "two"').replace('"2us"', "2").replace('"80GB"', '"?"')
    with pytest.raises(InputError) as caught:
        ClusterSpec.from_toml(write(tmp_path, text))
    told = "line 3, cluster.nodes: 'two'; line 6, cluster.memory: '?'; line 10, links.intra.latency: 2"
    assert caught.value.found == told


BY_HAND = TOML.replace('"h100"', '"mine"').replace('memory = "80GB"\n', "") + (
    '[device]\nflops = { bf16 = "400TFLOP/s", fp32 = "50TFLOP/s" }\nbandwidth = "2TB/s"\nmemory = "64GB"\n'
)


def test_a_device_may_be_described_by_hand(tmp_path: Path) -> None:
    found = ClusterSpec.from_toml(write(tmp_path, BY_HAND))
    assert found.described == DescribedDevice((("bf16", 400e12), ("fp32", 50e12)), 2e12)
    assert (found.device, found.device_type, found.memory) == ("mine", "cuda", 64 * 10**9)
    assert found.shaped(1, 2).described == found.described
    one = BY_HAND.replace('{ bf16 = "400TFLOP/s", fp32 = "50TFLOP/s" }', '"1PFLOP/s"')
    described = ClusterSpec.from_toml(write(tmp_path, one)).described
    assert described is not None and dict(described.flops) == dict.fromkeys(
        ("fp16", "bf16", "fp32", "fp64"), 1e15
    )


@pytest.mark.parametrize(
    "points",
    [((1, 1.0), (3, 2.0), (2, 3.0)), ((1, 1.0), (1, 2.0)), ((1, 2.0), (2, 1.0))],
    ids=["bytes fall", "bytes stay", "seconds fall"],
)
def test_points_out_of_order_are_refused_in_python(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(
        InputError, match=r"link: found points .*, then .*, wanted bytes that rise.*; sort points"
    ):
        Link(1e-6, 1e9, points=points)


POINTS = TOML.replace(
    'bandwidth = "200Gbit/s"\nlatency = "10us"',
    'points = [\n  ["1kB", "10us"],\n  ["2kB", "10us"],\n  ["1002kB", "110us"],\n]',
)


def test_a_link_may_be_a_table_of_measured_messages(tmp_path: Path) -> None:
    """Of 1 MB more in 100 us; messages between two points lie on a line, those beyond the last on its own."""
    link = ClusterSpec.from_toml(write(tmp_path, POINTS)).inter
    assert link is not None and link.latency == 10e-6 and link.bandwidth == pytest.approx(1e10)
    told = [link.seconds(nbytes) for nbytes in (1, 1000, 1500, 502_000, 1_002_000, 2_002_000)]
    assert told == pytest.approx([10e-6, 10e-6, 10e-6, 60e-6, 110e-6, 210e-6])
    assert all_gather(4 * 502_000, 4, link) == pytest.approx(3 * 60e-6)


@pytest.mark.parametrize(
    ("old", "new", "line", "where"),
    [
        ('["2kB", "10us"]', '["1kB", "10us"]', 15, "links.inter.points.2"),
        ('["2kB", "10us"]', '["2kB", "9us"]', 15, "links.inter.points.2"),
        ('["1002kB", "110us"]', '["1002kB", "10us"]', 16, "links.inter.points.3"),
        ('["1002kB", "110us"]', '["1002kB"]', 16, "links.inter.points.3"),
        ('["1002kB", "110us"]', '["1002kB", "-1us"]', 16, "links.inter.points.3"),
        ("points = [", 'latency = "1us"\npoints = [', 13, "links.inter.latency"),
        ("[links.inter]", "[links.inter]\ncards = 2", 13, "links.inter.cards"),
    ],
)
def test_points_out_of_order_name_their_line(
    tmp_path: Path, old: str, new: str, line: int, where: str
) -> None:
    assert POINTS.count(old) == 1
    with pytest.raises(InputError) as caught:
        ClusterSpec.from_toml(write(tmp_path, POINTS.replace(old, new)))
    assert f"line {line}: {where}: found" in str(caught.value)


def test_devices_of_a_node_share_its_network_cards(tmp_path: Path) -> None:
    """Four devices with two cards have half a card each, with eight cards two."""
    whole = ClusterSpec.from_toml(write(tmp_path, TOML)).inter
    assert whole is not None
    for cards, share in ((2, 0.5), (4, 1.0), (8, 2.0)):
        text = TOML.replace("[links.inter]", f"[links.inter]\ncards = {cards}")
        assert ClusterSpec.from_toml(write(tmp_path, text)).inter == replace(
            whole, bandwidth=share * whole.bandwidth
        )


@pytest.mark.parametrize(
    ("old", "new", "line", "where"),
    [
        ("nodes = 2", "nodes = 1000000000", 3, "cluster.nodes"),
        ("devices_per_node = 4", "devices_per_node = 1000000000", 4, "cluster.devices_per_node"),
        ('"450GB/s"', '"999999TB/s"', 8, "links.intra.bandwidth"),
        ('"450GB/s"', '"1B/s"', 8, "links.intra.bandwidth"),
        ('"450GB/s"', '"-450GB/s"', 8, "links.intra.bandwidth"),
        ('"2us"', '"3600s"', 9, "links.intra.latency"),
        ('"400TFLOP/s"', '"1000000000000000PFLOP/s"', 15, "device.flops.bf16"),
        ('"400TFLOP/s"', "1e30", 15, "device.flops.bf16"),
        ('"50TFLOP/s"', '"0TFLOP/s"', 15, "device.flops.fp32"),
        ("fp32", "fp12", 15, "device.flops"),
        ('"2TB/s"', '"0B/s"', 16, "device.bandwidth"),
        ('memory = "64GB"', 'memory = "9999999999TB"', 17, "device.memory"),
        ('bandwidth = "2TB/s"\n', "", 14, "device.bandwidth"),
        ('device = "mine"', 'device = "cpu"', 5, "cluster.device"),
        ("[links.inter]", "[links.inter]\ncards = 0", 12, "links.inter.cards"),
    ],
)
def test_figures_that_cannot_be_name_the_line(
    tmp_path: Path, old: str, new: str, line: int, where: str
) -> None:
    assert BY_HAND.count(old) == 1
    with pytest.raises(InputError) as caught:
        ClusterSpec.from_toml(write(tmp_path, BY_HAND.replace(old, new)))
    assert f"line {line}: {where}: found" in str(caught.value)


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 3, 4), (3, 2, 4)])
def test_groups_span_as_many_nodes_as_their_ranks_lie_on(shape: tuple[int, ...]) -> None:
    mesh = Mesh(shape)
    for per_node in (each for each in range(1, mesh.num_devices + 1) if mesh.num_devices % each == 0):
        nodes = mesh.num_devices // per_node
        cluster = ClusterSpec(nodes=nodes, devices_per_node=per_node, intra=Link(1, 1), inter=Link(1, 1))
        for axes in (axes for count in range(1, 4) for axes in itertools.combinations(mesh.axes, count)):
            spans = [len({rank // per_node for rank in group}) for group in mesh.groups(axes)]
            assert cluster.nodes_of(mesh, axes) == max(spans)


def test_more_devices_than_any_cluster_has_are_refused_in_code_too() -> None:
    with pytest.raises(InputError, match="at most 262,144"):
        ClusterSpec(nodes=1 << 15, devices_per_node=64, inter=Link(0.0, 1.0))


def test_several_nodes_need_the_link_between_them(tmp_path: Path) -> None:
    path = write(tmp_path, TOML[: TOML.index("[links.inter]")])
    with pytest.raises(InputError, match=r"links\.inter: found nothing, wanted the link between the 2 nodes"):
        ClusterSpec.from_toml(path)


def test_broken_syntax_and_missing_files_name_the_file_and_the_place(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cluster\.toml: found .*line 2, column 9"):
        ClusterSpec.from_toml(write(tmp_path, "[cluster]\nnodes = ?\n"))
    with pytest.raises(InputError, match=r"absent\.toml: found No such file or directory"):
        ClusterSpec.from_toml(tmp_path / "absent.toml")
    with pytest.raises(InputError):
        ClusterSpec.from_toml(tmp_path)


# From the machine


@pytest.mark.parametrize("text", ["local", "local:", "local:-1", "local:0", "local:two", "4", "cluster.yaml"])
def test_an_unknown_cluster_text_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        ClusterSpec.parse(text)


def test_local_processes_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    spec = ClusterSpec.parse("local:4")
    assert spec == ClusterSpec(devices_per_node=4, memory=1_024_000, intra=LOOPBACK)
    assert (spec.num_devices, spec.device_type) == (4, "cpu")


def test_detect_reads_what_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    spec = ClusterSpec.detect({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert (spec.nodes, spec.devices_per_node, spec.inter) == (2, 4, ETHERNET)
    assert ClusterSpec.detect({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}) == ClusterSpec.local(4)


@pytest.mark.parametrize(
    "environment", [{}, {"WORLD_SIZE": "4"}, {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}]
)
def test_detect_outside_torchrun_names_the_remedy(environment: dict[str, str]) -> None:
    with pytest.raises(InputError, match="torchrun"):
        ClusterSpec.detect(environment)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GPU", "cuda"),
    ],
)
def test_the_kind_of_a_gpu_is_its_model(name: str, kind: str) -> None:
    assert gpu_kind(name) == kind
