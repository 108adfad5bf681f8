"""Optimizers of a filtered list of parameters, of which a pipeline rank holds none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.core.schedule import ScheduleKind
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler

Pools = Callable[[int], Pool]
EXACT = 1e-10
MAKE: list[Callable[[nn.Module], optim.Optimizer]] = [
    lambda model: optim.Muon([item for item in model.parameters() if item.ndim == 2], 0.1),
    lambda model: optim.SGD((item for item in model.parameters() if item.ndim == 2), 0.1, momentum=0.9),
    lambda model: optim.AdamW([pair for pair in model.named_parameters() if "linear" in pair[0]], 0.1),
]


class Net(nn.Module):
    """A matrix on the first stage, vectors alone on the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 4).double(), nn.LayerNorm(4).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.norm(torch.tanh(self.linear(x))), y)


def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 4, dtype=torch.float64, generator=generator) for _ in range(2)]


def parallel() -> ParallelModule:
    pipeline = Pipeline(2, 2, ScheduleKind.ONE_F_ONE_B, (0, 2))
    compiler = forced_compiler(Mesh((1,)), ["batch"], pipeline=pipeline)
    model = ParallelModule(Net(), compiler, describe=describe, device=torch.device("cpu"), by_steps=True)
    model.prepare(*batch())
    return model


def _filtered() -> list[list[str]]:
    for make in MAKE:
        serial, ours = Net(), parallel()
        pair = [make(model) for model in (serial, ours)]
        for number in range(2):
            ours.train_step(*batch())
            serial(*batch()).backward()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
            state, saved = ours.state_dict(), [copy.deepcopy(optimizer.state_dict()) for optimizer in pair]
            for name, value in serial.state_dict().items():
                assert float((state[name] - value).abs().max()) < EXACT, (name, number)
            assert _rows(saved[0]) == _rows(saved[1])
            pair[1].load_state_dict(saved[0])  # the serial optimizer's
    return [[name for name, _ in ours.named_parameters()]]


def _rows(state: Any) -> Any:
    return [group["params"] for group in state["param_groups"]], sorted(state["state"])


def test_a_rank_without_one_of_the_list_steps_as_the_serial_optimizer(pools: Pools) -> None:
    found = pools(2).run(_filtered)
    assert found == [[["linear.weight", "linear.bias"]], [["norm.weight", "norm.bias"]]]


def _of_several() -> str:
    first, second = parallel(), parallel()
    stands = [item for model in (first, second) for item in model._autopar.tensors.nothing]
    try:
        optim.SGD([item for item in first.parameters() if item.numel() == 16], 0.1)
    except InputError as error:
        return str(error)
    return f"{dist.get_rank()} of {len(stands)}"


def test_an_empty_list_is_refused_beside_several_models_in_stages(pools: Pools) -> None:
    first, second = pools(2).run(_of_several)
    assert first == "0 of 2"
    assert "optimizer SGD: found an empty list" in second and "in groups" in second and len(second) <= 400


def _serial() -> str:
    with pytest.raises(ValueError, match="empty parameter list") as raised:
        optim.SGD([], 0.1)
    return str(raised.value)


def test_an_empty_list_without_stages_is_torchs_to_refuse(pools: Pools) -> None:
    pools(1).run(_serial)
