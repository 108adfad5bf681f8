"""A step that nobody cut has one rank, one stage and one micro-batch."""

from __future__ import annotations

import torch
from torch import nn

from autopar.core.pipeline import Pipeline, kept_starts, stages_of_uses
from autopar.trace.export import trace


def test_without_stages_one_rank_holds_the_only_stage() -> None:
    whole = Pipeline()
    assert (whole.ranks, whole.micro_batches, whole.num_stages) == (1, 1, 1)
    assert not whole.is_staged
    assert whole.rank_of(0) == 0 and whole.stages_of(0) == (0,)


def test_the_cut_of_another_call_leaves_each_use_of_a_parameter_on_its_stage() -> None:
    """A tied weight is used by the operators 0 and 4, another one by 2."""
    first, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    last = nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    graph = trace(nn.Sequential(first, nn.Tanh(), other, nn.Tanh(), last), (torch.ones(2, 4),)).graph
    for starts, kept in (((0, 4), (0, 4)), ((0, 3), (0, 4)), ((0, 1, 4), (0, 2, 4)), ((0, 2), (0, 2))):
        assert kept_starts(graph, stages_of_uses(graph, starts), len(starts)) == kept
    assert kept_starts(graph, {"0.weight": (1,), "2.weight": (1,)}, 2) == (0, 0)
    assert kept_starts(graph, {"0.weight": (0, 0, 2), "2.weight": (1,)}, 3) == (0, 2, 5)
