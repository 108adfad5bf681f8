"""float16: a program scales, unscales, clips and skips as the serial model; an overflow is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.compiled.test_program import tracing
from tests.runtime.forced_compiler import forced_compiler

Pools = Callable[[int], Pool]
CPU = torch.device("cpu")
WAYS = {
    "filter": Pipeline(),
    "micro-batches": Pipeline(ranks=1, micro_batches=2),
    "stages": Pipeline(ranks=2, micro_batches=2, starts=(0, 5)),  # weights on both
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def parallel(way: str, x: Tensor, y: Tensor, *, half: bool = True) -> ParallelModule:
    pipeline = WAYS[way]
    shape, wanted = ((1,), ["batch"]) if pipeline.ranks > 1 else ((2,), ["filter"])
    compiler = forced_compiler(Mesh(shape), wanted, pipeline=pipeline, loss_fn=F.mse_loss)
    by_steps = pipeline.micro_batches > 1
    ours = ParallelModule(net(), compiler, describe=describe, device=CPU, by_steps=by_steps)
    with torch.autocast("cpu", torch.float16, enabled=half):
        ours.prepare(x, y)
    return ours


def train(way: str, parts: int = 1, *, compiles: bool = False) -> None:
    """Five steps, each with the gradients of so many `parts` of the batch."""
    x, y = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 4)
    pair = net(), parallel(way, x[: 8 // parts], y[: 8 // parts])
    if compiles:
        pair[1].compile()
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in pair]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in pair]
    for step in range(5):
        inputs = x * 1e5 if step == 2 else x  # which is more than float16 holds
        norms, scales = [], []
        for model, scaler, optimizer in zip(pair, scalers, optimizers, strict=True):
            optimizer.zero_grad()
            serial = model is pair[0]
            for part in zip(inputs.chunk(parts), y.chunk(parts), strict=True):
                with torch.autocast("cpu", torch.float16):
                    if serial:
                        loss = F.mse_loss(model(part[0]), part[1])
                    elif way == "filter":
                        loss = model(*part)
                    else:
                        with model.scaled_by(scaler):
                            loss = model.train_step(*part)
                if loss.requires_grad:
                    scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip = nn.utils.clip_grad_norm_ if serial else lambda _, most: pair[1].clip_grad_norm_(most)
            norms.append(float(clip(model.parameters(), 0.5)))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales[0] == scales[1] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0][step]
        assert norms[0] == pytest.approx(norms[1], rel=1e-2, nan_ok=True)
    theirs = pair[0].state_dict()
    for name, own in pair[1].state_dict().items():
        torch.testing.assert_close(own, theirs[name], atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("way", WAYS)
def test_training_with_a_scaler_equals_serial_training(pools: Pools, way: str) -> None:
    pools(2).run(train, way)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_parts_add_up_are_clipped_and_scaled_as_serial_ones(pools: Pools, way: str) -> None:
    pools(2).run(train, way, 2)


def _train_compiled(way: str) -> None:
    with tracing() as made:
        train(way, compiles=True)
    assert made


@pytest.mark.parametrize("way", ["filter", "stages"])
def test_compiled_programs_scale_and_skip_alike(pools: Pools, way: str) -> None:
    pools(2).run(_train_compiled, way)


def spoil(way: str) -> None:
    x, y = torch.ones(8, 8), torch.zeros(8, 4)
    ours = parallel(way, x, y)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(ours.parameters(), 0.1)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    for spoiled in (0, 1):
        ours.zero_grad()
        with torch.autocast("cpu", torch.float16), ours.scaled_by(scaler):
            loss = ours(x, y) if way == "filter" else ours.train_step(x, y)
        if loss.requires_grad:
            scaler.scale(loss).backward()
        if torch.distributed.get_rank() == spoiled:
            gradient = next(item.grad for item in ours.parameters() if item.grad is not None)
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    assert scaler.get_scale() == 65536.0 / 4


@pytest.mark.parametrize("way", ["filter", "stages"])
def test_infinity_on_one_rank_is_a_step_less_on_all(pools: Pools, way: str) -> None:
    pools(2).run(spoil, way)


def overflow(way: str) -> None:
    x, y = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 4)
    ours = parallel(way, x, y)
    optimizer = torch.optim.Adam(ours.parameters(), lr=0.1)
    for factor in (1, 1e5):
        ours.zero_grad()
        before = {name: value.clone() for name, value in ours.state_dict().items()}
        with torch.autocast("cpu", torch.float16):
            loss = ours(x * factor, y) if way == "filter" else ours.train_step(x * factor, y)
        if loss.requires_grad:
            loss.backward()
        if factor == 1:
            optimizer.step()
            continue
        with pytest.raises(InputError, match=r"gradient of \d.weight that isn't finite.*GradScaler"):
            optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("way", ["filter", "stages"])
def test_a_step_that_overflows_without_a_scaler_is_refused(pools: Pools, way: str) -> None:
    pools(2).run(overflow, way)


def overflow_wide() -> None:
    ours = parallel("filter", x := torch.ones(8, 8), y := torch.zeros(8, 4), half=False)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours(x * math.inf, y).backward()  # in float32 throughout, the step is as it is with torch
    optimizer.step()


def test_steps_of_a_model_that_never_computes_in_float16_are_not_refused(pools: Pools) -> None:
    pools(2).run(overflow_wide)
