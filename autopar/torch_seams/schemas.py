"""Operators, and what their schemas say."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from autopar.torch_seams.required import expect, required

with required():
    from torch._library.custom_ops import CustomOpDef

    OpOverload = torch._ops.OpOverload
    """The class of what a graph calls: torch.ops has objects of it, but no name for it."""

    OpOverloadPacket = torch._ops.OpOverloadPacket
    """The class of all overloads of one name."""

    HigherOrderOperator = torch._ops.HigherOrderOperator
    """The class of operators that take functions, which traces refuse."""

    has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    """Whether an operator, by its name, has a kernel of its own for a dispatch key."""

    schema_of: Callable[[Any], Any] = attrgetter("_schema")
    """The schema of an overload: the only place where names and defaults of its arguments are."""

    short_name: Callable[[Any], str] = attrgetter("_opname")
    """The name of an overload without its namespace and its overload's: that of its packet."""

    overload_name: Callable[[Any], str] = attrgetter("_overloadname")
    """The name of an overload among those of its packet; "default" where its schema has none."""

    COMPOSITE: Any = torch._C.DispatchKey.CompositeImplicitAutograd
    """The key of kernels that write an operator by others."""

    BINDINGS: dict[str, Any] = {
        "torch._C._VariableFunctions": torch._C._VariableFunctions,
        "torch._C._nn": torch._C._nn,
        "torch._C.TensorBase": torch._C.TensorBase,
    }
    """Python's own bindings of operators, by their names in code, which are faster than torch.ops. Not those
    of torch or Tensor: these may be functions in Python, or replaced."""

    _add = torch.ops.aten.add.Tensor
    expect(schema_of(_add).arguments[2].kwarg_only, "OpOverload._schema", "one with arguments")
    expect(short_name(_add) == "add" and overload_name(_add) == "Tensor", "OpOverload._opname")
    expect(has_kernel("aten::add.Tensor", "CPU"), "kernel of aten::add.Tensor")


def overload_of(operator: Any) -> Any:
    """The overload that torch.library.custom_op has made; anything else as it is."""
    return operator._opoverload if isinstance(operator, CustomOpDef) else operator


def overload_names(target: Any) -> tuple[str, str, str]:
    """The names by which an overload is found in any process."""
    return target.namespace, target.overloadpacket.__name__, overload_name(target)


def named_overload(namespace: str, packet: str, overload: str) -> Any:
    """The overload of these names."""
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
