"""Matrix products: linear, mm, bmm and matmul, those that are added to something, and those of experts.

linear       "n s i+, o i+, o& -> n s o"      o: filter parallelism, i: channel parallelism
grouped_mm   "t. i+, e. i+ o, e. -> t. o"     rows and groups stay whole: values say which meet
routed_mm    "t i+, e. i+ o, t -> t o"        each row says which matrix it meets

A product of k-long sums costs 2 |y| k operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from autopar.core.operator_facts import declare
from autopar.core.work import Flops, MatrixProduct, Multiplication, SizedCall
from autopar.sharding.equation import Equation, Kind, parse
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.trace.forms.grouped_products import GROUPED_MM
from autopar.trace.rewrites.routed_products import ROUTED_MM

aten = torch.ops.aten


@register
class Linear(Rule):
    """y = x wᵀ + b over the last dim, any number of leading dims."""

    targets = (aten.linear.default,)

    def equation(self, op: Instance) -> Equation:
        lead = " ".join(f"n{index}" for index in range(len(op.shape()) - 1))
        out = "o" if len(op.shape(1)) == 2 else ""
        bias = f", {out}&" if len(op.operands) == 3 else ""
        return parse(f"{lead} i+, {out} i+{bias} -> {lead} {out}")

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.linear.default, (torch.randn(5, 7), torch.randn(6, 7), torch.randn(6)))
        yield Sample(aten.linear.default, (torch.randn(3, 5, 8), torch.randn(9, 8)))


@register
class AddedProduct(Rule):
    """beta b + alpha x w, of matrices, batches of them, and vectors; the bias broadcasts to the product."""

    products: ClassVar[Mapping[Any, str]] = {
        aten.addmm.default: "n i+, i+ o -> n o",
        aten.baddbmm.default: "b n i+, b i+ o -> b n o",
        aten.addbmm.default: "b+ n i+, b+ i+ o -> n o",
        aten.addmv.default: "n i+, i+ -> n",
        aten.addr.default: "n, o -> n o",
    }
    targets = tuple(products)

    def equation(self, op: Instance) -> Equation:
        product = self.products[op.operator.target]
        result, shape = op.result_shape(), op.shape(0)
        factors = product.split("-> ")[1].split()[len(result) - len(shape) :]
        ends = result[len(result) - len(shape) :]
        labels = [
            factor if size == wanted else "_"
            for size, factor, wanted in zip(shape, factors, ends, strict=True)
        ]
        return parse(f"{' '.join(f'{label}&' for label in labels) or '&'}, {product}")

    def samples(self) -> Iterable[Sample]:
        scaled = {"beta": 0.5, "alpha": 2.0}
        yield Sample(aten.addmm.default, (torch.randn(6), torch.randn(5, 7), torch.randn(7, 6)))
        yield Sample(aten.addmm.default, (torch.randn(5, 1), torch.randn(5, 4), torch.randn(4, 6)))
        yield Sample(aten.addmm.default, (torch.tensor(0.5), torch.randn(5, 4), torch.randn(4, 6)))
        yield Sample(aten.addmm.default, (torch.randn(5, 6), torch.randn(5, 4), torch.randn(4, 6)), scaled)
        left, right = torch.randn(3, 5, 7), torch.randn(3, 7, 4)
        yield Sample(aten.baddbmm.default, (torch.randn(3, 1, 4), left, right), scaled)
        yield Sample(aten.baddbmm.default, (torch.randn(5, 4), left, right))
        yield Sample(aten.addbmm.default, (torch.randn(5, 4), left, right), scaled)
        yield Sample(aten.addbmm.default, (torch.randn(4), left, right))
        yield Sample(aten.addmv.default, (torch.randn(5), torch.randn(5, 6), torch.randn(6)), scaled)
        yield Sample(aten.addr.default, (torch.randn(5, 6), torch.randn(5), torch.randn(6)), scaled)
        yield Sample(aten.addr.default, (torch.randn(5, 1), torch.randn(5), torch.randn(6)))


@register
class MatMul(Rule):
    """Products of matrices, batches of them, and vectors, with broadcast leading dims."""

    targets = (aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)

    def equation(self, op: Instance) -> Equation:
        left, right = op.shape(0), op.shape(1)
        lead = max(len(left), len(right)) - 2
        batch = [f"b{index}" for index in range(max(lead, 0))]
        result = op.result_shape()

        def labels(shape: tuple[int, ...], own: list[str]) -> tuple[str | None, ...]:
            count = len(shape) - len(own)
            names = batch[len(batch) - count :] if count else []
            sizes = dict(zip(batch, result, strict=False))
            kept = [name if sizes[name] == size else None for name, size in zip(names, shape, strict=False)]
            return (*kept, *own)

        operands = (
            labels(left, ["n", "i"] if len(left) > 1 else ["i"]),
            labels(right, ["i", "o"] if len(right) > 1 else ["i"]),
        )
        ends = [name for name, shape in (("n", left), ("o", right)) if len(shape) > 1]
        return Equation(operands, ((*batch, *ends),), {"i": Kind.CONTRACTED})

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.mm.default, (torch.randn(5, 7), torch.randn(7, 6)))
        yield Sample(aten.bmm.default, (torch.randn(3, 5, 7), torch.randn(3, 7, 4)))
        yield Sample(aten.matmul.default, (torch.randn(3, 1, 5, 6), torch.randn(4, 6, 5)))
        yield Sample(aten.matmul.default, (torch.randn(3, 5, 6), torch.randn(6)))
        yield Sample(aten.matmul.default, (torch.randn(6), torch.randn(6, 5)))
        yield Sample(aten.mv.default, (torch.randn(5, 6), torch.randn(6)))
        yield Sample(aten.dot.default, (torch.randn(6), torch.randn(6)))


@register
class GroupedMatMul(Rule):
    """Each group of rows times a matrix of its own; groups of other dims than rows stay whole."""

    targets = (aten._grouped_mm.default, GROUPED_MM)

    def equation(self, op: Instance) -> Equation:
        if self.is_of_rows(op):
            return parse("t. i+, e. i+ o, e. -> t. o")
        none = tuple((None,) * len(op.specs[name].shape) for name in op.operands)
        return Equation(none, ((None,) * len(op.result_shape()),))

    def is_of_rows(self, op: Instance) -> bool:
        """Whether groups are runs of rows, without a bias."""
        ranks = [len(op.specs[name].shape) for name in op.operands]
        return ranks == [2, 3, 1] and op.arguments.get("bias") is None

    def lower(self, site: Site) -> Sequence[Handle]:
        if self.is_of_rows(site) and site.arguments.get("out_dtype") is None:
            return (site.call(GROUPED_MM, *site.values),)
        return super().lower(site)

    def samples(self) -> Iterable[Sample]:
        rows, matrices = torch.randn(10, 8), torch.randn(3, 8, 9)
        for ends in ([2, 2, 10], [3, 7, 9]):
            yield Sample(GROUPED_MM, (rows, matrices, torch.tensor(ends, dtype=torch.int32)))


@register
class RoutedMatMul(Rule):
    """Each row times the matrix that it chooses; every rank has all matrices, or parts of each."""

    targets = (ROUTED_MM,)

    def equation(self, op: Instance) -> Equation:
        return parse("t i+, e. i+ o, t -> t o")

    def samples(self) -> Iterable[Sample]:
        rows, matrices = torch.randn(10, 8), torch.randn(3, 8, 9)
        yield Sample(ROUTED_MM, (rows, matrices, torch.tensor([2, 0, 0, 2, 1, 0, 2, 2, 1, 0])))
        yield Sample(ROUTED_MM, (rows, matrices, torch.tensor([2, 0, 0, 2, 2, 0, 2, 2, 0, 0])))


def _flops(left: int, right: int) -> Callable[[SizedCall], Flops]:
    """Flops of a product of the operands at two positions."""

    def form(call: SizedCall) -> Flops:
        one, other = call.operands[left], call.operands[right]
        return Flops.of_product(2 * call.result().numel * one.shape[-1], one, other)

    return form


def _product(left: int, right: int, *, columns: int = -1) -> Callable[[SizedCall], Multiplication]:
    """The product of the operands at two positions; `columns` is the right one's dim that it doesn't sum."""

    def form(call: SizedCall) -> Multiplication:
        one, other = call.operands[left], call.operands[right]
        rows, batch = math.prod(one.shape[:-1]), math.prod(other.shape[:-2])
        rows = rows if batch == 1 else max(1, rows // batch)
        return Multiplication(MatrixProduct(batch, rows, other.shape[columns], one.shape[-1]), one, other)

    return form


declare(aten.mm, aten.bmm, aten.matmul, aten.linear, flops=_flops(0, 1))
declare(aten.addmm, aten.baddbmm, flops=_flops(1, 2))
declare(aten.mm, aten.bmm, products=_product(0, 1))
declare(aten._grouped_mm, GROUPED_MM, flops=_flops(0, 1), products=_product(0, 1), group_ends=2)
declare(ROUTED_MM, flops=_flops(0, 1), products=_product(0, 1))
declare(aten.linear, products=_product(0, 1, columns=0))
declare(aten.addmm, aten.baddbmm, products=_product(1, 2))
declare(aten.mm, aten.matmul, aten.bmm, aten.dot, aten.linear, sum_of=2)
