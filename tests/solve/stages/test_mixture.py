"""Parts of several placements make a program that computes what the serial graph does."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cluster import ClusterSpec
from autopar.core.mesh import Mesh
from autopar.cost.operators.prices import Prices
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.solve.stages.mixture import Mixture, is_placed_alike
from autopar.trace.export import trace
from tests.forced_programs import force_kinds
from tests.proof.models import Model, draw_model
from tests.proof.plans import dims_of, draw_program, limit_of, magnified, prove
from tests.runtime.forced_compiler import ROUGH

RANDOM = 400


class Tied(nn.Module):
    """Blocks between two uses of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.head(x).square().mean()


def prices_of(dims: Dims) -> Prices:
    return Prices(dims.graph, dims, ClusterSpec.local(dims.mesh.num_devices), ROUGH)


@pytest.mark.slow
@pytest.mark.parametrize(("joins", "share"), [(False, 0.1), pytest.param(True, 0.4, marks=pytest.mark.long)])
def test_random_mixtures_equal_serial(joins: bool, share: float) -> None:
    """Operators follow either of two random placements; where they may, the program is right."""
    found = 0
    for seed in range(RANDOM):
        random = Random(seed)
        model = draw_model(random)
        dims = dims_of(model, Mesh((2,)))
        programs = [draw_program(random, model.graph, dims) for _ in range(2)]
        mixture = Mixture(programs, prices_of(dims), joins=joins)
        turn = random.randrange(len(model.graph.operators) + 1)
        levels = [int(place >= turn) for place in range(len(model.graph.operators))]
        program = mixture.program(levels)
        if program is None or any(is_placed_alike(program, each) for each in programs):
            continue
        error, where = prove(model, program, dims)
        assert error < limit_of(error, lambda model=model, dims=dims: magnified(model, dims)), (seed, where)
        found += 1
    assert found >= share * RANDOM, "placements hardly ever meet"


def tied() -> tuple[Model, Dims, Mixture]:
    """By batch; and so with some layers by filters: those with the tied weight, and two blocks."""
    graph = trace(Tied().double(), (torch.zeros(4, 6, dtype=torch.long),), {}).graph
    dims = Dims(graph, find_atoms(graph), Mesh((2,)))
    filters = {name: ["filter"] for name in ("embed", "blocks.1", "blocks.3", "head")}
    programs = [force_kinds(graph, dims, {"*": ["batch"], **each}) for each in ({}, filters)]
    tensors = {
        item.name: torch.randn(item.spec.shape, dtype=torch.float64)
        if item.spec.dtype.is_floating_point
        else torch.randint(0, 12, item.spec.shape)
        for item in graph.inputs
    }
    return Model(graph, tensors, 0), dims, Mixture(programs, prices_of(dims))


def test_users_of_a_tied_weight_follow_the_first_placement() -> None:
    model, dims, mixture = tied()
    operators = model.graph.operators
    weight = next(item.name for item in model.graph.inputs if "embed" in item.target)
    users = {place for place, item in enumerate(operators) if weight in item.operands}
    assert users <= mixture.settled and len(mixture.settled) < len(operators) / 2
    places = mixture.seams(range(len(operators) + 1))
    middle = min(places, key=lambda place: abs(place - len(operators) // 2))
    for way in ((0, 1), (1, 0)):
        program = mixture.program(mixture.turning(middle, *way))
        assert program is not None
        first, second = mixture.programs
        assert all(
            program.strategies[operators[place].name] == first.strategies[operators[place].name]
            for place in users
        )
        assert not is_placed_alike(program, first) and not is_placed_alike(program, second)
        error, where = prove(model, program, dims)
        assert error < limit_of(error, lambda: magnified(model, dims)), where


def test_one_placement_alone_stays_as_it_is() -> None:
    model, _, mixture = tied()
    count = len(model.graph.operators)
    assert mixture.program([1] * count) is mixture.programs[1]
    assert mixture.seams([0, count]) == (0, count)
