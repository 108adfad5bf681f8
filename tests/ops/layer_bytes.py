"""What simulated ranks send for one product of a graph net, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.convert.path import tree
from autopar.core.mesh import Mesh
from autopar.core.placement import Layout, R, Shard
from autopar.core.program import Program
from autopar.proof.operators import OneOperator
from autopar.proof.ranks import distribute, run
from autopar.proof.simulated import Call, simulate
from autopar.rewrite.rank_program import rewrite
from autopar.sharding.atoms import Dims
from autopar.sharding.rule import Sample
from autopar.sharding.strategies import find_atoms, strategies_of
from autopar.trace.sparse_products import PRODUCT

N, F = 5040, 240  # vertices and features, which the numbers of ranks divide
BACK = {"s_to_b": "p_to_s", "p_to_s": "s_to_b", "p_to_b": "p_to_b"}  # the move that a gradient makes


def sent(name: str, group: int, whole: int) -> float:
    """Elements that one rank sends of a tensor with `whole` elements, by the ring."""
    rounds = {"s_to_b": 1, "p_to_s": 1, "p_to_b": 2}
    return rounds.get(name, 0) * (group - 1) / group * whole


class Counting:
    """Collectives as they are simulated, and what one of `ranks` sends on average, with what their gradients
    send."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.elements = ranks, 0.0

    def __call__(self, target: Any, calls: Sequence[Call]) -> list[Tensor]:
        results = simulate(target, calls)
        name = target._schema.name.removeprefix("autopar::")
        whole = max(calls[0][0][0].numel(), results[0].numel())
        if name == "needed_rows":  # there, and their gradients back
            width = calls[0][0][0][0].numel()
            self.elements += sum(2 * len(args[2]) * width for args, _ in calls) / self.ranks
        elif calls[0][0][0].is_floating_point():
            both = sent(name, len(calls), whole) + sent(BACK.get(name, ""), len(calls), whole)
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
            lambda move: float(sum(isinstance(each, Shard) for each in move.source) + 1),
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
