"""Optimizers as public packages write them: in Python, one parameter at a time, some with norms of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LAMB(Optimizer):
    """Adam's step, scaled for each parameter by its norm over the step's (You et al., 2019)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for item in group["params"]:
                if item.grad is not None:
                    self._update(item, group)
        return loss

    def _update(self, item: Tensor, group: dict[str, Any]) -> None:
        assert item.grad is not None
        state, (first, second) = self.state[item], group["betas"]
        if not state:
            state.update(step=0, mean=torch.zeros_like(item), square=torch.zeros_like(item))
        state["step"] += 1
        state["mean"].mul_(first).add_(item.grad, alpha=1 - first)
        state["square"].mul_(second).addcmul_(item.grad, item.grad, value=1 - second)
        size = (state["square"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        update = state["mean"] / (1 - first ** state["step"]) / size
        update.add_(item, alpha=group["weight_decay"])
        weight, length = item.norm(p=2).clamp(0, 10), update.norm(p=2)
        trust = weight / length if weight != 0 and length != 0 else 1.0
        item.add_(update * trust, alpha=-group["lr"])


class Lion(Optimizer):
    """The sign of an interpolated momentum (Chen et al., 2023)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            first, second = group["betas"]
            for item in group["params"]:
                if item.grad is None:
                    continue
                item.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[item]
                if "average" not in state:
                    state["average"] = torch.zeros_like(item)
                average = state["average"]
                update = average.clone().mul_(first).add(item.grad, alpha=1 - first).sign_()
                item.add_(update, alpha=-group["lr"])
                average.mul_(second).add_(item.grad, alpha=1 - second)
        return loss
