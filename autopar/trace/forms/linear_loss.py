"""A product and the cross-entropy of what it gives, in pieces of rows: `autopar.linear_cross_entropy`.

    loss = sum_n l(x_n w^T + b, y_n) / count            logits x w^T of all rows are never there at once

    rows      [ piece ][ piece ][ piece ]               for each piece, one after the other:
    logits    [       ]                                 p = softmax(x w^T + b)       l = -log p_y
    slope of x [ p' w ][       ][       ]               p' = p - onehot(y), 0 for ignored rows
    slope of w    +=    p'^T x                          one sum over all pieces

Slopes are found in forward, where the logits are, if anyone wants them; backward multiplies them by the
loss's own gradient and divides by the count. So nothing is computed twice; a gradient of a gradient is
refused, as slopes are numbers. Sums over pieces are in 32 bits at least.
Source: Hsu et al., Liger Kernel, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import InputError
from autopar.torch_seams.transforms import is_forward_mode

NAMESPACE = "autopar_losses"
WHERE = "autopar.linear_cross_entropy"
MEAN, SUM = 1, 2  # at::Reduction
IGNORED = -100  # as in torch
_custom_op: Any = torch.library.custom_op  # ships without types
_Library: Any = torch.library.Library  # ships without types
_library = _Library(NAMESPACE, "FRAGMENT")


def linear_cross_entropy(
    rows: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    piece: int | None = None,
) -> Tensor:
    """Computes the cross-entropy of `rows @ weight.T + bias`, whose logits are made `piece` rows at a time.

    Rows are [..., inputs], the weight [classes, inputs], labels [...]; the loss has 32 bits at least. Without
    `piece` the logits of one take no more elements than the gradients of rows and weight. Raises InputError
    for other shapes and dtypes, and in backward for create_graph=True.
    """
    rows, weight, bias = _autocast(rows, weight, bias)
    fault = _fault(rows, weight, labels, bias, reduction) or _fault_of_numbers(
        ignore_index, label_smoothing, piece
    )
    if fault:
        found, wanted = fault
        raise InputError(where=WHERE, found=found, wanted=wanted, remedy="change the call")
    if is_forward_mode():
        raise InputError(
            where=WHERE,
            found="a forward-mode derivative",
            wanted="derivatives by backward: its gradients are numbers that forward found",
            remedy="call F.cross_entropy(F.linear(rows, weight), labels) where tangents are wanted",
        )
    labels = labels if labels.dtype is torch.int64 else labels.long()
    flat = rows.reshape(-1, rows.shape[-1]), labels.reshape(-1), weight, bias
    how = {"mean": MEAN, "sum": SUM}[reduction], ignore_index, float(label_smoothing), piece or 0
    loss: Tensor = LINEAR_LOSS(*flat, *how)
    return loss


def _autocast(rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a product as autocast has them, which leaves doubles alone."""
    if not torch.is_autocast_enabled(rows.device.type):
        return rows, weight, bias
    dtype = torch.get_autocast_dtype(rows.device.type)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x

    return cast(rows), cast(weight), None if bias is None else cast(bias)


def _fault_of_numbers(ignore_index: object, label_smoothing: object, piece: object) -> tuple[str, str] | None:
    """What is wrong with a call's numbers, and what is wanted."""
    if type(ignore_index) is not int:
        return f"ignore_index={ignore_index!r}", "a whole number"
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
        return f"label_smoothing={label_smoothing!r}", "a number from 0 to 1"
    if piece is not None and (type(piece) is not int or piece < 1):
        return f"piece={piece!r}", "at least one row, or None"
    return None


def _fault(
    rows: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, reduction: str
) -> tuple[str, str] | None:
    """What is wrong with a call's tensors, and what is wanted."""
    floats = [rows, weight, *([] if bias is None else [bias])]
    if weight.dim() != 2 or not rows.dim() or rows.shape[-1] != weight.shape[1]:
        return (
            f"rows {list(rows.shape)}, a weight {list(weight.shape)}",
            "[..., inputs] and [classes, inputs]",
        )
    if not weight.numel():
        return f"a weight {list(weight.shape)}", "one class and one input at least"
    numbers = labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype is torch.bool
    if labels.shape != rows.shape[:-1] or numbers:
        found = f"labels {list(labels.shape)} of {labels.dtype} for rows {list(rows.shape)}"
        return found, "one whole number for each row"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"a bias {list(bias.shape)}", f"one of the {weight.shape[0]} classes"
    if not rows.dtype.is_floating_point or len({x.dtype for x in floats}) > 1:
        return ", ".join(str(x.dtype) for x in floats), "floats of one dtype"
    if reduction not in ("mean", "sum"):
        return f"reduction={reduction!r}", '"mean" or "sum"'
    return None


def rows_of_piece(rows: int, inputs: int, classes: int, piece: int) -> int:
    """The rows of a piece: as said, or (0) the largest power of two at which its logits have no more elements
    than the gradients of rows and weight."""
    if piece:
        return max(1, min(piece, rows))
    most = max(1, inputs * (rows + classes) // max(1, classes))
    return max(1, min(1 << (most.bit_length() - 1), rows))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of losses and sums: of 32 bits for those of 16."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What slopes are wanted of, and how labels are read."""

    rows: bool
    weight: bool
    bias: bool
    ignore_index: int = IGNORED
    smoothing: float = 0.0

    @property
    def any(self) -> bool:
        return self.rows or self.weight or self.bias


def _run(
    rows: Tensor,
    labels: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    divisor: Tensor | None,
    reduction: int,
    ignore_index: int,
    smoothing: float,
    piece: int,
    *wants: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_rows, of_weight, of_bias = wants
    wanted = _Wanted(of_rows, of_weight, of_bias, ignore_index, smoothing)
    length = rows_of_piece(len(rows), rows.shape[1], len(matrix), piece)
    total = rows.new_zeros((), dtype=wide(rows.dtype))
    slopes = _empty_slopes(rows, matrix, wanted)
    for first in range(0, len(rows), length):
        part = slice(first, first + length)
        into = slopes[0][part], *slopes[1:]
        total += _piece(rows[part], labels[part], matrix, bias, wanted, into)
    count = _count(labels, divisor, reduction, ignore_index).to(total.dtype)
    return (total / count, *slopes, count)


def _empty_slopes(rows: Tensor, weight: Tensor, wanted: _Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """Slopes of rows, and sums for those of weight and bias."""
    dtype, (classes, inputs) = wide(rows.dtype), weight.shape
    return (
        rows.new_empty(rows.shape if wanted.rows else (len(rows), 0)),
        weight.new_zeros((classes, inputs) if wanted.weight else (0, 0), dtype=dtype),
        weight.new_zeros(classes if wanted.bias else 0, dtype=dtype),
    )


def _piece(
    rows: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: _Wanted,
    into: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Sum of the losses of some rows; their slopes are written into, or added to, `into`."""
    scores = F.log_softmax(F.linear(rows, weight, bias).to(wide(rows.dtype)), -1)
    kept = labels != wanted.ignore_index
    share, classes = wanted.smoothing / scores.shape[1], scores.shape[1]
    loss = F.nll_loss(scores, labels, ignore_index=wanted.ignore_index, reduction="sum")
    if share:
        alike = scores.sum(-1).masked_fill(~kept, 0.0).sum()
        loss = (1 - wanted.smoothing) * loss - share * alike
    if not wanted.any:
        return loss
    slope = scores.exp_()
    slope.sub_(share) if share else slope
    safe = labels.clamp(0, classes - 1).unsqueeze(-1)  # of rows that are kept the label itself
    slope.scatter_add_(-1, safe, slope.new_full((1, 1), wanted.smoothing - 1).expand(len(rows), 1))
    slope.masked_fill_(~kept.unsqueeze(-1), 0.0)
    _add_slopes(slope, rows, weight, wanted, into)
    return loss


def _add_slopes(
    slope: Tensor, rows: Tensor, weight: Tensor, wanted: _Wanted, into: tuple[Tensor, Tensor, Tensor]
) -> None:
    """The shares of slopes that follow from that of a piece's logits."""
    of_rows, of_weight, of_bias = into
    narrow = slope.to(rows.dtype)
    if wanted.rows:
        torch.mm(narrow, weight, out=of_rows)
    if wanted.weight and of_weight.dtype == rows.dtype:
        of_weight.addmm_(narrow.T, rows)
    elif wanted.weight:
        of_weight.add_(narrow.T @ rows)
    if wanted.bias:
        of_bias.add_(slope.sum(0))


def _count(labels: Tensor, divisor: Tensor | None, reduction: int, ignore_index: int) -> Tensor:
    """What the sum of losses is divided by: labels that are kept, or what was found elsewhere."""
    if divisor is not None:
        return divisor.clone()
    return (labels != ignore_index).sum() if reduction == MEAN else labels.new_ones(())


def _shape(
    rows: Tensor, labels: Tensor, matrix: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    slopes = _empty_slopes(rows, matrix, _Wanted(*how[-3:]))
    loss, count = (rows.new_empty((), dtype=wide(rows.dtype)) for _ in range(2))
    return loss, *slopes, count


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, _, weight, bias, *_ = inputs
    ctx.dtypes = rows.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
    ctx.wanted = inputs[-3:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(
        *(x for x, wanted in zip(output[1:4], ctx.wanted, strict=True) if wanted), output[4]
    )


def _backward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise InputError(
            where=WHERE,
            found="create_graph=True, for a gradient of its gradient",
            wanted="first derivatives: its gradients are numbers that forward found",
            remedy="plan with --loss-pieces none, or call F.cross_entropy(F.linear(rows, weight), labels), "
            "where second derivatives are taken",
        )
    *slopes, count = ctx.saved_tensors
    # Of no label that is kept all slopes are 0, and stay so beside a gradient that is no number.
    factor = (gradient / count).masked_fill(count == 0, 0.0)
    queue = iter(slopes)
    of_rows, of_weight, of_bias = (
        _scaled(next(queue), factor, dtype) if wanted else None
        for wanted, dtype in zip(ctx.wanted, ctx.dtypes, strict=True)
    )
    return of_rows, None, of_weight, of_bias, *(None for _ in range(8))


def _scaled(slope: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The product in a dtype that may be narrower, without one in more bits beside it."""
    scaled: Tensor = torch.ops.autopar_losses.scaled.default(slope, factor, dtype)
    return scaled


def _run_scaled(slope: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mul(slope, factor, out=torch.empty_like(slope, dtype=dtype))


# A loss with an argument `weight` is one with weights of classes.
_OPERANDS = "Tensor rows, Tensor labels, Tensor matrix, Tensor? bias"
_loss_and_slopes = _custom_op(
    f"{NAMESPACE}::loss_and_slopes",
    _run,
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor? divisor, int reduction, int ignore_index, float label_smoothing, "
    "int piece, bool of_rows, bool of_weight, bool of_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_loss_and_slopes.register_fake(_shape)
_loss_and_slopes.register_autograd(_backward, setup_context=_save)
_scaled_op = _custom_op(
    f"{NAMESPACE}::scaled",
    _run_scaled,
    mutates_args=(),
    schema="(Tensor slope, Tensor factor, ScalarType dtype) -> Tensor",
)
_scaled_op.register_fake(lambda slope, factor, dtype: torch.empty_like(slope, dtype=dtype))


def _linear_loss(
    rows: Tensor,
    labels: Tensor,
    matrix: Tensor,
    bias: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    piece: int = 0,
    divisor: Tensor | None = None,
) -> Tensor:
    learns = torch.is_grad_enabled()
    wants = [learns and x is not None and x.requires_grad for x in (rows, matrix, bias)]
    how = reduction, ignore_index, label_smoothing, piece
    loss: Tensor = torch.ops.autopar_losses.loss_and_slopes.default(
        rows, labels, matrix, bias, divisor, *how, *wants
    )[0]
    return loss


_library.define(
    f"linear_cross_entropy({_OPERANDS}=None, int reduction=1, int ignore_index=-100, "
    "float label_smoothing=0.0, int piece=0, Tensor? divisor=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("linear_cross_entropy", _linear_loss, "CompositeImplicitAutograd")
LINEAR_LOSS: Any = torch.ops.autopar_losses.linear_cross_entropy.default
