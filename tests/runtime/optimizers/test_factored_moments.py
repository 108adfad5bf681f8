"""Optimizers that keep rows and columns of moments go on from any checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.runtime.optimizers.factored_moments import _orders
from tests.pool import Pool
from tests.runtime.module.test_checkpoints import LOSS, make_net, parallel, train

Pools = Callable[[int], Pool]
SAVED, LAST = range(3), range(3, 6)


class Rows(torch.optim.Optimizer):
    """Adafactor as transformers and many others have it: moments without one of a parameter's dims."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for item in self.param_groups[0]["params"]:
            state, square = self.state[item], item.grad**2 + 1e-8
            if item.dim() < 2:
                item.sub_(0.01 * item.grad)
                continue
            row, column = square.mean(-1), square.mean(-2)
            if state:
                row, column = 0.7 * state["row"] + 0.3 * row, 0.7 * state["column"] + 0.3 * column
            state.update(row=row, column=column)
            scale = (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1) * column.rsqrt().unsqueeze(-2)
            item.sub_(0.01 * item.grad * scale)


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "rows": Rows,
    "torch": lambda items: torch.optim.Adafactor(items, 0.05, eps=(1e-4, 1e-3)),  # biases of keys have none
}


def run(case: str | None, kind: str, steps: range, saved: Any = None) -> tuple[list[float], Any, nn.Module]:
    """Losses of some steps from a checkpoint, if any, and the checkpoint at their end."""
    model: nn.Module = parallel(case) if case else make_net()
    optimizer = KINDS[kind](model.parameters())
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    losses = train(model, optimizer, steps)
    states = {name: item.detach().clone() for name, item in model.state_dict().items()}
    return losses, (states, optimizer.state_dict()), model


def _to_and_fro(case: str, kind: str, folder: Path) -> tuple[list[float], list[float], bool]:
    """Losses after the serial model's checkpoint; the parallel one's is saved."""
    serial = torch.load(folder / "serial", weights_only=False)
    after, _, _ = run(case, kind, LAST, serial)
    before, saved, model = run(case, kind, SAVED)
    if dist.get_rank() == 0:
        torch.save(saved, folder / "parallel")
    apart = any(stored.serial.is_apart for stored in cast(Any, model)._autopar.tensors.tree.stored.values())
    return before, after, apart


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["filter", "weights in shards"])
def test_factored_moments_go_to_the_serial_optimizer_and_back(
    case: str, kind: str, pools: Pools, tmp_path: Path
) -> None:
    first, saved, _ = run(None, kind, SAVED)
    torch.save(saved, tmp_path / "serial")
    last, _, _ = run(None, kind, LAST, saved)
    for before, after, apart in pools(2).run(_to_and_fro, case, kind, tmp_path):
        assert before == pytest.approx(first, abs=LOSS) and after == pytest.approx(last, abs=LOSS)
        assert apart == (case == "filter")
    back, _, _ = run(None, kind, LAST, torch.load(tmp_path / "parallel", weights_only=False))
    assert back == pytest.approx(last, abs=LOSS)


def test_a_dim_that_cannot_be_told_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    order = {0: (0, 2, 1, 3), 1: tuple(range(4)), 2: tuple(range(3))}
    monkeypatch.setattr(
        "autopar.runtime.optimizers.factored_moments._parameter_orders",
        lambda parameter, _: [order[dim] for dim in range(parameter.dim())],
    )

    def found(shape: tuple[int, ...], *whole: int) -> Any:
        return _orders(shape, cast(Any, Tensor(*whole)), cast(Any, SimpleNamespace()))

    assert found((4, 1), 4, 4) == (order[0], (0,)) and found((1, 4), 4, 4) == ((0,), order[1])
    assert found((4,), 4, 4) is None  # rows or columns
    assert found((4, 4), 4, 4, 3) is None  # moments without the last dim, or products of the first
    assert found((4, 3), 4, 4, 3) is None and found((5,), 4, 4) is None
