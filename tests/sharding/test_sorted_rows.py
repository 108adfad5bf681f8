"""Rows that are sorted by keys go apart to the loss where each is computed by its own key, and only there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from autopar.core.mesh import Mesh
from autopar.planning.graphs.micro_batch_graphs import CallTraces, parts_of
from autopar.sharding.atoms import Dims
from autopar.sharding.sample_dims import find_batch
from autopar.sharding.strategies import find_atoms
from autopar.trace.export import trace
from autopar.trace.forms.simplify import only_loss

SAMPLES, ROWS, EXPERTS, CHOSEN, WIDTH = 6, 5, 4, 2, 8


class Mixture(nn.Module):
    """Two experts for every row, chosen by a gate; what `then` makes of them is the loss."""

    def __init__(self, then: Callable[[Mixture, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.then = nn.Linear(WIDTH, EXPERTS), then
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, x.reshape(-1, WIDTH))

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, keys = self.gate(x).softmax(-1).topk(CHOSEN)
        return weights.reshape(-1), keys.reshape(-1)

    def products(self, rows: Tensor, keys: Tensor, bins: int = EXPERTS) -> Tensor:
        ends = torch.histc(keys.float(), bins, 0, bins - 1).cumsum(0, dtype=torch.int32)
        return torch._grouped_mm(rows.bfloat16(), self.experts[:bins].bfloat16(), ends).float()


def places_of(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return places


def mixed(model: Mixture, x: Tensor) -> Tensor:
    weights, keys = model.chosen(x)
    keys, order = keys.sort()
    made = model.products(x[order // CHOSEN], keys) + model.bias[keys]
    rows = (made * weights[order].unsqueeze(-1)).relu()[places_of(order)]
    return (x + rows.view(-1, CHOSEN, WIDTH).sum(1)).square().mean()


def added(model: Mixture, x: Tensor) -> Tensor:
    keys, order = model.chosen(x)[1].sort(stable=True)
    made = model.products(x[order // CHOSEN], keys)
    return torch.zeros_like(x).index_add(0, order // CHOSEN, made).square().sum()


def sorted_back(model: Mixture, x: Tensor) -> Tensor:
    """By the order's order, and by numbers of rows."""
    keys, order = model.chosen(x)[1].sort()
    twice = x.repeat_interleave(CHOSEN, 0)
    made = model.products(twice[order], keys)
    return made[order.argsort()].sin().mean() + torch.zeros_like(twice).index_put((order,), made).cos().mean()


def sorted_twice(model: Mixture, x: Tensor) -> Tensor:
    """Numbers and keys by sorts of their own, and numbers again where rows go back."""
    keys = model.chosen(x)[1]
    order, again = keys.argsort(), keys.sort()
    made = model.products(x[order // CHOSEN], again[0]) + model.bias[again[0]]
    return torch.zeros_like(made).index_put((again[1],), made).sin().mean()


def counted_as_they_lie(model: Mixture, x: Tensor) -> Tensor:
    """However ties are sorted, groups end where they end."""
    keys = model.chosen(x)[1]
    order = keys.argsort(stable=True)
    return model.products(x[order // CHOSEN], keys)[places_of(order)].square().mean()


def counted_before_they_are_one_row(model: Mixture, x: Tensor) -> Tensor:
    keys = model.gate(x).topk(CHOSEN)[1]
    ends = torch.histc(keys.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    order = keys.flatten().argsort()
    made = torch._grouped_mm(x[order // CHOSEN].bfloat16(), model.experts.bfloat16(), ends).float()
    return torch.zeros_like(x).index_add(0, order // CHOSEN, made).square().mean()


def counted_by_value(model: Mixture, x: Tensor) -> Tensor:
    keys = model.chosen(x)[1]
    in_order, order = keys.sort()
    ends = torch.bincount(keys, minlength=EXPERTS).cumsum(0, dtype=torch.int32)
    again = in_order.bincount(minlength=EXPERTS).cumsum(0, dtype=torch.int32)
    rows, experts = x[order // CHOSEN].bfloat16(), model.experts.bfloat16()
    made = torch._grouped_mm(rows, experts, ends) + torch._grouped_mm(rows, experts, again)
    return made.float()[places_of(order)].square().mean()


TWICE = [sorted_twice, counted_as_they_lie, counted_before_they_are_one_row, counted_by_value]


def obstacle(then: Callable[[Mixture, Tensor], Tensor]) -> str | None:
    inputs = (torch.randn(SAMPLES, ROWS, WIDTH),)
    graph = only_loss(trace(Mixture(then), inputs).graph)
    return find_batch(graph, Dims(graph, find_atoms(graph), Mesh((1,))))[1]


@pytest.mark.parametrize("then", [mixed, added, sorted_back, *TWICE])
def test_rows_that_are_sorted_to_experts_go_apart(then: Callable[[Mixture, Tensor], Tensor]) -> None:
    assert obstacle(then) is None


def too_few(model: Mixture, x: Tensor) -> Tensor:
    """Keys beside the bins move the ends of all groups."""
    keys, order = model.chosen(x)[1].sort()
    return model.products(x[order // CHOSEN], keys, EXPERTS - 1)[places_of(order)].mean()


def falling(model: Mixture, x: Tensor) -> Tensor:
    keys, order = model.chosen(x)[1].sort(descending=True)
    return model.products(x[order // CHOSEN], keys)[places_of(order)].mean()


def of_others(model: Mixture, x: Tensor) -> Tensor:
    keys, order = model.chosen(x)[1].sort()
    return model.products(x[order // (2 * CHOSEN)], keys)[places_of(order)].mean()


def in_place(model: Mixture, x: Tensor) -> Tensor:
    """A row and the one that stands where it is sorted to."""
    keys, order = model.chosen(x)[1].sort()
    twice = x.repeat_interleave(CHOSEN, 0)
    return (model.products(twice[order], keys) * twice).mean()


def scanned(model: Mixture, x: Tensor) -> Tensor:
    keys, order = model.chosen(x)[1].sort()
    return model.products(x[order // CHOSEN].cumsum(0), keys)[places_of(order)].mean()


def from_elsewhere(model: Mixture, x: Tensor) -> Tensor:
    keys, order = model.chosen(x)[1].sort()
    other = model.chosen(x.sin())[1].sort()[1]
    return model.products(x[order // CHOSEN], keys)[places_of(other)].mean()


def crowded(model: Mixture, x: Tensor) -> Tensor:
    """How many rows chose each expert."""
    keys, order = model.chosen(x)[1].sort()
    counts = torch.histc(keys.float(), EXPERTS, 0, EXPERTS - 1)
    made = model.products(x[order // CHOSEN], keys)
    return (made * counts.mean())[places_of(order)].mean()


def ties_otherwise(model: Mixture, x: Tensor) -> Tensor:
    """Equal keys lie in their order by one sort, in any by the other."""
    keys = model.chosen(x)[1]
    order = keys.argsort(stable=True)
    return model.products(x[order // CHOSEN], keys)[places_of(keys.argsort())].mean()


def counted_elsewhere(model: Mixture, x: Tensor) -> Tensor:
    order = model.chosen(x)[1].argsort()
    return model.products(x[order // CHOSEN], model.chosen(x.sin())[1])[places_of(order)].mean()


def by_bits_of_keys(model: Mixture, x: Tensor) -> Tensor:
    """Two groups in the order, and ends of four."""
    keys = model.chosen(x)[1]
    order = keys.bool().argsort()
    return model.products(x[order // CHOSEN], keys)[places_of(order)].mean()


def crowded_as_they_lie(model: Mixture, x: Tensor) -> Tensor:
    keys = model.chosen(x)[1]
    order, counts = keys.argsort(), torch.histc(keys.float(), EXPERTS, 0, EXPERTS - 1)
    return (model.products(x[order // CHOSEN], keys) * counts.mean())[places_of(order)].mean()


def crowded_by_value(model: Mixture, x: Tensor) -> Tensor:
    keys = model.chosen(x)[1]
    order, counts = keys.argsort(), keys.bincount(minlength=EXPERTS)
    return (model.products(x[order // CHOSEN], keys) * counts.float().mean())[places_of(order)].mean()


def counted_with_weights(model: Mixture, x: Tensor) -> Tensor:
    weights, keys = model.chosen(x)
    order, ends = keys.argsort(), torch.bincount(keys, weights.detach(), EXPERTS).cumsum(0, dtype=torch.int32)
    made = torch._grouped_mm(x[order // CHOSEN].bfloat16(), model.experts.bfloat16(), ends)
    return made.float()[places_of(order)].mean()


MEETING = [
    *(too_few, falling, of_others, in_place, scanned, from_elsewhere, crowded),
    *(ties_otherwise, counted_elsewhere, by_bits_of_keys, crowded_as_they_lie),
    *(crowded_by_value, counted_with_weights),
]


@pytest.mark.slow
@pytest.mark.parametrize("then", MEETING)
def test_rows_that_meet_others_where_they_are_sorted_are_told(
    then: Callable[[Mixture, Tensor], Tensor],
) -> None:
    assert "takes samples together" in (obstacle(then) or "")


@pytest.mark.parametrize("then", [mixed, added, *TWICE])
def test_parts_of_a_batch_compute_what_the_batch_does(then: Callable[[Mixture, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Mixture(then), torch.randn(SAMPLES, ROWS, WIDTH)
    parts = parts_of(CallTraces(partial(trace, model)), (x,), {})
    assert parts.traced(2).cutting is not None and parts.is_exact
    losses = torch.stack([model(part) for part in x.chunk(3)])
    whole = losses.sum() if then is added else losses.mean()
    assert torch.allclose(model(x), whole, rtol=1e-5)
