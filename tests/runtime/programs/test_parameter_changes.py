"""A rank that does by itself what changes its training is found at the next call, whatever the plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.parameters import local
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler

Pools = Callable[[int], Pool]
AT, STEPS = 6, 9  # the step in which rank 1 parts, after those in which everything is compared


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.first(x).tanh()), y)


class Training:
    """Steps of `STEPS` batches, one of which `apart` takes on rank 1."""

    def __init__(self, force: str, apart: Callable[[Training, Tensor, Tensor], bool]) -> None:
        compiler = forced_compiler(Mesh((2,)), [force], pipeline=Pipeline())
        self.model: Any = ParallelModule(Net(), compiler, describe=describe, device=torch.device("cpu"))
        self.apart, self.data = apart, torch.Generator().manual_seed(1)
        self.model.prepare(*self.batch())
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(8, 4, generator=self.data), torch.randint(0, 4, (8,), generator=self.data)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.model(x, y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self) -> int:
        """The step in which this rank was refused."""
        for number in range(STEPS):
            x, y = self.batch()
            if number != AT or dist.get_rank() == 0 or not self.apart(self, x, y):
                self.step(x, y)
        raise AssertionError("nothing was found")


def one_call_more(training: Training, x: Tensor, y: Tensor) -> bool:
    training.model(x, y)
    return False


def one_without_gradients(training: Training, x: Tensor, y: Tensor) -> bool:
    with torch.no_grad():
        training.model(x, y)
    return False


def one_step_less(training: Training, x: Tensor, y: Tensor) -> bool:
    return True


def one_step_more(training: Training, x: Tensor, y: Tensor) -> bool:
    training.step(x, y)
    return False


def no_backward(training: Training, x: Tensor, y: Tensor) -> bool:
    training.model(x, y)
    training.optimizer.step()
    return True


def no_update(training: Training, x: Tensor, y: Tensor) -> bool:
    training.model(x, y).backward()
    training.optimizer.zero_grad()
    return True


def another_rate(training: Training, x: Tensor, y: Tensor) -> bool:
    training.optimizer.param_groups[0]["lr"] = 0.5
    return False


def another_option(training: Training, x: Tensor, y: Tensor) -> bool:
    training.optimizer.param_groups[0]["weight_decay"] = 0.5
    return False


@torch.no_grad()
def a_write(training: Training, x: Tensor, y: Tensor) -> bool:
    training.model.first.weight.mul_(3)
    return False


@torch.no_grad()
def a_write_to_its_part(training: Training, x: Tensor, y: Tensor) -> bool:
    local(training.model.second.bias).mul_(3)
    return False


def another_mode(training: Training, x: Tensor, y: Tensor) -> bool:
    training.model.eval()
    return False


APART: dict[str, Callable[[Training, Tensor, Tensor], bool]] = {
    r"(backward of )?forward.* on rank \d .*found rank \d made another call instead": one_call_more,
    r"is_grad_enabled\(\) on rank 1 \(False\), at .*:\d+ unlike .* \(True\), at": one_without_gradients,
    r"input input_0 on rank 1 unlike .*as many": one_step_less,
    r"input input_0 on rank 1 unlike that on rank 0, ": one_step_more,
    r"on rank \d .*found rank \d made another call": no_backward,
    r"count of optimizer steps since the last call on rank 1 \(0\) unlike .*\(1\)": no_update,
    r"lr of SGD on rank 1 \(0\.5\) unlike that on rank 0 \(0\.1\)": another_rate,
    r"options of SGD on rank 1 unlike": another_option,
    r"writes to parameters beside steps on rank 1 \(first\.weight\) unlike .*\(none\)": a_write,
    r"writes to parameters beside steps on rank 1 \(second\.bias\) unlike": a_write_to_its_part,
    r"train or eval mode": another_mode,
}


def _parts(force: str, pattern: str) -> str:
    with pytest.raises(InputError) as told:
        Training(force, APART[pattern]).run()
    return str(told.value)


@pytest.mark.parametrize("force", ["batch", "filter"])
@pytest.mark.parametrize("pattern", APART)
def test_a_rank_that_parts_is_found_at_once(pools: Pools, force: str, pattern: str) -> None:
    for message in pools(2).run(_parts, force, pattern, timeout=30.0):
        assert re.search(pattern, message), message
        assert len(set(re.findall(r"test_parameter_changes\.py:\d+", message))) >= 1, "a line of the user's"


def _copy(saves: bool, gap: float) -> str:
    """What four ranks say where one has written, past versions, to a copy that another has, too."""
    compiler = forced_compiler(Mesh((2, 2)), ["batch", "filter"], pipeline=Pipeline())
    model: Any = ParallelModule(Net(), compiler, describe=describe, device=torch.device("cpu"))
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4
    model.prepare(x, y)
    if dist.get_rank() == 3:
        model.first.weight.data.mul_(1 + gap)
    try:
        model.state_dict() if saves else model(x, y)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("saves", [True, False])
def test_copies_of_split_weights_are_compared(pools: Pools, saves: bool) -> None:
    for message in pools(4).run(_copy, saves, 2.0):
        assert "parameter or buffer first.weight on rank 3 unlike that on rank 1, wanted the same" in message
    assert pools(4).run(_copy, saves, 1e-7) == [""] * 4, "a rounding is let pass"


def _alike() -> float:
    """What all ranks do passes: other rates, writes, calls without backward, steps left out."""

    def free(training: Training, x: Tensor, y: Tensor) -> bool:
        return False

    training = Training("filter", free)
    for number in range(3):
        training.optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        with torch.no_grad():
            training.model.first.weight.mul_(0.5)
            training.model(*training.batch())
        training.step(*training.batch())
        if number:
            training.optimizer.step()
    training.model.load_state_dict(training.model.state_dict())
    return float(training.model(*training.batch()))


def test_what_all_ranks_do_passes(pools: Pools) -> None:
    first, second = pools(2).run(_alike)
    assert first == second


def _assigned() -> None:
    training = Training("filter", a_write)
    changes, weight = training.model._autopar.tensors.changes, training.model.first.weight
    for _ in range(50):
        list(changes.parts())
        for _ in range(2):  # the second part may lie where the one before the first lay
            weight.data = weight.data * 1.0
        *_, writes = changes.parts()
        assert writes.value == b"first.weight"


def test_parts_that_take_the_place_of_others_are_always_seen(pools: Pools) -> None:
    pools(2).run(_assigned)
