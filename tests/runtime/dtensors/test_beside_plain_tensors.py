"""Parameters outside the program take plain tensors as the serial ones do, or are refused by name."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.mesh import Mesh
from autopar.core.placement import Shard
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.dtensors.beside_plain_tensors import take_plain_tensors
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler
from tests.whole_tensors import full_of

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
Y = torch.tensor([0, 1, 2, 1])
START = torch.linspace(-2, 2, 48, dtype=torch.float64).reshape(8, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(x).tanh())
        return out


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.inner(x)))
        return out


def _penalty(net: Any) -> Tensor:
    start = (net.inner.weight - START).square().sum()
    squares = sum(item.square().sum() for item in net.parameters())
    return F.cross_entropy(net(X), Y) + 0.1 * start + 0.2 * squares


def _feature(net: Any) -> Tensor:
    features = net(X)  # a result of the program, with a gradient
    out: Tensor = (features @ net.head.weight).square().mean()
    return out


def _masked(net: Any) -> Tensor:
    out: Tensor = torch.where(START > 0, net.inner.weight, 0.0).square().sum() + net(X).square().sum()
    return out


def pair(kinds: list[str], kind: type[nn.Module] = Net) -> tuple[Any, Any]:
    gc.collect()  # modules of earlier tests, which may lie otherwise on an equal mesh
    torch.manual_seed(0)
    theirs = kind().double()
    compile = forced_compiler(Mesh((2,)), kinds)
    ours: Any = ParallelModule(copy.deepcopy(theirs), compile, describe=describe, device=torch.device("cpu"))
    ours.prepare(X)
    return theirs, ours


def gap(ours: Any, theirs: Any) -> float:
    mine, full = ours.state_dict(), theirs.state_dict()
    return max(float((mine[name] - full[name]).abs().max()) for name in full)


def _losses(kinds: list[str]) -> None:
    theirs, ours = pair(kinds)
    for loss in (_penalty, _feature, _masked):
        for net in (theirs, ours):
            net.zero_grad()
            loss(net).backward()
        assert abs(loss(ours).item() - loss(theirs).item()) < 1e-12
        for mine, full in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (full_of(mine.grad) - full.grad).abs().max() < 1e-12, loss


@torch.no_grad()
def _in_place(kinds: list[str]) -> None:
    theirs, ours = pair(kinds)
    shadows: dict[int, Tensor] = {}
    for net in (theirs, ours):
        net.inner.weight.data.mul_(START > 0)  # pruning
        net.head.bias.copy_(torch.arange(4.0))
        net.head.weight.add_(torch.linspace(0, 1, 32).reshape(4, 8), alpha=0.5)
        shadow = shadows[id(net)] = torch.ones(8, 6, dtype=torch.float64)
        assert shadow.mul_(0.9).add_(net.inner.weight, alpha=0.1) is shadow and type(shadow) is Tensor
        torch._foreach_lerp_([shadow], [net.inner.weight], 0.5)
    assert gap(ours, theirs) < 1e-12
    assert (shadows[id(ours)] - shadows[id(theirs)]).abs().max() < 1e-12
    assert torch.equal(full_of(torch.histc(ours.inner.weight, 5)), torch.histc(theirs.inner.weight, 5))
    assert f"{ours.inner.weight.mean():.6f}" == f"{theirs.inner.weight.mean():.6f}"


def _assigned(kinds: list[str]) -> None:
    """Averages that are swapped in and out, as vectors of parameters and pruned gradients are."""
    theirs, ours = pair(kinds)
    losses, stepped = [], []
    for net in (theirs, ours):
        before = {name: item.data for name, item in net.named_parameters()}
        for item in net.parameters():
            item.data = item.data * 0.5
        net.inner.weight.data = START.clone()
        losses.append(net(X).square().sum())
        losses[-1].backward()
        net.inner.weight.data.add_(1.0)
        net.head.bias.grad = torch.arange(4, dtype=torch.float64)
        sign = net.head.weight.grad.sign()
        net.head.weight.grad = sign
        assert net.head.weight.grad is sign
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        with pytest.raises((InputError, RuntimeError), match="shape|size"):
            net.head.bias.grad = torch.ones(3, dtype=torch.float64)
        stepped.append({name: item.clone() for name, item in net.state_dict().items()})
        for name, item in net.named_parameters():
            item.data = before[name]
        vector = nn.utils.parameters_to_vector(net.parameters())
        nn.utils.vector_to_parameters(vector * 2, net.parameters())
    assert abs(losses[0].item() - losses[1].item()) < 1e-12 and gap(ours, theirs) < 1e-12
    assert max(float((stepped[0][name] - stepped[1][name]).abs().max()) for name in stepped[0]) < 1e-12


def _exchanged() -> None:
    """Gradients of what takes a parameter's place for one call have no way to it."""
    theirs, ours = pair(["filter"])
    halves = [{name: item * 0.5 for name, item in net.named_parameters()} for net in (theirs, ours)]
    with pytest.raises(InputError, match="functional_call"):
        torch.func.functional_call(ours, halves[1], X)
    with torch.no_grad():
        outputs = [torch.func.functional_call(*each, X) for each in zip((theirs, ours), halves, strict=True)]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-12
    leaves = {name: item.detach().clone().requires_grad_() for name, item in ours.named_parameters()}
    with pytest.raises(InputError, match="functional_call"):
        torch.func.functional_call(ours, leaves, X).sum().backward()
    _, ours = pair(["filter"], Normed)
    ours.norm.running_mean = torch.ones(8, dtype=torch.float64)
    with pytest.raises(InputError, match=r"buffer norm.running_mean.*copy_"):
        ours(X)


def _refused() -> None:
    _, ours = pair(["filter"])
    weight = ours.inner.weight.detach()
    for use in (weight.numpy, weight.tolist, lambda: np.asarray(weight), lambda: torch.unique(weight)):
        with pytest.raises(InputError, match=r"autopar.full\(parallel\)") as error:
            use()
        assert len(str(error.value)) <= 400 and "test_beside_plain_tensors.py" in error.value.where
    runner = ours._autopar
    by_heads = replace(
        runner.tensors._parts["inner.weight"], layout=(Shard(0, atom=1),)
    )  # one head after the other
    runner.tensors._parts["inner.weight"] = by_heads
    take_plain_tensors(runner.tensors, weight.device_mesh, runner.tensors._obstacle())
    with pytest.raises(InputError, match="rows lie in another order") as error:
        weight.sub(START)
    assert len(str(error.value)) <= 400
    assert (ours(X).sum() + ours.inner.weight.square().sum()).requires_grad


def _all(kinds: list[str]) -> None:
    _losses(kinds)
    _in_place(kinds)
    _assigned(kinds)
    if kinds == ["filter"]:
        _exchanged()
        _refused()


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [["batch"], ["filter"]])
def test_plain_tensors_beside_parameters_are_whole(kinds: list[str], pools: Callable[[int], Pool]) -> None:
    pools(2).run(_all, kinds)
