"""Steps on DTensors: fused where that is right, on lists elsewhere, always the serial numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.core.mesh import Mesh
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.optimizers.optimizers import _hooks, at_steps
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler
from tests.whole_tensors import full_of

Pools = Callable[[int], Pool]
EXACT = 1e-12  # sums in another order, float64


class Net(nn.Module):
    """Two layers, the second of which may be left out."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype)

    def forward(self, x: Tensor, y: Tensor, *, deep: bool = True) -> Tensor:
        h = torch.tanh(self.first(x))
        return F.mse_loss(self.second(h) if deep else h, y)


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64).to(dtype).unbind()
    return x, y


def pair(dtype: torch.dtype = torch.float64, force: str = "filter") -> tuple[Net, ParallelModule]:
    ours = ParallelModule(
        Net(dtype), forced_compiler(Mesh((2,)), [force]), describe=describe, device=torch.device("cpu")
    )
    ours.prepare(*batch(dtype))
    return Net(dtype), ours


def step(optimizer: torch.optim.Optimizer) -> str:
    """Take a step; which way it took."""
    seen: list[str] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        (group,) = optimizer.param_groups
        seen.append("fused" if group["fused"] else "lists" if group["foreach"] else "loop")

    handle = optimizer.register_step_pre_hook(look)
    optimizer.step()
    handle.remove()
    return seen[0]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda items: torch.optim.SGD(items, 0.1),
    "nesterov": lambda items: torch.optim.SGD(items, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampened": lambda items: torch.optim.SGD(items, 0.1, momentum=0.9, dampening=0.5, maximize=True),
    "rate as a tensor": lambda items: torch.optim.SGD(items, torch.tensor(0.1), momentum=0.9),
    "adam": lambda items: torch.optim.Adam(items, 0.01, amsgrad=True, weight_decay=0.1),
    "adamw": lambda items: torch.optim.AdamW(items, 0.01),
}


def _fused(name: str) -> None:
    models = pair()
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(*batch()).backward()
        assert [step(optimizer) for optimizer in optimizers] == ["loop", "fused"]
        (group,) = optimizers[1].param_groups
        assert group["fused"] is None and group["foreach"] is None
    assert _gap(*models) < EXACT


def _gap(serial: Net, ours: ParallelModule) -> float:
    found = ours.state_dict()
    return max(float((found[name] - item).abs().max()) for name, item in serial.state_dict().items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fused_step_is_the_serial_step(name: str, pools: Pools) -> None:
    pools(2).run(_fused, name)


def _momentum_that_begins_later() -> None:
    models = pair()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
    ways = []
    for deep in (False, True, True):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(*batch(), deep=deep).backward()
        ways.append([step(optimizer) for optimizer in optimizers][1])
    assert ways == ["fused", "lists", "fused"]
    assert _gap(*models) < EXACT


def test_momenta_that_begin_at_different_steps_are_no_fused_step(pools: Pools) -> None:
    pools(2).run(_momentum_that_begins_later)


def _other_ways() -> None:
    _, ours = pair()
    ours(*batch()).backward()
    ways = [({"foreach": False}, "loop"), ({"foreach": True}, "lists"), ({"fused": False}, "lists")]
    for chosen, way in ways:
        assert step(torch.optim.SGD(ours.parameters(), 0.1, **chosen)) == way
    optimizer, seen = torch.optim.SGD(ours.parameters(), 0.1), list[Any]()
    optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["fused"]))
    optimizer.step(lambda: ours(*batch()))
    assert seen == [None]
    _, half = pair(torch.bfloat16)
    half(*batch(torch.bfloat16)).backward()
    assert step(torch.optim.SGD(half.parameters(), 0.1)) == "lists"


def test_the_users_choice_and_16_bits_are_not_fused(pools: Pools) -> None:
    pools(2).run(_other_ways)


def _between_forward_and_backward() -> None:
    for model in pair(force="batch"):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(*batch()).backward()
        late = model(*batch())
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()


def test_a_step_between_forward_and_backward_is_refused_as_serially(pools: Pools) -> None:
    pools(2).run(_between_forward_and_backward)


def _odd_gradient() -> None:
    _, ours = pair()
    ours(*batch()).backward()
    weight = ours.get_parameter("first.weight")
    assert weight.grad is not None
    weight.grad = weight.grad.t().contiguous().t()  # the same numbers, columns first
    assert step(torch.optim.SGD(ours.parameters(), 0.1)) == "lists"
    with pytest.raises(InputError, match="lies otherwise"):
        torch.optim.SGD(ours.parameters(), 0.1, fused=True).step()


def test_a_gradient_that_lies_otherwise_is_not_fused(pools: Pools) -> None:
    pools(2).run(_odd_gradient)


def _unlike_placements() -> None:
    """Of fused Adam, called by itself: a gradient that each rank has whole, of a weight that lies in rows."""
    mesh = init_device_mesh("cpu", (2,))
    weight, slope = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    options |= {"amsgrad": False, "maximize": False}
    serial = weight.clone()
    zeros = torch.zeros_like(weight)
    torch._fused_adam_([serial], [slope], [zeros.clone()], [zeros.clone()], [], [torch.ones(())], **options)
    for placements in ([Shard(0)], [Replicate()]):
        ours = distribute_tensor(weight, mesh, [Shard(0)])
        gradient = distribute_tensor(slope, mesh, placements)
        moments = [distribute_tensor(zeros, mesh, [Shard(0)]) for _ in range(2)]
        torch._fused_adam_([ours], [gradient], [moments[0]], [moments[1]], [], [torch.ones(())], **options)
        assert torch.equal(full_of(ours), serial)


def test_fused_adam_goes_torch_s_way_where_a_gradient_lies_otherwise(pools: Pools) -> None:
    pools(2).run(_unlike_placements)


def test_an_owner_that_dies_during_a_step_leaves_torch_s_hooks_alone() -> None:
    """Garbage is collected at any moment, also while torch walks through its hooks."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    owners = [nn.Identity(), nn.Identity()]
    seen = []

    def die(*_: object) -> None:
        owners.clear()
        seen.append(len(_hooks))

    for owner in owners:
        at_steps(register_optimizer_step_pre_hook, owner, die)
    del owner
    optimizer.step()
    assert not owners and len(seen) == 2
    at_steps(register_optimizer_step_pre_hook, weight, die)
    optimizer.step()
    assert len(seen) == 3 and seen[-1] < seen[0]
    _hooks.pop()[1].remove()
