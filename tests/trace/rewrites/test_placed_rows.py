"""However rows are placed by constants, the graph places them among zeros and computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.placement import B, P
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms, options_of
from autopar.trace.export import trace
from autopar.trace.forms.sparse_products import PRODUCT
from autopar.trace.rewrites.edge_operators import PICK, PLACE
from tests.proof.models import Model, serial
from tests.trace.graph_nets import VERTICES, edges

aten = torch.ops.aten
Forward = Callable[[Tensor, Tensor], Tensor]
COUNT = edges().shape[1]
REACHED = edges()[1].unique()  # vertices that edges lead to; the last three have none
LENGTHS = torch.tensor([8, 0, 9, VERTICES - 17])
OTHERS = {
    aten.index_copy.default,
    aten.index_put.default,
    aten.index_reduce.default,
    aten.index_add.default,
    aten.scatter.src,
    aten.scatter_reduce.two,
    aten.slice_scatter.default,
    aten.segment_reduce.default,
    aten.index_fill.int_Scalar,
}


def spread(index: Tensor, x: Tensor) -> Tensor:
    return index.view(-1, 1).expand(-1, x.shape[1])


def written(x: Tensor, index: object, values: Tensor | float) -> Tensor:
    out = x * 1.5
    out[index] = values  # type: ignore[index]
    return out


def reduced(reduce: str, *, self_too: bool, ones: bool = False) -> Forward:
    def forward(x: Tensor, edge_index: Tensor) -> Tensor:
        into, rows = torch.ones_like(x) if ones else x * 1.5, torch.tanh(x[edge_index[0]])
        index = spread(edge_index[1], x)
        return into.scatter_reduce(0, index, rows, reduce, include_self=self_too)

    return forward


def segments(reduce: str, initial: float | None = None) -> Forward:
    def forward(x: Tensor, edge_index: Tensor) -> Tensor:
        found = torch.segment_reduce(x, reduce, lengths=LENGTHS, initial=initial)
        return torch.where(torch.isfinite(found), found, -7.0)

    return forward


FORMS: dict[str, Forward] = {
    "index_copy": lambda x, e: x.index_copy(0, REACHED, torch.tanh(x[REACHED])),
    "index_copy of nothing": lambda x, e: x.index_copy(0, REACHED[:0], x[:0]) + x[e[1]].sum(),
    "index_copy among zeros": lambda x, e: torch.zeros_like(x).index_copy(0, REACHED, x[REACHED].exp()),
    "index_fill": lambda x, e: x.index_fill(0, e[1], 0.5).index_add(0, e[1], x[e[0]]),
    "index_put": lambda x, e: torch.zeros_like(x).index_put((e[1],), torch.tanh(x[e[0]]), accumulate=True),
    "rows": lambda x, e: written(x, REACHED, x[REACHED].exp()),
    "rows from the end": lambda x, e: written(x, torch.tensor([-1, 2]), x[:2].exp()),
    "rows that are alike": lambda x, e: written(x, REACHED, x[0].exp()),
    "columns": lambda x, e: written(x, (slice(None), torch.tensor([2, 0])), x[:, 1:3].exp()),
    "a slice": lambda x, e: written(x, slice(3, 9, 2), x[REACHED[:3]].exp()),
    "scatter": lambda x, e: torch.tanh(x).scatter(0, spread(REACHED, x), x[REACHED]),
    "sum": lambda x, e: x.index_add(0, e[1], torch.tanh(x[e[0]])),
    "mean, too": reduced("mean", self_too=True),
    "sum, alone": reduced("sum", self_too=False),
    "mean, alone": reduced("mean", self_too=False),
    "amax, alone": reduced("amax", self_too=False),
    "prod of ones": reduced("prod", self_too=True, ones=True),
    "prod, too": reduced("prod", self_too=True),
    **{f"segments {reduce}": segments(reduce) for reduce in ("sum", "mean", "prod")},
    **{f"segments {reduce} from 0.5": segments(reduce, 0.5) for reduce in ("sum", "mean")},
    **{
        f"segments {reduce} {initial}, no gradient": lambda x, e, how=reduce, initial=initial: (  # type: ignore[misc]
            x.index_add(0, e[1], x[e[0]])[:4] + segments(how, initial)(x.detach(), e)
        )
        for reduce in ("max", "min")
        for initial in (None, 0.5)
    },
    "segments prod from 2": segments("prod", 2.0),
}


class Forwards(nn.Module):
    """A function of vertices and edges."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.function(x, edge_index)


def prove(forward: Forward, *, shape: tuple[int, ...] = (VERTICES, 4)) -> Graph:
    """The graph, whose values and gradients are found to be the model's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
    model = Forwards(forward)
    graph = trace(model, (x, edges())).graph
    passed = {"input_0": x, "input_1": edges()}
    given = {item.name: passed.get(item.target, item.value) for item in graph.inputs}
    tensors = {name: value for name, value in given.items() if value is not None}
    found, wanted = serial(Model(graph, tensors, seed=0)), model(x, edges())
    (output,), name = graph.outputs, "input_0"
    torch.testing.assert_close(found[output], wanted)
    cotangent = torch.randn(wanted.shape, dtype=wanted.dtype, generator=generator)
    (gradient,) = torch.autograd.grad(found[output], found[name], cotangent)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, x, cotangent)[0])
    return graph


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_placed_among_zeros(form: str) -> None:
    targets = {item.target for item in prove(FORMS[form]).operators}
    assert not targets & OTHERS
    assert targets & {PLACE, PRODUCT} or form == "index_copy of nothing"


def test_maxima_that_count_what_is_there_stay_as_they_are() -> None:
    targets = {item.target for item in prove(reduced("amax", self_too=True)).operators}
    assert aten.index_reduce.default in targets


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("initial", [None, 0.0])
def test_extremes_of_segments_have_torchs_own_gradients_where_rows_are_alike(
    reduce: str, initial: float | None
) -> None:
    """It gives each of them the whole of a negative gradient, but shares of a positive one."""
    graph = prove(lambda x, e: segments(reduce, initial)(x.sign() + x.index_add(0, e[1], x[e[0]]) * 0, e))
    (kept,) = (item for item in graph.operators if item.target is aten.segment_reduce.default)
    options = options_of(kept, Dims(graph, find_atoms(graph), Mesh((2,))))
    assert options and {B, P}.isdisjoint(place for option in options for place in option.results)


def test_rows_that_are_copied_to_one_place_stay_as_they_are() -> None:
    twice = torch.tensor([3, 3])
    graph = prove(lambda x, e: x.index_copy(0, twice, torch.stack((x[1], x[1]))).index_add(0, e[1], x[e[0]]))
    assert aten.index_copy.default in {item.target for item in graph.operators}


def weighted(x: Tensor, edge_index: Tensor) -> Tensor:
    source, target = edge_index
    weight = torch.linspace(0.5, 1.5, COUNT, dtype=x.dtype)[:, None]
    return torch.zeros_like(x).index_add(1, target, weight * x.index_select(1, source))


@pytest.mark.parametrize(
    ("forward", "shape"),
    [
        (weighted, (2, VERTICES, 3)),
        (lambda x, e: torch.zeros_like(x).index_add(0, e[1], x[e[0]]), (VERTICES, 2, 3)),
        (lambda x, e: torch.zeros_like(x).index_add(0, e[1], x[e[0]]), (VERTICES,)),
    ],
)
def test_sums_of_neighbours_are_products_whatever_dims_they_have(
    forward: Forward, shape: tuple[int, ...]
) -> None:
    targets = [item.target for item in prove(forward, shape=shape).operators]
    assert PRODUCT in targets and PLACE not in targets


def test_vertices_may_be_in_any_dim() -> None:
    def largest(x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        rows = F.softplus(x[:, source] - x[:, target])
        index = target.view(1, -1, 1).expand_as(rows)
        return torch.zeros_like(x).scatter_reduce(1, index, rows, "amax", include_self=False)

    targets = [item.target for item in prove(largest, shape=(2, VERTICES, 3)).operators]
    assert targets.count(PICK) >= 2 and targets.count(PLACE) == 1
