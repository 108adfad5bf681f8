"""Batch norm over channels that are two dims in one: each of them is split alone, and both together."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.core.graph import Graph, Operator
from autopar.core.mesh import Mesh
from autopar.core.strategy import GATHERED, Strategy
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms, is_legal, options_of
from tests.forced_programs import Forced, check_against_serial, force_each

aten = torch.ops.aten


class Merged(nn.Module):
    """A sample's channels are two groups of four, merged for the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.rand(4, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        grouped = self.layer(x).unflatten(1, (2, 4)) * self.scale
        normal: Tensor = self.norm(grouped.flatten(1, 2)).unflatten(1, (2, 4))
        return torch.tanh(normal) * self.scale


class Joined(nn.Module):
    """The channels are those of two layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.norm(torch.cat((self.left(x), self.right(x).square()), 1)).chunk(2, 1)
        return torch.tanh(left) * right


MODELS: dict[str, Callable[[], nn.Module]] = {"merged": Merged, "joined": Joined}
FACTORS = ("n", "s0", "c", "c.1", GATHERED)  # of the norm: its channels are two atoms, 2 and 4


def of_the_norm(factors: tuple[str, ...]) -> Callable[[Graph, Mesh], Forced]:
    """The program in which the norm runs by these factors and all else is gathered; raises LookupError where
    there is no such strategy."""

    def by(graph: Graph, mesh: Mesh) -> Forced:
        dims = Dims(graph, find_atoms(graph), mesh)

        def choose(operation: Operator) -> Strategy:
            named = {option.factor: option for option in options_of(operation, dims)}
            if operation.target is not aten.batch_norm.default:
                return (named[GATHERED],) * len(mesh.shape)
            assert set(FACTORS) <= set(named)
            strategy = tuple(named[factor] for factor in factors)
            if not is_legal(operation, strategy, dims):
                raise LookupError(str(factors))
            return strategy

        return dims, force_each(graph, dims, choose)

    return by


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "training"),
    [("joined", True), *(pytest.param("merged", each, marks=pytest.mark.long) for each in (True, False))],
)
def test_channels_of_two_atoms_are_split_by_either(name: str, training: bool) -> None:
    """Values, gradients and running buffers are the serial ones, five samples on two ranks."""
    torch.manual_seed(0)
    x, proved = torch.randn(5, 3, 4, 2, dtype=torch.float64), set()
    pairs = itertools.combinations_with_replacement(FACTORS, 2)
    for factors in (*pairs, ("c.1", "n"), ("c.1", "c"), ("c.1",)):
        mesh = Mesh((2, 2)) if len(factors) > 1 else Mesh((4,))
        model = MODELS[name]().double().train(training)
        model.norm.running_mean.normal_()  # type: ignore[union-attr, operator]
        try:
            check_against_serial(model, mesh, x, by=of_the_norm(factors))
            proved.add(factors)
        except LookupError:
            assert factors == ("c", "c"), factors  # of length two
    assert proved >= {("c", "c.1"), ("c.1", "c.1"), ("n", "c.1"), ("c.1", "n"), ("s0", "c"), ("c.1",)}
