"""Writes to parts of parameters and draws outside the program do what they do to the serial ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

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
START = torch.linspace(0, 1, 48, dtype=torch.float64).reshape(8, 6)
ROWS = torch.tensor([0, 5])
ONES = torch.ones(2, 6, dtype=torch.float64)


class Net(nn.Module):
    """Widths that two ranks share evenly, and one that they don't."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.middle, self.head = nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.inner(x).tanh()).tanh())
        return out


def _by_index(net: Any) -> None:
    weight, bias = net.inner.weight, net.inner.bias
    bias[5] = 0.5
    weight[1:6] *= 0.5
    weight[7] = weight[0] * 2
    weight[weight > 0.3] = 0.1
    weight[ROWS, 1] = torch.tensor([3.0, 4.0], dtype=torch.float64)
    net.middle.weight.grad[6] = 1.0
    net.middle.bias.data[-1] += 2.0


def _by_views(net: Any) -> None:
    weight = net.inner.weight.data
    weight[6].zero_()
    weight.narrow(0, 3, 2).mul_(3.0)
    weight.t()[1].add_(torch.arange(8.0))
    weight[4:].t().data[0].fill_(9.0)
    weight.chunk(2)[1].clamp_(max=0.2)
    weight.view(-1)[40:].sub_(1.0)
    weight[torch.tensor([1, 2])].mul_(100.0)  # a copy, of a plain tensor as well
    net.middle.weight.data.split(3)[2].neg_()
    net.middle.weight.fill_diagonal_(0.25)


def _by_operators(net: Any) -> None:
    weight = net.inner.weight
    weight.index_add_(0, ROWS, ONES)
    weight.index_copy_(0, ROWS + 1, ONES * 2)
    weight.scatter_(0, torch.tensor([[7, 6, 5, 4, 3, 2]]), 0.7)
    weight.index_fill_(0, torch.tensor([3]), 0.3)
    net.middle.bias.fill_(torch.tensor(0.4, dtype=torch.float64))
    net.middle.weight.cumsum_(0)
    nn.init.eye_(net.head.weight)
    torch.mul(net.middle.bias, 2.0, out=net.middle.bias)


def _by_lists(net: Any) -> None:
    weight, bias = net.inner.weight, net.inner.bias
    weight[[0, 7]] = weight[[7, 0]] * 2
    weight[0] = weight[range(2, 6), [1, 0, 5, 2]].sum() + weight[np.array([3])].mean(0)
    bias[:3] = bias[[False] * 5 + [True] * 3] + weight[torch.arange(8) > 4].sum()
    weight[:, [1, 2]] = weight[..., [2, 1]]
    weight[5] = torch.quantile(weight, 0.3, dim=0) + weight[[]].sum()
    torch._foreach_mul_([weight[1], bias[2:4], net.head.weight], 3.0)
    torch._foreach_add_([*weight.grad.chunk(4)[2:], bias.data], 1.0)


def _by_draws(net: Any) -> None:
    nn.init.xavier_uniform_(net.inner.weight)
    net.middle.weight.normal_()
    net.middle.bias.add_(torch.randn_like(net.middle.bias))
    net.inner.bias.data[2:6].uniform_()
    net.head.weight.mul_(torch.bernoulli(torch.full_like(net.head.weight, 0.5)))


class Scaled(Net):
    """A parameter that every rank has whole, beside those that are split."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def _pair(kinds: list[str], net: type[Net] = Net) -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = net().double()
    compile = forced_compiler(Mesh((2,)), kinds)
    ours: Any = ParallelModule(copy.deepcopy(theirs), compile, describe=describe, device=torch.device("cpu"))
    ours.prepare(X)
    return theirs, ours


def _alike(kinds: list[str]) -> None:
    for write in (_by_index, _by_views, _by_operators, _by_lists, _by_draws):
        theirs, ours = _pair(kinds)
        for net in (theirs, ours):
            net(X).square().sum().backward()
            torch.manual_seed(3)
            with torch.no_grad():
                write(net)
            torch.optim.SGD(net.parameters(), lr=0.1).step()
        mine, full = ours.state_dict(), theirs.state_dict()
        for name, value in full.items():
            assert (mine[name] - value).abs().max() < 1e-12, (write.__name__, name)
        assert (ours(X) - theirs(X)).abs().max() < 1e-12
    _penalties(kinds)
    if kinds == ["filter"]:
        _with_gradients()
        _from_unequal_seeds()
        _of_another_mesh()
        _in_blocks()


def _with_gradients() -> None:
    """What is written into by an index is part of the graph of gradients; no leaf is, and no view."""
    theirs, ours = _pair(["filter"])
    for net in (theirs, ours):
        scaled = net.inner.weight * 2
        scaled[5] = net.inner.bias[:6]
        scaled[1:3] = scaled[1:3] * 3.0
        (scaled.square().sum() + scaled[[0, 2, 2]].sum()).backward()
        with pytest.raises(RuntimeError, match="leaf"):
            net.inner.bias[5] = 0.0
    with pytest.raises(InputError, match="no_grad"):
        (ours.inner.weight * 2)[1:3].mul_(3.0)
    with pytest.raises(InputError, match=r"quantile of a sharded .* of \.detach\(\)"):
        torch.quantile(ours.inner.weight, 0.3, dim=0)
    rows = ours.inner.weight.detach()
    with pytest.raises(InputError, match="share elements.*one after the other"):
        torch._foreach_mul_([rows[1:3], rows[2]], 2.0)
    for name in ("weight", "bias"):
        mine, full = (getattr(net.inner, name).grad for net in (ours, theirs))
        assert (full_of(mine) - full).abs().max() < 1e-12, name


def _penalties(kinds: list[str]) -> None:
    """Means of losses of parameters, whose gradients count all elements."""
    theirs, ours = _pair(kinds)
    for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits):
        for net in (theirs, ours):
            net.zero_grad()
            (loss(net.inner.weight, START) + loss(net.middle.bias, START[0, :1].expand(7))).backward()
        for layer in ("inner", "middle"):
            for name, full in getattr(theirs, layer).named_parameters():
                mine = getattr(ours, layer).get_parameter(name).grad
                assert (mine is None) == (full.grad is None)
                assert full.grad is None or (full_of(mine) - full.grad).abs().max() < 1e-12, loss


def _from_unequal_seeds() -> None:
    """A whole parameter beside split ones is one rank's draw; where all are whole, the next call tells."""
    _, ours = _pair(["filter"], Scaled)
    torch.manual_seed(torch.distributed.get_rank())
    assert ours.scale.placements == (Replicate(),)
    drawn = ours.scale.detach().normal_().to_local()
    first = drawn.clone()
    torch.distributed.broadcast(first, 0)
    assert torch.equal(drawn, first)
    _, ours = _pair(["batch"])
    torch.manual_seed(torch.distributed.get_rank())
    ours.inner.weight.detach().normal_()
    torch.manual_seed(0)
    with pytest.raises(InputError, match=r"inner\.weight"):
        ours(X)


def _of_another_mesh() -> None:
    """Tensors of a mesh that isn't ours are torch's own affair."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("theirs",))
    whole = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
    assert torch.rand_like(whole).shape == (4,) and whole.fill_(2.0).sum().item() == 8.0
    whole[1] = 0.0
    assert whole.sum().item() == 6.0


def _in_blocks() -> None:
    _, ours = _pair(["filter"])
    runner = ours._autopar
    parts = runner.tensors._parts
    parts["inner.weight"] = replace(parts["inner.weight"], layout=(Shard(0, atom=1),))
    weight = ours.inner.weight.detach()
    take_plain_tensors(runner.tensors, weight.device_mesh, runner.tensors._obstacle(), in_blocks=True)
    writes: list[Callable[[], Any]] = [
        lambda: weight.__setitem__(0, 0.0),
        lambda: weight[0].zero_(),
        lambda: weight.index_fill_(0, torch.tensor([3]), 0.3),
        lambda: torch._foreach_zero_([weight[0]]),
    ]
    for write in writes:
        with pytest.raises(InputError, match="in blocks"):
            write()
    weight.normal_().mul_(0.1)
    take_plain_tensors(runner.tensors, weight.device_mesh, staged=True)  # each stage would draw for itself
    for draw in (weight.normal_, lambda: torch.randn_like(weight)):
        with pytest.raises(InputError, match=r"autopar.full\(parallel\)"):
            draw()


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [["batch"], ["filter"]])
def test_parameters_are_written_in_part_as_serially(kinds: list[str], pools: Callable[[int], Pool]) -> None:
    pools(2).run(_alike, kinds)
