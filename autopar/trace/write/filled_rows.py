"""What stands in rows that a mask leaves out: a number in the domain of what is made of them next.

    log(1 - p[m]) * w    1 - p is 0 where p is filled by 1: filled anew before `log`, and so is its result

No gradient passes a row that is filled, so none of `log` at 0 gets there; and `w`, whose gradient is a sum of
all rows' values times 0, needs finite ones. Operators that are finite wherever operands are need neither.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.core.graph import Call
from autopar.torch_seams.schemas import schema_of

aten = torch.ops.aten
_SUMS_AND_BOUNDS = (
    "add",
    "sub",
    "rsub",
    "neg",
    "mul",
    "abs",
    "clamp",
    "clamp_min",
    "clamp_max",
    "sum",
    "mean",
)
_PRODUCTS_OF_ROWS = ("linear", "mm", "bmm", "matmul", "addmm")
_ACTIVATIONS = ("relu", "leaky_relu", "gelu", "silu", "sigmoid", "log_sigmoid", "tanh", "softplus")
_NORMS = ("softmax", "log_softmax", "layer_norm", "rms_norm")
_COPIES = ("cat", "stack", "clone", "_to_copy")
_FINITE = frozenset((*_SUMS_AND_BOUNDS, *_PRODUCTS_OF_ROWS, *_ACTIVATIONS, *_NORMS, *_COPIES))
_DIVIDING = (
    aten.div.Tensor,
    aten.div.Tensor_mode,
    aten.floor_divide.default,
    aten.remainder.Tensor,
    aten.fmod.Tensor,
)


def is_finite_everywhere(target: Any) -> bool:
    """Whether an operator gives finite values of finite ones, whatever these are, as all views do."""
    schema = schema_of(target)
    space, _, name = schema.name.partition("::")
    return (space == "aten" and name in _FINITE) or any(item.alias_info for item in schema.returns)


def filling_of(dtype: torch.dtype) -> int:
    """The number that stands in rows that are left out: 1, and 0 for integers, which may be indices."""
    return 1 if dtype.is_floating_point or dtype.is_complex else 0


def filling_before(call: Call, operand: Any, dtype: torch.dtype) -> int:
    """The number that stands there in an operand of a call: 1 in a divisor."""
    is_divisor = call.target in _DIVIDING and call.args[1] is operand
    return 1 if is_divisor else filling_of(dtype)
