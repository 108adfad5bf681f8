"""What a large batch costs on handwritten digits, and what scaled rates, warm-up and LARS give back.

Every recipe sees the same number of samples, so a batch of 1,024 takes a 32nd of the steps. The rate is
scaled by the batch (Goyal et al., 2017), grows to it over the first steps, and LARS scales it once more for
each matrix by the norm of its weights over that of its gradient (You et al., 2017).

    python examples/large_batches.py
    autopar run examples/large_batches.py --cluster local:2
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer

import autopar

SMALL, LARGE = 32, 1024
TRAINED = 1500  # samples; the other 297 are for the accuracy
EPOCHS = 20
RATE = 0.02  # of the small batch
WARM_UP = 0.25  # of the steps
SEEDS = range(3)


class LARS(Optimizer):
    """SGD with momentum whose rate for a matrix is in proportion to its norm over its gradient's."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.05,
    ) -> None:
        given = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, given)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for item in group["params"]:
                if item.grad is None:
                    continue
                update = item.grad
                if item.ndim > 1:
                    update = update.add(item, alpha=group["weight_decay"])
                    update = update * _trust(item.norm(), update.norm(), group["trust"])
                state = self.state[item]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(item)
                state["momentum"].mul_(group["momentum"]).add_(update)
                item.add_(state["momentum"], alpha=-group["lr"])
        return loss


def _trust(weight: Tensor, gradient: Tensor, trust: float) -> Tensor:
    """The factor of a matrix's rate: 1 where one of the norms is 0."""
    one = torch.ones_like(weight)
    inside = torch.where(gradient > 0, trust * weight / gradient, one)
    return torch.where(weight > 0, inside, one)


class Recipe(NamedTuple):
    """How to train: `scaled` says that the rate grows with the batch."""

    name: str
    batch: int
    scaled: bool
    warm: bool
    make: Callable[..., Optimizer] = torch.optim.SGD


RECIPES = (
    Recipe("SGD", SMALL, scaled=False, warm=False),
    Recipe("SGD, the same rate", LARGE, scaled=False, warm=False),
    Recipe("SGD, scaled rate", LARGE, scaled=True, warm=False),
    Recipe("SGD, scaled rate, warm-up", LARGE, scaled=True, warm=True),
    Recipe("LARS, scaled rate, warm-up", LARGE, scaled=True, warm=True, make=LARS),
)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def digits() -> tuple[Tensor, Tensor]:
    """All 1,797 images from 0 to 1, and their labels, in an order that mixes writers."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(data.images).float().unsqueeze(1)[order] / 16, torch.from_numpy(data.target)[
        order
    ]


def rate(recipe: Recipe, step: int, steps: int) -> float:
    """The rate of a step: linear warm-up, then a cosine."""
    top = RATE * (recipe.batch / SMALL if recipe.scaled else 1)
    warm = round(WARM_UP * steps) if recipe.warm else 0
    if step < warm:
        return top * (step + 1) / warm
    return top * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def accuracy(recipe: Recipe, seed: int) -> tuple[float, int]:
    """The share of unseen digits that are read after training, and the number of steps."""
    images, labels = digits()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model: Any = net()
    if "WORLD_SIZE" in os.environ:
        example = images[: recipe.batch]
        model = autopar.parallelize(
            model, autopar.ClusterSpec.detect(), example, force="batch", measure=False, quiet=True
        )
    optimizer = recipe.make(model.parameters(), lr=RATE, momentum=0.9)
    steps = EPOCHS * TRAINED // recipe.batch
    for step in range(steps):
        chosen = torch.randint(TRAINED, (recipe.batch,), generator=generator)
        optimizer.param_groups[0]["lr"] = rate(recipe, step, steps)
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model(images[TRAINED:]).argmax(1) == labels[TRAINED:]
    return float(right.float().mean()), steps


def main() -> None:
    """Print the table."""
    first = os.environ.get("RANK", "0") == "0"
    rows = [("recipe", "batch", "steps", "accuracy")]
    for recipe in RECIPES:
        found = [accuracy(recipe, seed) for seed in SEEDS]
        shares = torch.tensor([share for share, _ in found]) * 100
        shown = f"{shares.mean():.1f} % ({shares.min():.1f} to {shares.max():.1f})"
        rows.append((recipe.name, f"{recipe.batch:,}", f"{found[0][1]:,}", shown))
    for name, batch, steps, share in rows if first else ():
        print(f"{name:<28}{batch:>6}{steps:>7}  {share}")


if __name__ == "__main__":
    main()
