"""What ranks send for a layer of a graph net is what docs/theory/graphs.md says, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.convert.path import tree
from autopar.core.mesh import Mesh
from autopar.core.placement import B, Layout, Placement, R, Shard
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
    """Collectives as they are simulated, and what one of `ranks` sends, with what their gradients send."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.elements = ranks, 0.0

    def __call__(self, target: Any, calls: Sequence[Call]) -> list[Tensor]:
        results = simulate(target, calls)
        name = target._schema.name.removeprefix("autopar::")
        whole = max(calls[0][0][0].numel(), results[0].numel())
        if calls[0][0][0].is_floating_point():
            both = sent(name, len(calls), whole) + sent(BACK.get(name, ""), len(calls), whole)
            self.elements += both * len(calls) / self.ranks  # every group calls once
        return results


def layer(mesh: Mesh, factors: Sequence[str], before: Layout, after: Layout) -> float:
    """Elements that rank 0 sends for one product, forward and backward, between these layouts of its dense
    operand and its result."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, N, (3 * N,), generator=generator).sort().values
    columns = torch.randint(0, N, (3 * N,), generator=generator)
    x = torch.randn(N, F, generator=generator)
    values = torch.ones(3 * N)
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


S0, S1 = Shard(0), Shard(1)


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("factor", "before", "after"),
    [("i", S0, S0), ("j", S0, S0), ("f", S1, S1)],
    ids=["rows", "columns", "features"],
)
def test_one_axis(factor: str, before: Placement, after: Placement, ranks: int) -> None:
    wanted = 0.0 if factor == "f" else 2 * (ranks - 1) / ranks * N * F
    assert layer(Mesh((ranks,)), [factor], (before,), (after,)) == pytest.approx(wanted)


@pytest.mark.parametrize("side", [2, pytest.param(3, marks=pytest.mark.long)])
def test_blocks_whose_roles_rotate_from_layer_to_layer(side: int) -> None:
    """x split over b, whole over a; then sums over b, for x split over a."""
    wanted = 4 * (side - 1) / side * N * F / side
    assert layer(Mesh((side, side)), ["i", "j"], (B, S0), (S0, B)) == pytest.approx(wanted)


@pytest.mark.parametrize("side", [2, pytest.param(3, marks=pytest.mark.long)])
def test_rows_by_features(side: int) -> None:
    wanted = 2 * (side - 1) / side * N * F / side
    assert layer(Mesh((side, side)), ["i", "f"], (S0, S1), (S0, S1)) == pytest.approx(wanted)


def test_a_block_with_its_sums_scattered() -> None:
    """Of a mesh of 2 x 3: rows over two, columns over three, both ends whole over the other axis."""
    wanted = 2 * (2 / 3) * N * F / 2  # sums scattered over b, their gradient gathered
    assert layer(Mesh((2, 3)), ["i", "j"], (B, S0), (S0, S0)) == pytest.approx(wanted)
