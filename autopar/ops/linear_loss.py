"""A product and the cross-entropy of what it gives, in pieces of rows.

    "n i., n, o. i., o. -> "     n contracted: each rank's rows give a share of the loss

Classes and inputs stay whole: to split them, ranks would meet within each piece. The mean divides by the
labels that all ranks keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.core.graph import Call, TensorSpec
from autopar.core.operator_facts import declare
from autopar.sharding.equation import Equation, Kind
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.trace.forms.linear_loss import LINEAR_LOSS, MEAN, SUM, rows_of_piece, wide

aten = torch.ops.aten


@register
class LinearCrossEntropy(Rule):
    """The loss of rows times a weight, without their logits as a whole."""

    targets = (LINEAR_LOSS,)

    def equation(self, op: Instance) -> Equation:
        whole = ((None, None), (None,))[: len(op.operands) - 2]
        return Equation((("n", None), ("n",), *whole), ((),), {"n": Kind.CONTRACTED})

    def lower(self, site: Site) -> Sequence[Any]:
        rows = site.sharding_axes("n")
        if not rows or site["reduction"] != MEAN:
            return (site.local_call(),)
        bias = site.values[3] if site["bias"] is not None else None
        how = SUM, site["ignore_index"], site["label_smoothing"], site["piece"]
        count = site.reduce(self.kept(site), rows, target=torch.ops.autopar.p_to_r.default)
        return (site.call(LINEAR_LOSS, *site.values[:3], bias, *how, count),)

    def kept(self, site: Site) -> Handle:
        """The number of the rank's labels that aren't ignored."""
        kept = site.call(aten.ne.Scalar, site.values[1], int(site["ignore_index"]))
        return site.call(aten.sum.default, site.call(aten.to.dtype, kept, site.result_dtype()))

    def samples(self) -> Iterable[Sample]:
        x, w, b = torch.randn(11, 6), torch.randn(5, 6), torch.randn(5)
        y = torch.tensor([0, 4, -100, 2, 2, 1, 3, 3, 0, -100, 4])
        yield Sample(LINEAR_LOSS, (x, y, w, b, MEAN, -100, 0.0, 2))
        yield Sample(LINEAR_LOSS, (x, y, w, None, MEAN, -100, 0.1, 3))
        yield Sample(LINEAR_LOSS, (x, y.clamp(min=0), w, b, SUM, 2, 0.2))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Operands of a call, as specs, and the number of rows of each of its pieces."""

    rows: TensorSpec
    weight: TensorSpec
    bias: TensorSpec | None
    piece: int

    @classmethod
    def of(cls, args: Sequence[Any]) -> _Sizes:
        rows, _, weight, *rest = args
        bias, piece = rest[0] if rest else None, rest[4] if len(rest) > 4 else 0
        (count, inputs), classes = rows.shape, weight.shape[0]
        return cls(rows, weight, bias, rows_of_piece(count, inputs, classes, piece))

    @property
    def learn(self) -> tuple[bool, bool]:
        """Whether slopes are wanted of rows, and of the weight."""
        return self.rows.requires_grad, self.weight.requires_grad

    @property
    def is_narrow(self) -> bool:
        """Whether losses and sums have more bits than operands."""
        return wide(self.rows.dtype) is not self.rows.dtype

    def spec(self, *shape: int, narrow: bool = True) -> TensorSpec:
        return TensorSpec(shape, self.rows.dtype if narrow else wide(self.rows.dtype))


def _within(args: Sequence[Any]) -> tuple[Call, ...]:
    """Forward calls that cost what the operator does both ways, piece by piece."""
    sizes = _Sizes.of(args)
    (count, inputs), (classes, _) = sizes.rows.shape, sizes.weight.shape
    whole, rest = divmod(count, sizes.piece)
    pieces = [sizes.piece] * whole + ([rest] if rest else [])
    found = [call for rows in pieces for call in _of_piece(sizes, rows)]
    lengths = [length for learns, length in zip(sizes.learn, (count, classes), strict=True) if learns]
    found += [Call(aten.mul.Tensor, (sizes.spec(length, inputs), sizes.spec()), {}) for length in lengths]
    return tuple(found)


def _of_piece(sizes: _Sizes, count: int) -> Iterator[Call]:
    """Calls of so many rows."""
    classes, inputs = sizes.weight.shape
    rows, weight = sizes.spec(count, inputs), replace(sizes.weight, requires_grad=False)
    logits, scores = sizes.spec(count, classes), sizes.spec(count, classes, narrow=False)
    bias = () if sizes.bias is None else (replace(sizes.bias, requires_grad=False),)
    yield Call(aten.linear.default, (rows, weight, *bias), {})
    if sizes.is_narrow:
        yield Call(aten.to.dtype, (logits, scores.dtype), {})
    yield Call(aten.log_softmax.int, (scores, -1), {})
    if not any(sizes.learn):
        return
    yield Call(aten.exp.default, (scores,), {})
    yield Call(aten.masked_fill.Scalar, (scores, TensorSpec((count, 1), torch.bool), 0.0), {})
    if sizes.is_narrow:
        yield Call(aten.to.dtype, (scores, logits.dtype), {})
    if sizes.rows.requires_grad:
        yield Call(aten.mm.default, (logits, weight), {})
    if sizes.weight.requires_grad:
        sums = sizes.spec(classes, inputs, narrow=False)
        yield Call(aten.mm.default, (sizes.spec(classes, count), rows), {})
        yield Call(aten.add.Tensor, (sums, sizes.spec(classes, inputs)), {})


def _scratch(args: Sequence[Any]) -> tuple[int, int]:
    """Bytes of a piece: logits and their softmax, in 32 bits at least; or its slope, in both dtypes, and the
    share of the weight's slope."""
    sizes = _Sizes.of(args)
    classes, inputs = sizes.weight.shape
    wide_logits = sizes.spec(sizes.piece, classes, narrow=False).nbytes
    share = sizes.spec(classes, inputs).nbytes if sizes.is_narrow and sizes.weight.requires_grad else 0
    slopes = sizes.spec(sizes.piece, classes).nbytes * sizes.is_narrow + share
    return wide_logits + max(wide_logits, slopes), 0


declare(LINEAR_LOSS, within=_within, scratch=_scratch)
