"""DTensors past their operators: their local parts, how they lie, and torch's tables of what operators do."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.torch_seams.replaced import Replaceable
from autopar.torch_seams.required import expect, required

with required():
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec as OpSpec
    from torch.distributed.tensor._op_schema import OpStrategy as OpStrategy
    from torch.distributed.tensor._op_schema import TupleStrategy as TupleStrategy
    from torch.distributed.tensor._ops._math_ops import _NormPartial
    from torch.distributed.tensor._utils import (
        compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
    )

    NormPartial = _NormPartial
    """How a norm lies of which each rank has a share: such shares don't add up."""

    part_of: Callable[[Any], Tensor] = attrgetter("_local_tensor")
    """A DTensor's local part, which shares its memory: `to_local` gives a view with a derivative, slowly."""

    spec_of: Callable[[Any], DTensorSpec] = attrgetter("_spec")
    """Mesh, placements, and the global tensor's shape and strides."""

    _dispatcher: Any = DTensor._op_dispatcher

    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    """Operators that are computed otherwise than by torch's rules: the door for ours."""

    laying = Replaceable(_dispatcher.sharding_propagator, "_wrap_with_op_strategy")
    """Gives every rule how an operator's operands lie."""

    propagating = Replaceable(_dispatcher, "_propagate_op_sharding_dispatch_slow_path")
    """Called for operators and placements that weren't seen before."""

    # What DTensor(...) calls, without a wrapper for torch's compiler that takes longer than all else.
    _new: Callable[..., DTensor] = DTensor.__new__
    _clear_in_c: Callable[[], None] = torch._C._clear_DTensor_sharding_propagator_cache
    _clear_in_python: Callable[[], None] = _dispatcher.sharding_propagator.propagate_op_sharding.cache_clear

for _name in ("_local_tensor", "_spec"):
    expect(hasattr(DTensor, _name), f"DTensor.{_name}")


def with_part(part: Tensor, like: Any) -> DTensor:
    """A DTensor without a gradient of this local part, that lies as `like` does; nothing is exchanged."""
    return _new(DTensor, part, like._spec, requires_grad=False)


def take_over(owner: DTensor, other: DTensor) -> None:
    """Let a DTensor have another one's part and spec, in the same Python object."""
    owner._local_tensor, owner._spec = other._local_tensor, other._spec


def forget_shardings() -> None:
    """Clear torch's caches of shardings, as a function of its does whose module imports compilers."""
    _clear_in_python()
    _clear_in_c()
