"""Micro-batches are chosen only where samples don't meet before the loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.core.graph import InputKind
from autopar.core.mesh import Mesh
from autopar.sharding.atoms import Dims
from autopar.sharding.sample_dims import find_batch, samples_elsewhere
from autopar.sharding.sample_independence import SampleFlow
from autopar.sharding.sample_values import Role
from autopar.sharding.strategies import find_atoms
from autopar.trace.export import trace
from autopar.trace.forms.simplify import only_loss

SAMPLES = 6


def alike_in_heads(x: Tensor, numbers: Tensor) -> Tensor:
    """Scores of two heads, to which are added numbers of each sample's positions times a slope."""
    slopes = torch.arange(1.0, 3.0)
    bias = (slopes[:, None] * numbers[:, None]).reshape(2 * len(x), 1, 4)
    heads = x.view(2 * len(x), 4, 1)
    return bias.baddbmm(heads, heads.transpose(1, 2), alpha=0.5).softmax(2).square().mean()


class Model(nn.Module):
    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.then = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.linear(x))


@pytest.mark.parametrize(
    "forward",
    [
        lambda _, x: x.relu().mean(),
        lambda _, x: F.mse_loss(x, torch.ones_like(x)),
        lambda _, x: F.layer_norm(x, (8,)).softmax(1).sum(),
        lambda _, x: (x.reshape(SAMPLES, 2, 4).transpose(1, 2).reshape(-1, 2) ** 2).mean(),
        lambda _, x: F.scaled_dot_product_attention(
            *x.view(SAMPLES, 1, 2, 4).expand(3, -1, -1, -1, -1)
        ).mean(),
        lambda _, x: alike_in_heads(x, torch.ones(len(x), 4).cumsum(1)),
    ],
)
def test_samples_that_go_their_own_ways(forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
    assert mixing(forward) is None


@pytest.mark.parametrize(
    ("forward", "culprit"),
    [
        (lambda model, x: model.norm(x).mean(), "batch_norm"),
        (lambda _, x: x.softmax(0).mean(), "softmax"),
        (lambda _, x: (x @ x.t()).mean(), "matmul"),
        (lambda _, x: (x - x.mean(0)).square().mean(), "mean"),
        (lambda _, x: x.roll(1, 0).mean(), "roll"),
        (lambda _, x: x.cumsum(0).mean(), "cumsum"),
        (lambda _, x: (x[0] * x).mean(), "select"),
        (lambda _, x: alike_in_heads(x, torch.arange(len(x) * 4.0).view(len(x), 4)), "baddbmm"),
    ],
)
def test_samples_that_meet(forward: Callable[[nn.Module, Tensor], Tensor], culprit: str) -> None:
    assert culprit in str(mixing(forward))


ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": lambda x, dim: x.softmax(dim),
    "mean": lambda x, dim: x - x.mean(dim, keepdim=True),
    "sum": lambda x, dim: x / x.square().sum(dim, keepdim=True),
    "roll": lambda x, dim: x.roll(1, dim),
    "cumsum": lambda x, dim: x.cumsum(dim),
    "select": lambda x, dim: x.select(dim, 0).unsqueeze(dim) * x,
    "sort": lambda x, dim: x.sort(dim).values,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONG)
def test_a_dim_is_the_samples_from_either_end(name: str) -> None:
    for dim in (0, -2):
        assert name in str(mixing(lambda _, x, dim=dim: ALONG[name](x, dim).mean()))
    for dim in (1, -1):
        assert mixing(lambda _, x, dim=dim: ALONG[name](x, dim).mean()) is None


def mixing(forward: Callable[[nn.Module, Tensor], Tensor]) -> str | None:
    """What stands in the way of samples in dim 0."""
    graph = only_loss(trace(Model(forward), (torch.rand(SAMPLES, 8),), {}).graph)
    dims = Dims(graph, find_atoms(graph), Mesh((1,)))
    (name,) = (item.name for item in graph.inputs if item.kind is InputKind.USER)
    return SampleFlow(graph, dims, {dims.atoms.components[(name, 0, 0)]}).obstacle


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "filled in place": lambda x: x * x.new_empty((len(x), 1)).bernoulli_(0.5).div_(0.5),
    "of equal probabilities": lambda x: x * torch.bernoulli(torch.full((len(x), 1), 0.5)),
    "of each one's own": lambda x: x * torch.bernoulli(x.sigmoid()),
    "integers": lambda x: x + torch.randint(0, 5, (len(x), 1)),
    "exponential": lambda x: x + x.new_empty(len(x), 1).exponential_(),
    "uniform": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
}
QUERIES = torch.linspace(0.0, 1.0, 16).view(2, 8)
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "repeat": lambda x: x[:, None] * QUERIES.repeat(len(x), 1, 1),
    "repeat into rows": lambda x: x[:, None].repeat(1, 2, 1).flatten(0, 1) * QUERIES.repeat(len(x), 1),
    "tile": lambda x: x[:, None] * QUERIES.tile(len(x), 1, 1),
    "repeat_interleave": lambda x: x[:, None] * QUERIES[None].repeat_interleave(len(x), 0),
}
TABLE = torch.linspace(0.0, 1.0, SAMPLES)[:, None]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_samples_draw_each_for_itself(draw: Callable[[Tensor], Tensor]) -> None:
    assert mixing(lambda _, x: draw(x).mean()) is None


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_samples_have_copies_of_a_tensor(copied: Callable[[Tensor], Tensor]) -> None:
    assert mixing(lambda _, x: copied(x).mean()) is None


def test_rows_that_are_repeated_one_by_one_differ_with_the_place_in_the_batch() -> None:
    def forward(_: nn.Module, x: Tensor) -> Tensor:
        return (x.repeat_interleave(2, 0) * QUERIES.repeat_interleave(len(x), 0)).mean()

    assert mixing(forward) is not None


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x[torch.randperm(len(x))] * x,
        lambda x: x * torch.bernoulli(torch.arange(len(x)).to(x.dtype)[:, None] / SAMPLES),
        lambda x: x * torch.bernoulli(x.softmax(0)),
        lambda x: x * torch.bernoulli(TABLE),
    ],
    ids=["permuted", "by its number", "by the others", "by a table"],
)
def test_draws_that_differ_with_the_place_in_the_batch_take_samples_together(
    draw: Callable[[Tensor], Tensor],
) -> None:
    assert mixing(lambda _, x: draw(x).mean()) is not None


# -- roles ---------------------------------------------------------------------------------------------


class With(nn.Module):
    """A linear layer, and a loss of its result and another input."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(8, 8), loss

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.loss(self.linear(x), other)


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (lambda x, mask: (x * mask).mean(), (8,)),
        (lambda x, table: F.cross_entropy(x @ table.t(), torch.zeros(SAMPLES, dtype=torch.long)), (5, 8)),
        (lambda x, table: x.mean() + table.square().mean(), (5, 8)),
        (lambda x, table: (x.t() @ x).mean() * table.mean(), (5, 8)),
        (lambda x, target: F.mse_loss(x.t(), target[:, None].expand(8, SAMPLES)), (8,)),
    ],
    ids=["mask", "table", "regularized", "correlations", "samples last"],
)
def test_inputs_that_are_no_samples_may_stand_beside_them(
    loss: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    flow = batch_of(With(loss), torch.randn(SAMPLES, 8), torch.randn(shape))
    assert flow is not None and flow.obstacle is None
    x, other = (item.name for item in flow.graph.inputs if item.kind is InputKind.USER)
    assert (flow.values[x].role, flow.values[other].role) == (Role.ROWS, Role.WHOLE)


def batch_of(model: nn.Module, *inputs: Tensor) -> SampleFlow | None:
    graph = only_loss(trace(model, inputs).graph)
    return find_batch(graph, Dims(graph, find_atoms(graph), Mesh((1,))))[0]


def test_rows_that_stay_when_fewer_samples_come_are_no_samples() -> None:
    """Numbers of rows, a table with one for each, and a causal query's place."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(SAMPLES, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.rows).sum()

    def attended(x: Tensor, keys: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, keys, keys, is_causal=True).sum()

    assert batch_of(Table(), torch.randn(SAMPLES, 8)) is None
    assert batch_of(With(lambda x, _: (x * torch.arange(SAMPLES)[:, None]).sum()), *two()) is None
    assert batch_of(With(attended), *two()) is None
    plain = batch_of(With(lambda x, keys: F.scaled_dot_product_attention(x, keys, keys).sum()), *two())
    assert plain is not None


def two() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, 8), torch.randn(5, 8)


def test_buffers_that_every_part_writes_are_told() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return self.linear(x).sum()

    flow = batch_of(Counting(), torch.randn(SAMPLES, 8))
    assert flow is not None and flow.obstacle == "every part of the batch updates seen"


def test_samples_in_another_dim_than_the_first_are_told() -> None:
    """Of an encoder's output, too, whose loss is outside."""

    def elsewhere(model: nn.Module, *inputs: Tensor) -> int | None:
        graph = trace(model, inputs).graph
        found = samples_elsewhere(graph, Dims(graph, find_atoms(graph), Mesh((1,))))
        return None if found is None else found[1]

    assert elsewhere(nn.LSTM(6, 8), torch.randn(5, 4, 6)) == 1
    assert elsewhere(nn.LSTM(6, 8, batch_first=True), torch.randn(5, 4, 6)) is None
    assert elsewhere(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(4, 3, 6, 6)) is None
    assert elsewhere(Model(lambda _, x: (x @ x.t()).logsumexp(1).mean()), torch.randn(SAMPLES, 8)) is None
