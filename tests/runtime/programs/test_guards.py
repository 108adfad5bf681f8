"""A program is used only while everything that its trace read is as it was: changes show as in eager mode."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.mesh import Mesh
from autopar.errors import AutoparError, InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.programs.guards import Guard
from autopar.trace.export import trace
from autopar.trace.reads.attribute_reads import recording
from tests.pool import Pool
from tests.runtime.forced_compiler import ForcedCompiler, forced_compiler

Pools = Callable[[int], Pool]
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
SCALE = 1.0  # a global that forward reads
TABLE = {"scale": 1.0}


@dataclass
class Settings:
    width: float = 1.0
    inner: dict[str, float] = field(default_factory=lambda: {"shift": 0.0})


def plus(x: Tensor) -> Tensor:
    return x + 1


class Block(nn.Module):
    kind_scale = 1.0
    tau: float

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.0)
        self.act: nn.Module = nn.Tanh()
        self.tau, self.use, self.epoch = 1.0, False, 0
        self.settings = Settings()
        self.scales, self.table = [1.0, 2.0], torch.ones(6, dtype=torch.float64)
        self.function: Callable[[Tensor], Tensor] = torch.sin
        self.partial = partial(F.leaky_relu, negative_slope=0.5)

    def encode(self, x: Tensor) -> Tensor:
        return self.function(x)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(self.fc(x))) * self.tau * SCALE * TABLE["scale"] * self.kind_scale
        h = self.act(h) if self.use else h
        h = h * self.settings.width + self.settings.inner["shift"]
        h = self.partial(self.encode(h)) * self.scales[1] * self.table
        return h * getattr(self, "later", 1.0)

    def train(self, mode: bool = True) -> Block:
        super().train(mode)
        self.norm.train(mode and not getattr(self, "frozen", False))
        return self


def serial() -> Block:
    torch.manual_seed(0)
    return Block().double()


def parallel(model: nn.Module, **options: Any) -> tuple[ParallelModule, ForcedCompiler]:
    compiler = forced_compiler(Mesh((2,)), ["batch"], **options)
    ours = ParallelModule(model, compiler, describe=describe, device=torch.device("cpu"))
    return ours, compiler


def _frozen(model: Block) -> None:
    model.frozen = True  # type: ignore[assignment]
    model.train()


def _isinstance(model: Block) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute of the root": lambda model: setattr(model, "tau", 0.5),
    "of a module of torch": lambda model: setattr(model.drop, "p", 1.0),
    "momentum": lambda model: setattr(model.norm, "momentum", 1.0),
    "eps": lambda model: setattr(model.norm, "eps", 1.0),
    "a flag that switches a branch": lambda model: setattr(model, "use", True),
    "a field of settings": lambda model: setattr(model.settings, "width", 3.0),
    "what settings hold": lambda model: model.settings.inner.update(shift=1.0),
    "other settings": lambda model: setattr(
        model, "settings", SimpleNamespace(width=2.0, inner={"shift": 1.0})
    ),
    "an item of a list": lambda model: model.scales.__setitem__(1, 5.0),
    "a tensor in place": lambda model: model.table.mul_(2),
    "another tensor": lambda model: setattr(model, "table", torch.arange(6.0)),
    "a function": lambda model: setattr(model, "function", torch.cos),
    "a function of the user's": lambda model: setattr(model, "function", plus),
    "arguments of a partial": lambda model: model.partial.keywords.update(negative_slope=0.1),
    "an instance's own of its class's": lambda model: setattr(model, "kind_scale", 2.0),
    "a method": lambda model: setattr(model, "encode", torch.cos),
    "what was absent": lambda model: setattr(model, "later", 2.0),
    "a mode": lambda model: model.norm.eval(),
    "modes by isinstance": _isinstance,
    "train of the user's own": _frozen,
    "statistics": lambda model: setattr(model.norm, "track_running_stats", False),
    "a module without parameters": lambda model: (
        setattr(model, "act", nn.ReLU()),
        setattr(model, "use", True),
    ),
}


def _changes(name: str) -> None:
    theirs, (ours, _) = serial(), parallel(serial())
    before = ours(X)
    assert (before - theirs(X)).abs().max() < 1e-12
    for model in (theirs, ours):
        CHANGES[name](model)
    for _ in range(2):
        assert (ours(X) - theirs(X)).abs().max() < 1e-12
    assert (ours.state_dict()["norm.running_mean"] - theirs.norm.running_mean).abs().max() < 1e-12
    assert (ours(X) - before).abs().max() > 1e-6 or name in ("momentum", "statistics"), "the change shows"


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_after_parallelize_takes_effect(name: str, pools: Pools) -> None:
    pools(2).run(_changes, name)


def _globals() -> None:
    global SCALE
    theirs, (ours, _) = serial(), parallel(serial())
    ours(X), theirs(X)
    SCALE = 3.0
    assert (ours(X) - theirs(X)).abs().max() < 1e-12
    TABLE["scale"] = 2.0
    assert (ours(X) - theirs(X)).abs().max() < 1e-12
    SCALE, TABLE["scale"] = 1.0, 1.0
    Block.kind_scale = 2.0
    assert (ours(X) - theirs(X)).abs().max() < 1e-12
    Block.kind_scale = 1.0
    assert (ours(X) - theirs(X)).abs().max() < 1e-12


def test_globals_and_class_attributes_take_effect(pools: Pools) -> None:
    pools(2).run(_globals)


def _unread() -> None:
    ours, compiler = parallel(serial())
    ours(X)
    ours.epoch, ours.unknown = 3, "text"
    ours.settings.unread = 5  # type: ignore[union-attr]
    ours.tau = 1.0 + 0.0  # another object that says the same
    ours(X)
    assert compiler.count == 1


def test_what_forward_does_not_read_makes_no_program(pools: Pools) -> None:
    pools(2).run(_unread)


def _back() -> None:
    theirs, (ours, compiler) = serial(), parallel(serial())
    ours(X), theirs(X)
    for tau in (0.5, 1.0, 0.5, 2.0, 1.0):
        ours.tau = theirs.tau = tau
        assert (ours(X) - theirs(X)).abs().max() < 1e-12
    assert compiler.count == len(ours._autopar._programs) == 3
    for step in range(20):
        ours.tau = step + 10.0
        ours(X)
    assert len(ours._autopar._programs) == 16


@pytest.mark.long
def test_programs_of_values_that_come_back_are_kept_and_the_oldest_dropped(pools: Pools) -> None:
    pools(2).run(_back)


class Focal:
    def __init__(self) -> None:
        self.gamma = 1.0

    def __call__(self, output: Tensor) -> Tensor:
        return (output.abs() ** self.gamma).mean()


class FocalModule(nn.Module):
    gamma = 1.0

    def forward(self, output: Tensor) -> Tensor:
        return (output.abs() ** self.gamma).mean()


def _losses() -> None:
    weight, factors = 1.0, {"w": 1.0}

    def closing(output: Tensor) -> Tensor:
        return weight * factors["w"] * output.square().mean()

    def weighted(output: Tensor, *, factor: float = 1.0) -> Tensor:
        return factor * output.square().mean()

    focal, module, part = Focal(), FocalModule(), partial(weighted, factor=1.0)

    def change_closing() -> None:
        nonlocal weight
        weight *= 2.0

    losses: list[tuple[Any, Callable[[], object]]] = [
        (closing, change_closing),
        (closing, lambda: factors.update(w=3.0)),
        (focal, lambda: setattr(focal, "gamma", 2.0)),
        (module, lambda: setattr(module, "gamma", 2.0)),
        (part, lambda: part.keywords.update(factor=4.0)),
        (partial(closing), change_closing),  # what is read by the function of a partial
        (weighted, lambda: weighted.__kwdefaults__.update(factor=5.0)),
    ]
    for loss_fn, change in losses:
        theirs, (ours, _) = serial(), parallel(serial(), loss_fn=loss_fn)
        before = ours(X)
        assert (before - loss_fn(theirs(X))).abs() < 1e-12
        change()
        after = ours(X)
        assert (after - loss_fn(theirs(X))).abs() < 1e-12
        assert (after - before).abs() > 1e-6


class Perceptual(nn.Module):
    """A loss with modules, buffers and weights of its own, none of which learns."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).double().eval()
        self.requires_grad_(False)
        self.register_buffer("scales", torch.linspace(0.1, 1.0, 5, dtype=torch.float64))

    def forward(self, output: Tensor) -> Tensor:
        out: Tensor = (self.features(output) * self.scales).square().mean()
        return out


def _modules_of_losses() -> None:
    """What is put in the place of what a module outside of the model holds, and its mode."""
    loss_fn: Any = Perceptual()
    halves = nn.Parameter(torch.full((5, 6), 0.5, dtype=torch.float64), requires_grad=False)
    theirs, (ours, _) = serial(), parallel(serial(), loss_fn=loss_fn)
    changes: list[Callable[[], object]] = [
        lambda: setattr(loss_fn, "scales", torch.ones(5, dtype=torch.float64)),
        lambda: setattr(loss_fn.features[0], "weight", halves),
        lambda: loss_fn.features.append(nn.Tanh()),
        lambda: loss_fn.features.__setitem__(1, nn.Sigmoid()),
    ]
    before = ours(X)
    for change in changes:
        change()
        after = ours(X)
        assert (after - loss_fn(theirs(X))).abs() < 1e-12
        assert (after - before).abs() > 1e-6
        before = after


def test_modules_of_a_loss_may_be_exchanged(pools: Pools) -> None:
    pools(2).run(_modules_of_losses)


@pytest.mark.slow
def test_numbers_that_a_loss_reads_take_effect(pools: Pools) -> None:
    pools(2).run(_losses)


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor, settings: Any) -> Tensor:
        out: Tensor = self.fc(x) * settings.width
        return out


class Plain:
    """Settings that say nothing when they are printed."""

    def __init__(self, width: float) -> None:
        self.width = width


def _arguments() -> None:
    torch.manual_seed(0)
    theirs = Told().double()
    ours, compiler = parallel(copy.deepcopy(theirs))
    settings = Plain(1.0)
    for width in (1.0, 2.0, 1.0):
        settings.width = width
        assert (ours(X, settings) - theirs(X, settings)).abs().max() < 1e-12
        assert (ours(X, Plain(width)) - theirs(X, Plain(width))).abs().max() < 1e-12
    assert compiler.count == 2


def test_settings_as_arguments_are_told_by_their_fields(pools: Pools) -> None:
    pools(2).run(_arguments)


# -- what forward itself changes ------------------------------------------------------------------


class Stores(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.fc, self.how = nn.Linear(6, 6), how
        self.calls, self.kept, self.table, self.maps = 0, None, None, []  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        match self.how:
            case "counts":
                self.calls += 1
                h = h * self.calls
            case "says":
                self.calls = 7
            case "keeps":
                self.kept = h.mean()
                h = h + self.kept
            case "first":
                if self.kept is None:
                    self.kept = h.mean().detach()
                h = h + self.kept
            case "caches":
                if self.table is None or self.table.shape[0] != len(x):
                    self.table = torch.linspace(0, 1, len(x), dtype=x.dtype)[:, None]
                h = h + self.table
            case "appends":
                self.maps.append(h)
        return h


def stores(how: str) -> tuple[Stores, ParallelModule]:
    torch.manual_seed(0)
    theirs = Stores(how).double()
    return theirs, parallel(copy.deepcopy(theirs))[0]


def _counts() -> None:
    theirs, ours = stores("counts")
    with pytest.raises(
        InputError, match=r"attribute calls: found a number that forward reads, and changes"
    ) as caught:
        for _ in range(10):
            assert (ours(X) - theirs(X)).abs().max() < 1e-12
    assert len(str(caught.value)) <= 400


def test_a_counter_is_right_until_it_is_refused_by_name(pools: Pools) -> None:
    pools(2).run(_counts)


def _left() -> None:
    theirs, ours = stores("says")
    assert (ours(X) - theirs(X)).abs().max() < 1e-12
    assert ours.calls == 7
    theirs, ours = stores("caches")
    for size in (4, 2, 4):
        assert (ours(X[:size]) - theirs(X[:size])).abs().max() < 1e-12


def test_a_number_is_left_behind_and_a_cache_is_made_anew(pools: Pools) -> None:
    pools(2).run(_left)


def _inside() -> None:
    theirs, ours = stores("keeps")
    for _ in range(2):
        assert (ours(X) - theirs(X)).abs().max() < 1e-12
    uses: list[Callable[[Any], object]] = [
        lambda kept: kept + 1,
        lambda kept: torch.zeros(()) + kept,
        lambda kept: kept.detach(),
        torch.sum,
        float,
        lambda kept: 0.1 * kept,
    ]
    for use in uses:
        with pytest.raises(
            InputError, match="attribute kept: .*inside the program alone.*let forward return it"
        ) as caught:
            use(ours.kept)
        assert len(str(caught.value)) <= 400
    for how in ("first", "appends"):
        theirs, ours = stores(how)
        with pytest.raises(
            AutoparError, match="attribute (kept|maps): found a tensor that forward reads and replaces"
        ):
            ours(X)
        assert ours.maps == [] and ours.kept is None


def test_tensors_that_forward_leaves_are_refused_where_they_are_used(pools: Pools) -> None:
    pools(2).run(_inside)


# -- the guard alone ------------------------------------------------------------------------------


def test_a_guard_of_1000_modules_asks_them_in_c() -> None:
    model = nn.Sequential(
        *(module for _ in range(334) for module in (nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout(0.1)))
    )
    with recording() as reads, reads.on():
        model(torch.zeros(1, 2))
    guard = Guard(reads, own=model.modules())
    assert guard.holds()
    called: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, _: called.update([frame.f_code.co_qualname] * (event == "call")))
    try:
        guard.holds()
    finally:
        sys.setprofile(None)
    assert called.total() < 100, called  # no function of Python's for each module
    model[2].p = 0.2  # type: ignore[assignment]
    assert guard.change() == "Dropout.p"


class Options(dict[str, float]):
    """A dict with attributes beside its items."""

    def __init__(self) -> None:
        super().__init__(width=1.0)
        self.scale = 1.0


class Slots:
    __slots__ = ("scale", "unset")

    def __init__(self) -> None:
        self.scale = 1.0


PROXIED = {"scale": 1.0}
OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]] = {
    "attribute of a dict": (Options, lambda held: held.scale, lambda held: setattr(held, "scale", 2.0)),
    "item of it": (Options, lambda held: held["width"], lambda held: held.update(width=2.0)),
    "all attributes": (
        lambda: Namespace(scale=1.0),
        lambda held: float(sum(vars(held).values())),
        lambda held: setattr(held, "shift", 1.0),
    ),
    "a name among them": (
        lambda: Namespace(scale=1.0),
        lambda held: 2.0 if "shift" in held else 1.0,
        lambda held: setattr(held, "shift", 1.0),
    ),
    "a proxy": (
        lambda: MappingProxyType(PROXIED),
        lambda held: float(held["scale"]),
        lambda _: PROXIED.update(scale=2.0),
    ),
    "a slot": (Slots, lambda held: held.scale, lambda held: setattr(held, "scale", 2.0)),
    "an unset slot": (
        Slots,
        lambda held: 2.0 if hasattr(held, "unset") else 1.0,
        lambda held: setattr(held, "unset", 2.0),
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_what_objects_hold_shows_when_it_changes(name: str) -> None:
    make, read, change = OBJECTS[name]

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.held = nn.Linear(6, 6), make()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x) * read(self.held)
            return y

    model = Reader().double()
    with recording() as reads:
        trace(model, (X,))
    guard = Guard(reads, own=model.modules())
    assert guard.holds() and guard.holds()
    change(model.held)
    assert not guard.holds()
    PROXIED["scale"] = 1.0


class Kind(tuple[Any, ...]):
    """A value that is no sequence, although its class is one of Python's."""

    @property
    def order(self) -> Any:
        return tuple.__getitem__(self, 0)

    def __len__(self) -> int:
        raise NotImplementedError

    __iter__ = __getitem__ = __contains__ = __len__  # type: ignore[assignment]


class OfKind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.pair = Kind((1, Settings())), (Kind((2,)),)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.kind.order + self.pair[0].order
        return out


def test_what_a_container_holds_is_looked_at_whatever_its_class_makes_of_that() -> None:
    model = OfKind()
    with recording() as reads:
        trace(model, (X,))
    guard = Guard(reads)
    model.kind = Kind(tuple.__iter__(model.kind))
    assert guard.holds()
    model.kind = Kind((3, Settings()))
    assert guard.change() == "OfKind.kind"
