"""Has a rank's program call torch's own Python bindings where they mean the same operator.

    add = torch.ops.aten.add.Tensor(x, y)             what the graph says, 1 to 4 us slower on a host
    add = torch._C._VariableFunctions.add(x, y)       what runs

The graph keeps its operators; only the text that is compiled from it changes. A binding chooses among the
overloads of an operator by its arguments, so it is asked once for each form of a call: with tensors without
memory in the places of tensors, both ways must reach the same overload with the same arguments. An operator
that torch writes by others has none that could be seen; it counts if it has one overload to choose from.

Operators of autopar's own are called past torch's dispatcher, which takes 40 us around one with a derivative.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.runtime import registry
from autopar.torch_seams.modes import TorchDispatchMode
from autopar.torch_seams.schemas import BINDINGS, COMPOSITE, overload_name, schema_of

_ATEN = "torch.ops.aten."
_NAMED = ("Dimname", "Optional[Dimname]", "List[Dimname]", "str")  # types of arguments
_NAMES: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}


def call_bindings(graph: fx.Graph) -> None:
    """Have the code of `graph` call torch's bindings, now and whenever it is compiled again."""
    graph.on_generate_code(lambda other: lambda body: _rewritten(other(body) if other else body))


def _rewritten(body: Sequence[str]) -> list[str]:
    attributes: set[str] = set()  # names of numbers, for which no tensor can stand
    return [_line(line, attributes) for line in body]


def _line(line: str, attributes: set[str]) -> str:
    if own := re.search(r" = torch\.ops\.autopar\.(\w+)\.default\(", line):
        is_eager = hasattr(registry.operator(own[1]), registry.EAGER)
        return line.replace(".default(", f".default.{registry.EAGER}(", 1) if is_eager else line
    if _ATEN not in line and "self." not in line:
        return line
    assigned, _, rest = line.partition(" = ")
    name = assigned.split(":")[0].strip()
    if rest.startswith("self."):
        attributes.add(name)
        return line
    if not rest.startswith(_ATEN):
        return line
    text = rest.split(";")[0].strip()
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or any(item.id in attributes for item in _names(call)):
        return line
    target = ast.unparse(call.func)
    binding = _binding(target, _form(call))
    return line.replace(f"{target}(", f"{binding}(", 1) if binding else line


def _names(call: ast.Call) -> list[ast.Name]:
    """The values of the program that a call takes."""
    arguments = [*call.args, *(item.value for item in call.keywords)]
    names = [item for argument in arguments for item in ast.walk(argument) if isinstance(item, ast.Name)]
    return [item for item in names if item.id not in _NAMES]


def _form(call: ast.Call) -> str:
    """The arguments of a call, in which all tensors have one name."""
    for item in _names(call):
        item.id = "_"
    return ", ".join(map(ast.unparse, [*call.args, *call.keywords]))


@functools.cache
def _binding(target: str, form: str) -> str | None:
    """The binding that means the operator `target` for arguments of this form; None if none is known to."""
    if not re.search(r"\b_\b", form):
        return None  # without tensors a user's mode, as of torch.set_default_device, changes what it makes
    packet, _, overload = target.removeprefix(_ATEN).partition(".")
    try:
        operator = getattr(getattr(torch.ops.aten, packet), overload)
        stand_in = torch.empty(1, device="meta", requires_grad=False)
        args, kwargs = eval(f"(lambda *args, **kwargs: (args, kwargs))({form})", _NAMES | {"_": stand_in})
    except (AttributeError, NameError, SyntaxError):
        return None
    for module, functions in BINDINGS.items():
        if hasattr(functions, packet) and _is_same(getattr(functions, packet), operator, args, kwargs):
            return f"{module}.{packet}"
    return None


def _is_same(
    binding: Callable[..., Any], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """True if a binding reaches the operator, with the same arguments."""
    if _is_composed(operator):
        is_taken = _is_only(operator, args, kwargs) and _call(binding, args, kwargs) is not TypeError
        return is_taken and not any(map(_has_name, _left_out(operator, args, kwargs)))
    wanted, got = _call(operator, args, kwargs), _call(binding, args, kwargs)
    return isinstance(wanted, tuple) and wanted[0] is operator and wanted == got


def _is_composed(operator: Any) -> bool:
    return bool(operator.has_kernel_for_dispatch_key(COMPOSITE))


def _is_only(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if every other overload writes its results into an argument, or takes none of these arguments."""
    packet = operator.overloadpacket
    others = [getattr(packet, name) for name in packet.overloads() if name != overload_name(operator)]
    return all(schema_of(other).is_mutable or _is_refused(other, args, kwargs) for other in others)


def _is_refused(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if an overload wants text, or names of dims, where a call gives something else or nothing."""
    for place, item in enumerate(schema_of(operator).arguments):
        if str(item.type) in _NAMED:
            is_given = place < len(args) or item.name in kwargs
            given = args[place] if place < len(args) else kwargs.get(item.name)
            if not isinstance(given, str) if is_given else not item.has_default_value():
                return True
    return False


class _First(TorchDispatchMode):
    """Ends a call at the first operator that it reaches below autograd, and keeps that with its arguments."""

    reached: tuple[Any, ...] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reached = func, args, kwargs or {}
        raise _ReachedError


class _ReachedError(Exception): ...


def _left_out(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The defaults that a call relies on."""
    rest = schema_of(operator).arguments[len(args) :]
    return [item.default_value for item in rest if item.name not in kwargs]


def _has_name(default: Any) -> bool:
    """True if torch may know a default by a name: bindings take `reduction=Mean`, which is 1, for 0."""
    return type(default) is int and default != 0


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The target that a call reaches, or the type of the error that it raises."""
    first = _First()  # type: ignore[no-untyped-call]
    try:
        with first:
            function(*args, **kwargs)
    except (_ReachedError, RuntimeError, TypeError, IndexError, ValueError) as error:
        return first.reached or type(error)
    return first.reached
