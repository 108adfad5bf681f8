"""What each rule offers to shard: a proof of few strategies is no proof of many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar.ops  # noqa: F401  (registers every family)
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.placement import P, Shard
from autopar.core.strategy import PARTIAL
from autopar.proof.operators import OneOperator, error, strategies
from autopar.sharding.atoms import Dims
from autopar.sharding.rule import Sample
from autopar.sharding.strategies import find_atoms, options_of
from tests.forced_programs import Forced, check_against_serial, force_each, option

aten = torch.ops.aten
X = torch.randn(2, 4, 8, 12)
ROWS = torch.tensor([1, 0, 1])
GRU_WEIGHTS = [torch.randn(9, 3), torch.randn(9, 3), torch.randn(9), torch.randn(9)]
GRU = (torch.randn(5, 2, 3), torch.randn(1, 5, 3), GRU_WEIGHTS, True, 1, 0.0, True, False, True)


def factors(target: Any, *args: Any) -> set[str]:
    """The factors that are offered on one axis, and -p where a partial sum passes."""
    one = OneOperator(Sample(target, args))
    dims = Dims(one.graph, find_atoms(one.graph), Mesh((2,)))
    found = options_of(one.graph.operators[0], dims)
    return {option.factor for option in found if option.shards or option.factor == PARTIAL}


OFFERS = [
    (aten.max_pool2d.default, (X, [3, 3], [2, 2], [1, 1]), "n c h w"),
    (aten.max_pool2d_with_indices.default, (X, [2, 2]), "n c h w"),
    (aten.avg_pool2d.default, (X, [3, 3], [2, 2], [1, 1]), "n c h w -p"),
    (aten.adaptive_avg_pool2d.default, (X, [1, 1]), "n c h w -p"),
    (aten.adaptive_avg_pool2d.default, (X, [4, 5]), "n c h -p"),
    (aten.adaptive_max_pool2d.default, (X, [5, 4]), "n c w"),
    (aten.upsample_nearest2d.vec, (X, None, [2.0, 1.5]), "n c h -p"),
    (aten.upsample_bilinear2d.vec, (X, [16, 6], False, None), "n c h w -p"),
    (aten.upsample_bilinear2d.vec, (X, [16, 12], True, None), "n c h w -p"),
    (aten.upsample_bicubic2d.vec, (X, [16, 6], False, None), "n c h -p"),
    (aten.pixel_shuffle.default, (X.repeat(1, 2, 1, 1), 2), "d0.0 d1.0 d2.0 d3.0 -p"),
    (aten.pixel_unshuffle.default, (X, 2), "d0.0 d1.0 d2.0 d3.0 -p"),
    (aten.repeat.default, (X, [1, 3, 1, 1]), "d0.0 d1.0 d2.0 d3.0 -p"),
    (aten.repeat_interleave.self_int, (X, 3, 1), "d0.0 d1.0 d2.0 d3.0 -p"),
    (aten.roll.default, (X, [1], [2]), "d0 d1 d3 -p"),
    (aten.tril.default, (X,), "d0 d1 -p"),
    (aten.index_select.default, (X, 1, ROWS), "d0 i d2 d3 -p"),
    (aten.gather.default, (X, 0, torch.zeros(3, 4, 8, 12, dtype=torch.int64)), "v d0 d1 d2 d3 -p"),
    (aten.index.Tensor, (X, [ROWS]), "i0 d1 d2 d3 -p"),
    (aten.index.Tensor, (X, [None, ROWS, ROWS]), "d0 i0 d3 -p"),
    (aten.embedding_bag.default, (X[0, 0], ROWS, torch.tensor([0, 2])), "e"),
    (aten.scatter_add.default, (X, 1, torch.zeros(2, 3, 8, 12, dtype=torch.int64), X), "d0 d2 d3 -p"),
    (aten.gru.input, GRU, "n"),
    (aten.gru.input, (*GRU[:5], 0.5, *GRU[6:]), "n"),
    (aten.gru.input, (GRU[0], GRU[1].repeat(2, 1, 1), 2 * GRU[2], True, 2, 0.5, True, False, True), ""),
    (aten.prelu.default, (X, torch.rand(4)), "d0 d1 d2 d3"),
    (aten.glu.default, (X, 1), "d0.0 d1.1 d2.0 d3.0"),
]


@pytest.mark.parametrize(("target", "args", "wanted"), OFFERS, ids=[str(offer[0]) for offer in OFFERS])
def test_a_rule_offers_every_factor_that_it_can_shard(
    target: Any, args: tuple[Any, ...], wanted: str
) -> None:
    assert factors(target, *args) == set(wanted.split())


def test_a_mean_over_the_image_is_a_partial_sum() -> None:
    one = OneOperator(Sample(aten.adaptive_avg_pool2d.default, (X, [1, 1])))
    dims = Dims(one.graph, find_atoms(one.graph), Mesh((2,)))
    (option,) = [item for item in options_of(one.graph.operators[0], dims) if item.factor == "h"]
    assert option.operands == (Shard(2),) and option.results == (P,)


def test_indices_of_a_sharded_maximum_name_places_in_the_whole_plane() -> None:
    sample = Sample(aten.max_pool2d_with_indices.default, (torch.randn(1, 1, 9, 7), [3, 2], [2, 1], [1, 1]))
    found = [item for item in strategies(sample, Mesh((2, 2))) if [o.factor for o in item[2]] == ["h", "w"]]
    assert len(found) == 1 and error(*found[0]) < 1e-12


class Blocks(nn.Module):
    """A windowed dim that is refined into blocks by what comes after it."""

    def __init__(self, layer: nn.Module, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.view = layer, view

    def forward(self, x: Tensor) -> Tensor:
        return self.view(self.layer(x))


LAYERS = [
    nn.Conv1d(2, 3, 3, padding=1),
    nn.ConvTranspose1d(2, 3, 4, 2, 1),
    nn.AvgPool1d(3, 1, 1, count_include_pad=False),
    nn.Upsample(scale_factor=2, mode="linear"),
    nn.Upsample(28, mode="linear", align_corners=True),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_windows_of_dims_that_are_cut_in_blocks(layer: nn.Module) -> None:
    def by(graph: Graph, mesh: Mesh) -> Forced:
        dims = Dims(graph, find_atoms(graph), mesh)
        assert any(len(atoms) > 1 for name in graph.specs for atoms in dims.atoms.of[name][2:3])
        return dims, force_each(graph, dims, lambda item: (option(item, dims, Shard(2)),))

    layer = nn.Sequential(nn.Conv1d(2, 2, 1), layer)
    model = Blocks(layer, lambda y: y.unflatten(2, (-1, 4)).sin()).double()
    check_against_serial(model, Mesh((3,)), torch.rand(2, 2, 20, dtype=torch.float64), by=by)
