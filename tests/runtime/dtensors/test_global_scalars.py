"""Numbers read from DTensors are the serial tensor's, on every rank; of one stage's they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.dtensors import global_scalars
from autopar.runtime.dtensors.global_scalars import _meshes, read_whole_scalars
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler

Pools = Callable[[int], Pool]
EXACT = 1e-12  # sums in another order, float64

NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: float(x.sum()),
    "mean": lambda x: x.mean().item(),
    "absolute mean": lambda x: x.abs().mean().item(),
    "norm": lambda x: x.norm().item(),
    "largest norm": lambda x: torch.linalg.vector_norm(x, float("inf")).item(),
    "sum of norms": lambda x: torch.stack([x.norm(), x.norm()]).sum().item(),
    "norms of columns": lambda x: x.norm(dim=0).mean().item(),
    "norms of rows": lambda x: x.norm(dim=1).mean().item(),
    "norm of norms": lambda x: torch.stack([x.norm(), x.norm(1)]).norm().item(),
    "sum of squares": lambda x: float(sum([(x**2).sum(), (x * x).sum()])) ** 0.5,
    "foreach norm": lambda x: torch._foreach_norm([x])[0].item(),
    "total norm": lambda x: torch.nn.utils.get_total_norm([x, x]).item(),
    "deviation": lambda x: x.std().item(),
    "variance": lambda x: x.var(correction=0).item(),
    "largest": lambda x: x.max().item(),
    "least": lambda x: x.amin().item(),
    "largest magnitude": lambda x: x.abs().max().item(),
    "dot": lambda x: (x * (x + 1)).sum().item(),
    "count": lambda x: (x > 0).sum().item(),
    "zeros": lambda x: torch.count_nonzero(x > 2).item(),
    "finite": lambda x: bool(torch.isfinite(x).all()),
    "a NaN": lambda x: bool(torch.isnan(x).any()),
    "equal": lambda x: bool((x == x.clone()).all()),
    "same": lambda x: torch.equal(x, x.clone()),
    "close": lambda x: torch.allclose(x, x + 1e-3),
    "truth": lambda x: 1 if x.sum() > 3 else 0,
    "median": lambda x: x.median().item(),
    "product": lambda x: x.prod().item(),
}


def values(rows: int) -> Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


def mesh_of(*shape: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", shape)
    read_whole_scalars(mesh, staged=False)
    return mesh


def laid(full: Tensor, mesh: DeviceMesh) -> DTensor:
    """Rows over the first axis, as torch.chunk gives them, which may be none."""
    parts = full.chunk(mesh.size(0))
    place = mesh.get_local_rank(0)
    mine = parts[place].clone() if place < len(parts) else full[:0].clone()
    placements = [Shard(0)] + [Replicate()] * (mesh.ndim - 1)
    return DTensor.from_local(mine, mesh, placements, run_check=False, shape=full.shape, stride=(3, 1))


def _numbers(rows: int, shape: tuple[int, ...]) -> dict[str, Any]:
    mesh = mesh_of(*shape)
    numbers = {name: read(laid(values(rows), mesh)) for name, read in NUMBERS.items()}
    with torch.inference_mode():  # in which torch takes no operator apart by itself
        again = {name: read(laid(values(rows), mesh)) for name, read in NUMBERS.items()}
    assert all(_near(numbers[name], again[name]) for name in numbers)
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "shape"),
    [(4, (2,)), (5, (2,)), (1, (2,)), (5, (4,)), (7, (2, 2))],
    ids=["even", "uneven", "a rank without rows", "two ranks and a half", "two axes"],
)
def test_a_number_is_the_serial_one(pools: Pools, rows: int, shape: tuple[int, ...]) -> None:
    serial = {name: read(values(rows)) for name, read in NUMBERS.items()}
    for numbers in pools(torch.Size(shape).numel()).run(_numbers, rows, shape, timeout=30.0):
        wrong = {
            name: (numbers[name], serial[name]) for name in serial if not _near(numbers[name], serial[name])
        }
        assert not wrong


def _near(one: float, other: float) -> bool:
    return one == pytest.approx(other, rel=EXACT, abs=EXACT, nan_ok=True)


def _finite() -> list[bool]:
    gradient = laid(values(4), mesh_of(2))
    if dist.get_rank() == 1:
        gradient._local_tensor[0, 0] = float("inf")
    return [
        bool(torch.isfinite(gradient).all()),
        bool(torch.isinf(gradient.sum())),
        bool(gradient.norm() < 1e3),
    ]


def test_what_one_rank_holds_decides_for_all(pools: Pools) -> None:
    assert pools(2).run(_finite) == [[False, True, False]] * 2


def _foreign() -> float:
    _meshes.clear()
    return laid_on_own_mesh().sum().item()


def laid_on_own_mesh() -> DTensor:
    return DTensor.from_local(
        torch.ones(2, 3), init_device_mesh("cpu", (2,), mesh_dim_names=("mine",)), [Shard(0)]
    )


def test_numbers_on_other_meshes_are_what_torch_reads(pools: Pools) -> None:
    assert pools(2).run(_foreign) == [6.0, 6.0]


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "flat": lambda x: x.flatten().norm().item(),
    "quantile": lambda x: x.quantile(0.3).item(),
}


def _refused(name: str) -> None:
    with pytest.raises(
        InputError, match=r"scalars.py:\d+: .*found aten.* wanted an operator of elements.*gather"
    ) as told:
        REFUSED[name](laid(values(5), mesh_of(2)))
    assert len(str(told.value)) < 500


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_operator_of_elements_is_refused_by_name(pools: Pools, name: str) -> None:
    pools(2).run(_refused, name)


# -- penalties ------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers and a number that learns."""

    def __init__(self, *, number: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 5, dtype=torch.float64), nn.Linear(5, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64)) if number else 2.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(torch.tanh(self.first(x))) * self.scale, y)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 9, generator=generator, dtype=torch.float64).split((6, 3), 1)
    return x, y


def pair(kind: str, *, micro_batches: int = 1) -> tuple[Net, ParallelModule]:
    compiler = forced_compiler(Mesh((2,)), [kind], pipeline=Pipeline(micro_batches=micro_batches))
    ours = ParallelModule(Net(), compiler, describe=describe, device=torch.device("cpu"))
    ours.prepare(*batch())
    return Net(), ours


Penalty = Callable[[Tensor, list[Tensor], list[Tensor]], Tensor]
PENALTIES: dict[str, Penalty] = {
    "L2": lambda loss, now, _: loss + 0.1 * sum((item**2).sum() for item in now),
    "L1 and plain sums": lambda loss, now, _: 2 * loss + sum(item.abs().sum() + item.sum() for item in now),
    "first the penalty": lambda loss, now, _: sum(item.norm() for item in now) - loss,
    "proximal": lambda loss, now, old: (
        loss + sum(((p - q) ** 2).mean() for p, q in zip(now, old, strict=True))
    ),
    "Fisher": lambda loss, now, old: (
        loss + sum((q * q * (p - q) ** 2).sum() for p, q in zip(now, old, strict=True))
    ),
    "a product": lambda loss, now, _: loss * (1 + sum(item.norm() for item in now)),
    "both ways": lambda loss, now, _: loss.sqrt() + loss * now[0].abs().max(),
    "orthogonal": lambda loss, now, _: loss + (now[0] @ now[0].T).square().sum() + now[2].std(),
    "stacked": lambda loss, now, _: loss + torch.stack([item.norm() for item in now]).sum(),
    "spread": lambda loss, now, _: loss + torch.logsumexp(now[0], (0, 1)) + now[2].softmax(1).max(),
}


def _penalised(kind: str, name: str) -> None:
    models = pair(kind)
    old = [[item.detach() * 0.9 for item in _ordered(model)] for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) for model in models]
    for _ in range(3):
        losses = []
        for model, before, optimizer in zip(models, old, optimizers, strict=True):
            optimizer.zero_grad()
            loss = PENALTIES[name](model(*batch()), _ordered(model), before)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert _near(*losses), losses
    serial, ours = models[0].state_dict(), models[1].state_dict()
    for target, value in serial.items():
        torch.testing.assert_close(ours[target], value, rtol=1e-10, atol=1e-12)


def _ordered(model: nn.Module) -> list[Tensor]:
    held: dict[str, Any] = dict(model.named_parameters())
    return [held[name] for name in ("first.weight", "first.bias", "second.weight", "second.bias", "scale")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batch", "filter", "channel"])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_beside_the_loss_learns_as_in_the_serial_model(pools: Pools, kind: str, name: str) -> None:
    pools(2).run(_penalised, kind, name, timeout=30.0)


def _apart(first: bool) -> None:
    """The penalty's own backward, before or after the steps' of two micro-batches."""
    serial, ours = pair("filter", micro_batches=2)
    for model in (serial, ours):
        penalty = sum(item.sum() + item.norm() for item in _ordered(model))
        if first:
            penalty.backward()
        if isinstance(model, ParallelModule):
            model.train_step(*batch())
        else:
            model(*batch()).backward()
        if not first:
            penalty.backward()
    for name, parameter in serial.named_parameters():
        torch.testing.assert_close(
            ours.gather(name, dict(ours.named_parameters())[name].grad), parameter.grad
        )


@pytest.mark.parametrize("first", [True, False])
def test_a_penalty_may_have_a_backward_of_its_own(pools: Pools, first: bool) -> None:
    pools(2).run(_apart, first, timeout=30.0)


# -- stages ---------------------------------------------------------------------------------------

BY_HAND: dict[str, Callable[[list[Any]], Any]] = {
    "item": lambda items: items[0].grad.norm().item(),
    "truth": lambda items: all(torch.isfinite(item.grad).all() for item in items),
    "stack": lambda items: torch.stack([item.grad.norm() for item in items]).norm(),
    "sum": lambda items: sum((item.grad**2).sum() for item in items),
    "comparison": lambda items: torch.equal(items[0], items[0].clone()),
    "vector": nn.utils.parameters_to_vector,
    "vector by hand": lambda items: torch.cat([item.flatten() for item in items]),
    "of a vector": lambda items: nn.utils.vector_to_parameters(
        torch.zeros(sum(item.numel() for item in items)), items
    ),
}


def _by_hand(name: str, number: bool) -> None:
    global_scalars._with_numbers.clear()  # models of other tests may live on an equal mesh
    staged = forced_compiler(Mesh((1,)), ["batch"], pipeline=Pipeline(2, 2, starts=(0, 2)))
    ours = ParallelModule(
        Net(number=number), staged, describe=describe, device=torch.device("cpu"), by_steps=True
    )
    ours.train_step(*batch())
    optimizer = torch.optim.AdamW(ours.parameters(), foreach=False)
    optimizer.step()
    items = [item for item in ours.parameters() if item.grad is not None]
    assert len(items) > 1
    with pytest.raises(
        InputError, match=r"test_global_scalars.py:\d+: .* found a (norm|number|comp|vector).*clip_grad_norm_"
    ) as told:
        BY_HAND[name](items)
    assert len(str(told.value).partition(": found")[2]) < 400


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [*((name, False) for name in BY_HAND), ("stack", True)])
def test_of_one_stages_parameters_no_number_is_made_by_hand(pools: Pools, name: str, number: bool) -> None:
    pools(2).run(_by_hand, name, number, timeout=30.0)
