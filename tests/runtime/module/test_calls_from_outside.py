"""Calls of the parallel module by its own methods, and inside torch.utils.checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.core.mesh import Mesh
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.forced_compiler import ForcedCompiler, forced_compiler

Pools = Callable[[int], Pool]
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


class Cache:
    """What Hugging Face's models put keys and values into."""

    keys: Tensor | None = None


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        h = self.embedding(ids).cumsum(1)
        if cache is not None:
            cache.keys = h
        out: Tensor = self.head(h)
        return out

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids

    def cached(self, ids: Tensor) -> Tensor:
        out: Tensor = self(ids, Cache())
        return out

    def score(self, ids: Tensor) -> Tensor:
        out: Tensor = self(ids)
        return out


def pair(kind: Callable[[], nn.Module], example: Tensor) -> tuple[Any, Any, ForcedCompiler]:
    torch.manual_seed(0)
    theirs = kind()
    compile = forced_compiler(Mesh((2,)), ["batch"])
    ours: Any = ParallelModule(copy.deepcopy(theirs), compile, describe=describe, device=torch.device("cpu"))
    ours.prepare(example)
    return theirs, ours, compile


def _methods() -> None:
    theirs, ours, compile = pair(Speaker, IDS)
    assert torch.equal(ours.generate(IDS, 3), theirs.generate(IDS, 3))
    with pytest.raises(InputError, match="ever longer inputs") as error:
        ours.generate(IDS[:, :2], 9)
    message = str(error.value)
    assert "generate, " in message and "with autopar.full(parallel) as model: model.generate(...)" in message
    assert "self(ids)" in message and len(message) <= 400
    with autopar.full(ours) as model:
        assert torch.equal(model.generate(IDS, 6), theirs.generate(IDS, 6))
    with pytest.raises(InputError, match="an argument of Cache: found an object into which") as error:
        ours.cached(IDS)
    assert "model.cached(...)" in str(error.value) and len(str(error.value)) <= 400
    for width in range(1, 7):  # other inputs, not longer ones
        ours.score(torch.arange(2 * width).reshape(2, width) % 9)
    assert type(ours).__name__ == "Speaker"  # as libraries write it into files


@pytest.mark.slow
def test_generation_token_by_token_is_refused_and_shown_a_way(pools: Pools) -> None:
    pools(2).run(_methods)


def _dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)).double()


def _checkpoints() -> None:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
    for reentrant in (False, True):
        _, ours, _ = pair(_dropped, x)
        for _ in range(2):  # the first call is traced inside the checkpoint
            ours.zero_grad()
            loss = checkpoint(ours, x.clone().requires_grad_(), use_reentrant=reentrant).sum()
            loss.backward()
            # The loss is linear in the last layer: its gradients, by the same masks, give the loss.
            last = (ours[3].weight, ours[3].bias)
            again = sum((item.grad * item.detach()).sum().item() for item in last)
            assert abs(again - loss.item()) < 1e-12


def test_a_checkpoint_around_the_module_recomputes_the_same_masks(pools: Pools) -> None:
    pools(2).run(_checkpoints)
