"""Weights that a later program uses on another pipeline stage than the first one did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.core.schedule import ScheduleKind
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler

Pools = Callable[[int], Pool]


class Net(nn.Module):
    """May use `side`, which the first call doesn't, or `first` once more, on the second stage."""

    extra = ""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.side = (nn.Linear(4, 4).double() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.last(torch.tanh(self.first(x)))
        if self.extra:
            h = getattr(self, self.extra)(torch.tanh(h))
        return F.mse_loss(h, y)


def _later() -> list[str]:
    pipeline = Pipeline(2, 2, ScheduleKind.ONE_F_ONE_B, (0, 2))
    compiler = forced_compiler(Mesh((1,)), ["batch"], pipeline=pipeline)
    model = ParallelModule(Net(), compiler, describe=describe, device=torch.device("cpu"), by_steps=True)
    x, y = torch.ones(2, 4, 4, dtype=torch.float64).unbind()
    model.train_step(x, y)
    found = []
    for extra in ("side", "first"):
        model.extra = extra
        with pytest.raises(InputError) as raised:
            model.train_step(x, y)
        found.append(str(raised.value))
    model.extra = ""
    assert torch.equal(model.train_step(x, y), Net()(x, y))
    return found


def test_a_weight_that_another_stage_uses_later_is_refused_by_name(pools: Pools) -> None:
    for found in pools(2).run(_later):
        for message, name in zip(found, ("side", "first"), strict=True):
            assert f"{name}.weight of the parallel module, and 1 more" in message
            assert (
                "by this call, held by 0" in message and "without stages" in message and len(message) <= 400
            )
