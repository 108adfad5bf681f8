"""What a forward puts in the place of buffers, tensors and numbers is kept, refused or noted, never lost."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext, suppress
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.core.graph import InputKind
from autopar.errors import InputError, TraceError
from autopar.trace.export import trace
from autopar.trace.reads.attribute_reads import recording
from autopar.trace.reads.inside import Inside


class Layer(nn.Module):
    mean: Tensor
    empty: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("empty", None)
        self.tensor, self.calls, self.width = torch.zeros(3), 1, 0.5
        self.shown: Any = torch.zeros(1)

    def forward(self, x: Tensor, what: str) -> Tensor:
        match what:
            case "buffer":
                before = self.mean
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
                return x * before + self.mean
            case "longer":
                self.mean = self.mean.repeat(2)
            case "filled":
                self.empty = x.detach().mean(0)
            case "tensor":
                self.tensor = 0.9 * self.tensor + x.detach().mean(0)
                return x + self.tensor
            case "number":
                self.calls += 1
                return x * self.calls
            case _:
                self.shown, self.width = x.mean(), x.shape[1]
                return x * self.shown
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(3, 3), Layer()

    def forward(self, x: Tensor, what: str) -> Tensor:
        out: Tensor = self.layer(self.first(x), what)
        return out


def traced(what: str) -> tuple[Model, Any]:
    model = Model()
    return model, trace(model, (torch.randn(2, 3), what)).graph


def test_a_new_tensor_in_a_buffers_place_is_a_write_and_what_was_read_before_is_the_old_one() -> None:
    model, graph = traced("buffer")
    makers = {item.results[0]: item for item in graph.operators}
    ((buffer, written),) = graph.writes
    assert buffer == "layer_mean" and makers[written].target is torch.ops.aten.add.Tensor
    product = next(item for item in graph.operators if item.operands == ("linear", "layer_mean"))
    assert makers[graph.outputs[0]].operands == (product.results[0], written)
    assert torch.equal(model.layer.mean, torch.zeros(3)), "tracing leaves the model as it was"


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("longer", r"buffer layer\.mean: .*float32\[6\] in the place of float32\[3\]"),
        ("filled", r"buffer layer\.empty: .*float32\[3\] in the place of None"),
        ("tensor", r"attribute layer\.tensor: .*reads and replaces.*register_buffer\('tensor'"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(what: str, found: str) -> None:
    with pytest.raises(TraceError, match=found):
        traced(what)


def left(what: str) -> tuple[Any, Any]:
    model = Model()
    with recording() as reads:
        graph = trace(model, (torch.randn(2, 3), what)).graph
    assert model.layer.calls == 1 and model.layer.width == 0.5 and model.layer.shown.shape == (1,)
    return graph, reads.left


def test_a_number_that_is_read_and_changed_is_left_behind_and_noted() -> None:
    graph, values = left("number")
    assert values == {("layer", "calls"): 2}
    assert graph.notes == ("forward reads and changes layer.calls: a program is made for each of its values",)


def test_tensors_that_are_only_shown_stay_inside_and_numbers_are_left_behind() -> None:
    graph, values = left("shown")
    assert graph.writes == () and graph.notes == ()
    assert values.pop(("layer", "width")) == 3
    ((path, inside),) = values.items()
    assert path == ("layer", "shown") and isinstance(inside, Inside)
    with pytest.raises(InputError, match=r"attribute layer\.shown: .*inside the program alone"):
        inside + 1


class Holding(nn.Module):
    """Keeps what it made last in an object of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.box = SimpleBox()

    def forward(self, x: Tensor) -> Tensor:
        self.box.last = x.mean()
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(3.0), persistent=False)
            self.register_buffer("unused", None, persistent=False)
        return x + self.table


class SimpleBox:
    last: Any = None


def test_a_trace_leaves_objects_and_modules_as_they_were() -> None:
    model = Holding()
    with recording() as reads:
        trace(model, (torch.randn(2, 3),))
    assert model.box.last is None and vars(model.box) == {}
    assert not model._buffers
    (left,) = reads.inside
    left.leave()
    with pytest.raises(InputError, match=r"SimpleBox\.last"):
        model.box.last + 1


class Library:
    """What dispatches to a library holds its module, whose own names hold tensors and itself."""

    def __init__(self, seen: int) -> None:
        self.of, self.seen = module, seen


module = ModuleType("library")
module.eps, module.known = torch.ones(1), [vars(module)]  # type: ignore[attr-defined]


class Dispatching(nn.Module):
    """Puts another registry in the place of the last one at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.box = SimpleBox()
        self.box.last = Library(0)

    def forward(self, x: Tensor) -> Tensor:
        self.box.last = Library(self.box.last.seen)
        return x + 1


def test_a_module_that_what_forward_leaves_names_holds_no_tensors_of_the_call() -> None:
    traced = trace(Dispatching(), (torch.randn(2, 3),))
    assert traced.once == ("SimpleBox.last",)


class Tabled(nn.Module):
    """Makes its table of positions where it has none, or too short a one."""

    table: Any

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(float(rows)) if rows else None, persistent=False)

    def forward(self, x: Tensor, what: str = "rows") -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            table = torch.arange(float(x.shape[1])) if what == "rows" else x.mean(0)
            self.register_buffer("table", table, persistent=False)
        return x + self.table[: x.shape[1]]


@pytest.mark.parametrize("rows", [0, 2])
def test_a_table_that_no_state_dict_has_is_made_anew_whatever_was_there(rows: int) -> None:
    model = Tabled(rows)
    before = model.table
    graph = trace(model, (torch.randn(2, 3),)).graph
    assert model.table is before and not graph.writes
    assert [item.target for item in graph.operators][0] is torch.ops.aten.arange.default
    assert trace(Tabled(4), (torch.randn(2, 3),)).graph.inputs[0].target == "table"


class Sloped(nn.Module):
    """Makes its table of a buffer."""

    table: Any
    slopes: Tensor

    def __init__(self, *, saved: bool) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.arange(3.0), persistent=saved)
        self.register_buffer("table", None, persistent=False)

    def forward(self, slopes: Tensor, what: str) -> Tensor:  # an argument of the buffer's name
        if what == "write":
            self.slopes.mul_(2)
        if self.table is None:
            self.table = (slopes if what == "argument" else self.slopes) * 2
        return slopes + self.table


def test_a_table_is_made_anew_of_buffers_that_stay_as_they_are() -> None:
    graph = trace(Sloped(saved=False), (torch.randn(2, 3), "read")).graph
    assert {(item.kind, item.target) for item in graph.inputs} == {
        (InputKind.USER, "input_0"),
        (InputKind.BUFFER, "slopes"),
    }


@pytest.mark.parametrize("what", ["read", "write", "argument"])
def test_a_table_of_what_may_be_another_at_the_next_call_is_refused(what: str) -> None:
    with pytest.raises(TraceError, match="attribute table: .*or call the model once before"):
        trace(Sloped(saved=what == "read"), (torch.randn(2, 3), what))


def test_what_a_call_puts_in_the_place_of_nothing_is_refused() -> None:
    with pytest.raises(TraceError, match="attribute table: .*a tensor that forward reads and replaces"):
        trace(Tabled(0), (torch.randn(2, 3), "values"))


class Sharing(nn.Module):
    """Shares settings with a layer, and notes what it did in attributes, old and new."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.settings = self.layer.settings = {"scale": [1.0], "sizes": deque([2])}  # type: ignore[assignment]
        self.last: Any = None

    def forward(self, x: Tensor, fails: bool) -> Tensor:
        out: Tensor = self.layer(x) * self.settings["scale"][0]
        self.last, self.seen = ({"out": out},), {"in": x}
        if fails and out.sum() > 0:
            return x
        return out


@pytest.mark.parametrize("fails", [False, True])
def test_a_trace_leaves_the_same_objects_in_attributes_and_none_of_its_own(fails: bool) -> None:
    model = Sharing()
    before = vars(model).copy()
    with pytest.raises(TraceError) if fails else nullcontext():
        trace(model, (torch.randn(2, 3), fails))
    assert vars(model).keys() == before.keys() and all(vars(model)[name] is before[name] for name in before)
    assert model.settings is model.layer.settings


def test_what_forward_changes_in_lists_of_lists_is_as_it_was() -> None:
    class Logging(Sharing):
        def forward(self, x: Tensor, fails: bool) -> Tensor:
            self.settings["scale"].append(x.mean())
            self.settings["new"] = self.settings["sizes"].pop()
            return super().forward(x, fails)

    model = Logging()
    with suppress(TraceError):
        trace(model, (torch.randn(2, 3), False))
    assert model.settings == {"scale": [1.0], "sizes": deque([2])}
