"""Products of a sparse matrix that stays where it is and a dense one.

    product    "i j+, j+ f -> i f"

| factor | x          | result          | known as                                    |
|--------|------------|-----------------|---------------------------------------------|
| i      | whole      | split by rows   | 1D, by rows: x gathered                     |
| j      | split      | partial sums    | 1D, by columns: sums scattered              |
| f      | by columns | by columns      | feature-parallel: nothing is exchanged      |
| r      | split      | split by rows   | 1D, by rows: only rows that are read come   |

Each mesh axis takes one of them, so that i on one and j on another are blocks in two dims. A rank cuts its
block once, when its program is written. Which rows of x it reads is known then, too (`needed_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from autopar.core.graph import TensorSpec
from autopar.core.operator_facts import declare
from autopar.core.placement import B, Shard
from autopar.core.strategy import Option
from autopar.sharding.atoms import Atoms
from autopar.sharding.equation import Equation, Kind
from autopar.sharding.needed_rows import (
    NEEDED,
    NeededRows,
    cut_key,
    fetch_needed,
    members,
    needed_rows,
    owned_rows,
    remembered,
)
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.sharding.sparse_blocks import block_of, index_dtype
from autopar.trace.forms.sparse_products import PRODUCT

aten = torch.ops.aten


class _Mine:
    """The block of one rank: its rows and, of those columns that its group has, its entries."""

    def __init__(self, site: Site) -> None:
        self.site, self.axes = site, site.axes(NEEDED)
        self.rows = self.rows_of(site.coordinate)
        self.group = tuple(owned_rows(site, 3, place) for place in members(site, self.axes))
        self.own = owned_rows(site, 3, site.coordinate)
        self.matrix = site.operands[:2]
        self.key = *self.matrix, cut_key(site, 3)
        self.whose = "block", *self.matrix, self.rows, self.group, self.own

    def rows_of(self, coordinate: Sequence[int]) -> tuple[int, int]:
        """The rows of the result that the rank at a coordinate makes."""
        result, layout = self.site.operator.results[0], self.site.result_layout()
        assert result is not None
        if Shard(0) not in layout:
            return 0, self.site.result_shape()[0]
        return self.site.dims.rows(result, Shard(0), layout, coordinate)

    def entries(self, coordinate: Sequence[int]) -> Tensor:
        """Matrix entries that the rank at a coordinate multiplies by."""
        columns = self.group_of(coordinate)
        key = "entries", *self.matrix, self.rows_of(coordinate), columns
        return remembered(self.site, key, lambda: self.find_entries(self.rows_of(coordinate), columns))

    def group_of(self, coordinate: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The ranges of columns that the rank at a coordinate reads of, its own among them."""
        places = members(self.site, self.axes, of=coordinate)
        return tuple(owned_rows(self.site, 3, place) for place in places)

    def find_entries(self, rows: tuple[int, int], columns: Sequence[tuple[int, int]]) -> Tensor:
        row, column = self.places()
        low, high = torch.searchsorted(row, torch.tensor(rows)).tolist()
        inside = torch.zeros(high - low, dtype=torch.bool)
        for first, stop in columns:
            inside |= (column[low:high] >= first) & (column[low:high] < stop)
        found: Tensor = inside.nonzero()[:, 0].add_(low)
        return found

    def work(self, coordinate: Sequence[int]) -> int:
        """Number of entries and of distinct rows that the rank at a coordinate multiplies."""
        rows, columns = self.rows_of(coordinate), self.group_of(coordinate)

        def count() -> int:
            found = self.places()[1][self.find_entries(rows, columns)]
            return len(found) + int((torch.bincount(found) > 0).sum())

        return remembered(self.site, ("work", *self.matrix, rows, columns), count)

    def reads(self, coordinate: Sequence[int]) -> Tensor:
        """The rows of x that the rank at a coordinate reads, rising."""
        key = "reads", *self.matrix, self.rows_of(coordinate), self.group_of(coordinate)

        def find() -> Tensor:
            found: Tensor = self.places()[1][self.entries(coordinate)].unique()
            return found

        return remembered(self.site, key, find)

    @cached_property
    def needed(self) -> NeededRows:
        """Rows that ranks exchange along axes on which only rows that are read travel."""
        return needed_rows(self.site, 3, self.axes, self.reads)

    @property
    def width(self) -> int:
        """Number of rows of x that the rank multiplies."""
        return self.needed.length if self.axes else self.own[1] - self.own[0]

    def block(self) -> tuple[Tensor, ...]:
        """The forms of the block."""

        def cut() -> tuple[Tensor, ...]:
            row, column = self.places()
            kept = self.entries(self.site.coordinate)
            local = self.needed.places(column[kept]) if self.axes else column[kept] - self.own[0]
            shape = self.rows[1] - self.rows[0], self.width
            return block_of(row[kept] - self.rows[0], local, shape).forms

        return remembered(self.site, self.whose, cut)

    def places(self) -> tuple[Tensor, Tensor]:
        """The row and the column of every entry."""
        row, column = self.site.value_of(0), self.site.value_of(1)
        assert row is not None and column is not None, "the places of a product's entries are constants"
        return row, column


@register
class SparseProduct(Rule):
    """sum_j A[i, j] x[j, f], of the entries of A in the order of rows."""

    targets = (PRODUCT,)
    reads_values = True

    def equation(self, op: Instance) -> Equation:
        entries: tuple[str | None, ...] = (None,)
        linear = (frozenset({2}), frozenset({3}))
        return Equation(
            (entries, entries, entries, ("j", "f")), (("i", "f"),), {"j": Kind.CONTRACTED}, linear=linear
        )

    def options(self, op: Instance, atoms: Atoms) -> list[Option]:
        result = op.operator.results[0]
        assert result is not None
        found = super().options(op, atoms)
        if len(atoms.of[op.operands[3]][0]) == len(atoms.of[result][0]) == 1:
            found.append(Option(NEEDED, (B, B, B, Shard(0)), (Shard(0),)))
        return found

    def depth_of(self, op: Instance, equation: Equation, factor: str, atoms: Atoms) -> int:
        depth = super().depth_of(op, equation, factor, atoms)
        return depth if factor == "f" or depth == 1 else 0  # a rank's rows are one range

    def lower(self, site: Site) -> Sequence[Handle]:
        mine = _Mine(site)
        count, length, width = len(mine.entries(site.coordinate)), mine.rows[1] - mine.rows[0], mine.width
        short = index_dtype(count, length, width)

        def form(place: int, size: int, dtype: torch.dtype = short) -> Handle:
            return site.emitter.constant(
                (*mine.key, place),
                TensorSpec((size,), dtype),
                lambda: mine.block()[place],
                memory=(*mine.whose, place),
            )

        crow, column, *transposed = map(form, range(4), (length + 1, count, width + 1, count))
        values, x = self.values(site, mine), site.values[3]
        if mine.axes:
            x = fetch_needed(site, x, mine.needed, mine.axes, mine.key)
        last = self.known_values(site, mine, transposed=True)
        order = form(4, count, torch.int64) if last is None else None
        target = torch.ops.autopar_graphs.spmm.default
        return (site.call(target, crow, column, values, x, *transposed, order, last),)

    def fullest(self, site: Site) -> tuple[int, ...]:
        """The rank with the most entries and rows that it reads."""
        mine = _Mine(site)
        return max(members(site, site.mesh.axes), key=mine.work)

    def values(self, site: Site, mine: _Mine) -> Handle:
        """The values of the rank's entries: cut now if they are known, else picked of what they come to."""
        known = self.known_values(site, mine, transposed=False)
        if known is not None:
            return known
        if not site.sharding_axes("i", "j", NEEDED):
            return site.values[2]
        kept = mine.entries(site.coordinate)
        spec = TensorSpec((len(kept),), torch.int64)
        places = site.emitter.constant((*mine.key, "kept"), spec, lambda: kept)
        return site.call(aten.index_select.default, site.values[2], 0, places)

    def known_values(self, site: Site, mine: _Mine, *, transposed: bool) -> Handle | None:
        """The values of the rank's entries, by rows or by columns, if they are known and don't learn."""
        known = site.value_of(2)
        if known is None or site.spec(2).requires_grad:
            return None
        kept, name = mine.entries(site.coordinate), site.operands[2]
        memory = *mine.whose, name, transposed

        def cut() -> Tensor:
            return known[kept[mine.block()[-1]] if transposed else kept]

        return site.emitter.constant(
            (*mine.key, name, transposed),
            TensorSpec((len(kept),), known.dtype),
            lambda: remembered(site, memory, cut),
            memory=memory,
        )

    def samples(self) -> Iterable[Sample]:
        rows = torch.tensor([0, 0, 1, 3, 3, 3, 4, 4, 6])
        columns = torch.tensor([2, 2, 5, 0, 1, 4, 4, 3, 0])
        yield Sample(PRODUCT, (rows, columns, torch.randn(9), torch.randn(6, 5), 7))
        yield Sample(PRODUCT, (rows, columns, torch.randn(9), torch.randn(6, 5), 7), constant=("operand_2",))


declare(
    *(torch.ops.aten.sparse_coo_tensor.indices_size, torch.ops.aten._sparse_coo_tensor_unsafe),
    places_by=0,
)
