"""What follows from a graph's structure is evaluated once; the rest is traced with the sizes that it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.graph import InputKind, Operator, map_refs
from autopar.errors import InputError, TraceError, ValuesAskedError
from autopar.trace.export import Traced, trace
from autopar.trace.forms.sparse_products import PRODUCT
from autopar.trace.rewrites.edge_operators import PLACE
from tests.trace.graph_nets import FEATURES, VERTICES, SumOfNeighbours, WeightedLayer, adjacency, edges

aten = torch.ops.aten


def traced(forward: object, *inputs: Tensor, static: tuple[str, ...] = ()) -> Traced:
    class Model(nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            return forward(*args)  # type: ignore[operator, no-any-return]

    return trace(Model(), inputs, static=static)


def users(found: Traced) -> list[str]:
    return [item.target for item in found.graph.inputs if item.kind is InputKind.USER]


def products(found: Traced) -> list[Operator]:
    return [item for item in found.graph.operators if item.target is PRODUCT]


def test_an_edge_list_is_seen_and_a_table_of_two_rows_is_not() -> None:
    x = torch.randn(VERTICES, FEATURES)
    found = trace(SumOfNeighbours(FEATURES, 3), (x, edges()))
    assert users(found) == ["input_0"] and found.structure.users == {1}
    ids = torch.randint(0, 5, (2, 7))
    assert users(trace(nn.Embedding(5, 4), (ids,))) == ["input_0"]


def test_sizes_that_follow_from_edges_are_those_of_the_graph() -> None:
    def without_loops(x: Tensor, edge_index: Tensor) -> Tensor:
        kept = edge_index[:, edge_index[0] != edge_index[1]]
        count = len(torch.unique(kept))
        return torch.zeros(count, x.shape[1]).index_add(0, kept[1], x[kept[0]])

    x, pairs = torch.randn(VERTICES, FEATURES), edges()
    found = traced(without_loops, x, pairs)
    kept = int((pairs[0] != pairs[1]).sum())
    (product,) = products(found)
    assert found.graph.specs[product.operands[0]].shape == (kept,)


def test_degrees_are_one_constant_in_as_many_digits_as_a_proof_has() -> None:
    def scaled(x: Tensor, edge_index: Tensor) -> Tensor:
        degree = torch.zeros(len(x)).scatter_add(0, edge_index[1], torch.ones(edge_index.shape[1]))
        return x * degree.clamp(min=1).pow(-0.5).view(-1, 1)

    pairs = edges()
    found = traced(scaled, torch.randn(VERTICES, FEATURES), pairs)
    assert [item.target for item in found.graph.operators] == [aten.mul.Tensor]
    (constant,) = (item for item in found.graph.inputs if item.value is not None)
    degree = torch.bincount(pairs[1], minlength=VERTICES).clamp(min=1)
    assert constant.exact is not None and torch.equal(constant.exact, degree.double().pow(-0.5).view(-1, 1))


def test_scatters_of_whole_rows_are_told_as_such() -> None:
    def most(x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        rows = target.view(-1, 1).expand(-1, x.shape[1])
        zeros, messages = torch.zeros_like(x), x[source].exp()
        largest = zeros.scatter_reduce(0, rows, messages, "amax", include_self=False)
        return largest + zeros.scatter_add(0, rows, messages)

    found = traced(most, torch.randn(VERTICES, FEATURES), edges())
    placed = {item.args[3] for item in found.graph.operators if item.target is PLACE}
    assert placed == {"amax", "sum"}
    assert all(item.target is not aten.expand.default for item in found.graph.operators)


def test_scatters_into_what_is_there_are_by_rows_as_well() -> None:
    def added(x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        rows = target.view(-1, 1).expand(-1, x.shape[1])
        return x.scatter_reduce(0, rows, x[source], "amax") + x.scatter_add(0, rows, x[source].exp())

    found = traced(added, torch.randn(VERTICES, FEATURES), edges())
    targets = {item.target for item in found.graph.operators}
    assert {aten.index_reduce.default, PLACE} <= targets, "one counts what is there, the other adds to it"


def test_masks_of_constants_and_of_edges_choose_rows() -> None:
    mask = torch.arange(VERTICES) % 3 == 0

    def chosen(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        source, target = edge_index[:, edge_index[0] < 9]
        y = torch.zeros_like(x).index_add(0, target, x[source])
        return y[mask], torch.masked_select(y[:, 0], mask)

    found = traced(chosen, torch.randn(VERTICES, FEATURES), edges())
    shapes = [found.graph.specs[name].shape for name in found.graph.outputs]
    assert shapes == [(int(mask.sum()), FEATURES), (int(mask.sum()),)]


def test_values_that_are_no_structure_decide_nothing() -> None:
    def chosen(x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        y = torch.zeros_like(x).index_add(0, target, x[source])
        return y[y[:, 0] > 0]

    with pytest.raises(ValuesAskedError, match=r"test_structure.*torch\.where") as refusal:
        traced(chosen, torch.randn(VERTICES, FEATURES), edges())
    assert "static" not in str(refusal.value), "edges are structure already"


def test_random_numbers_like_edges_are_drawn_at_each_call() -> None:
    def noisy(x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        return x.index_add(0, target, x[source]) + torch.randint_like(edge_index, 9).sum()

    found = traced(noisy, torch.randn(VERTICES, FEATURES), edges())
    assert any("randint" in str(item.target) for item in found.graph.operators)


def test_static_says_what_cannot_be_seen() -> None:
    def pooled(x: Tensor, batch: Tensor) -> Tensor:
        graphs, place = torch.unique(batch, return_inverse=True)
        return torch.zeros(len(graphs), x.shape[1]).index_add(0, place, x)

    x, batch = torch.randn(VERTICES, FEATURES), torch.arange(VERTICES) // 5
    with pytest.raises(ValuesAskedError, match=r'static=\("input_1",\)'):
        traced(pooled, x, batch)
    found = traced(pooled, x, batch, static=("input_1",))
    assert found.graph.specs[found.graph.outputs[0]].shape == (5, FEATURES)
    with pytest.raises(InputError, match="static: found 'nodes'.*input_0"):
        traced(pooled, x, batch, static=("nodes",))


def test_edges_are_seen_behind_masks_and_where_rows_are_put() -> None:
    """Edges of one kind, of a constant kind each, and a sum that is written as a put."""

    def put(x: Tensor, edge_index: Tensor, kinds: Tensor) -> Tensor:
        source, target = edge_index[:, kinds == 1]
        return torch.zeros_like(x).index_put((target,), torch.tanh(x[source]), accumulate=True)

    kinds = torch.arange(edges().shape[1]) % 3
    found = traced(put, torch.randn(VERTICES, FEATURES), edges(), kinds, static=("input_2",))
    assert found.structure.users == {1, 2}
    assert PLACE in {item.target for item in found.graph.operators}


def test_numbers_that_follow_from_structure_decide_branches() -> None:
    """By arithmetic that rounds, of numbers alone and of constants, but of no values that are traced."""

    def decided(x: Tensor, edge_index: Tensor) -> Tensor:
        degree = torch.bincount(edge_index[1], minlength=len(x))
        load = torch.tensor([int(degree.max()) / 4.0, 1.0]) @ torch.tensor([2.0, 0.5])
        out = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        return out * 2 if load > 1 else out

    x = torch.randn(VERTICES, FEATURES)
    targets = {item.target for item in traced(decided, x, edges()).graph.operators}
    assert aten.mul.Tensor in targets

    def of_values(x: Tensor, edge_index: Tensor) -> Tensor:
        load = torch.tensor([1.0, 1.0]).add_(nn.functional.dropout(x)[0, 0])
        out = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        return out * 2 if load.sum() > 1 else out

    with pytest.raises(TraceError, match="depends on a tensor's values"):
        traced(of_values, x, edges())


def test_edges_out_of_range_are_refused_with_the_line() -> None:
    pairs = edges()
    pairs[0, 7] = VERTICES
    with pytest.raises(TraceError, match=rf"graph_nets.*rows 0 to {VERTICES} of {VERTICES}"):
        trace(SumOfNeighbours(FEATURES, 3), (torch.randn(VERTICES, FEATURES), pairs))


def weighted(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    source, target = edge_index
    return x.index_add(0, target, weight.view(-1, 1) * x[source])


def test_sums_of_neighbours_are_products_with_the_entries_by_rows() -> None:
    x, pairs = torch.randn(VERTICES, FEATURES), edges()
    weight = torch.rand(pairs.shape[1])
    found = traced(weighted, x, pairs, weight)
    (product,) = products(found)
    values = {item.name: item.value for item in found.graph.inputs}
    assert bool((values[product.operands[0]].diff() >= 0).all())
    values |= {"input_0": x, "input_2": weight}
    for item in found.graph.operators:
        args, kwargs = map_refs((item.args, item.kwargs), lambda ref: values[ref.name])
        values[item.results[0] or ""] = item.target(*args, **kwargs)
    wanted = weighted(x, pairs, weight)
    assert torch.allclose(values[found.graph.outputs[0]], wanted, rtol=1e-5, atol=1e-6)


def test_messages_that_are_used_otherwise_stay() -> None:
    def twice(x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        messages = x[source]
        return x.index_add(0, target, messages) * messages.sum()

    assert not products(traced(twice, torch.randn(VERTICES, FEATURES), edges()))


# Sparse matrices


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_products_with_a_sparse_matrix_are_one_operator_however_they_are_written(layout: str) -> None:
    def everything(x: Tensor, matrix: Tensor) -> Tensor:
        y = matrix @ x + torch.sparse.mm(matrix, x) + torch.addmm(x, matrix, x, beta=0.5, alpha=2)
        y = y + matrix.t() @ x + (x.t() @ matrix).t() + torch.mv(matrix, x[:, 0])[:, None]
        return y + torch.sparse.addmm(x, matrix, x)

    x, matrix = torch.randn(VERTICES, FEATURES), adjacency(layout)
    found = traced(everything, x, matrix)
    assert users(found) == ["input_0"] and found.structure.users == {1}
    assert len(products(found)) == 7
    values = {item.name: item.value for item in found.graph.inputs}
    values["input_0"] = x
    for item in found.graph.operators:
        args, kwargs = map_refs((item.args, item.kwargs), lambda ref: values[ref.name])
        (values[item.results[0] or ""],) = (item.target(*args, **kwargs),)
    wanted = everything(x, matrix)
    assert torch.allclose(values[found.graph.outputs[0]], wanted, rtol=1e-4, atol=1e-5)


def test_values_of_a_matrix_that_is_made_in_forward_may_learn() -> None:
    found = trace(WeightedLayer(FEATURES, 3), (torch.randn(VERTICES, FEATURES), edges()))
    (product,) = products(found)
    assert found.graph.specs[product.operands[2]].requires_grad and found.structure.users == {1}


def test_other_operators_on_sparse_matrices_are_refused_with_the_line() -> None:
    def scaled(x: Tensor, matrix: Tensor) -> Tensor:
        return (matrix * x) @ x

    square = torch.randn(VERTICES, VERTICES)
    with pytest.raises(TraceError, match=r"test_structure\.py:\d+.*on a sparse tensor.*torch\.sparse\.mm"):
        traced(scaled, square, adjacency())


SPARSE_CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a product at entries": lambda x, matrix: torch.sparse.sampled_addmm(matrix, x, x.t()) @ x,
    "CSR of values": lambda x, matrix: (
        torch.sparse_csr_tensor(
            matrix.crow_indices(), matrix.col_indices(), x.mean() * torch.ones(70), (23, 23)
        )
        @ x
    ),
    "entries that are kept apart": lambda x, matrix: (matrix * x[:, :1]) @ x,
}


@pytest.mark.parametrize("name", SPARSE_CALLS)
def test_sparse_calls_that_torch_cannot_trace_are_refused_by_what_can_be(name: str) -> None:
    with pytest.raises(TraceError, match=r"test_structure\.py:\d+.*A @ x.*sparse_coo_tensor") as refusal:
        traced(SPARSE_CALLS[name], torch.randn(VERTICES, FEATURES), adjacency("csr"))
    assert "eagerly" not in str(refusal.value) and len(str(refusal.value)) <= 400


@pytest.mark.parametrize("layer", ["GCNConv", "SAGEConv", "GATConv"])
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_layers_that_are_passed_a_sparse_matrix_want_edges(layer: str, layout: str) -> None:
    nets = pytest.importorskip("torch_geometric.nn")
    model = getattr(nets, layer)(FEATURES, 3)
    with pytest.raises(TraceError, match="PyTorch Geometric edge_index"):
        trace(model, (torch.randn(VERTICES, FEATURES), adjacency(layout)))


class Kinds(nn.Module):
    """Sizes follow from the kinds of edges; forward takes more than a call passes."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: Tensor | None = None

    def forward(
        self, x: Tensor, edge_index: Tensor, kind: Tensor, batch: Tensor | None = None, *, keeps: bool = False
    ) -> Tensor:
        source, target = edge_index[:, edge_index[0] != edge_index[1]]
        out = torch.zeros_like(x).index_add(0, target, x[source])
        if keeps:
            self.cached = out if self.cached is None else self.cached + out
            return self.cached
        return out[torch.unique(kind)]


def test_what_could_be_static_is_named_as_forward_does_and_labels_are_none_of_it() -> None:
    x, labels = torch.randn(VERTICES, FEATURES), torch.zeros(5, dtype=torch.int64)
    inputs = (x, edges(), torch.arange(70) % 5, labels)
    with pytest.raises(ValuesAskedError) as refusal:
        trace(Kinds(), inputs, loss_fn=nn.functional.cross_entropy)
    assert 'static=("kind",)' in refusal.value.remedy
    found = trace(Kinds(), inputs, loss_fn=nn.functional.cross_entropy, static=("kind",))
    assert found.structure.users == {1, 2}
    with pytest.raises(InputError, match="found 'batch'"):
        trace(Kinds(), inputs, loss_fn=nn.functional.cross_entropy, static=("batch",))


ASKING: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "a size": (lambda h, kind, other: h[: int(kind.float().exp().sum())] * other.sum(), '"kind",'),
    "a number": (lambda h, kind, other: h * kind.float().mean().item() + other.sum(), '"kind",'),
    "rows": (lambda h, kind, other: h[:4][torch.unique(other + kind[0])], '"kind", "other",'),
    "by weights": (lambda h, kind, other: h * 2 if h[kind].sum() > other.sum() else h, ""),
    "by draws": (lambda h, kind, other: h[: int(F.dropout(kind + 0.0).sum())] * other.sum(), ""),
    "by fractions": (lambda h, kind, other: h[:4][torch.unique((kind + h[0].sum()).long())], ""),
}


@pytest.mark.parametrize("name", ASKING)
def test_only_inputs_whose_values_are_asked_could_be_static(name: str) -> None:
    """Not those beside them, and none where weights, draws or an input that rounds decide, too."""
    then, named = ASKING[name]
    inputs = torch.randn(70, FEATURES), torch.arange(4), torch.arange(4) % 2
    with pytest.raises(ValuesAskedError) as refusal:
        trace(Asking(then), inputs)
    assert (f"static=({named})" in refusal.value.remedy) if named else ("static" not in refusal.value.remedy)
    if named == '"kind",':
        assert trace(Asking(then), inputs, static=("kind",)).structure.users == {1}


class Asking(nn.Module):
    """A linear layer, and what forward makes of its output and two more inputs."""

    def __init__(self, then: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(FEATURES, FEATURES), then

    def forward(self, x: Tensor, kind: Tensor, other: Tensor) -> Tensor:
        return self.then(self.linear(x), kind, other)


def test_of_edges_that_are_seen_what_is_in_the_way_then_is_told() -> None:
    x = torch.randn(VERTICES, FEATURES)
    with pytest.raises(
        TraceError, match=r"cached: found a tensor that forward reads and replaces"
    ) as refusal:
        trace(Kinds(), (x, edges(), torch.arange(70) % 5), {"keeps": True})
    assert "static" not in str(refusal.value)


class Picking(nn.Module):
    """Picks rows by numbers that the model holds."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.tensor([2, 0])
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, self.rows]).sum()


def test_rows_without_memory_are_no_structure() -> None:
    model, x = Picking(), torch.randn(4, 3, 3)
    assert trace(model, (x,)).graph.operators
    model.rows = model.rows.to("meta")
    assert trace(model.to("meta"), (x.to("meta"),)).graph.operators
