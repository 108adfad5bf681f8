"""Graphs of micro-batches that two traced ones tell are those that a trace would make, or are traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from autopar.core.graph import Graph
from autopar.errors import TraceError
from autopar.planning.graphs.micro_batch_graphs import CallTraces, Parts, parts_of
from autopar.planning.graphs.told_graphs import PartGraphs, told
from autopar.trace.export import trace

BATCH = 48


class Heads(nn.Module):
    """Attention by views, whose sizes are products of the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.inner(x).view(len(x) * 6, 3, 8).unbind(1)
        mixed = torch.stack([q, k, v]).view(3, len(x), 6, 2, 4).transpose(2, 3).flatten(1, 2)
        weights = (mixed[0] @ mixed[1].mT).softmax(-1)
        out = (weights @ mixed[2]).view(len(x), 2, 6, 4).transpose(1, 2).reshape(len(x), 6, 8)
        return nn.functional.cross_entropy(self.last(out).flatten(0, 1), y.flatten(), ignore_index=-1)


class Otherwise(Heads):
    """The same, but for parts of few samples."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.relu() if len(x) < 10 else x, y)


class Between(Heads):
    """The same, but for parts of a number of samples that lies between others."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.tanh() if len(x) == 12 else x, y)


def batch(samples: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(samples, 6, 8), torch.zeros(samples, 6, dtype=torch.long)


def batch_parts(model: nn.Module) -> Parts:
    return parts_of(CallTraces(partial(trace, model)), batch(BATCH), {})


@pytest.mark.slow
def test_two_graphs_tell_those_of_other_sizes() -> None:
    parts = batch_parts(Heads())
    few = parts.traced(8).graph
    for count in (2, 3, 4, 6, 12, 16, 24):
        samples = BATCH // count
        assert told(few, 6, parts.as_one(), BATCH, samples) == parts.traced(count).graph


def part_graphs(parts: Parts, refused: int = 0) -> tuple[PartGraphs, list[int]]:
    """The graphs of parts, and the counts that were traced; one count is refused."""
    counts: list[int] = []

    def traced(count: int) -> Graph:
        counts.append(count)
        if count == refused:
            raise TraceError(where="here", found="a part", wanted="another", remedy="none")
        return parts.traced(count).graph

    return PartGraphs(traced, parts.as_one, BATCH), counts


def test_what_two_traces_tell_is_traced_once_it_is_chosen() -> None:
    graphs, counts = part_graphs(batch_parts(Heads()))
    told_graph = [graphs(count) for count in (8, 4, 2, 24, 4)][1]
    assert counts == [8]
    assert graphs.stands(8) and graphs.stands(4) and counts == [8, 4]
    assert graphs(4) == told_graph and graphs.stands(4) and counts == [8, 4]


def test_a_single_sample_is_always_traced() -> None:
    graphs, counts = part_graphs(batch_parts(Heads()))
    _ = [graphs(count) for count in (8, BATCH)]
    assert counts == [8, BATCH]


@pytest.mark.parametrize("refused", [0, 4])
def test_a_graph_that_is_not_as_told_lets_all_be_traced(refused: int) -> None:
    graphs, counts = part_graphs(batch_parts(Between() if not refused else Heads()), refused)
    _ = [graphs(count) for count in (8, 2, 4)]
    assert counts == [8]
    assert not graphs.stands(4)
    assert graphs(2).operators and counts == [8, 4, 2]


def test_operators_that_only_some_sizes_have_tell_nothing() -> None:
    less, more = (trace(Otherwise(), batch(samples), {}).graph for samples in (6, BATCH))
    assert told(less, 6, more, BATCH, 12) is None


@pytest.mark.parametrize("change", [lambda n: 1.0 / n, lambda n: n // 5])
def test_numbers_that_are_no_sizes_tell_nothing(change: Callable[[int], float]) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * change(len(x))).sum()

    def graph(samples: int) -> Graph:
        return trace(Scaled(), (torch.zeros(samples, 2),), {}).graph

    assert told(graph(6), 6, graph(48), 48, 12) is None
