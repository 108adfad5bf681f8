"""Models that checkpoint themselves: traced through, with their gradients, and their regions known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from autopar.cluster import ClusterSpec, Link
from autopar.core.recompute import Recompute
from autopar.core.schedule import ScheduleKind
from autopar.errors import InputError
from autopar.planning.asked.request import Request
from autopar.planning.search import search
from autopar.proof.check import check
from autopar.proof.verify import verify_simulated
from autopar.results.plan.plan import Plan
from autopar.trace.export import trace
from autopar.trace.forward.checkpoint_regions import inlined
from autopar.trace.target import Target

TWO = ClusterSpec(devices_per_node=2, device="h100", intra=Link(2e-6, 450e9))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.dropout(self.norm(self.up(x)))))
        return out


class Net(nn.Module):
    """Two checkpointed blocks around which nothing is."""

    def __init__(self, *, reentrant: bool, learned: bool = True) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 6).requires_grad_(learned)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


def net(**options: Any) -> tuple[Net, tuple[Tensor]]:
    torch.manual_seed(0)
    return Net(**options), (torch.randn(8, 6),)


def request(**options: Any) -> Request:
    return Request(measure=False, alternatives=False, **options)


def plan(model: nn.Module, args: tuple[Tensor], **options: Any) -> Plan:
    return search(trace(model, args).graph, TWO, request(**options)).plan


def test_a_wrapped_block_is_a_region_and_a_wrapped_model_is_refused() -> None:
    layers = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 6)))
    apply_activation_checkpointing(layers, check_fn=lambda module: module is layers[1])
    graph = trace(layers, (torch.randn(4, 6),)).graph
    assert [item.checkpoint > 0 for item in graph.operators] == [False, True, True]
    with pytest.raises(InputError, match="a CheckpointWrapper: .*pass the module that it wraps"):
        trace(checkpoint_wrapper(layers), (torch.randn(4, 6),))


@pytest.mark.parametrize("reentrant", [False, True])
def test_regions_are_traced_through_with_their_gradients(reentrant: bool) -> None:
    model, args = net(reentrant=reentrant)
    graph = trace(model, args).graph
    plain = [str(item.target).split(".")[1] for item in graph.operators]
    regions = [plain[first:stop] for first, stop in graph.checkpoints]
    assert regions == [["linear", "add", "batch_norm", "dropout", "relu", "linear"]] * 2
    assert graph.loss is not None and graph.specs[graph.loss].requires_grad
    assert not trace(nn.Sequential(nn.Linear(6, 6)), args).graph.checkpoints


@pytest.mark.parametrize("reentrant", [False, True])
def test_training_equals_the_eager_models_and_the_plan_recomputes_them(reentrant: bool) -> None:
    model, args = net(reentrant=reentrant)
    traced = trace(model, args)
    found = plan(model, args)
    assert found.program.recompute == traced.graph.checkpoints
    assert "computed again in backward: 2 regions that the model checkpoints" in found.notes
    assert any("write their statistics and counts twice a call" in note for note in found.notes)
    verdict = verify_simulated(model, traced, found.program, loss_fn=None, steps=2)
    assert verdict.passed, verdict.worst


def test_a_checkpoint_that_takes_nothing_with_a_gradient_gives_none_as_torchs() -> None:
    """The reentrant kind leaves even its own weights without a gradient."""
    model, args = net(reentrant=True, learned=False)
    graph = trace(model, args).graph
    assert graph.loss is not None and not graph.specs[graph.loss].requires_grad
    with pytest.warns(UserWarning, match="Gradients will be None"):
        assert not model(*args).requires_grad
    with inlined():
        assert not model(*args).requires_grad
    other, _ = net(reentrant=False, learned=False)
    graph = trace(other, args).graph
    assert graph.loss is not None and graph.specs[graph.loss].requires_grad


class Written(nn.Module):
    """Regions that write buffers in the way that `how` says."""

    n: Tensor
    mean: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.fc, self.out = how, nn.Linear(6, 6), nn.Linear(6, 1)
        self.norm = (
            nn.InstanceNorm1d(3, track_running_stats=True) if how == "instances" else nn.BatchNorm1d(6)
        )
        if how == "cumulative":
            self.norm.momentum = None
        self.norm.requires_grad_(how != "frozen")
        self.fc.requires_grad_(how != "frozen")
        self.register_buffer("n", torch.tensor(3))
        self.register_buffer("mean", torch.zeros(6))

    def inner(self, x: Tensor) -> Tensor:
        match self.how:
            case "count" | "a count that is read":
                self.n += 2
            case "average":
                self.mean.lerp_(x.detach().mean(0), 0.1)
            case "instances":
                return self.norm(x.reshape(-1, 3, 2)).reshape(-1, 6).tanh()
        x = self.norm(self.fc(x))
        x = x * self.n if self.how == "a count that is read" else x
        return self.norm(x).tanh() if self.how == "twice" else x.tanh()

    def nested(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out + x

    def forward(self, x: Tensor) -> Tensor:
        inner = self.nested if self.how == "nested" else self.inner
        x = self.fc(x) if self.how == "instances" else x
        h = checkpoint(inner, x, use_reentrant=False)
        if self.how == "shared":
            h = h + self.norm(x)
        loss: Tensor = self.out(h).square().mean()
        return loss


@pytest.mark.parametrize("how", ["once", "count", "instances", "frozen"])
def test_what_regions_write_is_written_as_often_as_eager_training_does(how: str) -> None:
    torch.manual_seed(0)
    model, args = Written(how), (torch.randn(8, 6),)
    traced = trace(model, args)
    assert all("twice a call" in note for note in traced.graph.notes)
    verdict = verify_simulated(model, traced, plan(model, args).program, loss_fn=None, steps=2)
    assert verdict.passed, verdict.worst
    with torch.no_grad():
        model(*args)
        traced = trace(model, args)
    momenta = [item.args[6] for item in traced.graph.operators if "batch_norm" in item.name]
    assert momenta == [0.1] * len(momenta), "without gradients a region runs once"


@pytest.mark.parametrize(
    "how", ["a count that is read", "average", "shared", "twice", "nested", "cumulative"]
)
def test_writes_whose_second_run_is_not_known_are_noted(how: str) -> None:
    model, args = Written(how), (torch.randn(8, 6),)
    (note,) = [note for note in trace(model, args).graph.notes if "twice a call" not in note]
    named = {"average": " mean:", "a count that is read": " n:"}.get(how, "norm.running_mean")
    assert named in note and "writes oftener" in note


def test_a_checkpoint_inside_another_belongs_to_the_outer_one() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(reentrant=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.net, x, use_reentrant=False)
            return 2 * out

    _, args = net(reentrant=False)
    graph = trace(Nested(), args).graph
    assert graph.checkpoints == ((0, len(graph.operators) - 1),)


def test_checkpoints_are_priced_and_not_made_where_that_is_impossible_or_unwanted() -> None:
    model, args = net(reentrant=False)
    plain = plan(model, args, recompute=Recompute.NONE)
    assert not plain.program.recompute and "--recompute none" in plain.notes[1]
    found = plan(model, args)
    assert found.step_seconds > plain.step_seconds and found.gap > plain.gap
    assert found.peak_bytes <= plain.peak_bytes
    every = plan(model, args, recompute=Recompute.ALL)
    assert every.program.recompute and "the planner chose" in every.notes[1]
    for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB1P):
        cut = plan(model, args, pipeline_ranks=2, micro_batches=2, schedule=kind)
        assert sum(stop - first for first, stop in cut.program.recompute) == 12
        assert any("2 regions that the model checkpoints" in note for note in cut.notes)
    silent = plan(model, args, training=False)
    told = [note for note in silent.notes if "checkpoint" in note]
    assert not silent.program.recompute and len(told) == 1


def test_nothing_of_torch_stays_changed_and_errors_inside_pass() -> None:
    before = dict(vars(torch.utils.checkpoint))
    with pytest.raises(ZeroDivisionError), inlined():
        checkpoint(lambda x: x / (1 // 0), torch.ones(1), use_reentrant=False)
    assert dict(vars(torch.utils.checkpoint)) == before


@pytest.mark.long
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_hugging_face_model_that_checkpoints_its_layers(reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=20, n_positions=8)
    config.use_cache = False
    model = transformers.GPT2LMHeadModel(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    tokens = torch.randint(20, (4, 8))
    inputs = {"input_ids": tokens, "labels": tokens}
    assert len(trace(model, (), inputs).graph.checkpoints) == 2
    report = check(Target(model, (), inputs, None, ""), TWO, request(), steps=2)
    assert report.passed and len(report.plan.program.recompute) == 2
