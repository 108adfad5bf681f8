"""Backward in two halves, inputs first: where it is taken it gives the gradients of one whole backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from autopar.cluster import ClusterSpec
from autopar.comparing.measured_peak import StorageTracker
from autopar.core.pipeline import Pipeline
from autopar.core.schedule import ScheduleKind
from autopar.cost.program.values import find_values
from autopar.cost.stages.split_backward import splits_cleanly as planned_to_split
from autopar.planning.asked.request import Request
from autopar.planning.search import search
from autopar.results.plan.plan import Plan
from autopar.rewrite.build import build_stages
from autopar.runtime.executable import Executable
from autopar.runtime.execute.stage import splits_cleanly
from autopar.runtime.saved.recompute import Recomputed
from autopar.runtime.saved.regather import freeing
from autopar.runtime.saved.split_backward import Between, Box
from autopar.trace.export import Traced, trace
from autopar.trace.forms.simplify import only_loss


class Chain(nn.Module):
    """A skip over the middle, a weight that is used twice, batch norm, dropout, a fused projection."""

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
        left, right = self.fused(F.dropout(h, 0.3) + skip).chunk(2, dim=-1)
        loss: Tensor = (left * right).square().mean() + skip.mean()
        return loss


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": Chain,
    "a weight used twice": lambda: Chain(twice=True),
    "samples of a later stage": lambda: Chain(late=True),
}


def planned(model: nn.Module, part: int = 0) -> tuple[Traced, Plan]:
    """The plan; with a `part` all operators are recomputed, so many at a time."""
    inputs = (torch.randn(5, 6, dtype=torch.float64), torch.randint(4, (5,)))
    traced = trace(model.double(), inputs)
    traced = replace(traced, graph=only_loss(traced.graph))
    plan = search(traced.graph, ClusterSpec.local(1), Request(measure=False, alternatives=False)).plan
    count = len(traced.graph.operators)
    parts = tuple((first, min(first + part, count)) for first in range(0, count, part)) if part else ()
    return traced, replace(plan, program=replace(plan.program, recompute=parts))


def stages(model: nn.Module, part: int = 0) -> list[tuple[Executable, Traced]]:
    """The later stages of every cut into two, and of some into three."""
    traced, plan = planned(model, part)
    count = len(traced.graph.operators)
    cuts: list[tuple[int, ...]] = [(0, cut) for cut in range(1, count)]
    cuts += [(0, cut, (cut + count) // 2) for cut in range(1, count - 2)]
    found = []
    for starts in cuts:
        pipeline = Pipeline(len(starts), 1, ScheduleKind.ZB1P, starts)
        for rank in range(1, len(starts)):
            made = build_stages(traced, replace(plan, pipeline=pipeline), rank=rank, exact_random=False)
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
    between = Between()
    program = freeing(stage.module, between) if halves else stage.module
    outputs = list(program(*received, *own))[: len(stage.sent) + len(stage.outputs)]
    outputs = [item for item in outputs if item.requires_grad]
    seeds = [torch.randn_like(item) for item in outputs]
    weights = [item for item in own if item.requires_grad]
    if not halves:
        torch.autograd.backward(outputs, seeds)
        return [item.grad for item in (*received, *weights)]
    with between.first_half(weights):
        found, groups = stage_backward_input(outputs, seeds, received, iter(weights))
    stage_backward_weight(iter(weights), groups)
    return [*found, *(item.grad for item in weights)]


every_model = pytest.mark.parametrize("name", MODELS)
every_part = pytest.mark.parametrize("part", [0, 1, 3, 50], ids="recomputed by {}".format)


@pytest.mark.slow
@every_part
@every_model
def test_planning_knows_what_splits_cleanly(name: str, part: int) -> None:
    traced, plan = planned(MODELS[name](), part)
    count = len(traced.graph.operators)
    values = find_values(traced.graph, plan.program, training=True)
    clean = planned_to_split(traced.graph, values, range(count + 1))
    assert not clean[0].any()
    for start, stop in combinations(range(1, count), 2):
        pipeline = Pipeline(3, 1, ScheduleKind.ZB1P, (0, start, stop))
        stage = build_stages(traced, replace(plan, pipeline=pipeline), rank=1, exact_random=False).stages[0]
        assert clean[start, stop] == splits_cleanly(stage)
    assert clean.any()


@pytest.mark.slow
@every_part
@every_model
def test_two_halves_give_the_gradients_of_the_whole(name: str, part: int) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    every = stages(model, part)
    split = [(stage, traced) for stage, traced in every if stage.received and splits_cleanly(stage)]
    assert split and (name == "chain" or len(split) < len(every))
    for stage, traced in split:
        whole = gradients(stage, model, traced, halves=False)
        parts = gradients(stage, model, traced, halves=True)
        for one, two in zip(whole, parts, strict=True):
            assert (one is None) == (two is None)
            assert one is None or two is None or torch.allclose(one, two, rtol=1e-12, atol=1e-14)


def test_between_the_halves_nothing_is_kept_but_what_weights_need() -> None:
    x, weight = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def run(between: Between) -> tuple[Tensor, list[Box[Tensor]]]:
        boxes: list[Box[Tensor]] = []

        def pack(tensor: Tensor) -> Box[Tensor]:
            boxes.append(Box(tensor))
            return boxes[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, between.open):
            made = torch.tanh(x @ (weight * weight))  # 0 and 1: the weight; 2 and 3: what is multiplied; 4
            loss = (made * made.sin()).sum()  # and three more
        return loss, boxes

    between = Between()
    loss, boxes = run(between)
    with between.first_half([weight]):
        (found,), groups = stage_backward_input([loss], None, [x], iter([weight]))
    assert [box.saved is not None for box in boxes] == [True] * 4 + [False] * 4
    stage_backward_weight(iter([weight]), groups)
    halves, x.grad = [found, weight.grad], None
    weight.grad = None
    run(Between())[0].backward()
    for one, two in zip(halves, (x.grad, weight.grad), strict=True):
        assert one is not None and two is not None
        assert torch.allclose(one, two, rtol=1e-12)


class Twice(nn.Module):
    """Two layers and a mask; counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor]:
        self.runs += 1
        return (torch.tanh(F.dropout(torch.tanh(x @ one), 0.5) @ two) * 2,)


def test_a_part_is_computed_again_once_for_both_halves() -> None:
    body, between = Twice(), Between()
    part = Recomputed(body, mutated=())
    x, *weights = (torch.randn(500, 500, requires_grad=True) for _ in range(3))
    torch.manual_seed(1)
    run = freeing(_calling(part, 3), between)
    unit = x.nbytes
    with StorageTracker([x, *weights]) as tracker:
        loss = run(x, *weights)[0].sum()
        assert tracker.nbytes < 4.1 * unit and body.runs == 1  # nothing beside what was given
        with between.first_half(weights):
            found, groups = stage_backward_input([loss], None, [x], iter(weights))
        assert body.runs == 2
        # The gradient of x, and for each weight what it was multiplied with, one of them x, and a gradient.
        assert tracker.nbytes < 8.1 * unit
        stage_backward_weight(iter(weights), groups)
        assert body.runs == 2 and tracker.nbytes < 6.1 * unit  # what is left are the gradients
    halves = [*found, *(weight.grad for weight in weights)]
    torch.manual_seed(1)
    wanted = torch.autograd.grad(Twice()(x, *weights)[0].sum(), [x, *weights])
    assert all(one is not None and torch.equal(one, two) for one, two in zip(halves, wanted, strict=True))


def _calling(part: nn.Module, count: int) -> fx.GraphModule:
    """A program that hands its inputs to the module and returns what it gives."""
    root, graph = nn.Module(), fx.Graph()
    root.add_module("part", part)
    graph.output(graph.call_module("part", tuple(graph.placeholder(f"x{place}") for place in range(count))))
    return fx.GraphModule(root, graph)


def test_what_is_read_outside_of_a_first_half_stays() -> None:
    between, box = Between(), Box(torch.ones(2))
    with between.first_half([]):
        assert between.open(box) is between.open(box)
    assert box.saved is not None
