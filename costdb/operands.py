"""Tensors for a call: every `TensorSpec` among its arguments becomes a tensor of that shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autopar.core.graph import Call, TensorSpec
from autopar.core.operator_facts import facts_of
from autopar.errors import CostMissingError
from autopar.runtime.sparse_kernel import SPMM, example

Make = Callable[[TensorSpec], torch.Tensor]
NO_DERIVATIVE = (
    "torch::autograd::NotImplemented"  # the node of an operator that has none, which raises in backward
)


def specs(call: Call) -> tuple[TensorSpec, ...]:
    """The specs of a call's operands, in argument order; `SavedByCall.operands` counts them so."""
    return tuple(leaf for leaf in _leaves((call.args, call.kwargs)) if isinstance(leaf, TensorSpec))


def fill(call: Call, device: torch.device, make: Make) -> tuple[Any, Any, tuple[torch.Tensor, ...]]:
    """Arguments with a tensor in place of each spec and `device` in place of each device.

    Returns (args, kwargs, the tensors in argument order).
    """
    operands: list[torch.Tensor] = []

    def build(tree: Any) -> Any:
        match tree:
            case TensorSpec():
                operands.append(make(tree))
                return operands[-1]
            case torch.device():
                return device
            case tuple() | list():
                return type(tree)(build(item) for item in tree)
            case dict():
                return {name: build(item) for name, item in tree.items()}
            case _:
                return tree

    args, kwargs = build(call.args), build(call.kwargs)
    return args, kwargs, tuple(operands)


def empty(device: torch.device) -> Make:
    """Makes tensors without values, for fake and meta devices."""

    def make(spec: TensorSpec) -> torch.Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device=device, requires_grad=spec.requires_grad)

    return make


def random(call: Call, device: torch.device) -> Make:
    """Makes tensors whose values every operator accepts.

    Floats lie in [0.5, 1.5): in the domain of logarithms, roots and running variances. Integers
    count up to the shortest dim of any floating operand: valid as rows of a table, as classes and
    as indices along any dim, without all of them hitting one row. Masks are all true.
    """
    if call.target is SPMM:
        made = iter(example(specs(call), device))
        return lambda spec: next(made)
    group_ends = facts_of(call.target).group_ends
    if group_ends is not None:
        rows = specs(call)[0].shape[0]
        return _with_group_ends(_any_values(call, device), specs(call)[group_ends], rows)
    return _any_values(call, device)


def _with_group_ends(make: Make, ends: TensorSpec, rows: int) -> Make:
    """Like `make`, but groups that are as long as each other and take all rows."""

    def made(spec: TensorSpec) -> torch.Tensor:
        values = make(spec)
        if spec is ends:
            steps = torch.arange(1, len(values) + 1, device=values.device)
            return (steps * rows // len(values)).to(spec.dtype)
        return values

    return made


def _any_values(call: Call, device: torch.device) -> Make:
    sizes = [size for spec in specs(call) if spec.dtype.is_floating_point for size in spec.shape if size]
    bound = min(sizes, default=1)

    def make(spec: TensorSpec) -> torch.Tensor:
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            values = torch.rand(spec.shape, dtype=spec.dtype, device=device) + 0.5
            return values.requires_grad_(spec.requires_grad)
        if spec.dtype == torch.bool:
            return torch.ones(spec.shape, dtype=spec.dtype, device=device)
        rows = torch.arange(spec.numel, device=device) % bound
        return rows.to(spec.dtype).reshape(spec.shape)

    return make


def tensors(tree: Any) -> Iterator[torch.Tensor | None]:
    """The results of a call in order, None for each that is no tensor."""
    for leaf in _leaves(tree):
        yield leaf if isinstance(leaf, torch.Tensor) else None


def differentiable(results: Any) -> tuple[torch.Tensor, ...]:
    """The results of a call that backward begins at: of some operators torch has no derivative, and a model
    goes on without one."""
    found = (item for item in tensors(results) if item is not None and item.requires_grad)
    return tuple(item for item in found if item.grad_fn is None or item.grad_fn.name() != NO_DERIVATIVE)


@contextmanager
def refused(call: Call) -> Iterator[None]:
    """Turn an operator's refusal of its operands into an error that names the call."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError) as cause:
        raise CostMissingError(
            where=call.key(),
            found=str(cause).partition("\n")[0] or type(cause).__name__,
            wanted="a call that runs on its own",
            remedy="plan without measuring this operator",
        ) from cause


def _leaves(tree: Any) -> Iterator[Any]:
    match tree:
        case tuple() | list():
            for item in tree:
                yield from _leaves(item)
        case dict():
            for item in tree.values():
                yield from _leaves(item)
        case _:
            yield tree
