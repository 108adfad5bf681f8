"""Micro-batches are chosen only where samples don't meet before the loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.sharding.sample_independence import mixing_operator, rows_instead
from autopar.trace.export import trace
from autopar.trace.micro_batches import reducer_of

SAMPLES = 6


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


@pytest.mark.parametrize("name", ALONG)
def test_a_dim_is_the_samples_from_either_end(name: str) -> None:
    for dim in (0, -2):
        assert name in str(mixing(lambda _, x, dim=dim: ALONG[name](x, dim).mean()))
    for dim in (1, -1):
        assert mixing(lambda _, x, dim=dim: ALONG[name](x, dim).mean()) is None


def mixing(forward: Callable[[nn.Module, Tensor], Tensor]) -> object:
    graph = trace(Model(forward), (torch.rand(SAMPLES, 8),), {}).graph
    end = reducer_of(graph)
    assert end is not None
    found = mixing_operator(graph, SAMPLES, end=end)
    return None if found is None else found.target


# -- what micro-batches take in parts ------------------------------------------------------------------


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(30, 8, mode="sum"), nn.Linear(8, 3)

    def forward(self, x: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(x, offsets)), y)


class With(nn.Module):
    """A linear layer, and a loss of its result and another input."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(8, 8), loss

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.loss(self.linear(x), other)


def test_a_loss_over_rows_that_are_not_cut_is_told() -> None:
    call = (torch.arange(10), torch.tensor([0, 2, 5, 7]), torch.zeros(4, dtype=torch.long))
    graph = trace(Bags(), call).graph
    assert [item.target for item in rows_instead(graph, {"input_0"})] == ["input_2"]


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (lambda x, mask: (x * mask).mean(), (8,)),
        (lambda x, table: F.cross_entropy(x @ table.t(), torch.zeros(SAMPLES, dtype=torch.long)), (5, 8)),
        (lambda x, table: x.mean() + table.square().mean(), (5, 8)),
        (lambda x, table: (x.t() @ x).square().mean() + table.mean(), (5, 8)),
        (lambda x, target: F.mse_loss(x.t(), target[:, None].expand(8, SAMPLES)), (8,)),
    ],
    ids=["mask", "table", "regularized", "correlations", "samples last"],
)
def test_inputs_that_are_no_samples_may_stand_beside_them(
    loss: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    graph = trace(With(loss), (torch.randn(SAMPLES, 8), torch.randn(shape))).graph
    assert rows_instead(graph, {"input_0"}) == ()
