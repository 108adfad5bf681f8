"""Every optimizer as it is shipped takes the serial steps of a parallel module, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from autopar.core.gathering import Gathering
from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from examples.large_batches import LARS
from tests.pool import Pool
from tests.public_optimizers import LAMB, Lion
from tests.runtime.forced_compiler import forced_compiler

Pools = Callable[[int], Pool]
Make = Callable[[list[Any]], optim.Optimizer]
STEPS = 5
EXACT = 1e-10  # line searches and divisions by small numbers enlarge another order of sums


class Net(nn.Module):
    """Matrices, vectors and a number; some of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(torch.tanh(self.norm(self.first(x)))) * self.scale, y)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(8, 5, generator=generator, dtype=torch.float64)


def matrices(items: Iterable[Any]) -> list[Any]:
    return [item for item in items if item.ndim == 2]


SHIPPED: dict[str, Make] = {
    "SGD": lambda items: optim.SGD(items, 0.1, momentum=0.9, nesterov=True),
    "SGD, fused": lambda items: optim.SGD(items, 0.1, momentum=0.9, fused=True),
    "Adam": lambda items: optim.Adam(items, 0.01, amsgrad=True),
    "Adam, fused": lambda items: optim.Adam(items, 0.01, fused=True),
    "AdamW": lambda items: optim.AdamW(items, 0.01, foreach=True),
    "AdamW, fused": lambda items: optim.AdamW(items, 0.01, fused=True),
    "NAdam": lambda items: optim.NAdam(items, 0.01),
    "NAdam, foreach": lambda items: optim.NAdam(items, 0.01, foreach=True),
    "RAdam": lambda items: optim.RAdam(items, 0.01),
    "RAdam, foreach": lambda items: optim.RAdam(items, 0.01, foreach=True),
    "Adamax": lambda items: optim.Adamax(items, 0.01),
    "Adamax, foreach": lambda items: optim.Adamax(items, 0.01, foreach=True),
    "Adadelta": lambda items: optim.Adadelta(items),
    "Adadelta, foreach": lambda items: optim.Adadelta(items, foreach=True),
    "Adagrad": lambda items: optim.Adagrad(items, 0.01),
    "Adagrad, foreach": lambda items: optim.Adagrad(items, 0.01, foreach=True),
    "Adagrad, fused": lambda items: optim.Adagrad(items, 0.01, fused=True),
    "RMSprop": lambda items: optim.RMSprop(items, 0.01, momentum=0.9, centered=True),
    "RMSprop, foreach": lambda items: optim.RMSprop(items, 0.01, momentum=0.9, foreach=True),
    "ASGD": lambda items: optim.ASGD(items, 0.01),
    "ASGD, foreach": lambda items: optim.ASGD(items, 0.01, foreach=True),
    "Rprop": lambda items: optim.Rprop(items, 0.01),
    "Rprop, foreach": lambda items: optim.Rprop(items, 0.01, foreach=True),
    "Adafactor": lambda items: optim.Adafactor(items, 0.01, weight_decay=0.1),
    "Adafactor, foreach": lambda items: optim.Adafactor(items, 0.01, foreach=True),
    "Muon": lambda items: optim.Muon(matrices(items), 0.01),
    "LARS": lambda items: LARS(items, 0.5, weight_decay=0.01),
    "Lion": lambda items: Lion(items, 0.01, weight_decay=0.01),
}
TOGETHER: dict[str, Make] = {  # that ask for numbers of parameters, or step along all of them
    "LAMB": lambda items: LAMB(items, 0.01, weight_decay=0.01),
    "LBFGS": lambda items: optim.LBFGS(items, 0.1, max_iter=4),
    "LBFGS, wolfe": lambda items: optim.LBFGS(items, 0.1, max_iter=4, line_search_fn="strong_wolfe"),
}
PLANS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "batch": ((2,), {"wanted": ["batch"]}),
    "filter": ((2,), {"wanted": ["filter"]}),
    "batch x filter": ((2, 2), {"wanted": ["batch", "filter"]}),
    "weights in shards": ((2,), {"wanted": ["batch"], "gathering": Gathering.REGATHER}),
    "stages": ((1,), {"wanted": [None], "pipeline": Pipeline(2, 2, starts=(0, 3))}),
    "stages of filters": ((2,), {"wanted": ["filter"], "pipeline": Pipeline(2, 2, starts=(0, 3))}),
}


def schedule_free() -> dict[str, Make]:
    try:
        import schedulefree
    except ImportError:
        return {}
    return {
        "AdamWScheduleFree": lambda items: schedulefree.AdamWScheduleFree(items, 0.01),
        "AdamWScheduleFree, loop": lambda items: schedulefree.AdamWScheduleFree(items, 0.01, foreach=False),
        "SGDScheduleFree": lambda items: schedulefree.SGDScheduleFree(items, 0.1),
        "RAdamScheduleFree": lambda items: schedulefree.RAdamScheduleFree(items, 0.01),
    }


def placed(plan: str) -> Any:
    shape, options = PLANS[plan]
    compiler = forced_compiler(Mesh(shape), **options)
    staged = compiler.pipeline.is_staged
    ours = ParallelModule(
        Net(), compiler, describe=describe, device=torch.device("cpu"), by_steps=staged, quiet=True
    )
    ours.prepare(*batch(0))
    return ours, staged


def trained(model: Any, make: Make, *, staged: bool) -> optim.Optimizer:
    optimizer: Any = make(list(model.parameters()))
    for seed in range(STEPS):
        getattr(optimizer, "train", lambda: None)()

        def loss(seed: int = seed) -> Tensor:
            optimizer.zero_grad()
            if staged:
                return model.train_step(*batch(seed))  # type: ignore[no-any-return]
            found: Tensor = model(*batch(seed))
            found.backward()
            return found

        if isinstance(optimizer, optim.LBFGS):
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
    getattr(optimizer, "eval", lambda: None)()
    return optimizer  # type: ignore[no-any-return]


def _gaps(plan: str) -> dict[str, float]:
    """The largest difference of a parameter, and of the optimizers' states, after some steps by each."""
    ours, staged = placed(plan)
    found = {}
    together = {} if staged else TOGETHER if plan == "batch" else {"LAMB": TOGETHER["LAMB"]}
    for name, make in (SHIPPED | schedule_free() | together).items():
        serial = Net()
        ours.load_state_dict(serial.state_dict())
        ours.zero_grad()
        theirs, mine = trained(serial, make, staged=False), trained(ours, make, staged=staged)
        gradients = [item.grad is not None for item in ours.parameters() if item.numel()]
        assert all(gradients), name  # those that a step of its own has hidden are back
        state, wanted = ours.state_dict(), serial.state_dict()
        found[name] = max(float((state[key] - item).abs().max()) for key, item in wanted.items())
        found[f"state of {name}"] = _state_gap(mine, theirs)
    return found


def _state_gap(mine: optim.Optimizer, theirs: optim.Optimizer) -> float:
    if isinstance(theirs, optim.LBFGS):
        return 0.0
    ours, wanted = mine.state_dict()["state"], theirs.state_dict()["state"]
    assert ours.keys() == wanted.keys()
    return max(
        float((ours[number][name] - value).abs().max())
        for number, state in wanted.items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    )


LONG = ("batch x filter", "stages of filters")


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=[pytest.mark.long] if plan in LONG else []) for plan in PLANS]
)
def test_an_optimizer_as_shipped_takes_the_serial_steps(plan: str, pools: Pools) -> None:
    shape, options = PLANS[plan]
    ranks = Mesh(shape).num_devices * getattr(options.get("pipeline"), "ranks", 1)
    for gaps in pools(ranks).run(_gaps, plan, timeout=240):
        assert len(gaps) >= 2 * len(SHIPPED)
        assert {name: gap for name, gap in gaps.items() if not gap < EXACT} == {}


def _refused() -> dict[str, str]:
    found = {}
    for name, plan in (("LBFGS", "stages"), ("LAMB", "stages"), ("LBFGS, wolfe", "filter")):
        ours, staged = placed(plan)
        before = {key: item.clone() for key, item in ours.state_dict().items()}
        with pytest.raises(InputError) as raised:
            trained(ours, TOGETHER[name], staged=staged)
        found[name] = str(raised.value)
        after = ours.state_dict()
        assert all(torch.equal(after[key], item) for key, item in before.items())
    return found


def test_what_steps_along_all_parameters_is_refused_on_parts_of_them_before_the_first_step(
    pools: Pools,
) -> None:
    for found in pools(2).run(_refused):
        assert "optimizer LBFGS: found the parameters of one pipeline stage" in found["LBFGS"]
        assert "optimizer LBFGS: found parameters in unequal shards" in found["LBFGS, wolfe"]
        assert "public_optimizers.py" in found["LAMB"] and "one pipeline stage" in found["LAMB"]


def _with_closure() -> float:
    ours, _ = placed("filter")
    serial, losses = Net(), []
    for model in (serial, ours):
        optimizer = optim.Muon(matrices(model.parameters()), 0.01)

        def closure(model: Any = model, optimizer: optim.Optimizer = optimizer) -> float:
            optimizer.zero_grad()
            loss = model(*batch(1))
            loss.backward()
            return float(loss)

        losses.append([optimizer.step(closure) for _ in range(3)])
    assert losses[0][0] > losses[0][-1]
    return max(abs(mine - theirs) for mine, theirs in zip(*losses, strict=True))


def test_a_closure_is_called_once_for_a_step_of_its_own(pools: Pools) -> None:
    assert max(pools(2).run(_with_closure)) < EXACT
