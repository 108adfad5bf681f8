"""What simulated ranks send for a whole graph net, gradients of weights among it, and by which formula.

    x -> (linear -> product -> relu) -> (linear -> product -> relu)

Of the products that is what docs/theory/graphs.md's first table says. A linear layer whose features are split
by `i` scatters sums of n f elements over that axis, by `o` it gathers as many; in backward the other way. The
gradient of a weight is summed over the axes on which the weight isn't split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.graph import InputKind, Operator
from autopar.core.mesh import Mesh
from autopar.core.placement import B, Layout, Shard
from autopar.core.strategy import Strategy
from autopar.proof.ranks import distribute, run
from autopar.rewrite.rank_program import RankProgram, rewrite
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms, options_of
from autopar.trace.export import trace
from tests.forced_programs import as_first_taken, connect
from tests.ops.layer_bytes import Counting, N, by_elements

S0, S1 = Shard(0), Shard(1)
LAYERS = 2


class Gcn(nn.Module):
    """Layers of one width on a graph that the model holds."""

    adjacency: Tensor

    def __init__(self, edges: Tensor, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        made = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (N, N), check_invariants=False)
        self.register_buffer("adjacency", made.coalesce())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(torch.sparse.mm(self.adjacency, layer(x)))
        return x


@dataclass(frozen=True, slots=True)
class Way:
    """Factors of one layer on each axis, the layouts before and after, and what its product sends."""

    linear: str
    product: str
    relu: str
    before: Layout
    after: Layout


def rotated(way: Way) -> Way:
    """The first two axes change their roles."""

    def turn(text: str) -> str:
        one, other, *rest = text.split()
        return " ".join((other, one, *rest))

    def turned(layout: Layout) -> Layout:
        return (layout[1], layout[0], *layout[2:])

    linear, product, relu = map(turn, (way.linear, way.product, way.relu))
    return Way(linear, product, relu, turned(way.before), turned(way.after))


def one_axis(factor: str) -> Way:
    """Rows, columns, needed rows or features."""
    if factor == "f":
        return Way("i", "f", "d1", (S1,), (S1,))
    return Way("n0", factor, "d0", (S0,), (S0,))


ROWS_BY_FEATURES = Way("n0 i", "i f", "d0 d1", (S0, S1), (S0, S1))
BLOCKS = Way("-b n0", "i j", "d0 -b", (B, S0), (S0, B))
CUBES = Way("-b n0 i", "i j f", "d0 -b d1", (B, S0, S1), (S0, B, S1))


def weights(mesh: Mesh, ways: Sequence[Way], width: int) -> float:
    """Elements that a rank sends for the products with W, by the docstring's formula."""
    total = 0.0
    for way in ways:
        linear = way.linear.split()
        split = math.prod(size for size, factor in zip(mesh.shape, linear, strict=True) if factor == "i")
        rows = math.prod(size for size, at in zip(mesh.shape, way.before, strict=True) if at == S0)
        sums = 1
        for size, factor in zip(mesh.shape, linear, strict=True):
            if factor == "i":
                total += 2 * N * width / rows * (size - 1) / size
            else:
                sums *= size
        # Over all axes at once; W is split, its bias is not.
        total += 2 * (width * width / split + width) * (sums - 1) / sums
    return total


def net(mesh: Mesh, ways: Sequence[Way], edges: Tensor, width: int) -> float:
    """Elements that one rank sends on average in a step, its layers split in these ways."""
    programs, inputs = net_programs(mesh, ways, edges, width)
    count = Counting(mesh.num_devices)
    run(programs, inputs, meaning=count)
    return count.elements


def net_programs(
    mesh: Mesh, ways: Sequence[Way], edges: Tensor, width: int
) -> tuple[list[RankProgram], list[dict[str, Tensor]]]:
    """All ranks' programs of the net, and what they take."""
    x = torch.randn(N, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    model = Gcn(edges, width)
    graph = trace(model, (x,)).graph
    dims = Dims(graph, find_atoms(graph), mesh)
    program = connect(
        graph,
        dims,
        {each.name: strategy for each, strategy in _strategies(graph.operators, dims, ways)},
        store=lambda item, needs: (
            ways[0].before if item.kind is InputKind.USER else as_first_taken(needs, dims)
        ),
        leave=lambda _: ways[-1].after,
        price=by_elements(mesh),
    )
    state: Mapping[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {
        item.name: item.value if item.value is not None else state.get(item.target, x).detach()
        for item in graph.inputs
    }
    programs = [rewrite(graph, program, dims, rank=rank) for rank in range(mesh.num_devices)]
    return programs, distribute(values, program.inputs, dims)


def _strategies(
    operators: Sequence[Operator], dims: Dims, ways: Sequence[Way]
) -> list[tuple[Operator, Strategy]]:
    found = []
    for number, way in enumerate(ways):
        for operator, factors in zip(
            operators[3 * number : 3 * number + 3], (way.linear, way.product, way.relu), strict=True
        ):
            named = {option.factor: option for option in options_of(operator, dims)}
            found.append((operator, tuple(named[factor] for factor in factors.split())))
    return found
