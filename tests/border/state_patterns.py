"""State that forward reads or leaves outside of its modules: patterns as in patterns.py."""

from __future__ import annotations

import contextvars
import functools
import itertools
import os
import threading
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.border import settings
from tests.border.patterns import Wrap, X, equal, mlp, refused
from tests.border.settings import Config, scaled

Forward = Callable[[Any, Tensor], Any]
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
LOCAL = threading.local()
LOCAL.scale = 1.0
SPACE = types.SimpleNamespace(scale=1.0)
QUEUE, BYTES, NUMBERS = deque([1.0]), bytearray(b"\x01"), array("d", [1.0])
CACHE: dict[int, Tensor] = {}
LOG: list[Tensor] = []
COUNTS = {"calls": 0}
SETTINGS: Any = settings


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()


def changed(wrap: Wrap, forward: Forward, *places: tuple[Any, Any, Any]) -> list[Any]:
    """Outputs before and after each change: of an attribute, an item or, by a function, of anything."""
    model = wrap(type("Changed", (Net,), {"forward": forward})(), X)
    found = [model(X).detach()]
    undo: list[Callable[[], object]] = []
    for owner, name, value in places:
        undo.append(_put(owner, name, value))
        found += [model(X).detach(), model(2 * X).detach()]
    for back in reversed(undo):
        back()
    return [*found, model(X).detach()]


def _put(owner: Any, name: Any, value: Any) -> Callable[[], object]:
    if isinstance(name, str) and not isinstance(owner, MutableMapping):
        before = getattr(owner, name)
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before)
    before = owner[name]
    owner[name] = value
    return lambda: owner.__setitem__(name, before)


@equal
def settings_of_an_imported_module(wrap: Wrap) -> list[Any]:
    def forward(self: Net, x: Tensor) -> Any:
        from tests.border.settings import SCALE

        own = settings
        return scaled(self.body(x)) * own.SCALE + SCALE + SETTINGS.TABLE["scale"]

    changes = (settings, "SCALE", 3.0), (settings.TABLE, "scale", 2.0)
    return changed(wrap, forward, *changes)


@equal
def settings_in_a_class(wrap: Wrap) -> list[Any]:
    def forward(self: Net, x: Tensor) -> Any:
        config, kind = Config, "scale"
        return getattr(torch, Config.act)(self.body(x)) * config.scale + getattr(config, kind)

    return changed(wrap, forward, (Config, "scale", 3.0), (Config, "act", "relu"))


class Single:
    """Makes its one object when it is asked first."""

    made: Single | None = None

    def __init__(self) -> None:
        self.scale = 1.0

    @classmethod
    def get(cls) -> Single:
        if cls.made is None:
            cls.made = cls()
        return cls.made


@equal
def one_object_made_by_the_first_forward(wrap: Wrap) -> list[Any]:
    def forward(self: Net, x: Tensor) -> Any:
        return self.body(x) * Single.get().scale

    Single.made = None
    model = wrap(type("Changed", (Net,), {"forward": forward})(), X)
    found = [model(X).detach()]
    Single.get().scale = 3.0
    return [*found, model(X).detach()]


@equal
def namespaces_threads_and_contexts(wrap: Wrap) -> list[Any]:
    def forward(self: Net, x: Tensor) -> Any:
        return self.body(x) * SPACE.scale * LOCAL.scale * VARIABLE.get()

    found = changed(wrap, forward, (SPACE, "scale", 2.0), (LOCAL, "scale", 3.0))
    model = wrap(type("Changed", (Net,), {"forward": forward})(), X)
    found.append(model(X).detach())
    token = VARIABLE.set(5.0)
    found.append(model(X).detach())
    VARIABLE.reset(token)
    return found


@equal
def queues_bytes_and_arrays(wrap: Wrap) -> list[Any]:
    def forward(self: Net, x: Tensor) -> Any:
        return self.body(x) * QUEUE[0] * BYTES[0] * NUMBERS[0]

    return changed(wrap, forward, (QUEUE, 0, 2.0), (BYTES, 0, 3), (NUMBERS, 0, 4.0))


def tuned(x: Tensor) -> Tensor:
    return x * getattr(tuned, "scale", 1.0)


@equal
def attributes_and_code_of_functions(wrap: Wrap) -> list[Any]:
    def forward(self: Net, x: Tensor) -> Any:
        return tuned(self.body(x))

    def other(x: Tensor) -> Tensor:
        return x + 1

    tuned.scale = 1.0  # type: ignore[attr-defined]
    return changed(wrap, forward, (tuned, "scale", 2.0), (tuned, "__code__", other.__code__))


@equal
def functions_of_torch_that_are_replaced(wrap: Wrap) -> list[Any]:
    def forward(self: Net, x: Tensor) -> Any:
        return F.gelu(self.body(x))

    return changed(wrap, forward, (F, "gelu", torch.relu))


@equal
def what_is_referred_to_weakly(wrap: Wrap) -> list[Any]:
    held = [Config(), Config()]
    held[1].scale = 4.0
    where = {"now": weakref.ref(held[0])}

    def forward(self: Net, x: Tensor) -> Any:
        config = where["now"]()
        return self.body(x) * (1.0 if config is None else config.scale)

    return changed(wrap, forward, (where, "now", weakref.ref(held[1])))


@equal
def environment_variables(wrap: Wrap) -> list[Any]:
    def forward(self: Net, x: Tensor) -> Any:
        return self.body(x) * float(os.environ.get("SCALE_OF_" + "FORWARD", "1"))

    os.environ["SCALE_OF_FORWARD"] = "1"
    return changed(wrap, forward, (os.environ, "SCALE_OF_FORWARD", "3"))


@equal
def tables_in_caches(wrap: Wrap) -> list[Any]:
    @functools.cache
    def table(size: int) -> Tensor:
        return torch.linspace(0, 1, size, dtype=torch.float64)[:, None]

    def forward(self: Net, x: Tensor) -> Any:
        size = x.shape[0]
        if size not in CACHE:
            CACHE[size] = torch.linspace(1, 2, size, dtype=torch.float64)[:, None]
        return self.body(x) * CACHE[size] + table(size)

    CACHE.clear()
    model = wrap(type("Cached", (Net,), {"forward": forward})(), X)
    found = [model(X).detach(), model(X[:6]).detach(), model.eval()(X).detach()]
    return [*found, table(8) * 2, table(6) * 2]


@equal
def questions_whether_it_is_traced(wrap: Wrap) -> list[Any]:
    class Asking(Net):
        def forward(self, x: Tensor) -> Any:
            traced = torch.compiler.is_compiling() or torch.compiler.is_exporting()
            y = (
                self.body(x)
                * (2 if traced else 1)
                * (3 if x.is_leaf else 5)
                * (7 if x.grad_fn is None else 11)
            )
            return y * (13 if x.is_contiguous() else 17)

    model = wrap(Asking(), X)
    found = [model(X), model(X.clone().requires_grad_()), model(X.clone().requires_grad_() * 2)]
    return [item.detach() for item in (*found, model(X.T.contiguous().T))]


class Meter:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.count, self.warm, self.last, self.warned = 0, True, 0.0, False

    def warn(self) -> None:
        if not self.warned:
            self.warned = True


class Metered(Net):
    def __init__(self, use: Callable[[Meter, Tensor], Any]) -> None:
        super().__init__()
        self.meter, self.use = Meter(), use

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        return y * self.use(self.meter, y)


@equal
def what_is_done_once_changes_nothing(wrap: Wrap) -> list[Any]:
    def use(meter: Meter, y: Tensor) -> Any:
        meter.warn()
        return 2.0

    model = wrap(Metered(use), X)
    return [model(X).detach(), model(X).detach(), float(model.meter.warned)]


@equal
def a_tensor_in_an_object_is_left_alone(wrap: Wrap) -> list[Any]:
    def use(meter: Meter, y: Tensor) -> Any:
        meter.last = y.mean()  # type: ignore[assignment]
        return 2.0

    model = wrap(Metered(use), X)
    return [model(X).detach(), model(X).detach()]


@equal
def tensors_are_handed_on_in_an_object(wrap: Wrap) -> list[Any]:
    def use(meter: Meter, y: Tensor) -> Any:
        meter.last = y.mean()  # type: ignore[assignment]
        return meter.last * 2

    model = wrap(Metered(use), X)
    return [model(X).detach(), model(2 * X).detach()]


# -- refused ------------------------------------------------------------------------------------------


def once(wrap: Wrap, forward: Forward) -> list[Any]:
    return [wrap(type("Once", (Net,), {"forward": forward})(), X)(X).detach()]


@refused("LOG.*changes what the list holds.*let forward return")
def a_log_of_tensors(wrap: Wrap) -> list[Any]:
    def forward(self: Net, x: Tensor) -> Any:
        y = self.body(x)
        LOG.append(y.detach().mean())
        return y

    return once(wrap, forward)


@refused("COUNTS.*calls.*leaves 1 instead of 0.*buffer")
def a_count_of_calls_outside(wrap: Wrap) -> list[Any]:
    def forward(self: Net, x: Tensor) -> Any:
        COUNTS["calls"] += 1
        return self.body(x)

    try:
        return once(wrap, forward)
    finally:
        COUNTS["calls"] = 0


@refused("cycle that forward may take the next item of.*list")
def an_iterator(wrap: Wrap) -> list[Any]:
    scales = itertools.cycle([1.0, 2.0])

    def forward(self: Net, x: Tensor) -> Any:
        return self.body(x) * next(scales)

    return once(wrap, forward)


@refused("arguments of forward.*list or dict")
def an_argument_that_is_filled(wrap: Wrap) -> list[Any]:
    class Filling(Net):
        def forward(self, x: Tensor, info: dict[str, Any] | None = None) -> Any:
            y = self.body(x)
            if info is not None:
                info["mean"] = y.mean()
            return y

    model = wrap(Filling(), X)
    return [model(X, info={}).detach()]


@refused("requires gradients and isn't the model's.*ModuleList")
def a_layer_in_a_plain_list(wrap: Wrap) -> list[Any]:
    class Heads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.heads = [nn.Linear(3, 2, dtype=torch.float64)]

        def forward(self, x: Tensor) -> Any:
            return self.heads[0](self.body(x))

    return [wrap(Heads(), X)(X).detach()]


@refused("parameter or buffer that forward makes.*once before")
def a_parameter_of_the_first_forward(wrap: Wrap) -> list[Any]:
    class Late(Net):
        def forward(self, x: Tensor) -> Any:
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
            return self.body(x) * self.scale

    return [wrap(Late(), X)(X).detach()]


@refused("parameter.grad.*outside of forward")
def gradients_that_forward_reads(wrap: Wrap) -> list[Any]:
    def forward(self: Net, x: Tensor) -> Any:
        return self.body(x) * (1.0 if self.body[0].weight.grad is None else 2.0)

    return once(wrap, forward)


@refused("accuracy.*let forward return")
def a_metric_by_item(wrap: Wrap) -> list[Any]:
    class Measured(Net):
        accuracy = 0.0

        def forward(self, x: Tensor) -> Any:
            y = self.body(x)
            self.accuracy = (y > 0).double().mean().item()
            return y

    model = wrap(Measured(), X)
    return [model(X).detach(), model.accuracy + 1.0]


def _counts(meter: Meter, y: Tensor) -> Any:
    meter.count += 1
    return meter.count


@refused("Meter.count.*1 instead of 0")
def a_count_in_an_object(wrap: Wrap) -> list[Any]:
    return [wrap(Metered(_counts), X)(X).detach()]


def _warms(meter: Meter, y: Tensor) -> Any:
    before, meter.warm = meter.warm, False
    return 3.0 if before else 1.0


@refused("Meter.warm.*does otherwise at its next call.*once before")
def a_flag_of_the_first_call(wrap: Wrap) -> list[Any]:
    return [wrap(Metered(_warms), X)(X).detach()]


@refused("closes over.*instead of")
def a_count_that_is_closed_over(wrap: Wrap) -> list[Any]:
    count = 0

    def use(meter: Meter, y: Tensor) -> Any:
        nonlocal count
        count += 1
        return count

    return [wrap(Metered(use), X)(X).detach()]


@refused("found.*2 instead of 1|next call")
def a_count_that_begins_absent(wrap: Wrap) -> list[Any]:
    counts: dict[str, int] = {}

    def use(meter: Meter, y: Tensor) -> Any:
        counts["calls"] = counts.get("calls", 0) + 1
        return counts["calls"]

    return [wrap(Metered(use), X)(X).detach()]


@refused("Meter.last.*let forward return")
def a_tensor_of_an_object_is_used(wrap: Wrap) -> list[Any]:
    def use(meter: Meter, y: Tensor) -> Any:
        meter.last = y.mean()  # type: ignore[assignment]
        return 2.0

    model = wrap(Metered(use), X)
    return [model(X).detach(), model.meter.last + 1]


@refused("Meter.last.*tensor of the call")
def a_mean_of_calls_in_an_object(wrap: Wrap) -> list[Any]:
    def use(meter: Meter, y: Tensor) -> Any:
        meter.last = 0.9 * meter.last + 0.1 * y.mean()  # type: ignore[assignment]
        return meter.last

    return [wrap(Metered(use), X)(X).detach()]
