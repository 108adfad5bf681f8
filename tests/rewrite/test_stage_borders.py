"""Messages between unlike meshes: any layout of a value arrives as any other, and its gradient goes back."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch

from autopar.core.mesh import Mesh
from autopar.core.placement import B, Layout, P, R, Shard
from autopar.errors import CheckError
from autopar.rewrite.stage_borders import MeshSide, PartMessage, messages, transposed
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import dims_of
from tests.planning.test_shares import net

MESHES = [Mesh((1,)), Mesh((3,)), Mesh((2, 2)), Mesh.parse("1:2"), Mesh.parse("3:1x2")]
GRAPH = net(12)
NAME = GRAPH.operators[0].name  # a linear layer's result, 12 x 64


def sides(mesh: Mesh) -> list[MeshSide]:
    dims = dims_of(GRAPH, mesh)
    layouts = itertools.product((Shard(0), Shard(1), R, P, B), repeat=len(mesh.shape))
    return [MeshSide(dims, layout) for layout in layouts if dims.legal(NAME, layout)]


def pieces(full: torch.Tensor, side: MeshSide) -> list[torch.Tensor]:
    """What each rank has of a value: of a sum, unequal shares."""
    mesh, found = side.dims.mesh, []
    for rank in range(mesh.num_devices):
        place = mesh.coordinate(rank)
        share = 1.0
        for axis, (size, each) in enumerate(zip(mesh.shape, side.layout, strict=True)):
            share *= (place[axis] + 1) / (size * (size + 1) / 2) if each == P else 1.0
        found.append(share * side.dims.part(NAME, side.layout, place).take(full))
    return found


def joined(locals_: list[torch.Tensor], side: MeshSide) -> torch.Tensor:
    """The value that ranks have, those with the same rows alike."""
    mesh, full = side.dims.mesh, torch.zeros(12, 64, dtype=torch.float64)
    for rank, local in enumerate(locals_):
        place = mesh.coordinate(rank)
        first = tuple(0 if each in (R, B) else at for at, each in zip(place, side.layout, strict=True))
        assert torch.equal(local, locals_[mesh.rank(first)])
        if place == first:
            side.dims.part(NAME, side.layout, place).add(local, full)
    return full


def carried(full: torch.Tensor, source: MeshSide, target: MeshSide) -> torch.Tensor:
    """The value that arrives, put together."""
    made, mesh = pieces(full, source), target.dims.mesh
    found = [
        torch.zeros(target.dims.local_shape(NAME, target.layout, mesh.coordinate(rank)), dtype=full.dtype)
        for rank in range(mesh.num_devices)
    ]
    for item in messages(NAME, source, target):
        item.received.add(item.sent.take(made[item.sender]), found[item.receiver])
    return joined(found, target)


@pytest.mark.parametrize("pair", range(12))
def test_a_value_arrives_whole_whatever_its_layouts(pair: int) -> None:
    random = Random(pair)
    one, other = (sides(random.choice(MESHES)) for _ in range(2))
    full = torch.rand(12, 64, dtype=torch.float64)
    for source, target in random.sample(list(itertools.product(one, other)), 5):
        assert torch.allclose(carried(full, source, target), full, rtol=1e-12)
        there, back = (side._replace(layout=transposed(side.layout)) for side in (target, source))
        assert torch.allclose(carried(full, there, back), full, rtol=1e-12)


def test_of_ranks_with_the_same_rows_one_sends() -> None:
    dims, other = dims_of(GRAPH, Mesh((3,))), dims_of(GRAPH, Mesh((2,)))
    assert [(item.sender, item.receiver) for item in sent((R,), dims, other)] == [(0, 0), (1, 1)]
    rows = [(item.sender, item.receiver, item.received.rows[0]) for item in sent((Shard(0),), dims, other)]
    assert rows == [(0, 0, ((0, 4),)), (1, 0, ((4, 6),)), (1, 1, ((0, 2),)), (2, 1, ((2, 6),))]


def sent(layout: Layout, dims: Dims, other: Dims) -> list[PartMessage]:
    return list(messages(NAME, MeshSide(dims, layout), MeshSide(other, layout)))


def test_values_of_other_dims_are_no_one_value() -> None:
    dims, other = dims_of(GRAPH, Mesh((1,))), dims_of(net(11), Mesh((1,)))
    with pytest.raises(CheckError, match="parts of the same dims"):
        list(messages(NAME, MeshSide(dims, (R,)), MeshSide(other, (R,))))
