"""One global batch as micro-batches, and how their losses make the batch's loss.

    batch of 10, 4 micro-batches      3  3  2  2          weights of a mean loss  0.3 0.3 0.2 0.2

Gradients add up over micro-batches, so each loss is weighted before backward: a mean over samples by
the micro-batch's share of them, a sum by 1. Statistics of a batch norm are those of the micro-batch,
as in every pipeline and in every serial accumulation of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.core.graph import Graph, Operator, Ref
from autopar.errors import InputError

aten = torch.ops.aten

_SUM_REDUCTION = 2  # ATen's at::Reduction::Sum; Mean is 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of one call, and its share of the batch's samples."""

    tensors: tuple[Tensor, ...]
    share: float


def split_batch(tensors: Sequence[Tensor], count: int, *, equal: bool = False) -> list[MicroBatch]:
    """Cut the tensors that have the batch's length in dim 0 into `count` parts, the longer ones first.

    That length is the first tensor's; the others are passed whole. Raises InputError where the batch
    is too short, or with `equal` where it is no multiple of `count`.
    """
    length = batch_length(tensors)
    if count == 1:
        return [MicroBatch(tuple(tensors), 1.0)]
    if length < count or (equal and length % count):
        raise InputError(
            where="micro-batches",
            found=f"{count} for a batch of {length}",
            wanted=f"a divisor of {length}: stages exchange tensors of one shape"
            if equal
            else f"at most {length}",
            remedy="choose another --micro-batches, or pad or drop samples",
        )
    parts = [
        tensor.tensor_split(count) if _is_batched(tensor, length) else (tensor,) * count for tensor in tensors
    ]
    sizes = [len(part) for part in torch.arange(length).tensor_split(count)]
    return [
        MicroBatch(tuple(group), size / length)
        for group, size in zip(zip(*parts, strict=True), sizes, strict=True)
    ]


def batch_length(tensors: Sequence[Tensor]) -> int:
    """The number of samples: dim 0 of the first tensor that has dims."""
    return next((len(tensor) for tensor in tensors if tensor.dim()), 1)


def _is_batched(tensor: Tensor, length: int) -> bool:
    return tensor.dim() > 0 and len(tensor) == length


def mask_seed(seed: int, number: int) -> int:
    """What proofs draw the random masks of micro-batch `number` from, in every stage and serially."""
    return seed + 1_000 * number


# -- the loss ---------------------------------------------------------------------------------------------


def loss_weight(graph: Graph, share: float) -> float:
    """What a micro-batch's loss counts in the loss of the batch: `share` of a mean, all of a sum.

    A loss that is neither by its last operators (both, or sums that are divided) counts as a mean.
    """
    return 1.0 if is_sum(graph) else share


def is_sum(graph: Graph) -> bool:
    """Whether the loss is a sum over samples, scaled or negated at most."""
    makers = {name: item for item in graph.operators for name in item.results if name}
    name = graph.loss
    while name in makers:
        item = makers[name]
        operands = [operand for operand in item.operands if not graph.specs[operand].shape]
        if item.target in _SUMS or _reduces_by_sum(item):
            return True
        if item.target not in _TRANSPARENT or len(operands) != 1:
            return False
        name = operands[0]
    return False


_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_TRANSPARENT = {aten.neg.default, aten.to.dtype, aten.alias.default, aten.clone.default, aten.detach.default}


def _reduces_by_sum(item: Operator) -> bool:
    """Losses of ATen that take a reduction, when it is the sum."""
    for argument, value in zip(item.target._schema.arguments, item.args, strict=False):
        if argument.name == "reduction" and not isinstance(value, Ref):
            return bool(value == _SUM_REDUCTION)
    return bool(item.kwargs.get("reduction") == _SUM_REDUCTION)
