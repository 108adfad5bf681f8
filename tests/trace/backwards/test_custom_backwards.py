"""A backward of the model's own is never lost: it runs, cut where it may be, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.cluster import ClusterSpec
from autopar.core.fingerprint import fingerprint_of
from autopar.core.force import Parallelism
from autopar.core.graph import InputKind, Operator
from autopar.core.mesh import Mesh
from autopar.core.placement import B, P
from autopar.errors import TraceError
from autopar.planning.asked.request import Request
from autopar.proof.check import Report, check
from autopar.sharding.atoms import Dims
from autopar.sharding.sample_independence import SampleFlow
from autopar.sharding.strategies import find_atoms, options_of
from autopar.trace.backwards.custom_operator import CUSTOM, call_at
from autopar.trace.export import trace
from autopar.trace.forms.simplify import only_loss
from autopar.trace.target import Target, load_target
from tests.trace.backwards.custom_backward_models import Flip, Net, made

MODELS = Path(__file__).parent / "custom_backward_models.py"
CUT = [
    "flip",
    "quantized",
    "spiking",
    "clamped",
    "several_results",
    "listed",
    "checkpointed",
    "hooked",
    "hooked_itself",
]
GATHERED = ["auxiliary", "normed", "noisy", "hooked_by_norm"]
TRACED = ["layer_norm", "without_gradients", "listed_alike", "only_held"]


def checked(name: str, ranks: int, *, force: str | None = "batch", **more: Any) -> Report:
    request = Request(force=Parallelism(force) if force else None, measure=False)
    return check(load_target(f"{MODELS}:{name}"), ClusterSpec.local(ranks), request, steps=2, **more)


def make(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    target = load_target(f"{MODELS}:{name}")
    return target.model, target.args


def customs(name: str) -> list[Operator]:
    graph = trace(*make(name)).graph
    return [item for item in graph.operators if item.target is CUSTOM]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CUT, *GATHERED, *TRACED])
@pytest.mark.parametrize("force", ["batch", None])
def test_it_trains_as_eager_code_does(name: str, force: str | None) -> None:
    report = checked(name, 2, force=force)
    assert report.verdict.passed, report


@pytest.mark.parametrize("name", ["flip", "normed", "hooked", "layer_norm"])
def test_a_model_without_memory_is_traced_alike(name: str) -> None:
    model, inputs = make(name)
    wanted = [item.target for item in trace(model, inputs).graph.operators]
    there = trace(model.to("meta"), tuple(item.to("meta") for item in inputs)).graph
    assert [item.target for item in there.operators] == wanted


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("name", ["hooked", "clamped", pytest.param("noisy", marks=pytest.mark.long)])
def test_so_it_does_on_real_processes(name: str) -> None:
    report = checked(name, 2, processes=True)
    assert report.verdict.passed, report


@pytest.mark.parametrize("name", ["quantized", "clamped"])
def test_two_axes_and_two_kinds(name: str) -> None:
    """A weight that is quantized is split as the product needs it."""
    request = Request(force=Parallelism("filter"), mesh=Mesh((2, 2)), measure=False)
    report = check(load_target(f"{MODELS}:{name}"), ClusterSpec.local(4), request, steps=2)
    assert report.passed, report


@pytest.mark.parametrize("stages", [1, 2])
def test_stages_and_micro_batches(stages: int) -> None:
    request = Request(pipeline_ranks=stages, micro_batches=2, measure=False)
    report = check(load_target(f"{MODELS}:hooked"), ClusterSpec.local(2), request, steps=2)
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_rows_go_their_own_ways_where_parts_are_those_of_the_whole(name: str) -> None:
    assert customs(name)
    assert all(0 in call_at(item.args[4]).factors for item in customs(name))


@pytest.mark.parametrize("name", ["clamped", "auxiliary"])
def test_its_backward_takes_whole_gradients_alone(name: str) -> None:
    """It needn't be linear: the sum of what it makes of parts is not what it makes of their sum."""
    graph = trace(*make(name)).graph
    dims = Dims(graph, find_atoms(graph), Mesh((2,)))
    options = [option for item in customs(name) for option in options_of(item, dims)]
    assert options and {B, P}.isdisjoint(place for option in options for place in option.results)


@pytest.mark.parametrize("name", GATHERED)
def test_what_needs_the_whole_batch_is_gathered_and_named(name: str) -> None:
    (item,) = customs(name)
    assert not call_at(item.args[4]).factors
    title = call_at(item.args[4]).title
    assert any(title in gathered for gathered in checked(name, 2).plan.gathered_ops)


@pytest.mark.parametrize(("name", "mixes"), [("flip", False), ("hooked", False), ("normed", True)])
def test_samples_are_mixed_by_a_backward_that_mixes_them(name: str, mixes: bool) -> None:
    graph = only_loss(trace(*make(name)).graph)
    dims = Dims(graph, find_atoms(graph), Mesh((1,)))
    user = next(item.name for item in graph.inputs if item.kind is InputKind.USER)
    flow = SampleFlow(graph, dims, {dims.atoms.components[(user, 0, 0)]})
    assert (flow.obstacle is not None) is mixes


@pytest.mark.parametrize("name", TRACED)
def test_what_autograd_derives_alike_stays_operators_of_torch(name: str) -> None:
    assert not customs(name)


# What can't be run right is refused, with the user's line


class Foreign(torch.autograd.Function):
    """Computes with a parameter that it isn't given."""

    weight: nn.Parameter

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: nn.Module) -> Tensor:
        ctx.net = net
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.net.scale, None


class Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, int]:
        return x * 1, 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, nothing: None) -> Tensor:
        return -gradient


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.min() < 0:
            raise ValueError("only probabilities")
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def _hook_of_other(net: Net, h: Tensor) -> Tensor:
    mask = h > 0
    h.register_hook(lambda gradient: gradient * mask)
    return h


def _hook_of_parameter(net: Net, h: Tensor) -> Tensor:
    net.scale.register_hook(lambda gradient: gradient * 2)
    return h * net.scale


def _watched(net: Net, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: None)
    return h


def _removed(net: Net, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: gradient / 2).remove()
    return h


def _hook_of_node(net: Net, h: Tensor) -> Tensor:
    assert h.grad_fn is not None
    h.grad_fn.register_hook(lambda after, before: None)
    return h


def _derived(net: Net, h: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(Flip.apply(h, 0.5).square().sum(), h, create_graph=True)
    return gradient


def _derived_beside_a_hook(net: Net, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: gradient / 2)
    (gradient,) = torch.autograd.grad(h.square().sum(), net.body.weight, create_graph=True)
    return h + gradient.sum()


def _accumulated(net: Net, h: Tensor) -> Tensor:
    (h * h).sum().backward(retain_graph=True)
    return h


class Noisy(torch.autograd.Function):
    """Draws in backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand_like(gradient)


def _noisy_hook(net: Net, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
    return h


REFUSED = [
    (lambda net, h: Noisy.apply(h), "Noisy, whose backward draws random numbers"),
    (_noisy_hook, "_noisy_hook.<locals>.<lambda>), whose backward draws random numbers"),
    (_accumulated, "backward inside forward"),
    (lambda net, h: Foreign.apply(h, net), "Foreign, which computes with tensors that aren't its arguments"),
    (lambda net, h: Writing.apply(h * 2), "Writing, which writes to its argument"),
    (lambda net, h: Counting.apply(h)[0], "Counting, which returns int"),
    (lambda net, h: Raising.apply(h), "ValueError from Raising on random values: only probabilities"),
    (_hook_of_other, "computes with tensors that aren't its arguments"),
    (_hook_of_parameter, "register_hook on a parameter"),
    (_watched, "which returns nothing"),
    (_removed, "a hook that forward removes"),
    (_hook_of_node, "grad_fn.register_hook inside forward"),
    (_derived, "grad inside forward through a backward or hook of its own"),
    (_derived_beside_a_hook, "grad inside forward through a backward or hook of its own"),
]


@pytest.mark.parametrize(("between", "found"), REFUSED)
def test_what_cannot_run_right_is_refused(between: Callable[[Net, Tensor], Tensor], found: str) -> None:
    model, args = made(between)
    with pytest.raises(TraceError) as caught:
        trace(model, args)
    message = str(caught.value)
    assert found in message
    assert f"{Path(__file__).name}:" in message
    assert len(message.replace(str(Path(__file__).parent), "")) <= 400


def test_a_backward_hook_of_a_module_is_refused_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    model[1].register_full_backward_hook(lambda module, before, after: (before[0] / 2,))
    with pytest.raises(TraceError, match=r"1 \(Tanh\): found a backward hook"):
        trace(model, (torch.randn(2, 3),))


# What the graph says


def test_a_number_that_differs_is_an_argument_of_its_own() -> None:
    """So that an annealed one leaves the rest of the graph alone."""

    def flipped(weight: float) -> Operator:
        graph = trace(*made(lambda net, h: Flip.apply(h, weight))).graph
        return next(item for item in graph.operators if item.target is CUSTOM)

    items = flipped(0.5), flipped(0.25)
    assert [item.args[3] for item in items] == [[0.5], [0.25]]
    assert items[0].args[1:3] == items[1].args[1:3] and items[0].args[4] == items[1].args[4]


def test_fingerprints_leave_out_what_only_this_process_knows() -> None:
    lines = [
        fingerprint_of(trace(*made(lambda net, h: Flip.apply(h, 0.5))).graph).operators for _ in range(2)
    ]
    (line,) = [line for line in lines[0] if "Flip" in line]
    assert lines[0] == lines[1] and "%place" in line and "[0.5]" in line


def test_the_trace_leaves_generators_and_functions_as_they_were() -> None:
    model, args = made(lambda net, h: Flip.apply(h, 0.5))
    state = torch.get_rng_state()
    trace(model, args)
    assert torch.equal(state, torch.get_rng_state())
    x = torch.ones(2, requires_grad=True)
    Flip.apply(x, 0.5).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("create", [False, True])
def test_gradients_that_forward_takes_have_gradients_where_it_asks_for_them(create: bool) -> None:
    def between(net: Net, h: Tensor) -> Tensor:
        return h * torch.autograd.grad((h * h * h).sum(), h, create_graph=create)[0]

    model, args = made(between)
    report = check(
        Target(model, args, {}, None, ""), ClusterSpec.local(2), Request(measure=False), steps=2, changes=0
    )
    assert report.passed, report


@pytest.mark.parametrize("learns", [True, False])
def test_an_apply_that_was_kept_aside_is_one_operator_and_without_gradients_none(learns: bool) -> None:
    kept = Flipped.apply

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            with torch.set_grad_enabled(learns):
                factor = kept(h, 0.7)
            return (h * factor).sum()

    graph = trace(Net(), (torch.randn(3, 4),)).graph
    names = [str(item.target) for item in graph.operators]
    assert any("custom_backward" in name for name in names) == learns
    assert any("detach" in name for name in names) != learns


class Flipped(torch.autograd.Function):
    """Its context is set up apart."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -ctx.scale * gradients[0], None
