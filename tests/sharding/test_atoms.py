"""Cuts of real networks: one cut for branches that meet, small halos, even parts, atoms of fused dims."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar.ops  # noqa: F401  (registers every family)
from autopar.core.cut import balanced, chunked, has_empty, longest, most_for_a_share
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.placement import R, Shard
from autopar.sharding.atoms import UNEVEN, Atoms, Dims
from autopar.sharding.rule import Instance, rule_of
from autopar.sharding.strategies import dims_of, find_atoms, options_of
from autopar.sharding.window import RowMap
from autopar.trace.export import trace
from examples.photographs import UNet, noisy

MESHES = [Mesh((2,)), Mesh((4,)), Mesh((2, 2))]
UNLIKE = [Mesh((2,), ((1, 2),)), Mesh((3,), ((1, 3, 5),)), Mesh((2, 2), ((2, 1), ()))]


@cache
def unet(height: int, width: int, levels: int) -> tuple[Graph, Atoms]:
    graph = trace(UNet(2, levels), (), noisy(torch.rand(2, 3, height, width))).graph
    return graph, find_atoms(graph)


def traced(model: nn.Module, *args: Tensor) -> tuple[Graph, Atoms]:
    graph = trace(model, args).graph
    return graph, find_atoms(graph)


def exchanged(dims: Dims) -> Iterator[tuple[str, RowMap, int]]:
    """For each windowed dim of each operator: the most rows that a rank takes from others."""
    axes = dims.mesh.axes
    for operation in dims.graph.operators:
        op, rule = Instance(operation, dims.graph.specs), rule_of(operation)
        windows = rule.equation(op).windows.values() if rule.scalings(op) else ()
        for scaling, window in zip(rule.scalings(op), windows, strict=True):
            ends = [dims.component(name, Shard(dim)) for name, dim in (scaling.source, scaling.output)]
            source, output = (dims.cut(end, axes) for end in ends)
            if has_empty(source) or has_empty(output):
                continue
            most = 0
            for own, mine in zip(pairwise(source), pairwise(output), strict=True):
                low, high = window.needs(*mine)
                below, above = own[0] - max(low, 0), min(high, source[-1]) - own[1]
                most = max(most, max(0, below) + max(0, above))
            yield operation.name, window, most


@pytest.mark.parametrize("mesh", [*MESHES, *UNLIKE], ids=str)
def test_a_unet_exchanges_no_more_than_its_windows_reach(mesh: Mesh) -> None:
    dims = Dims(*unet(107, 160, 4), mesh)
    found = list(exchanged(dims))
    assert len(found) == 2 * 27  # 19 convolutions of 3 x 3 and of 1 x 1, 4 strided, 4 transposed: h and w
    assert all(rows <= window.kernel - 1 for _, window, rows in found), found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_all_maps_of_one_size_in_a_unet_have_one_even_cut(mesh: Mesh) -> None:
    graph, atoms = unet(107, 160, 4)
    dims = Dims(graph, atoms, mesh)
    for dim in (2, 3):
        cuts: dict[int, set[tuple[int, ...]]] = {}
        for operation in graph.operators:
            for name in filter(None, operation.results):
                shape = graph.specs[name].shape
                if len(shape) == 4:
                    cut = dims.cut(dims.component(name, Shard(dim)), mesh.axes)
                    cuts.setdefault(shape[dim], set()).add(cut)
        assert sorted(cuts) == ([7, 14, 27, 54, 107] if dim == 2 else [10, 20, 40, 80, 160])
        for length, found in cuts.items():
            (cut,) = found
            even = -(-length // mesh.num_devices)
            assert not has_empty(cut) and longest(cut) <= max(even * (1 + UNEVEN), even + 1)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.integers(9, 70), st.integers(1, 3), st.sampled_from([*MESHES, Mesh((3,)), Mesh((2, 3))]))
def test_unets_of_any_size_keep_their_halos_small(height: int, levels: int, mesh: Mesh) -> None:
    dims = Dims(*unet(height, 16, levels), mesh)
    short = {
        length for length in (height >> level for level in range(levels + 1)) if length <= mesh.num_devices
    }
    assert short or all(rows <= window.kernel - 1 for _, window, rows in exchanged(dims))


class PoolingChain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(2, 2, 3, padding=1), nn.MaxPool2d(2)
        )


def test_windows_as_wide_as_their_stride_exchange_nothing() -> None:
    dims = Dims(*traced(PoolingChain(), torch.rand(2, 1, 32, 48)), Mesh((4,)))
    rows = {name: most for name, window, most in exchanged(dims) if window.kernel == 2}
    assert rows == dict.fromkeys(rows, 0) and len(rows) == 2


def test_boundaries_are_aligned_only_while_the_ranks_stay_even() -> None:
    def cut(height: int) -> tuple[int, ...]:
        graph, atoms = traced(PoolingChain(), torch.rand(2, 1, height, 8))
        dims = Dims(graph, atoms, Mesh((4,)))
        return dims.cut(dims.component(graph.inputs[-1].name, Shard(2)), (0,))

    assert cut(64) == (0, 16, 32, 48, 64)
    assert cut(72) == (0, 18, 36, 54, 72)  # multiples of 4 would make one part 20 rows long
    assert cut(160) == (0, 40, 80, 120, 160)


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Conv2d(1, 1, 3, 2, 1) for _ in range(3)))


def test_a_dim_too_short_for_its_share_of_the_boundaries_is_cut_by_itself() -> None:
    graph, atoms = traced(Deep(), torch.rand(1, 1, 18, 18))  # 18, 9, 5, 3 rows
    dims = Dims(graph, atoms, Mesh((2,)))
    lengths = [graph.specs[name].shape[2] for item in graph.operators for name in item.results if name]
    cuts = [dims.cut(dims.component(item.results[0] or "", Shard(2)), (0,)) for item in graph.operators]
    assert lengths == [9, 5, 3] and cuts == [(0, 5, 9), (0, 3, 5), (0, 2, 3)]


class Resized(nn.Module):
    """A skip connection across a stride and a resize to the skip's own, odd, size."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 2, 3, 2, 1), nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        small = self.down(x)
        return x + F.interpolate(self.up(small), size=x.shape[-2:], mode="bilinear")


def test_of_a_stride_and_a_resize_between_the_same_maps_the_stride_is_followed() -> None:
    dims = Dims(*traced(Resized(), torch.rand(1, 1, 27, 64)), Mesh((4,)))
    found = list(exchanged(dims))
    assert len(found) == 6 and all(rows <= 3 for _, _, rows in found)
    image = dims.component(dims.graph.inputs[-1].name, Shard(2))
    small = dims.component(dims.graph.operators[0].results[0] or "", Shard(2))
    assert dims.cut(small, (0,)) == tuple(-(-bound // 2) for bound in dims.cut(image, (0,)))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(16, dim=-1)
        heads = [item.view(*x.shape[:2], 4, 4).transpose(1, 2) for item in (q, k, v)]
        return heads[0] @ heads[1].transpose(-1, -2) @ heads[2]


def test_a_fused_projection_is_refined_into_its_heads() -> None:
    graph, atoms = traced(Fused(), torch.rand(2, 5, 16))
    weight = next(item.name for item in graph.inputs if item.target.endswith("weight"))
    assert atoms.of[weight] == ((3, 4, 4), (16,))
    dims = Dims(graph, atoms, Mesh((2,)))
    heads = {
        dims.component(name, Shard(1))
        for item in graph.operators
        for name in item.results
        if name and graph.specs[name].shape == (2, 4, 5, 4)
    }
    assert heads == {dims.component(weight, Shard(0, 1))}
    linear = next(item for item in graph.operators if "linear" in str(item.target))
    assert "o.1" in {option.factor for option in options_of(linear, dims)}
    assert dims.split(weight, Shard(0, 1), (Shard(0, 1),), 0, (0,)) == (3, (8, 8))


class TwoLayers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 3))


def test_dims_tied_to_weights_are_cut_as_dtensor_cuts_them() -> None:
    graph, atoms = traced(TwoLayers(), torch.rand(10, 7))
    dims = Dims(graph, atoms, Mesh((4,)))
    hidden = dims.component(graph.operators[0].results[0] or "", Shard(1))
    batch = dims.component(graph.operators[0].results[0] or "", Shard(0))
    assert dims.is_weight(hidden) and dims.cut(hidden, (0,)) == chunked(11, 4)
    assert not dims.is_weight(batch) and dims.cut(batch, (0,)) == balanced(10, 4)


@pytest.mark.parametrize("mesh", UNLIKE, ids=str)
def test_rows_follow_shares_and_weights_do_not(mesh: Mesh) -> None:
    graph, atoms = unet(107, 160, 4)
    dims, name = Dims(graph, atoms, mesh), graph.operators[0].results[0] or ""
    cut, (even, rows) = dims.cut(dims.component(name, Shard(3)), (0,)), (mesh.shape[0], graph.specs[name])
    shares = mesh.shares_of(0)
    assert most_for_a_share(cut, shares) <= rows.shape[3] / even * (1 + UNEVEN)
    assert dims.cut(dims.component(name, Shard(1)), (0,)) == chunked(rows.shape[1], even)


@pytest.mark.parametrize("mesh", [Mesh((2, 2)), Mesh((3, 2)), UNLIKE[-1]], ids=str)
def test_two_axes_on_one_dim_cut_each_other_s_parts(mesh: Mesh) -> None:
    graph, atoms = unet(107, 160, 4)
    dims = Dims(graph, atoms, mesh)
    shard, name = Shard(2), graph.operators[0].results[0] or ""
    for rank in range(mesh.num_devices):
        place = mesh.coordinate(rank)
        outer = dims.rows(name, shard, (shard, R), place)
        inner = dims.rows(name, shard, (shard, shard), place)
        assert outer[0] <= inner[0] < inner[1] <= outer[1]
    shapes = [dims.local_shape(name, (shard, shard), mesh.coordinate(r)) for r in range(mesh.num_devices)]
    assert sum(shape[2] for shape in shapes) == 107


def test_more_ranks_than_rows_is_not_legal() -> None:
    graph, atoms = traced(TwoLayers(), torch.rand(3, 7))
    dims = Dims(graph, atoms, Mesh((2, 2)))
    name = graph.operators[0].results[0] or ""
    assert dims.legal(name, (Shard(0), R)) and not dims.legal(name, (Shard(0), Shard(0)))
    assert not dims.legal(name, (Shard(2), R)) and not dims.legal(name, (Shard(0, 1), R))


class Emptied(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x[:, 4:].relu()], 1).flatten()


def test_a_dim_without_rows_is_one_atom_and_never_sharded() -> None:
    graph, atoms = traced(Emptied(), torch.rand(3, 4))
    name = graph.operators[0].results[0] or ""
    assert graph.specs[name].shape == (3, 0) and atoms.of[name] == ((3,), (0,))
    assert not Dims(graph, atoms, Mesh((2,))).legal(name, (Shard(1),))


def test_the_atoms_of_a_graph_are_found_once_and_no_copy_has_them() -> None:
    graph, atoms = traced(nn.Linear(4, 2), torch.rand(3, 4))
    assert find_atoms(graph) is atoms is dims_of(graph, Mesh((2,))).atoms
    assert graph.derived and graph == (other := dataclasses.replace(graph)) and not other.derived
    assert not copy.deepcopy(graph.derived) and not pickle.loads(pickle.dumps(graph.derived))
    assert find_atoms(other) is not atoms and find_atoms(other).of == atoms.of
