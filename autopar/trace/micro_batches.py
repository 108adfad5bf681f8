"""One global batch as micro-batches, and what the loss of each counts in that of the batch.

    batch of 10, 4 micro-batches      3  3  2  2          weights of a mean loss  0.3 0.3 0.2 0.2

Gradients add up over micro-batches, so each loss is weighted before backward, as core/cutting.py says.
Statistics of a batch norm are those of the micro-batch, as in every pipeline and in every serial
accumulation of gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.core.cutting import Count, Cutting, Rows
from autopar.core.graph import eager_target, map_refs
from autopar.errors import InputError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of one call, its share of the batch's samples, and what its loss counts."""

    tensors: tuple[Tensor, ...]
    share: float
    weight: float = 1.0


Find = Callable[[str], Tensor]  # a buffer's whole value, by its name in the model


def split_batch(
    cutting: Cutting | None,
    tensors: Sequence[Tensor],
    count: int,
    *,
    find: Find | None = None,
    weigh: bool = True,
) -> list[MicroBatch]:
    """Cut the tensors that hold samples into `count` parts, the longer ones first; the others are whole.

    Without `weigh` the parts have no weights. Raises InputError for a `count` below 1 and where the batch
    is too short, or empty.
    """
    _refuse_empty(tensors)
    if count < 1:
        raise InputError(
            where="micro-batches",
            found=str(count),
            wanted="at least 1",
            remedy="choose another --micro-batches",
        )
    if count == 1 or cutting is None:
        return [MicroBatch(tuple(tensors), 1.0)]
    if cutting.size < count:
        raise InputError(
            where="micro-batches",
            found=f"{count} for a batch of {cutting.size}",
            wanted=f"at most {cutting.size}",
            remedy="choose another --micro-batches, or pass more samples",
        )
    sizes = [len(part) for part in torch.arange(cutting.size).tensor_split(count)]
    parts = [
        cut(tensor, rows, sizes) if rows is not None else (tensor,) * count
        for tensor, rows in zip(tensors, cutting.rows, strict=True)
    ]
    factor = factor_of(cutting.count, tensors, find) if weigh else 1.0
    shares = [size / cutting.size for size in sizes]
    return [
        MicroBatch(tuple(group), share, factor * (share if cutting.by_share else 1.0))
        for group, share in zip(zip(*parts, strict=True), shares, strict=True)
    ]


def _refuse_empty(tensors: Sequence[Tensor]) -> None:
    first = next((tensor for tensor in tensors if tensor.dim()), None)
    if first is not None and not first.numel():
        raise InputError(
            where="batch",
            found=f"no samples in the first input, of shape {list(first.shape)}",
            wanted="at least one",
            remedy="pass a batch that is not empty",
        )


def cut(tensor: Tensor, rows: Rows, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The tensor's samples in groups of `sizes`, in memory like the tensor: a model may view them."""
    if rows.outer == 1:
        return _packed(tensor, tensor.split([size * rows.inner for size in sizes], rows.dim))
    opened: Tensor = tensor.unflatten(rows.dim, (rows.outer, -1))
    pieces = opened.split([size * rows.inner for size in sizes], rows.dim + 1)
    return _packed(tensor, [piece.flatten(rows.dim, rows.dim + 1) for piece in pieces])


def _packed(whole: Tensor, pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(piece.contiguous() for piece in pieces) if whole.is_contiguous() else tuple(pieces)


def mask_seed(seed: int, number: int) -> int:
    """Seed of the exact masks of micro-batch `number` in a step that begins with this `seed`."""
    return seed_after(torch.Generator().manual_seed(seed).get_state(), number) if number else seed


def seed_after(state: Tensor, number: int) -> int:
    """Seed of micro-batch `number` >= 1 in a step that begins where the generator has this `state`."""
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=7, salt=number.to_bytes(8))
    return int.from_bytes(digest.digest())


# -- counts ---------------------------------------------------------------------------------------------


def factor_of(count: Count | None, tensors: Sequence[Tensor], find: Find | None = None) -> float:
    """Factor of the sum of a batch's parts."""
    if count is None:
        return 1.0
    total = number_of(count, tensors, find)
    return float(total if count.multiplies else total.reciprocal())


def number_of(count: Count, tensors: Sequence[Tensor], find: Find | None = None) -> Tensor:
    """The count of a call's tensors, in float64: a graph's float32 would round large counts."""
    values = {name: _wide(tensors[place].detach()) for name, place in count.inputs}
    device = next((value.device for value in values.values()), torch.device("cpu"))
    values |= {name: _wide(value.to(device)) for name, value in count.constants.items()}
    if count.buffers:
        assert find is not None
        values |= {name: _wide(find(target).detach().to(device)) for name, target in count.buffers}
    with torch.no_grad():
        for item in count.operators:
            args, kwargs = _filled((item.args, item.kwargs), values)
            results = eager_target(item)(*args, **kwargs)
            whole = results if isinstance(results, (tuple, list)) else (results,)
            values |= {name: value for name, value in zip(item.results, whole, strict=False) if name}
    return values[count.result].double().reshape(())


def _filled(tree: Any, values: Mapping[str, Tensor]) -> Any:
    """Arguments with their tensors, and floats of any width as float64."""
    match tree:
        case torch.dtype():
            return torch.float64 if tree.is_floating_point else tree
        case tuple():
            return tuple(_filled(item, values) for item in tree)
        case list():
            return [_filled(item, values) for item in tree]
        case dict():
            return {key: _filled(item, values) for key, item in tree.items()}
        case _:
            return map_refs(tree, lambda ref: values[ref.name])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
