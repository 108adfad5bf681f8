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

import torch
from torch import Tensor

from autopar.sharding.atoms import Atoms
from autopar.sharding.equation import Equation, Kind
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.sharding.sparse_blocks import Block, block_of
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
        key = "block", *site.operands[:2], rows, columns
        if key not in site.dims.memo:
            site.dims.memo[key] = self.cut(site, rows, columns)
        kept, block = site.dims.memo[key]
        forms = (block.crow, block.column, block.crow_transposed, block.row, block.order)
        crow, column, *transposed = (
            site.emitter.constant((*key, place), form) for place, form in enumerate(forms)
        )
        values = self.values(site, kept, key)
        return (
            site.call(
                torch.ops.autopar_graphs.spmm.default, crow, column, values, site.values[3], *transposed
            ),
        )

    def ranges(self, site: Site) -> tuple[tuple[int, int], tuple[int, int]]:
        """The rows and the columns of the rank's block."""
        result = site.operator.results[0]
        assert result is not None
        rows = site.range_of(result, site.result_layout())
        return rows, site.range_of(site.operands[3], site.operand_layout(3))

    def cut(self, site: Site, rows: tuple[int, int], columns: tuple[int, int]) -> tuple[Tensor, Block]:
        """Which entries lie in these rows and columns, and the block that they are."""
        row, column = site.value_of(0), site.value_of(1)
        assert row is not None and column is not None, "the places of a product's entries are constants"
        mine = (row >= rows[0]) & (row < rows[1]) & (column >= columns[0]) & (column < columns[1])
        kept = mine.nonzero()[:, 0]
        shape = rows[1] - rows[0], columns[1] - columns[0]
        return kept, block_of(row[kept] - rows[0], column[kept] - columns[0], shape)

    def values(self, site: Site, kept: Tensor, key: tuple[object, ...]) -> Handle:
        """The values of the rank's entries: cut now if they are known, else picked of what they come to."""
        known = site.value_of(2)
        if known is not None and not site.spec(2).requires_grad:
            return site.emitter.constant((*key, site.operands[2]), known[kept].contiguous())
        if not site.sharding_axes("i", "j"):
            return site.values[2]
        mine = site.emitter.constant((*key, "kept"), kept)
        return site.call(aten.index_select.default, site.values[2], 0, mine)

    def samples(self) -> Iterable[Sample]:
        rows = torch.tensor([0, 0, 1, 3, 3, 3, 4, 4, 6])
        columns = torch.tensor([2, 2, 5, 0, 1, 4, 4, 3, 0])
        yield Sample(PRODUCT, (rows, columns, torch.randn(9), torch.randn(6, 5), 7))
        yield Sample(PRODUCT, (rows, columns, torch.randn(9), torch.randn(6, 5), 7), constant=("operand_2",))
