"""Backward in two halves, inputs first: where it is taken it gives the gradients of one whole backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from autopar.cluster import ClusterSpec
from autopar.compiler import build_stages
from autopar.core.executable import Executable
from autopar.core.pipeline import Pipeline
from autopar.core.schedule import ScheduleKind
from autopar.planning import search
from autopar.request import Request
from autopar.runtime.stage import splits_cleanly
from autopar.simplify import only_loss
from autopar.trace import Traced, trace


class Chain(nn.Module):
    """A skip over the middle, a weight that is used twice, batch norm, a fused projection."""

    def __init__(self, *, twice: bool = False, late: bool = False) -> None:
        super().__init__()
        self.twice, self.late = twice, late
        self.first, self.middle, self.again = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.fused = nn.BatchNorm1d(6), nn.Linear(6, 12)
        self.table = nn.Embedding(4, 6)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        skip = torch.tanh(self.first(x))
        h = torch.relu(self.norm(self.middle(skip)))
        if self.twice:
            h = torch.tanh(self.middle(h))
        if self.late:
            h = h + torch.tanh(self.again(self.table(index)))
        left, right = self.fused(h + skip).chunk(2, dim=-1)
        loss: Tensor = (left * right).square().mean() + skip.mean()
        return loss


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": Chain,
    "a weight used twice": lambda: Chain(twice=True),
    "samples of a later stage": lambda: Chain(late=True),
}


def stages(model: nn.Module) -> list[tuple[Executable, Traced]]:
    """The later stages of every cut into two, and of some into three."""
    inputs = (torch.randn(5, 6, dtype=torch.float64), torch.randint(4, (5,)))
    traced = trace(model, inputs)
    traced = replace(traced, graph=only_loss(traced.graph))
    plan = search(traced.graph, ClusterSpec.local(1), Request(measure=False, alternatives=False)).plan
    count = len(traced.graph.operators)
    cuts: list[tuple[int, ...]] = [(0, cut) for cut in range(1, count)]
    cuts += [(0, cut, (cut + count) // 2) for cut in range(1, count - 2)]
    found = []
    for starts in cuts:
        pipeline = Pipeline(len(starts), 1, ScheduleKind.ZB1P, starts)
        for rank in range(1, len(starts)):
            made = build_stages(traced, replace(plan, pipeline=pipeline), rank=rank)
            found.append((made.stages[0], traced))
    return found


def gradients(stage: Executable, model: nn.Module, traced: Traced, *, halves: bool) -> list[Tensor | None]:
    """Those of what the stage received, then those of its weights."""
    torch.manual_seed(3)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    users = dict(zip(traced.arguments.paths, traced.arguments.tensors, strict=True))
    received = [
        torch.randn(spec.shape, dtype=spec.dtype).requires_grad_(spec.requires_grad)
        for spec in stage.received
    ]
    own = [
        users[item.target]
        if item.target in users
        else state[item.target].detach().clone().requires_grad_(state[item.target].requires_grad)
        for item in stage.inputs
    ]
    outputs = list(stage.module(*received, *own))[: len(stage.sent) + len(stage.outputs)]
    outputs = [item for item in outputs if item.requires_grad]
    seeds = [torch.randn_like(item) for item in outputs]
    weights = [item for item in own if item.requires_grad]
    if not halves:
        torch.autograd.backward(outputs, seeds)
        return [item.grad for item in (*received, *weights)]
    found, groups = stage_backward_input(outputs, seeds, received, iter(weights))
    stage_backward_weight(iter(weights), groups)
    return [*found, *(item.grad for item in weights)]


@pytest.mark.parametrize("name", MODELS)
def test_two_halves_give_the_gradients_of_the_whole(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    every = stages(model)
    split = [(stage, traced) for stage, traced in every if stage.received and splits_cleanly(stage)]
    assert split and (name == "chain" or len(split) < len(every))
    for stage, traced in split:
        whole = gradients(stage, model, traced, halves=False)
        parts = gradients(stage, model, traced, halves=True)
        for one, two in zip(whole, parts, strict=True):
            assert (one is None) == (two is None)
            assert one is None or two is None or torch.allclose(one, two, rtol=1e-12, atol=1e-14)
