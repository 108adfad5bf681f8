"""A parameter that parallelize has replaced is the new one in traces, and refused anywhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.core.mesh import Mesh
from autopar.errors import InputError, TraceError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler
from tests.whole_tensors import full_of

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


class Penalty:
    """Holds a weight, as objects of users do."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight

    def __call__(self) -> Tensor:
        return self.weight.square().sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 1)
        self.penalty = Penalty(self.inner.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(x).tanh()).square().mean()
        return out + self.penalty()


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def parallel(model: nn.Module, kinds: list[str]) -> Any:
    compile = forced_compiler(Mesh((2,)), kinds)
    ours = ParallelModule(model, compile, describe=describe, device=torch.device("cpu"))
    ours.prepare(X)
    return ours


def _helper(kinds: list[str]) -> None:
    theirs, ours = make(), parallel(make(), kinds)
    twin = copy.deepcopy(ours)
    for side in (ours, twin):
        theirs = make()
        for batch in (X, X[:2], X, X[:2]):  # the second is traced after parameters were placed
            losses = []
            for model in (theirs, side):
                model.zero_grad()
                losses.append(model(batch))
                losses[-1].backward()
                torch.optim.SGD(model.parameters(), 0.1).step()
            assert abs(float(losses[0]) - float(losses[1])) < 1e-12
    for use in (ours.penalty, lambda: ours.penalty.weight + 1, lambda: copy.deepcopy(ours.penalty)):
        with pytest.raises(InputError, match="parameter inner.weight of the serial model") as error:
            use()
        assert "test_old_parameters.py" in error.value.where and len(str(error.value)) <= 400
    assert ours.penalty.weight.shape == (8, 6) and "inner.weight" in repr(ours.penalty.weight)


@pytest.mark.parametrize("kinds", [["batch"], ["filter"]])
def test_a_helper_that_holds_a_weight_trains_like_the_serial_model(
    kinds: list[str], pools: Callable[[int], Pool]
) -> None:
    pools(2).run(_helper, kinds)


def _memory() -> None:
    model = make()
    ours = parallel(model, ["batch"])
    kept = make()
    view = kept.inner.weight.detach()
    late = parallel(kept, ["batch"])
    late.penalty.weight = view  # alive, and no step changes it
    with pytest.raises(TraceError, match="in the memory of parameter inner.weight"):
        late(X)
    ours.penalty.weight = view.clone()
    ours(X)


def test_memory_of_replaced_parameters_is_known_as_long_as_somebody_holds_it(
    pools: Callable[[int], Pool],
) -> None:
    pools(2).run(_memory)


def _learned_before(kinds: list[str]) -> None:
    theirs, model = make(), make()
    for net in (theirs, model):
        net(X * 2).backward()
    ours = parallel(model, kinds)
    for net in (theirs, ours):
        net(X).backward()
    for mine, full in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert full.grad is not None
        assert (full_of(mine.grad) - full.grad).abs().max() < 1e-12


@pytest.mark.parametrize("kinds", [["batch"], ["filter"]])
def test_gradients_from_before_parallelize_count(kinds: list[str], pools: Callable[[int], Pool]) -> None:
    pools(2).run(_learned_before, kinds)
