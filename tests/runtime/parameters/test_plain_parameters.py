"""Where each rank has all parameters whole they are torch's own, and so is what is beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler

Pools = Callable[[int], Pool]
EXACT = 1e-12


class Net(nn.Module):
    """Two layers, the second of which is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.second(torch.tanh(self.first(x))))).pow(2).mean()


def pair(
    ranks: int, kind: type[Net] = Net, bucket_bytes: int | None = None, **options: Any
) -> tuple[Net, ParallelModule]:
    torch.manual_seed(0)
    serial, model = kind().double(), kind().double()
    model.load_state_dict(serial.state_dict())
    compiler = forced_compiler(Mesh((ranks,)), ["batch"], **options)
    by_steps = "pipeline" in options
    device = torch.device("cpu")
    ours = ParallelModule(
        model, compiler, describe=describe, device=device, by_steps=by_steps, bucket_bytes=bucket_bytes
    )
    ours.prepare(batch())
    assert not any(isinstance(item, DTensor) for item in ours.parameters())
    return serial, ours


def batch() -> Tensor:
    return torch.arange(32, dtype=torch.float64).view(8, 4).sin()


def gradient_gap_of(ours: Tensor, theirs: Tensor) -> float:
    assert ours.grad is not None and theirs.grad is not None
    return float((ours.grad - theirs.grad).abs().max())


def gradient_gap(ours: nn.Module, serial: nn.Module) -> float:
    pairs = zip(ours.parameters(), serial.parameters(), strict=True)
    return max(gradient_gap_of(*pair) for pair in pairs)


def _alone() -> None:
    serial, ours = pair(1)
    seen: dict[nn.Module, list[str]] = {serial: [], ours: []}
    for net, told in seen.items():
        net.first.weight.register_hook(lambda gradient: gradient.clamp(max=0))
        net.first.bias.register_post_accumulate_grad_hook(lambda _, told=told: told.append("bias"))
        loss = net(batch()) + sum(item.pow(2).sum() for item in net.parameters())
        loss.backward(retain_graph=True)
        loss.backward(inputs=[net.second.weight])
        chosen = torch.autograd.grad(net(batch()), [net.second.bias])[0]
        net.second.bias.grad += chosen
        nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=True)
    assert gradient_gap(ours, serial) < EXACT and seen[ours] == seen[serial] == ["bias"]


def test_one_device_leaves_parameters_hooks_and_chosen_gradients_to_torch(pools: Pools) -> None:
    pools(1).run(_alone)


def _micro_batches() -> None:
    serial, ours = pair(1, pipeline=Pipeline(micro_batches=2))
    ours.train_step(batch())
    serial(batch()).backward()
    assert gradient_gap(ours, serial) < EXACT
    ours.first.weight.register_hook(lambda gradient: gradient.clamp(max=0))
    with pytest.raises(InputError, match=r"parameter first.weight: found a hook on its gradient"):
        ours.train_step(batch())


def test_a_hook_that_micro_batches_would_call_several_times_is_refused(pools: Pools) -> None:
    pools(1).run(_micro_batches)


def _together(zeros: str) -> None:
    serial, ours = pair(2)
    for net in (serial, ours):
        optimizer = torch.optim.AdamW(net.parameters(), 0.1, fused=True)
        for step in range(3):
            optimizer.zero_grad(set_to_none=zeros == "none")
            for share in range(2):
                penalty = sum(item.norm() for item in net.parameters()) if share == step % 2 else 0.0
                (net(batch() + share) + 0.1 * penalty).backward(retain_graph=True)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=True)
            if step < 2:
                optimizer.step()
    assert gradient_gap(ours, serial) < EXACT
    loss = ours(batch())
    with pytest.raises(InputError, match="gradients of chosen parameters"):
        torch.autograd.grad(loss, [ours.first.weight])
    penalty = ours.first.weight.pow(2).sum()
    assert torch.equal(torch.autograd.grad(penalty, [ours.first.weight])[0], 2 * ours.first.weight)


@pytest.mark.parametrize("zeros", ["none", "zeros"])
def test_sums_of_several_ranks_come_beside_penalties(pools: Pools, zeros: str) -> None:
    pools(2).run(_together, zeros)


class Returning(Net):
    """Its output is a loss and a weight of its own."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.first.bias


def _moved(ranks: int) -> None:
    """Gradients of a call whose parameter has got other memory since, and of one after."""
    serial, ours = pair(ranks)
    for net in (serial, ours):
        earlier = net(batch())
        for values in (torch.full((6, 6), 0.25, dtype=torch.float64), torch.ones(6, 6).double() / 3):
            net.second.weight.data = values
            earlier = earlier + net(batch())
        earlier.backward()
    assert gradient_gap(ours, serial) < EXACT
    assert abs(float(ours(batch()) - serial(batch()))) < EXACT


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_that_data_is_given_is_read_from_then_on(pools: Pools, ranks: int) -> None:
    pools(ranks).run(_moved, ranks)


def _turned(ranks: int) -> None:
    """A parameter that is given another view of its own memory, of the same shape."""
    serial, ours = pair(ranks)
    for net in (serial, ours):
        net(batch())
        net.second.weight.data = net.second.weight.data.t()
        net(batch()).backward()
    assert gradient_gap(ours, serial) < EXACT
    assert abs(float((ours(batch()) - serial(batch())).detach())) < EXACT


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_view_of_a_parameters_memory_is_read_from_then_on(pools: Pools, ranks: int) -> None:
    pools(ranks).run(_turned, ranks)


def _returned(ranks: int) -> None:
    serial, ours = pair(ranks, kind=Returning)
    for net in (serial, ours):
        loss, bias = net(batch())
        (2 * bias).sum().backward()
        loss.backward()
    assert gradient_gap_of(ours.first.bias, serial.first.bias) < EXACT


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_that_is_an_output_gets_its_gradient(pools: Pools, ranks: int) -> None:
    pools(ranks).run(_returned, ranks)


def _raised() -> None:
    """A backward that raises leaves nothing to the next one."""
    serial, ours = pair(2)

    def fail(_: Tensor) -> None:
        raise RuntimeError("in backward")

    x = batch().requires_grad_()
    x.register_hook(fail)
    with pytest.raises(RuntimeError, match="in backward"):
        ours(x).backward()
    for net in (serial, ours):
        net.zero_grad()
        net(batch()).backward()
    assert gradient_gap(ours, serial) < EXACT


def test_what_a_backward_that_raised_has_left_is_dropped(pools: Pools) -> None:
    pools(2).run(_raised)


def _in_buckets(micro_batches: int) -> None:
    """Buckets of one gradient each, whose sums begin in the midst of backward."""
    serial, ours = pair(2, bucket_bytes=1, pipeline=Pipeline(micro_batches=micro_batches))
    for step in range(2):
        for net in (serial, ours):
            net.zero_grad()
        serial(batch() + step).backward()
        ours.train_step(batch() + step)
        assert gradient_gap(ours, serial) < EXACT
    serial.zero_grad()
    ours.zero_grad()
    with torch.no_grad():
        ours(batch())
    for net in (serial, ours):
        first, second = net(batch()), net(2 * batch())  # two uses of the same leaves, three backwards
        (first + second).backward(retain_graph=True)
        first.backward(retain_graph=True)
        second.backward()
    assert gradient_gap(ours, serial) < EXACT


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_sums_in_many_buckets_are_the_serial_gradients(pools: Pools, micro_batches: int) -> None:
    pools(2).run(_in_buckets, micro_batches)


def _drawn() -> None:
    _, ours = pair(2)
    for _ in range(5):
        ours(batch())
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(ours.first.weight)
    with pytest.raises(InputError, match=r"first.weight on rank 1 unlike .*; .*seed"):
        ours(batch())


def test_draws_that_differ_between_ranks_are_found_at_the_next_call(pools: Pools) -> None:
    pools(2).run(_drawn)


def _samples() -> None:
    torch.manual_seed(0)
    compiler = forced_compiler(Mesh((2,)), ["batch"])
    ours = ParallelModule(
        Net().double(), compiler, describe=describe, device=torch.device("cpu"), local_inputs=True
    )
    ours.prepare(batch())
    with pytest.raises(InputError, match="a plain tensor of this rank's samples"):
        F.mse_loss(ours.first.weight, batch()[:6])


def test_what_ranks_compute_of_their_own_samples_is_still_refused(pools: Pools) -> None:
    pools(2).run(_samples)
