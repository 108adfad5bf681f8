"""Legal layouts and bytes of many layouts are those of each by itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from autopar.core.graph import Graph, GraphInput, InputKind, TensorSpec
from autopar.core.mesh import Mesh
from autopar.core.placement import B, P, R, Shard
from autopar.sharding.atoms import Atoms, Dims, Relation
from autopar.sharding.local_sizes import LocalSizes


@pytest.mark.parametrize("shape", [(16, 24), (5, 9), (7, 2, 12), (1,), ()], ids=str)
@pytest.mark.parametrize("mesh", [Mesh((2, 2, 2)), Mesh((2, 3)), Mesh.parse("1:3x2"), Mesh((4, 1))], ids=str)
def test_layouts_have_the_parts_that_each_has_by_itself(mesh: Mesh, shape: tuple[int, ...]) -> None:
    spec = TensorSpec(shape, torch.float32)
    given = GraphInput("x", InputKind.USER, "x", spec)
    graph = Graph((given,), (), ("x",), {"x": spec})
    split = [Relation((("x", 0),), (2, shape[0] // 2))] if shape and shape[0] % 2 == 0 else []
    dims = Dims(graph, Atoms(graph, split, ()), mesh)
    choices = (R, P, B, Shard(0), Shard(0, 1), Shard(1), Shard(2))
    sizes = LocalSizes((choices,) * len(mesh.shape))
    legal = sizes.legal(dims, "x")
    assert legal.tolist() == [dims.legal("x", layout) for layout in sizes.layouts]
    numbers = np.flatnonzero(legal)
    wanted = [
        4 * math.prod(dims.local_shape("x", layout, dims.largest("x", layout)))
        for layout in (sizes.layouts[number] for number in numbers)
    ]
    assert sizes.nbytes(dims, "x", numbers).tolist() == wanted
