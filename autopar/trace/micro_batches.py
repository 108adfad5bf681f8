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

from autopar.core.graph import Graph, InputKind, Operator, may_learn
from autopar.errors import InputError

aten = torch.ops.aten

_MEAN, _SUM = 1, 2  # at::Reduction


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of one call, and its share of the batch's samples."""

    tensors: tuple[Tensor, ...]
    share: float


def split_batch(tensors: Sequence[Tensor], count: int) -> list[MicroBatch]:
    """Cut the tensors that have the batch's length in dim 0 into `count` parts, the longer ones first.

    That length is the first tensor's; the others are passed whole. Raises InputError for a
    `count` below 1 and where the batch is too short, or empty.
    """
    length = batch_length(tensors)
    if not length:
        raise InputError(
            where="batch",
            found="no samples in the first input",
            wanted="at least one, in its dim 0",
            remedy="pass a batch that is not empty",
        )
    if count < 1:
        raise InputError(
            where="micro-batches",
            found=str(count),
            wanted="at least 1",
            remedy="choose another --micro-batches",
        )
    if count == 1:
        return [MicroBatch(tuple(tensors), 1.0)]
    if length < count:
        raise InputError(
            where="micro-batches",
            found=f"{count} for a batch of {length}",
            wanted=f"at most {length}",
            remedy="choose another --micro-batches, or pass more samples",
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


def cut_inputs(paths: Sequence[str], tensors: Sequence[Tensor]) -> frozenset[str]:
    """The paths of those tensors of a call that its micro-batches take in parts."""
    length = batch_length(tensors)
    return frozenset(path for path, tensor in zip(paths, tensors, strict=True) if _is_batched(tensor, length))


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
    """Whether the loss is a sum over samples, negated at most."""
    reducer = _reducer(graph)
    return reducer is not None and _reduction(reducer) == _SUM


def reducer_of(graph: Graph) -> Operator | None:
    """The operator that makes the loss, a plain mean or sum, of all samples; None if there is no such."""
    reducer = _reducer(graph)
    return None if reducer is None or _reduction(reducer) is None else reducer


def loss_notes(graph: Graph) -> tuple[str, ...]:
    """Where the loss of the batch may differ from that of the same samples at once, for the plan."""
    reducer = _reducer(graph)
    if reducer is None or _reduction(reducer) is None:
        return ("the loss is no plain mean or sum of samples: micro-batches count in it by their samples",)
    labels = [argument.name for argument in reducer.target._schema.arguments]
    if _reduction(reducer) == _MEAN and "ignore_index" in labels and _takes_integers(reducer, graph):
        return (
            "micro-batches count in the mean loss by their samples: with unlike numbers of ignored labels, "
            "or unlike class weights, it is not that of the whole batch",
        )
    return ()


def _reducer(graph: Graph) -> Operator | None:
    """The operator that makes one number of the samples: the last reduction, or one of the other kind over
    them before it (`x.mean(0).sum()`, `x.sum(0).mean()`). None if that one's result is bent in between."""
    makers = {name: item for item in graph.operators for name in item.results if name}
    last = makers.get(graph.loss or "")
    while last is not None and last.target in _TRANSPARENT:
        last = makers.get(last.operands[0])
    if last is None or last.target not in _SUMS | _MEANS:
        return last
    others, is_linear = _MEANS if last.target in _SUMS else _SUMS, True
    before: Operator | None = last
    while before is not None and len(before.operands) == 1:
        if before.target in others and _takes_samples(before, graph):
            return before if is_linear else None
        is_linear = is_linear and before.target in _LINEAR
        before = makers.get(before.operands[0])
    return last


_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_MEANS = {aten.mean.default, aten.mean.dim}
_TRANSPARENT = {aten.neg.default, aten.to.dtype, aten.alias.default, aten.clone.default, aten.detach.default}
_LINEAR = {  # in the one tensor that they take
    *(_SUMS | _MEANS | _TRANSPARENT),
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
}


def _reduction(item: Operator) -> int | None:
    """ATen's number of the reduction of samples that the operator is; None if it is none."""
    if item.target in _SUMS | _MEANS:
        return _SUM if item.target in _SUMS else _MEAN
    for place, argument in enumerate(item.target._schema.arguments):
        if argument.name == "reduction":
            given = item.kwargs.get("reduction", argument.default_value)
            return int(item.args[place] if place < len(item.args) else given)
    return None


def _takes_samples(item: Operator, graph: Graph) -> bool:
    """Whether the sum or mean is over dim 0; a sum, that a mean of other dims may follow, over one as long as
    the batch: samples may also lie in the last dim."""
    shape = graph.specs[item.operands[0]].shape
    if not shape or 0 not in _dims(item, len(shape)):
        return False
    users = (each.spec.shape for each in graph.inputs if each.kind is InputKind.USER and each.spec.shape)
    return item.target in _MEANS or shape[0] == next(users, shape)[0]


def _dims(item: Operator, count: int) -> set[int]:
    """The dims, of `count`, over which a sum or mean is taken; all if it names none."""
    named = item.args[1] if item.target in (aten.sum.dim_IntList, aten.mean.dim) else ()
    return {dim % count for dim in named} if named else set(range(count))


def _takes_integers(item: Operator, graph: Graph) -> bool:
    return any(not may_learn(graph.specs[name].dtype) for name in item.operands)
