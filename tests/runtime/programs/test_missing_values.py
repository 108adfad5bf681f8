"""A model on the meta device computes nothing before its values are there, by whatever way they came."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.runtime.checkpoints.safetensors_files import DTYPES as FILE_DTYPES
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.programs.missing_values import placeholder
from tests.pool import Pool

Pools = Callable[[int], Pool]
DTYPES = sorted({*FILE_DTYPES.values(), torch.complex64}, key=str)


class Table(nn.Module):
    """Layers whose features are put in the order that a buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False)
        self.register_buffer("order", torch.arange(15, -1, -1), persistent=True)

    def forward(self, x: Tensor) -> Tensor:
        return (self.table(torch.tanh(self.first(x)))[:, self.order] * torch.arange(16)).square().mean()


PLANS: dict[str, Any] = {
    "batch": {"force": ["batch"]},
    "filter": {"force": ["filter"]},
    "stages": {"stages": 2},
}


def parallel(case: str) -> ParallelModule:
    """The model, on the meta device, on all ranks."""
    with torch.device("meta"):
        model = Table()
    made: ParallelModule = autopar.parallelize(
        model,
        ClusterSpec.local(dist.get_world_size()),
        (torch.zeros(4, 8),),
        measure=False,
        quiet=True,
        **PLANS[case],
    )
    return made


def serial() -> Table:
    torch.manual_seed(3)
    return Table()


def _saved(folder: Path) -> None:
    made: ParallelModule = autopar.parallelize(
        serial(),
        ClusterSpec.local(2),
        (torch.zeros(4, 8),),
        measure=False,
        quiet=True,
    )
    autopar.save(folder, made)


def _load(how: str, model: ParallelModule, folder: Path) -> None:
    match how:
        case "state dict":
            model.load_state_dict(serial().state_dict())
        case "save":
            autopar.load(folder, model)
        case "in place" | "by data":
            with torch.no_grad():
                for parameter in model.parameters():
                    nn.init.constant_(parameter, 0.5)
                for buffer in model.buffers():
                    (buffer if how == "in place" else buffer.data).copy_(serial().order)


def _called(case: str, how: str, folder: Path) -> tuple[str, float, float]:
    """What was refused first, then the loss, and the serial one."""
    x = torch.linspace(-1, 1, 32).view(4, 8)
    if how == "save":
        _saved(folder)
    model, expected = parallel(case), serial()
    with pytest.raises(InputError) as refused:
        model.train_step(x)
    _load(how, model, folder)
    if how in ("in place", "by data"):
        for parameter in expected.parameters():
            nn.init.constant_(parameter, 0.5)
    return str(refused.value), float(model.train_step(x)), float(expected(x))


@pytest.mark.parametrize("how", ["state dict", "save", "in place", "by data"])
@pytest.mark.parametrize("case", PLANS)
def test_calls_before_values_are_refused_on_all_ranks_and_right_after(
    case: str, how: str, pools: Pools, tmp_path: Path
) -> None:
    for refused, loss, expected in pools(2).run(_called, case, how, tmp_path):
        assert "first.weight, order, table.weight without values" in refused
        assert loss == pytest.approx(expected, rel=1e-6)


def _integers_left(case: str) -> str:
    model = parallel(case)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
    with pytest.raises(InputError) as refused:
        model.train_step(torch.ones(4, 8))
    return str(refused.value)


@pytest.mark.parametrize("case", PLANS)
def test_a_buffer_of_integers_that_nobody_wrote_is_not_zeros(case: str, pools: Pools) -> None:
    assert all("order without values" in each for each in pools(2).run(_integers_left, case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_placeholder_is_told_from_zeros_of_every_dtype(dtype: torch.dtype) -> None:
    mark = placeholder(dtype)
    assert mark.dtype is dtype and not (dtype is not torch.bool and mark == 0)
