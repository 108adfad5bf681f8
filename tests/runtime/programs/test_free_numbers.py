"""Numbers that change at each call are inputs of one program where that is proved, else a program of each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.programs.free_numbers import check_alike
from autopar.trace.reads.numbers import NotFreeError, Numbers, computed, freed, marked
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler

Pools = Callable[[int], Pool]
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
SCALE = 1.0  # a global that forward reads
NEAR = 1e-12


class Flip(torch.autograd.Function):
    """A gradient that is turned round, and made `strength` as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -ctx.strength * gradients[0], None


class Deciding(Flip):
    """Of strengths above 0.5 it mixes samples."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        mixed = gradient.mean(0, keepdim=True).expand_as(gradient) if ctx.strength > 0.5 else gradient
        return ctx.strength * mixed, None


class Squared(Flip):
    """The derivative of its forward where the strength is 0 or 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x * strength

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.strength**2 * gradients[0], None


class Net(nn.Module):
    """What forward does with a number says `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.fc, self.norm, self.drop, self.out = (
            nn.Linear(6, 6),
            nn.BatchNorm1d(6),
            nn.Dropout(0.5),
            nn.Linear(6, 6),
        )
        self.how, self.tau = how, 0.3
        self.settings = {"scales": [1.0, 0.3]}

    def forward(self, x: Tensor, w: Any = 0.3) -> Any:  # noqa: C901  (a table)
        h, tau = self.fc(x), self.tau
        match self.how:
            case "norm":
                h = self.norm(h)
            case "drop":
                h = F.dropout(self.drop(h), 0.5)  # whose mask comes after what the first has drawn
            case "attribute":
                h = (1 - tau) * h + (h / tau).sigmoid() ** tau + torch.full_like(h, 2 * tau)
            case "argument":
                h = h * w + F.leaky_relu(h, w) - min(w, 5.0)
            case "global":
                h = h * SCALE
            case "a list":
                h = h * self.settings["scales"][1]
            case "both":
                h = h * w + h.tanh() * tau
            case "an int":
                h = h * w + h.tanh() / (w + 1)
            case "flip":
                h = Flip.apply(h, w)  # type: ignore[no-untyped-call]
            case "decides":
                h = h.tanh() * tau if tau > 0.5 else h.sin() * tau
            case "an int decides":
                h = h * w if w % 2 else h.sin() * w
            case "deciding backward":
                h = Deciding.apply(h, w)  # type: ignore[no-untyped-call]
            case "derivative":
                h = Squared.apply(h, w)  # type: ignore[no-untyped-call]
            case "exp":
                h = h * 2 if math.exp(tau) > 2 else h.sin()
            case "int":
                h = h * int(4 * tau)
            case "round":
                h = h * round(tau, 1) * (tau if abs(tau) else 1.0)
            case "a tensor":
                h = h * torch.tensor(tau, dtype=h.dtype)
            case "a text":
                h = h * {"0.3": 1.0}.get(f"{tau}", 3.0)
            case "a key":
                h = h * {0.3: 1.0}.get(tau, 3.0)
            case "a kind":
                h = h * (tau if type(tau) is float else 7.0)
            case "isinstance":
                h = h * (tau if isinstance(tau, float) else 7.0)
            case "torch's Python":
                h = h + F.multi_margin_loss(h, torch.zeros(4, dtype=torch.int64), margin=tau)
            case "index":
                h = h * h[:, w : w + 1]
            case "returned":
                return {"h": self.out(h), "tau": tau * 2}
            case "left":
                self.last = tau * 2
                h = h * tau
        return self.out(h)


def both(how: str, **options: Any) -> tuple[Net, ParallelModule, list[None]]:
    """The serial model, the parallel one, and as many as it has compiled programs."""
    torch.manual_seed(0)
    theirs, compiled = Net(how).double(), list[None]()
    compiler = forced_compiler(Mesh((2,)), ["batch"], keeps=True, **options)

    def compile(*args: Any, **kwargs: Any) -> Any:
        compiled.append(None)
        return compiler(*args, **kwargs)

    ours = ParallelModule(
        copy.deepcopy(theirs),
        compile,
        describe=describe,
        device=torch.device("cpu"),
        exact_random=True,
        quiet=True,
    )
    return theirs, ours, compiled


def agree(theirs: Net, ours: ParallelModule, *args: Any) -> None:
    """One step of both gives the same output, gradients and buffers."""
    results, states = [], []
    ours.prepare(X, *args)
    for model in (theirs, ours):
        torch.manual_seed(1)
        output = model(X, *args)
        model.zero_grad()
        if isinstance(output, dict):
            assert output["tau"] == 2 * theirs.tau and type(output["tau"]) is float
            output = output["h"]
        output.square().sum().backward()
        results.append(output)
        gradients = {name: item.grad for name, item in model.named_parameters() if item.grad is not None}
        if isinstance(model, ParallelModule):
            gradients = {name: model.gather(name, item) for name, item in gradients.items()}
        states.append({**model.state_dict(), **gradients})
    assert (results[0] - results[1]).abs().max() < NEAR, (theirs.how, theirs.tau, theirs.drop.p, args)
    assert all((value - states[1][name]).abs().max() < NEAR for name, value in states[0].items())


def set_global(value: float) -> None:
    global SCALE
    SCALE = value


FREE: dict[str, Callable[[Any, Any], object]] = {
    "norm": lambda model, value: setattr(model.norm, "momentum", value),
    "drop": lambda model, value: setattr(model.drop, "p", value),
    "attribute": lambda model, value: setattr(model, "tau", value),
    "global": lambda model, value: set_global(value),
    "a list": lambda model, value: model.settings["scales"].__setitem__(1, value),
    "argument": lambda model, value: None,
    "flip": lambda model, value: None,
    "both": lambda model, value: setattr(model, "tau", value**2),
    "round": lambda model, value: setattr(model, "tau", value),
    "isinstance": lambda model, value: setattr(model, "tau", value),
}


def _free(how: str) -> None:
    theirs, ours, compiled = both(how)
    passes = how in ("argument", "flip", "both")
    for number, value in enumerate((0.3, 0.4, 0.99, 0.2)):
        for model in (theirs, ours):
            FREE[how](model, value)
        agree(theirs, ours, *([value] if passes else []))
        assert len(compiled) <= min(number + 1, 2), "the third value is put into the second's program"
    assert len(ours._autopar._programs) == 2
    set_global(1.0)


FEW = ("drop", "attribute", "flip", "both")


def _with_long(names: Iterable[str], few: Sequence[str]) -> list[Any]:
    """All names, of which those beside a few are tried in long runs."""
    return [name if name in few else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("how", _with_long(FREE, FEW))
def test_the_third_value_of_a_number_needs_no_trace(how: str, pools: Pools) -> None:
    pools(2).run(_free, how)


def _ints() -> None:
    theirs, ours, compiled = both("an int")
    for value in range(1, 7):
        agree(theirs, ours, value)
    agree(theirs, ours, 3.0)
    assert len(compiled) == 3, "a float is no int"


def test_ints_are_free_too_but_stay_ints(pools: Pools) -> None:
    pools(2).run(_ints)


def test_what_a_pass_makes_of_a_literal_stays_a_number_that_may_be_another() -> None:
    numbers = Numbers([0.3], [0.4])
    with freed(numbers):
        (literal,) = marked(numbers.items)
        formula = numbers.formula(computed(lambda m: 1 - m, literal))
        assert formula is not None and formula([0.75]) == 0.25
        assert numbers.formula(computed(lambda m: 1 - m, 0.5)) is None
    assert computed(lambda m: 1 - m, 0.25) == 0.75


VALUES = (0.3, 0.4, 0.6)
PROVED_NOT: dict[str, Sequence[Any]] = {
    "decides": VALUES,
    "deciding backward": VALUES,
    "derivative": (0.0, 1.0, 0.5),
    "drop": (0.3, 0.4, 1.0, 0.0),
    "exp": VALUES,
    "int": VALUES,
    "a tensor": VALUES,
    "a text": VALUES,
    "a key": VALUES,
    "a kind": VALUES,
    "torch's Python": VALUES,
    "index": (0, 1, 2),
    "an int decides": (1, 3, 4),
    "returned": VALUES,
    "left": VALUES,
}


def _never_wrong(how: str) -> None:
    theirs, ours, _ = both(how)
    passes = how in ("deciding backward", "derivative", "index", "an int decides")
    for value in PROVED_NOT[how]:
        if not passes:
            for model in (theirs, ours):
                setattr(*((model.drop, "p") if how == "drop" else (model, "tau")), value)  # type: ignore[arg-type]
        agree(theirs, ours, *([value] if passes else []))
        if how == "left":
            assert ours.last == theirs.last and type(ours.last) is float


@pytest.mark.parametrize(
    "how", _with_long(PROVED_NOT, ("decides", "deciding backward", "derivative", "drop", "exp"))
)
def test_numbers_that_python_decides_by_are_never_wrong(how: str, pools: Pools) -> None:
    pools(2).run(_never_wrong, how)


def _losses() -> None:
    weight = 1.0

    def loss_fn(output: Tensor) -> Tensor:
        return weight * output.square().mean()

    theirs, ours, compiled = both("", loss_fn=loss_fn)
    for weight in (1.0, 0.5, 0.25, 0.2):  # noqa: B007  (the loss closes over it)
        assert (ours(X) - loss_fn(theirs(X))).abs() < NEAR
    assert len(compiled) == 2


def test_a_number_that_a_loss_closes_over_is_free(pools: Pools) -> None:
    pools(2).run(_losses)


def _between() -> None:
    for recompute in (False, True):
        theirs, ours, _ = both("both", recompute=recompute, loss_fn=lambda output: output.square().sum())
        for value in (0.3, 0.4):
            ours(X, value)
        sums = []
        for model in (theirs, ours):
            losses = [model(X, value) for value in (0.5, 0.6)]  # both before any backward
            losses = losses if model is ours else [loss.square().sum() for loss in losses]
            torch.stack(losses).sum().backward()
            sums.append(model.fc.weight.grad)
        assert (sums[0] - ours.gather("fc.weight", sums[1])).abs().max() < 1e-10


def test_what_is_computed_again_has_the_number_of_its_own_forward(pools: Pools) -> None:
    pools(2).run(_between)


def _steps() -> None:
    def loss_fn(output: Tensor) -> Tensor:
        return output.square().mean()

    staged = Pipeline(ranks=1, micro_batches=2)
    theirs, ours, compiled = both("both", pipeline=staged, loss_fn=loss_fn)
    for value in (0.3, 0.4, 0.5, 0.6):
        ours.tau = theirs.tau = 2 * value
        loss = ours.train_step(X, value)
        assert (loss - loss_fn(theirs(X, value))).abs() < NEAR
    assert len(compiled) == 2


def test_numbers_are_free_in_steps_of_micro_batches(pools: Pools) -> None:
    pools(2).run(_steps)


def _unproved() -> None:
    theirs, ours, _ = both("argument")
    ours(X, 0.3)
    known = ours._autopar._current
    ours(X, 0.4)
    assert known is not None and ours._autopar._current is not None
    (entry,) = [entry for entry in ours._autopar._programs.cache.like(_key(ours)) if entry.free is None]
    numbers = Numbers([0.4], [0.3])
    check_alike(entry.program.executable, entry.program.executable, numbers)
    with pytest.raises(NotFreeError):  # of 0.3 in one and of 0.4 in the other nothing says what it is
        check_alike(ours._autopar._current.executable, entry.program.executable, numbers)


def _key(ours: ParallelModule) -> Any:
    runner = ours._autopar
    return next(key for key, _ in runner._programs.cache.plans())


def test_a_literal_that_differs_and_is_no_mark_is_no_number(pools: Pools) -> None:
    pools(2).run(_unproved)


# -- other sizes ------------------------------------------------------------------------------------


def _sizes() -> None:
    torch.manual_seed(0)
    theirs = Net("attribute").double()
    compiler = forced_compiler(Mesh((2,)), ["batch"], keeps=True)
    ours = ParallelModule(copy.deepcopy(theirs), compiler, describe=describe, device=torch.device("cpu"))
    for rows, counted in ((4, 1), (3, 1), (7, 1), (2, 1), (1, 2), (5, 2)):
        x = X.repeat(2, 1)[:rows]
        assert (ours(x) - theirs(x)).abs().max() < NEAR
        assert compiler.count == counted, "one row can't be cut in two: another plan"


def test_other_sizes_keep_the_plan_where_it_can_be_run(pools: Pools) -> None:
    pools(2).run(_sizes)
