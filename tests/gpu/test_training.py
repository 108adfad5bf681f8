"""Parallel modules on a GPU train as the serial model does there, by every option that changes a program."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.gpu.nets import NETS

STEPS = 4
EXACT = 1e-9  # sums in another order, float64
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": "all"},
    "offload": {"offload": "all"},
    "both": {"recompute": "all", "offload": "all"},
    "micro_batches": {"micro_batches": 2, "stages": 1},
    "overlap": {"overlap": True},
    "compile": {"compile": True},
}


def parallel_of(model: nn.Module, batch: tuple[Tensor, Tensor], **options: Any) -> Any:
    cluster = autopar.ClusterSpec.local(1)
    assert cluster.device_type == "cuda"
    return autopar.parallelize(
        model, cluster, batch, loss_fn=F.cross_entropy, quiet=True, **{"measure": False, **options}
    )


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0


def train(
    model: nn.Module, loss_of: Callable[[], Tensor], *, backward: bool = True
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of some steps from one seed, and the state after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return losses, {name: item.detach() for name, item in model.state_dict().items()}


def gap(ours: Any, serial: Any) -> float:
    """The largest difference of losses and states."""
    pairs = list(zip(ours[0], serial[0], strict=True))
    pairs += [(ours[1][name], serial[1][name]) for name in serial[1]]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("net", NETS)
def test_training_equals_serial_training(net: str, option: str) -> None:
    torch.manual_seed(0)
    model, batch = NETS[net](torch.float64)
    by_steps = option == "micro_batches"
    if by_steps or option == "compile":  # parts of a batch, and compiled kernels, draw other masks
        without_dropout(model)
    if by_steps:  # and of parts of a batch norms are others
        model.apply(lambda module: module.eval() if isinstance(module, nn.BatchNorm2d) else None)
    batch = (batch[0].cuda(), batch[1].cuda())
    serial = copy.deepcopy(model).cuda()
    parallel = parallel_of(model, batch, **OPTIONS[option])
    ours = train(
        parallel,
        lambda: parallel.train_step(*batch) if by_steps else parallel(*batch),
        backward=not by_steps,
    )
    theirs = train(serial, lambda: F.cross_entropy(serial(batch[0]), batch[1]))
    assert gap(ours, theirs) < EXACT


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("net", ["images", "words"])
def test_low_precision_is_that_of_autocast(net: str, dtype: str, compiled: bool) -> None:
    torch.manual_seed(0)
    model, batch = NETS[net]()
    without_dropout(model)
    batch = (batch[0].cuda(), batch[1].cuda())
    serial = copy.deepcopy(model).cuda()
    parallel = parallel_of(model, batch, dtype=dtype, compile=compiled)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16

    def loss() -> Tensor:
        with torch.autocast("cuda", kind):
            return F.cross_entropy(serial(batch[0]), batch[1])

    ours, theirs = train(parallel, lambda: parallel(*batch)), train(serial, loss)
    worst = max(float((a - b).abs()) for a, b in zip(ours[0], theirs[0], strict=True))
    assert worst < (5e-2 if compiled else 1e-2)  # other kernels, of bf16


def test_evaluation_and_checkpoints_hold_whole_tensors() -> None:
    torch.manual_seed(0)
    model, batch = NETS["images"](torch.float64)
    batch = (batch[0].cuda(), batch[1].cuda())
    serial = copy.deepcopy(model).cuda()
    parallel = parallel_of(model, batch)
    parallel(*batch).backward()
    F.cross_entropy(serial(batch[0]), batch[1]).backward()
    serial.eval(), parallel.eval()
    with torch.no_grad():
        assert abs(parallel(*batch) - F.cross_entropy(serial(batch[0]), batch[1])) < EXACT
    state = parallel.state_dict()
    assert all(item.is_cuda for item in state.values())
    assert all(torch.equal(item, state[name]) for name, item in serial.state_dict().items())


def test_scaled_losses_skip_what_overflows() -> None:
    torch.manual_seed(0)
    model, batch = NETS["images"]()
    batch = (batch[0].cuda(), batch[1].cuda())
    serial = copy.deepcopy(model).cuda()
    parallel = parallel_of(model, batch, dtype="fp16")
    found = []
    for side, loss in (
        (parallel, lambda: parallel(*batch)),
        (serial, lambda: autocast_loss(serial, batch)),
    ):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=2)
        optimizer = torch.optim.SGD(side.parameters(), lr=0.1)
        scales = []
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale(loss()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        found.append(scales)
    assert found[0] == found[1] and found[0][0] < 2.0**24


def autocast_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cuda", torch.float16):
        return F.cross_entropy(model(batch[0]), batch[1])
