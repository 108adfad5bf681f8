"""Products of a sparse matrix that stays where it is and a dense one.

    product    "i j+, j+ f -> i f"

| factor | x          | result          | known as                                    |
|--------|------------|-----------------|---------------------------------------------|
| i      | whole      | split by rows   | 1D, by rows: x gathered                     |
| j      | split      | partial sums    | 1D, by columns: sums scattered              |
| f      | by columns | by columns      | feature-parallel: nothing is exchanged      |

Each mesh axis takes one of them, so that i on one and j on another are blocks in two dims. A rank cuts its
block once, when its program is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from autopar.core.graph import TensorSpec
from autopar.sharding.atoms import Atoms
from autopar.sharding.equation import Equation, Kind
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.sharding.sparse_blocks import block_of
from autopar.trace.sparse_products import PRODUCT

aten = torch.ops.aten


@register
class Product(Rule):
    """sum_j A[i, j] x[j, f], of the entries of A in the order of rows."""

    targets = (PRODUCT,)

    def equation(self, op: Instance) -> Equation:
        entries: tuple[str | None, ...] = (None,)
        linear = (frozenset({2}), frozenset({3}))
        return Equation(
            (entries, entries, entries, ("j", "f")), (("i", "f"),), {"j": Kind.CONTRACTED}, linear=linear
        )

    def _depth(self, op: Instance, equation: Equation, factor: str, atoms: Atoms) -> int:
        depth = super()._depth(op, equation, factor, atoms)
        return depth if factor == "f" or depth == 1 else 0  # a rank's rows are one range

    def lower(self, site: Site) -> Sequence[Handle]:
        rows, columns = self.ranges(site)
        key = *site.operands[:2], rows, columns
        kept = self.entries(site, rows, columns)
        count, index = len(kept), partial(TensorSpec, dtype=torch.int64)
        lengths = rows[1] - rows[0] + 1, count, columns[1] - columns[0] + 1, count, count

        def form(place: int) -> Handle:
            return site.emitter.constant(
                (*key, place), index((lengths[place],)), lambda: self.block(site, rows, columns)[place]
            )

        crow, column, *transposed = map(form, range(len(lengths)))
        values = self.values(site, kept, key)
        target = torch.ops.autopar_graphs.spmm.default
        return (site.call(target, crow, column, values, site.values[3], *transposed),)

    def ranges(self, site: Site) -> tuple[tuple[int, int], tuple[int, int]]:
        """The rows and the columns of the rank's block."""
        result = site.operator.results[0]
        assert result is not None
        rows = site.range_of(result, site.result_layout())
        return rows, site.range_of(site.operands[3], site.operand_layout(3))

    def entries(self, site: Site, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Which entries lie in these rows and columns."""
        key = "entries", *site.operands[:2], rows, columns
        if key not in site.dims.memo:
            row, column = self.places(site)
            mine = (row >= rows[0]) & (row < rows[1]) & (column >= columns[0]) & (column < columns[1])
            site.dims.memo[key] = mine.nonzero()[:, 0]
        found: Tensor = site.dims.memo[key]
        return found

    def block(self, site: Site, rows: tuple[int, int], columns: tuple[int, int]) -> tuple[Tensor, ...]:
        """The forms of the block that they are."""
        key = "block", *site.operands[:2], rows, columns
        if key not in site.dims.memo:
            row, column = self.places(site)
            kept = self.entries(site, rows, columns)
            shape = rows[1] - rows[0], columns[1] - columns[0]
            site.dims.memo[key] = block_of(row[kept] - rows[0], column[kept] - columns[0], shape).forms
        found: tuple[Tensor, ...] = site.dims.memo[key]
        return found

    def places(self, site: Site) -> tuple[Tensor, Tensor]:
        """The row and the column of every entry."""
        row, column = site.value_of(0), site.value_of(1)
        assert row is not None and column is not None, "the places of a product's entries are constants"
        return row, column

    def values(self, site: Site, kept: Tensor, key: tuple[object, ...]) -> Handle:
        """The values of the rank's entries: cut now if they are known, else picked of what they come to."""
        known = site.value_of(2)
        if known is not None and not site.spec(2).requires_grad:
            spec = TensorSpec((len(kept),), known.dtype)
            return site.emitter.constant((*key, site.operands[2]), spec, lambda: known[kept].contiguous())
        if not site.sharding_axes("i", "j"):
            return site.values[2]
        spec = TensorSpec((len(kept),), torch.int64)
        mine = site.emitter.constant((*key, "kept"), spec, lambda: kept)
        return site.call(aten.index_select.default, site.values[2], 0, mine)

    def samples(self) -> Iterable[Sample]:
        rows = torch.tensor([0, 0, 1, 3, 3, 3, 4, 4, 6])
        columns = torch.tensor([2, 2, 5, 0, 1, 4, 4, 3, 0])
        yield Sample(PRODUCT, (rows, columns, torch.randn(9), torch.randn(6, 5), 7))
        yield Sample(PRODUCT, (rows, columns, torch.randn(9), torch.randn(6, 5), 7), constant=("operand_2",))
