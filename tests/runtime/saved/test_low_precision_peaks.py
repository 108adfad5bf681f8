"""Predicted peaks of the examples' models in bfloat16 beside measured ones, on two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.comparing.measured_peak import peak_bytes
from examples.characters import gpt
from examples.digits import vgg
from examples.photographs import unet
from tests.pool import Pool

Case = tuple[nn.Module, dict[str, Any] | tuple[Any, ...], Callable[..., Tensor] | None]


def _digits() -> Case:
    model = vgg(side=8, width=32, hidden=512)
    return model, (torch.rand(64, 1, 8, 8), torch.arange(64) % 10), F.cross_entropy


def _photographs() -> Case:
    clean = torch.rand(8, 3, 64, 64)
    return unet(16, 2), {"image": clean + 0.1 * torch.randn_like(clean), "target": clean}, None


def _characters() -> Case:
    tokens = torch.randint(0, 64, (16, 64))
    return gpt(2, 128, 4, 64, 64, dropout=0.0), (tokens, tokens.roll(1, 0)), None


def _peaks(make: Callable[[], Case], shard_state: str, reduce_dtype: str = "fp32") -> tuple[int, int]:
    """Bytes of a step's peak on this rank, as predicted and as measured."""
    torch.manual_seed(0)
    model, batch, loss_fn = make()
    args, kwargs = (batch, {}) if isinstance(batch, tuple) else ((), batch)
    options: dict[str, Any] = {"force": "batch", "measure": False, "quiet": True, "optimizer": "adam"}
    cluster = autopar.ClusterSpec.local(2)
    options |= {"dtype": "bf16", "shard_state": shard_state, "reduce_dtype": reduce_dtype}
    ours = autopar.parallelize(model, cluster, batch, loss_fn=loss_fn, **options)
    optimizer = torch.optim.Adam(ours.parameters())

    def step() -> None:
        result = ours(*args, **kwargs)
        (result if isinstance(result, Tensor) else result.loss).backward()

    for _ in range(2):
        step()
        optimizer.step()
        optimizer.zero_grad()
    states = [each for state in optimizer.state.values() for each in state.values()]
    alive = [*ours.parameters(), *ours.buffers(), *states, *args, *kwargs.values()]
    return ours.plan.peak_bytes, peak_bytes(step, alive, torch.device("cpu"))


@pytest.mark.parametrize("shard_state", ["none", "weights"])
@pytest.mark.parametrize(
    "make", [_digits, *(pytest.param(each, marks=pytest.mark.long) for each in (_photographs, _characters))]
)
def test_the_predicted_peak_in_bfloat16_is_the_measured_one(
    make: Callable[[], Case], shard_state: str, pools: Callable[[int], Pool]
) -> None:
    for predicted, measured in pools(2).run(_peaks, make, shard_state):
        assert predicted == pytest.approx(measured, rel=0.05), (predicted, measured)


def _wide() -> Case:
    """Gradients weigh more than activations; some are summed in buckets, and some by themselves."""
    layers = [module for _ in range(4) for module in (nn.Linear(512, 512), nn.Tanh())]
    return (
        nn.Sequential(*layers, nn.Linear(512, 4096)),
        (torch.randn(8, 512), torch.randn(8, 4096)),
        F.mse_loss,
    )


def test_the_predicted_peak_of_sums_in_bfloat16_is_the_measured_one(pools: Callable[[int], Pool]) -> None:
    for predicted, measured in pools(2).run(_peaks, _wide, "none", "bf16"):
        assert predicted == pytest.approx(measured, rel=0.01), (predicted, measured)
