"""What autocast does is written down as casts: a graph gives what eager code gives under it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import autopar.ops  # noqa: F401  (registers every family)
from autopar.core.graph import Call, Graph, InputKind, Operator, Ref, TensorSpec, map_refs
from autopar.core.operator_facts import facts_of
from autopar.errors import TraceError
from autopar.sharding.rule import RULES, Sample
from autopar.trace.backwards.custom_operator import CUSTOM
from autopar.trace.export import trace
from autopar.trace.forward.autocast import Autocast, Casting, UncastError, casted, map_specs

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def run(graph: Graph, model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """What the graph gives, without autocast."""
    state: dict[str, Any] = dict(model.named_parameters()) | dict(model.named_buffers())
    users, values = iter(inputs), dict[str, Any]()
    for item in graph.inputs:
        own = state.get(item.target, item.value)
        values[item.name] = next(users) if item.kind is InputKind.USER else own
    for item in graph.operators:
        args, kwargs = map_refs((item.args, item.kwargs), lambda ref: values[ref.name])  # noqa: B023
        results = item.target(*args, **kwargs)
        results = results if isinstance(results, (tuple, list)) else (results,)
        values |= dict(zip(item.results, results, strict=True))
        for name in item.results:
            assert name is None or graph.specs[name].dtype == values[name].dtype, item
    return [values[name] for name in graph.outputs]


def casts(graph: Graph) -> list[Operator]:
    return [item for item in graph.operators if item.target is aten.to.dtype]


class Net(nn.Module):
    """A tied weight, a norm, an in-place sum of two dtypes, softmax, and a loss."""

    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.third = nn.Linear(6, 6)  # torch's cache mixes up dtypes of a weight that is cast to both
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def plain(net: Net, x: Tensor) -> Tensor:
    h = net.norm(net.first(x)) + net.first(x)
    h += x
    h = net.second(h).softmax(-1) @ net.second(x).T
    return F.cross_entropy(h, torch.arange(len(x)))


def regions(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", FP16):
        h = net.first(x)
        with torch.autocast("cpu", enabled=False):
            g = net.second(h.float())
        h = net.second(g) * h
    return net.third(h.to(x.dtype)).sum()


def repeated(net: Net, x: Tensor) -> Tensor:
    x = checkpoint(lambda y: net.second(net.first(y)), x, use_reentrant=False)
    return net.first(x).square().mean()


@pytest.mark.parametrize("dtype", [None, BF16, FP16])
@pytest.mark.parametrize("body", [plain, regions, repeated])
def test_a_graph_gives_what_eager_code_gives_under_autocast(
    body: Callable[[Net, Tensor], Tensor], dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    net, x = Net(body), torch.randn(5, 6)
    with torch.autocast("cpu", dtype or BF16, enabled=dtype is not None):
        graph, serial = trace(net, (x,)).graph, net(x)
        theirs = torch.autograd.grad(serial, list(net.parameters()), allow_unused=True)
    (ours,) = run(graph, net, x)
    assert ours.dtype == serial.dtype
    torch.testing.assert_close(ours, serial)
    mine = torch.autograd.grad(ours, list(net.parameters()), allow_unused=True)
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-3, rtol=2e-2)


def test_a_model_on_the_meta_device_is_traced_under_autocast_of_the_cpu() -> None:
    with torch.device("meta"):
        model, batch = nn.Linear(3, 2), torch.empty(4, 3)
    plain = trace(model, (batch,)).graph
    assert [item.target for item in plain.operators] == [aten.linear.default]
    with torch.autocast("cpu", dtype=BF16):
        cast = trace(model, (batch,)).graph
    assert cast.specs[cast.outputs[0]].dtype == BF16


def test_equal_casts_of_a_tensor_are_one() -> None:
    graph = trace(Net(plain), (torch.randn(5, 6),), autocast=Autocast("cpu", BF16)).graph
    made = [(*item.operands, item.args[1]) for item in casts(graph)]
    assert len(made) == len(set(made)) and ("first_weight", BF16) in made


def test_what_a_checkpointed_region_casts_is_cast_again_outside_of_it() -> None:
    graph = trace(Net(repeated), (torch.randn(5, 6),), autocast=Autocast("cpu", BF16)).graph
    weights = [item for item in casts(graph) if item.operands == ("first_weight",)]
    assert [item.checkpoint > 0 for item in weights] == [True, False]


def test_what_follows_a_region_is_cast_as_before() -> None:
    graph = trace(Net(regions), (torch.randn(5, 6),)).graph
    matrices = [item for item in graph.operators if item.target is aten.linear.default]
    assert [graph.specs[item.operands[0]].dtype for item in matrices] == [FP16, FP32, FP16, FP32]


def test_a_laptop_writes_down_what_cuda_casts() -> None:
    dtypes = {}
    for device in ("cpu", "cuda"):
        graph = trace(Net(plain), (torch.randn(5, 6),), autocast=Autocast(device, BF16)).graph
        for item in graph.operators:
            (result,) = item.results
            dtypes.setdefault(item.target, {})[device] = graph.specs[str(result)].dtype
    assert dtypes[aten.layer_norm.default] == {"cpu": BF16, "cuda": FP32}
    assert dtypes[aten.softmax.int] == {"cpu": BF16, "cuda": FP32}
    assert dtypes[aten.linear.default] == {"cpu": BF16, "cuda": BF16}
    assert dtypes[aten.cross_entropy_loss.default] == {"cpu": FP32, "cuda": FP32}


def test_a_region_for_cuda_is_found_where_there_is_none() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        with torch.autocast("cuda", FP16):
            return net.first(x)

    assert not casts(trace(Net(body), (torch.randn(5, 6),), autocast=Autocast("cpu")).graph)
    graph = trace(Net(body), (torch.randn(5, 6),), autocast=Autocast("cuda")).graph
    assert {item.args[1] for item in casts(graph)} == {FP16}


def test_a_model_without_memory_is_cast_alike() -> None:
    with torch.device("meta"):
        ghost, x = Net(repeated), torch.randn(5, 6)
    for device in ("cpu", "cuda"):
        autocast = Autocast(device, BF16)
        graphs = [
            trace(net, (each,), autocast=autocast).graph
            for net, each in ((ghost, x), (Net(repeated), torch.randn(5, 6)))
        ]
        assert graphs[0].specs == graphs[1].specs


def test_doubles_are_left_alone() -> None:
    net, x = Net(plain).double(), torch.randn(5, 6, dtype=torch.float64)
    assert not casts(trace(net, (x,), autocast=Autocast("cpu", BF16)).graph)


def test_an_operator_that_cuda_refuses_under_autocast_is_refused_at_its_line() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        return F.binary_cross_entropy(net.first(x).sigmoid(), torch.ones(5, 6))

    with pytest.raises(TraceError, match=r"test_autocast\.py:\d+.*binary_cross_entropy.*enabled=False"):
        trace(Net(body), (torch.randn(5, 6),), autocast=Autocast("cuda", BF16))


class Scaled(torch.autograd.Function):
    """A product whose backward is its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return (grad.float() @ w.T) * 2, (x.T @ grad.float()) * 3


def test_a_forward_with_its_own_backward_runs_under_its_autocast() -> None:
    torch.manual_seed(0)
    net, x = Net(lambda net, x: Scaled.apply(x, net.first.weight).float().sum()), torch.randn(5, 6)
    with torch.autocast("cpu", BF16):
        graph, serial = trace(net, (x,)).graph, net(x)
    assert any(item.target is CUSTOM for item in graph.operators)
    torch.testing.assert_close(run(graph, net, x)[0], serial)


# -- torch's lists ------------------------------------------------------------------------------


def calls() -> list[Any]:
    """Every sample of every rule in float32, in bfloat16 and in both by turns."""
    samples = itertools.chain.from_iterable(rule.samples() for rule in dict.fromkeys(RULES.values()))
    return [sample for sample in samples if sample.target is not CUSTOM]


def in_dtypes(sample: Sample, *dtypes: torch.dtype) -> tuple[Any, Any]:
    turn = itertools.cycle(dtypes)
    return pytree.tree_map_only(
        torch.Tensor,
        lambda each: each.to(next(turn)) if each.is_floating_point() else each.clone(),
        (sample.args, sample.kwargs),
    )


def known_devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.slow
@pytest.mark.parametrize("device", known_devices())
@pytest.mark.parametrize(
    "dtypes", [(FP32,), pytest.param((BF16,), marks=pytest.mark.long), (BF16, FP32)], ids=str
)
def test_casts_are_those_of_torch_on_this_machine(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    casting = Casting(device)
    for sample in calls():
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda each: each.to(device), in_dtypes(sample, *dtypes)
        )
        names, specs = itertools.count(), dict[str, TensorSpec]()

        def named(each: Tensor) -> Ref:
            name = str(next(names))  # noqa: B023
            specs[name] = TensorSpec(tuple(each.shape), each.dtype)  # noqa: B023
            return Ref(name)

        try:
            with torch.no_grad(), torch.autocast(device, BF16):
                theirs = sample.target(*args, **kwargs)
        except (RuntimeError, ValueError):
            continue  # not for these dtypes
        given = pytree.tree_map_only(torch.Tensor, named, (args, kwargs))
        if facts_of(sample.target).casts_inside and dtypes[0] is FP32:
            with pytest.raises(UncastError):
                casting.find(Call(sample.target, tuple(given[0]), given[1]), specs, BF16)
            continue
        found = casting.find(Call(sample.target, tuple(given[0]), given[1]), specs, BF16)
        tensors = [each for each in pytree.tree_leaves(theirs) if isinstance(each, Tensor)]
        assert found.results == tuple(each.dtype for each in tensors), (sample.target, found)


LOWER = {
    *(aten.linear.default, aten.conv2d.default, aten.matmul.default, aten.bmm.default),
    *(aten.scaled_dot_product_attention.default, aten.addmm.default),
}
WIDER = {
    "cpu": {aten.mse_loss.default, aten.cross_entropy_loss.default, aten.avg_pool3d.default},
    "cuda": {
        *(aten.layer_norm.default, aten.group_norm.default, aten.mse_loss.default, aten.softmax.int),
        *(aten.pow.Tensor_Scalar, aten.sum.default, aten.upsample_bilinear2d.vec),
    },
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_lists_of_both_kinds_of_devices_are_known_here(device: str) -> None:
    casting, found = Casting(device), {True: set(), False: set()}
    for sample in calls():
        if sample.target in LOWER | WIDER[device]:
            specs = pytree.tree_map_only(
                torch.Tensor,
                lambda each: TensorSpec(tuple(each.shape), each.dtype),
                in_dtypes(sample, FP32 if sample.target in LOWER else BF16),
            )
            args, kwargs = map_specs(specs, lambda each: casted(each, each.dtype))
            cast = casting.find(Call(sample.target, args, kwargs), {}, BF16)
            found[cast.results[0] is BF16].add(sample.target)
    assert found == {True: LOWER, False: WIDER[device]}


class OnAnyDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.first(x)
        return self.second(x.float()).sum()


def test_a_model_on_the_meta_device_is_traced_as_one_that_is_there() -> None:
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            found.append(trace(OnAnyDevice(), (torch.zeros(2, 4),)).graph)
    here, on_paper = ([str(item.target) for item in graph.operators] for graph in found)
    assert here == on_paper and here.count("aten.to.dtype") == 4


class Taught(nn.Module):
    """A teacher without gradients, inside of autocast or around it."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.teacher, self.student, self.inside = nn.Linear(6, 6), nn.Linear(6, 6), inside

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            with torch.autocast("cpu", BF16):
                with torch.no_grad():
                    wanted = self.teacher(x)
                return (self.student(x) - wanted).float().square().mean()
        with torch.no_grad(), torch.autocast("cpu", BF16):
            wanted = self.teacher(x)
        return (self.student(x) - wanted).float().square().mean()


@pytest.mark.parametrize("inside", [True, False])
def test_what_is_made_without_gradients_has_none(inside: bool) -> None:
    graph = trace(Taught(inside=inside), (torch.randn(4, 6),)).graph
    linear = [item for item in graph.operators if item.target is aten.linear.default]
    results = [item.results[0] for item in linear]
    taught, learnt = sorted(results, key=lambda name: graph.specs[name].requires_grad)
    readers = [item for item in graph.operators if taught in item.operands]
    detached = [item.target is aten.detach.default for item in readers]
    assert not graph.specs[taught].requires_grad or all(detached)
    assert graph.specs[learnt].requires_grad
