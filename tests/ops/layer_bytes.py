"""What simulated ranks send for one product of a graph net, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.convert.path import Price, tree
from autopar.core.graph import InputKind, Operator
from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.placement import Layout, R, Shard
from autopar.core.program import Program
from autopar.core.strategy import Strategy
from autopar.proof.operators import OneOperator
from autopar.proof.ranks import distribute, run
from autopar.proof.simulated import Call, simulate
from autopar.rewrite.rank_program import rewrite
from autopar.sharding.atoms import Dims
from autopar.sharding.rule import Sample
from autopar.sharding.strategies import find_atoms, options_of, strategies_of
from autopar.trace.export import trace
from autopar.trace.forms.sparse_products import PRODUCT
from autopar.trace.rewrites.edge_operators import PICK, PLACE
from tests.forced_programs import connect

N, F = 5040, 240  # vertices and features, which the numbers of ranks divide
RINGS = {"s_to_b": 1, "s_to_r": 1, "p_to_s": 1, "p_to_b": 2, "p_to_r": 2}  # rounds of the whole tensor
LOCAL = {"r_to_b", "b_to_r", "b_to_s", "r_to_s", "s_to_p", "r_to_p", "b_to_p"}
BACK = {  # the move that a gradient makes
    "s_to_b": "p_to_s",
    "p_to_s": "s_to_b",
    "p_to_b": "p_to_b",
    "s_to_s": "s_to_s",
    "r_to_b": "p_to_r",
    "p_to_r": "r_to_b",
    "s_to_r": "r_to_s",
    "r_to_s": "s_to_r",
    "b_to_s": "s_to_p",
    "s_to_p": "b_to_s",
    "b_to_r": "r_to_p",
    "r_to_p": "b_to_r",
    "b_to_p": "b_to_p",
}


def sent(name: str, group: int, whole: float) -> float:
    """Elements that one rank sends of a tensor with `whole` elements: by the ring, or to each its part."""
    if name in LOCAL:
        return 0.0
    rounds = 1 / group if name == "s_to_s" else RINGS[name]
    return rounds * (group - 1) / group * whole


class Counting:
    """Collectives as they are simulated, and what one of `ranks` sends on average, with what their gradients
    send."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.elements = ranks, 0.0

    def __call__(self, target: Any, calls: Sequence[Call]) -> list[Tensor]:
        results = simulate(target, calls)
        name = target._schema.name.removeprefix("autopar::")
        if name == "needed_rows":  # there, and their gradients back
            width = calls[0][0][0][0].numel()
            self.elements += sum(2 * len(args[2]) * width for args, _ in calls) / self.ranks
        elif calls[0][0][0].is_floating_point():
            whole = sum(args[0].numel() for args, _ in calls)
            whole = whole if name[0] == "s" else whole // len(calls)  # of parts, or of a copy each
            both = sent(name, len(calls), whole) + sent(BACK[name], len(calls), whole)
            self.elements += both * len(calls) / self.ranks  # every group calls once
        return results


def random_edges() -> Tensor:
    """Three edges a vertex, anywhere: rows, which rise, and columns."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, N, (3 * N,), generator=generator).sort().values
    return torch.stack((rows, torch.randint(0, N, (3 * N,), generator=generator)))


def layer(
    mesh: Mesh,
    factors: Sequence[str],
    before: Layout,
    after: Layout,
    *,
    edges: Tensor | None = None,
    width: int = F,
) -> float:
    """Elements that one rank sends on average for one product, forward and backward, between these layouts of
    its dense operand and its result."""
    rows, columns = random_edges() if edges is None else edges
    x = torch.randn(N, width, generator=torch.Generator().manual_seed(0))
    values = torch.ones(len(rows))
    one = OneOperator(Sample(PRODUCT, (rows, columns, values, x, N), constant=("operand_2",)))
    dims = Dims(one.graph, find_atoms(one.graph), mesh)
    (operation,) = one.graph.operators
    (strategy,) = (
        each for each in strategies_of(operation, dims) if [str(option) for option in each] == [*factors]
    )
    ends = {"operand_3": before, "result_0": tuple(option.results[0] for option in strategy)}
    wanted = {"operand_3": tuple(option.operands[3] for option in strategy), "result_0": after}
    moves = {
        name: tree(
            ends[name],
            [wanted[name]],
            by_elements(mesh),
            legal=lambda layout, name=name: dims.legal(name, layout),  # type: ignore[misc]
            differentiable=True,
        )
        for name in ends
    }
    whole = {name: (R,) * len(mesh.shape) for name in ("operand_0", "operand_1", "operand_2")}
    program = Program(
        mesh,
        whole | {"operand_3": before},
        {operation.name: strategy},
        moves,
        {"result_0": after},
    )
    programs = [rewrite(one.graph, program, dims, rank=rank) for rank in range(mesh.num_devices)]
    count = Counting(mesh.num_devices)
    run(programs, distribute(one.tensors, program.inputs, dims), meaning=count)
    return count.elements


class _Messages(nn.Module):
    """Messages that are no product, of the vertices where edges begin."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.register_buffer("edge_index", edges)
        self.edge_index: Tensor

    def forward(self, x: Tensor) -> Tensor:
        target, source = self.edge_index
        return torch.zeros_like(x).index_add(0, target, torch.tanh(x[source]))


def messages(mesh: Mesh, source: str, target: str, *, edges: Tensor, width: int = F) -> float:
    """Elements that one rank sends on average for messages along edges (rows and columns), forward and
    backward, picked by one factor and placed by the other, with vertices split before and after."""
    x = torch.randn(N, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    graph = trace(_Messages(edges), (x,)).graph
    dims = Dims(graph, find_atoms(graph), mesh)
    split = (Shard(0),) * len(mesh.shape)
    factors = {PICK: source, PLACE: target}

    def strategy(item: Operator) -> Strategy:
        wanted = factors.get(item.target, "d0")
        named = {option.factor: option for option in options_of(item, dims)}
        return (named[wanted],) * len(mesh.shape)

    program = connect(
        graph,
        dims,
        {item.name: strategy(item) for item in graph.operators},
        store=lambda item, _: split if item.kind is InputKind.USER else (R,) * len(mesh.shape),
        leave=lambda _: split,
        price=by_elements(mesh),
    )
    given = {InputKind.USER: x, InputKind.BUFFER: edges}
    values = {item.name: given[item.kind] if item.value is None else item.value for item in graph.inputs}
    programs = [rewrite(graph, program, dims, rank=rank) for rank in range(mesh.num_devices)]
    count = Counting(mesh.num_devices)
    run(programs, distribute(values, program.inputs, dims), meaning=count)
    return count.elements


def by_elements(mesh: Mesh) -> Price:
    """A price of moves by the share of a tensor that a rank sends for them, and for those of gradients."""

    def price(move: Move) -> float:
        size = math.prod(mesh.shape[axis] for axis in move.axes)
        parts = math.prod(
            mesh.shape[axis]
            for axis, at in enumerate(move.source)
            if isinstance(at, Shard) and axis not in move.axes
        )
        name = "_to_".join(type(at).__name__[0].lower() for at in move.placements)
        return (sent(name, size, 1) + sent(BACK[name], size, 1)) / parts + 1e-6

    return price
