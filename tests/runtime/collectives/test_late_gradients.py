"""Programs whose sums start early, and whose gradients of weights are late, train as the serial model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.mesh import Mesh
from autopar.errors import CheckError
from autopar.rewrite.render import describe
from autopar.runtime.collectives import groups, late_gradients, transport
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler, train_together

Pools = Callable[[int], Pool]
CPU = torch.device("cpu")
EXACT = 1e-12  # sums in another order, float64
STEPS = 3
KINDS = {name: ["filter"] for name in ("left", "right", "narrow")} | {
    **{name: ["channel"] for name in ("out", "aside")},
    "*": ["none"],
}


class Branches(nn.Module):
    """Two branches that read one activation; the sum of the first one is needed after the second."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.first = nn.Linear(6, 12)
        self.left, self.out = nn.Linear(12, rows), nn.Linear(rows, 12)
        self.right, self.aside = nn.Linear(12, rows, bias=False), nn.Linear(rows, 12)
        self.narrow = nn.Conv1d(3, rows, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        a = self.out(torch.tanh(self.left(h)))
        b = self.aside(torch.tanh(self.right(h)))
        c = self.narrow(torch.tanh(b).unflatten(1, (3, 4)))
        return F.mse_loss(a + b, y) + c.square().mean()


def make_net(rows: int) -> Branches:
    torch.manual_seed(0)
    return Branches(rows).double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(8, 12, generator=generator, dtype=torch.float64)


def _train(rows: int, *, wired: bool) -> list[str]:
    """Trains beside the serial model; in which order exchanges begin, and gradients are made late."""
    begun: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begun.append(name)
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("start_all_reduce", "start_reduce_scatter", "start_all_gather"):
            patch.setattr(transport, name, noted(name, getattr(transport, name)))
        patch.setattr(late_gradients, "kept", noted("late", late_gradients.kept))
        if not wired:
            patch.setattr(groups, "wires", lambda _: None)
            patch.setattr(transport, "SMALL_BYTES", 0)
        compiler = forced_compiler(Mesh((2,)), KINDS)
        compiler = replace(compiler, request=replace(compiler.request, overlap=True))
        serial = make_net(rows)
        ours = ParallelModule(make_net(rows), compiler, describe=describe, device=CPU)
        ours.prepare(*batch(0))
        train_together((serial, ours), map(batch, range(STEPS)))
        wanted = serial.state_dict()
        for name, value in ours.state_dict().items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert (full - wanted[name]).abs().max() < EXACT, name
    return begun


@pytest.mark.parametrize("wired", [True, False], ids=["streams", "process group"])
@pytest.mark.parametrize("rows", [6, 5], ids=["even", "uneven"])
def test_training_equals_serial_training(rows: int, wired: bool, pools: Pools) -> None:
    """Forward one branch's sum starts beside the other branch; backward the sum of what both read, and that
    of what the convolution reads, start before the gradients of the weights are made."""
    ours, others = pools(2).run(_train_keyed, rows, wired)
    assert ours == others
    forward, backward = ["start_all_reduce", "start_all_gather"], ["start_all_reduce", "late", "late"]
    assert ours == [*forward, *backward, *backward, "late"] * STEPS


def _train_keyed(rows: int, wired: bool) -> list[str]:
    return _train(rows, wired=wired)


def test_a_promise_that_was_added_to_something_is_refused() -> None:
    ours = torch.ops.autopar
    x, weight = torch.randn(3, 4), torch.randn(2, 4, requires_grad=True)
    shared = ours.late_gradient(weight)
    total = ours.late_linear(x, shared, None).sum() + ours.late_linear(x, shared, None).sum()
    with pytest.raises(CheckError, match="one product for each late gradient"):
        total.backward()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_late_gradients_are_those_of_the_product(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    ours = torch.ops.autopar
    shapes = {"linear": ((2, 3, 4), (5, 4)), "convolution": ((2, 4, 7), (6, 2, 3))}
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes[kind])
    offset = torch.randn(len(weight), dtype=torch.float64, requires_grad=True) if bias else None
    how = {"linear": (), "convolution": ([2], [1], [1], False, [0], 2)}[kind]
    late = [each if each is None else ours.late_gradient(each) for each in (weight, offset)]
    found = getattr(ours, f"late_{kind}")(x, *late, *how)
    plain = F.linear(x, weight, offset) if kind == "linear" else torch.convolution(x, weight, offset, *how)
    leaves = [each for each in (x, weight, offset) if each is not None]
    seed = torch.randn_like(plain)
    grads = [torch.autograd.grad(y, leaves, seed) for y in (found, plain)]
    assert torch.equal(found, plain)
    assert all(torch.allclose(one, other, atol=EXACT) for one, other in zip(*grads, strict=True))
