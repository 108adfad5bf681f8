"""Calls of an exported graph in the form in which a program has them: functional, without examples.

    x.add_(y)            --> add(x, y)
    x.new_zeros(...)     --> zeros(...)
    narrow(x, d, i, n)   --> slice(x, d, i, i + n)
    f(x, dtype, device)  --> f(x, dtype, device=...)
    a library's own name for an operator that is known here --> that operator

A tensor that is taken for its shape alone need be neither whole nor there; programs put in their own device.
Passes that change arguments of a call take them by name (`arguments_of`) and write it anew (`called`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from autopar.core.graph import Call, Operator
from autopar.torch_seams.schemas import schema_of
from autopar.trace.forms.grouped_products import GROUPED_MM

aten = torch.ops.aten
Called = TypeVar("Called", Operator, Call)

# Calls that take a tensor for its shape, dtype or device alone, and what does the same without it, so that it
# need be neither whole nor there; and how many of their first arguments go on.
_ALIKE: dict[Any, tuple[Any, int]] = {
    aten.new_zeros.default: (aten.zeros.default, 0),
    aten.new_ones.default: (aten.ones.default, 0),
    aten.new_full.default: (aten.full.default, 0),
    aten.new_empty.default: (aten.empty.memory_format, 0),
    aten.rand_like.default: (aten.rand.default, 0),
    aten.randn_like.default: (aten.randn.default, 0),
    aten.view_as.default: (aten.view.default, 1),
    aten.reshape_as.default: (aten.reshape.default, 1),
    aten.expand_as.default: (aten.expand.default, 1),
}
_THEIRS = {"transformers::grouped_mm_fallback": GROUPED_MM}  # what libraries define once they are imported
_NEEDED = object()  # the default of what has none, equal to nothing
_CAST_ALIKE = (aten.type_as.default, aten.to.other)


def ours(target: Any) -> Any:
    """The operator, or of a library's own the one of the same arguments and results that is known here."""
    return _THEIRS.get(schema_of(target).name, target)


def device_by_name(call: Call) -> Call:
    """A call whose device, and what follows it, are keyword arguments: programs put in their own."""
    args = call.args
    names = [item.name for item in schema_of(call.target).arguments][: len(args)]
    if "device" not in names:
        return call
    place = names.index("device")
    named = dict(zip(names[place:], args[place:], strict=True))
    return Call(call.target, args[:place], {**named, **call.kwargs})


def without_example(call: Call, value: Any) -> Call:
    """The call that gives `value` without the tensor that it only takes as an example (`_ALIKE`)."""
    args, kwargs = call.args, call.kwargs
    if call.target is aten.narrow.default:
        tensor, dim, start, length = args
        end = sys.maxsize if start < 0 and start + length == 0 else start + length
        return Call(aten.slice.Tensor, (tensor, dim, start, end), kwargs)
    if call.target in _CAST_ALIKE:
        return Call(aten.to.dtype, (args[0], value.dtype), {})
    if call.target not in _ALIKE:
        return call
    plain, kept = _ALIKE[call.target]
    if kept:
        return Call(plain, (*args[:kept], list(value.shape)), {})
    filled = (*args[2:], *(kwargs[name] for name in kwargs if name == "fill_value"))
    return Call(plain, (list(value.shape), *filled), {"dtype": value.dtype, "device": value.device})


def functional(target: Any) -> Any | None:
    """The overload that returns what `target` writes; None where there is none."""
    packet = getattr(aten, schema_of(target).name.split("::")[1].removesuffix("_"), None)
    same = schema_of(target).overload_name or "default"
    wanted = [str(item.type) for item in schema_of(target).arguments if item.name != "out"]
    for name in sorted(packet.overloads(), key=lambda name: name != same) if packet else ():
        found = getattr(packet, name)
        given = [str(item.type) for item in schema_of(found).arguments]
        if given == wanted and not schema_of(found).is_mutable:
            return found
    return None


def left_open(mutable: Any, functional: Any, call: Call) -> dict[str, Any]:
    """Defaults that only the in-place overload of an operator has, for a call that leaves them open."""
    wanted = [item.name for item in schema_of(functional).arguments if not item.has_default_value()]
    defaults = {
        item.name: item.default_value for item in schema_of(mutable).arguments if item.has_default_value()
    }
    given = {*call.kwargs, *(item.name for item in schema_of(mutable).arguments[: len(call.args)])}
    return {name: defaults[name] for name in wanted if name in defaults and name not in given}


# -- arguments by name ------------------------------------------------------------------------


def arguments_of(item: Operator | Call) -> dict[str, Any]:
    """Arguments of an operator, by name."""
    names = (argument.name for argument in schema_of(item.target).arguments)
    return dict(zip(names, item.args, strict=False)) | dict(item.kwargs)


def called(item: Called, given: Mapping[str, Any]) -> Called:
    """The operator called with these arguments: by place, up to the last one that isn't its default."""
    schema = schema_of(item.target).arguments
    placed = [argument for argument in schema if not argument.kwarg_only]
    args = [given.get(each.name, each.default_value) for each in placed]
    defaults = [each.default_value if each.has_default_value() else _NEEDED for each in placed]
    while args and args[-1] == defaults[len(args) - 1]:
        args.pop()
    kwargs = {each.name: given[each.name] for each in schema if each.kwarg_only and each.name in given}
    return replace(item, args=tuple(args), kwargs=kwargs)


def is_view(target: Any) -> bool:
    """Whether an operator's first result shares its operand's memory, where it can."""
    returned = schema_of(target).returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
