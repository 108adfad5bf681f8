"""State that forward may read is found by the names in code that ran, in whatever that can reach."""

from __future__ import annotations

import cProfile
import dataclasses
import sys
import types
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.trace.export import trace
from autopar.trace.reads.attribute_reads import recording
from autopar.trace.reads.code_names import names_in
from autopar.trace.reads.code_that_ran import code_that_runs
from autopar.trace.reads.reachable_state import Reachable
from autopar.trace.state.eager_answers import NOTE
from tests.border import settings

X = torch.ones(4, 6)


def helper(x: Tensor) -> Any:
    return x * settings.SCALE


def never(x: Tensor) -> Any:
    return x * settings.TABLE["scale"]


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 3), function

    def forward(self, x: Tensor) -> Any:
        def inner(y: Tensor) -> Any:
            return self.function(y) if len(y) else never(y)

        return inner(self.layer(x))


def named(model: nn.Module) -> Reachable:
    with recording() as reads:
        trace(model, (X,))
    return reads.by_name()


def test_names_of_code_are_those_of_globals_attributes_imports_and_texts() -> None:
    def code(self: Any) -> Any:
        import json.decoder

        return getattr(self, "width"), settings.SCALE, ("a b", "depth"), json, lambda: X.shape  # noqa: B009

    names = names_in(code.__code__)
    assert names.globals == {"getattr", "settings", "X"}
    assert names.imports == {"json.decoder"}
    assert {"width", "SCALE", "depth", "shape"} <= names.every and "a b" not in names.every


def test_code_that_ran_is_noted_and_the_profiler_goes_on() -> None:
    profile = cProfile.Profile()
    profile.enable()
    try:
        with code_that_runs() as ran:
            helper(X)
    finally:
        profile.disable()
    assert helper.__code__ in ran and never.__code__ not in ran
    assert sys.getprofile() is None


def test_names_are_those_of_code_that_ran() -> None:
    reached = named(Net(helper))
    names = {space.shown: space.held() for space in reached.namespaces.values()}
    assert "SCALE" in names["tests.border.settings"]
    assert "TABLE" not in names["tests.border.settings"]  # of `never`, which didn't run
    assert helper in reached.functions.values() and never not in reached.functions.values()


def test_libraries_are_not_followed() -> None:
    reached = named(Net(torch.tanh))
    functions = {function.__module__.partition(".")[0] for function in reached.functions.values()}
    assert functions == {"tests"}


class Asking(nn.Module):
    """Takes values out of the program where it isn't traced."""

    def forward(self, x: Tensor) -> Any:
        if torch.compiler.is_exporting():
            return x * 2
        return x * 3 if x.sin().sum() > self.limit() else x

    def limit(self) -> Any:
        return torch.rand(())


@dataclasses.dataclass
class Sizes:
    width: int = 6


class Table(Mapping[str, float]):
    def __init__(self) -> None:
        self.held = {"scale": 2.0}

    def __getitem__(self, name: str) -> float:
        return self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.others, self.sizes = Table(), UserDict({"shift": 1.0}), Sizes()

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.table, Mapping)
        (width,) = dataclasses.fields(self.sizes)
        return x * self.table["scale"] + self.others["shift"] + self.sizes.width / width.default


def test_mappings_are_recorded_where_forward_reads_them_but_not_those_of_the_tracer() -> None:
    with recording() as reads:
        trace(Scaled(), (X,))
    read = {owner.kind: owner.names for owner in reads.owners.values()}
    assert "held" in read[Table] and "data" in read[UserDict] and "width" in read[Sizes]
    assert [own for own in reads.owners.values() if own.kind is dataclasses.Field and "default" in own.names]
    assert not [kind for kind in read if kind.__module__ in ("weakref", "torch.utils.weak")]


def test_who_asks_hears_that_it_is_traced_where_nothing_else_can_be() -> None:
    assert NOTE in trace(Asking(), (X,)).graph.notes
    plain = types.MethodType(lambda self, x: x * (2 if torch.compiler.is_exporting() else 3), nn.Module())
    assert NOTE not in trace(Net(plain), (X,)).graph.notes
