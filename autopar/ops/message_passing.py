"""Rows that are placed by a vector of indices, added up or reduced otherwise: messages along edges.

    index_add      "n& f&, e+, e+ f -> n f"      each rank adds up its edges; their sums are partial
    index_reduce   "n f, e., e. f -> n f"        largest, least, mean or product of rows: edges stay whole

The dim that rows are placed in stays whole: an index may name any of its rows. Where it is a constant that is
known, too: a rank's rows of the result follow from rows that it can name, and fetches those that it lacks
(factor r). Edges in the order of their destinations are cut with these, and then none is lacking.

    pick           "n f, e -> e f"               x[e] for the rank's edges e, of rows that it fetches
    place          "e f, e -> n f"               the rank's vertices, of edges that it fetches
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from autopar.core.graph import TensorSpec
from autopar.core.operator_facts import declare
from autopar.core.placement import B, Shard
from autopar.core.strategy import Option
from autopar.sharding.atoms import Atoms, Dim, RowTable
from autopar.sharding.equation import Equation, Kind
from autopar.sharding.needed_rows import (
    NEEDED,
    cut_key,
    fetch_needed,
    members,
    needed_rows,
    owned_rows,
    remembered,
)
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.trace.rewrites.edge_operators import PICK, PLACE

aten = torch.ops.aten


def _labels(op: Instance) -> tuple[tuple[str | None, ...], tuple[str | None, ...], tuple[str | None, ...]]:
    """Labels of the tensor that rows are placed in, of the index and of the rows."""
    dim = op.dim(op["dim"])
    free = [f"d{here}" for here in range(len(op.shape()))]
    into = tuple(None if here == dim else label for here, label in enumerate(free))
    rows = tuple("e" if here == dim else label for here, label in enumerate(free))
    return into, ("e",) * len(op.shape(1)), rows[: len(op.shape(2))]


def reduced(site: Site, values: Sequence[Handle], dim: int, reduce: str, *, include_self: bool) -> Handle:
    """Rows placed along `dim` by scatter_reduce, which has faster kernels: the index is seen as one for each
    element."""
    into, index, rows = values
    shape = site.emitter.shape(rows)
    seen = [size if here == dim else 1 for here, size in enumerate(shape)]
    index = site.call(aten.reshape.default, index, seen)
    index = site.call(aten.expand.default, index, list(shape))
    args = (into, dim, index, rows, reduce)
    return site.call(aten.scatter_reduce.two, *args, include_self=include_self)


@register
class IndexAdd(Rule):
    """self + alpha x rows, at the rows of `dim` that the index names."""

    targets = (aten.index_add.default,)

    def equation(self, op: Instance) -> Equation:
        into, index, rows = _labels(op)
        linear = (frozenset({0, 2}),)
        return Equation((into, index, rows), (into,), {"e": Kind.CONTRACTED}, frozenset({0}), linear)

    def samples(self) -> Iterable[Sample]:
        index = torch.tensor([3, 0, 3, 1, 4, 4, 0])
        yield Sample(aten.index_add.default, (torch.randn(5, 4), 0, index, torch.randn(7, 4)))
        yield Sample(
            aten.index_add.default, (torch.randn(3, 5), -1, index, torch.randn(3, 7)), {"alpha": 0.5}
        )
        yield Sample(aten.index_add.default, (torch.zeros(5), 0, index, torch.randn(7)))


@register
class IndexReduce(Rule):
    """The extreme, mean or product of the rows that the index places at each row of `dim`."""

    targets = (aten.index_reduce.default,)

    def equation(self, op: Instance) -> Equation:
        into, index, rows = _labels(op)
        return Equation((into, index, rows), (into,), {"e": Kind.WHOLE})

    def lower(self, site: Site) -> Sequence[Handle]:
        dim, reduce = site.dim(site["dim"]), str(site["reduce"])
        return (reduced(site, site.values, dim, reduce, include_self=bool(site["include_self"])),)

    def samples(self) -> Iterable[Sample]:
        index = torch.tensor([3, 0, 3, 1, 4, 4, 0])
        for reduce in ("amax", "amin", "mean", "prod"):
            args = (torch.randn(5, 4), 0, index, torch.randn(7, 4), reduce)
            yield Sample(aten.index_reduce.default, args, {"include_self": reduce != "amax"})


@register
class Pick(Rule):
    """Rows of dim 0 by a constant."""

    targets = (PICK,)
    reads_values = True

    def equation(self, op: Instance) -> Equation:
        rest = tuple(f"d{dim}" for dim in range(1, len(op.shape())))
        return Equation(((None, *rest), ("e",)), (("e", *rest),), linear=(frozenset({0}),))

    def tables(self, op: Instance, values: Mapping[str, Tensor]) -> list[RowTable]:
        return _tables((op.operands[0], 0), op.operator.results[0], op, values)

    def options(self, op: Instance, atoms: Atoms) -> list[Option]:
        return [*super().options(op, atoms), *_needing(op, atoms)]

    def lower(self, site: Site) -> Sequence[Handle]:
        axes = site.axes(NEEDED)
        if not axes:
            return (site.call(aten.index_select.default, site.values[0], 0, site.values[1]),)
        index, edges = _index(site), _made_rows(site, site.coordinate)

        def reads(coordinate: Sequence[int]) -> Tensor:
            first, stop = _made_rows(site, coordinate)
            return remembered(
                site, ("reads", site.operands[1], first, stop), lambda: _different(index[first:stop])
            )

        needed = needed_rows(site, 0, axes, reads)
        key = site.operator.target, site.operands[1], cut_key(site, 0)
        x = fetch_needed(site, site.values[0], needed, axes, key)
        local = site.emitter.constant(
            ("picked", *key), _indices(edges[1] - edges[0]), lambda: needed.places(index[slice(*edges)])
        )
        return (site.call(aten.index_select.default, x, 0, local),)

    def fullest(self, site: Site) -> tuple[int, ...]:
        """The rank that picks most rows."""
        return max(members(site, site.mesh.axes), key=lambda place: _length(_made_rows(site, place)))

    def samples(self) -> Iterable[Sample]:
        yield Sample(PICK, (torch.randn(7, 4), torch.tensor([5, 0, 3, 3, 6, 1, 0, 2, 2, 4, 6])))
        yield Sample(PICK, (torch.randn(7, 2, 3), torch.tensor([0, 0, 1, 2, 3, 3, 4, 5, 6])))
        yield Sample(PICK, (torch.randn(6), torch.tensor([5, 4, 5])))


@register
class Place(Rule):
    """Rows that a constant places among zeros, added up or reduced otherwise."""

    targets = (PLACE,)
    reads_values = True

    def equation(self, op: Instance) -> Equation:
        rest = tuple(f"d{dim}" for dim in range(1, len(op.shape())))
        kind, linear = (Kind.CONTRACTED, (frozenset({0}),)) if op["reduce"] == "sum" else (Kind.WHOLE, ())
        return Equation((("e", *rest), ("e",)), ((None, *rest),), {"e": kind}, linear=linear)

    def tables(self, op: Instance, values: Mapping[str, Tensor]) -> list[RowTable]:
        result = op.operator.results[0]
        return [] if result is None else _tables((result, 0), op.operands[0], op, values)

    def options(self, op: Instance, atoms: Atoms) -> list[Option]:
        return [*super().options(op, atoms), *_needing(op, atoms)]

    def lower(self, site: Site) -> Sequence[Handle]:
        rows, index = site.values
        if site.axes(NEEDED):
            rows, index = self.own_rows(site)
        reduce, shape = str(site["reduce"]), site.local_result_shape()
        into = site.call(
            aten.zeros.default, list(shape), dtype=site.result_dtype(), device=torch.device("cpu")
        )
        if reduce == "sum":
            return (site.call(aten.index_add.default, into, 0, index, rows),)
        return (reduced(site, (into, index, rows), 0, reduce, include_self=False),)

    def own_rows(self, site: Site) -> tuple[Handle, Handle]:
        """The rows that are placed among the rank's own, and where in these."""
        axes, index, made = site.axes(NEEDED), _index(site), _made_rows(site, site.coordinate)

        def reads(coordinate: Sequence[int]) -> Tensor:
            first, stop = _made_rows(site, coordinate)
            group = [owned_rows(site, 0, place) for place in members(site, axes, of=coordinate)]

            def find() -> Tensor:
                edges = torch.cat([torch.arange(*each) for each in group])
                kept: Tensor = edges[(index[edges] >= first) & (index[edges] < stop)]
                return kept

            return remembered(site, ("placed", site.operands[1], first, stop, tuple(group)), find)

        needed, mine = needed_rows(site, 0, axes, reads), reads(site.coordinate)
        key = site.operator.target, site.operands[1], cut_key(site, 0)
        rows, count = fetch_needed(site, site.values[0], needed, axes, key), _indices(len(mine))
        if not needed.is_silent:  # else each has just its own
            places = site.emitter.constant(("placed", *key), count, lambda: needed.places(mine))
            rows = site.call(aten.index_select.default, rows, 0, places)
        index = site.emitter.constant(("place", *key), count, lambda: index[mine] - made[0])
        return rows, index

    def fullest(self, site: Site) -> tuple[int, ...]:
        """Coordinate of the rank with most rows to place."""
        return max(members(site, site.mesh.axes), key=lambda place: _length(owned_rows(site, 0, place)))

    def samples(self) -> Iterable[Sample]:
        rows = torch.randn(11, 3)
        for index in ([0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 6], [5, 0, 3, 3, 6, 1, 0, 1, 2, 4, 6]):
            yield Sample(PLACE, (rows, torch.tensor(index), 8, "sum"))
            yield Sample(PLACE, (rows, torch.tensor(index), 8, "amax"))
        yield Sample(PLACE, (torch.randn(5, 2, 2), torch.tensor([0, 2, 2, 2, 4]), 5, "mean"))
        yield Sample(PLACE, (torch.randn(4), torch.tensor([3, 1, 1, 0]), 4, "amin"))


def _needing(op: Instance, atoms: Atoms) -> list[Option]:
    """The option of which each rank fetches the rows that it needs for its rows of the result."""
    result = op.operator.results[0]
    if result is None or len(atoms.of[op.operands[0]][0]) != 1 or len(atoms.of[result][0]) != 1:
        return []
    return [Option(NEEDED, (Shard(0), B), (Shard(0),))]


def _tables(base: Dim, output: str | None, op: Instance, values: Mapping[str, Tensor]) -> list[RowTable]:
    """Which rows of `output` belong to which of `base`, if the index rises."""
    index = values.get(op.operands[1])
    if output is None or index is None or len(index) < 2 or bool((index.diff() < 0).any()):
        return []
    return [RowTable.of(base, (output, 0), index, op.specs[base[0]].shape[0])]


def _index(site: Site) -> Tensor:
    index = site.value_of(1)
    assert index is not None, "rows are picked and placed by constants"
    return index


def _made_rows(site: Site, coordinate: Sequence[int]) -> tuple[int, int]:
    """The rows of the result that the rank at a coordinate has."""
    result, layout = site.operator.results[0], site.result_layout()
    assert result is not None
    if Shard(0) not in layout:
        return 0, site.result_shape()[0]
    return site.dims.rows(result, Shard(0), layout, coordinate)


def _different(rows: Tensor) -> Tensor:
    found: Tensor = rows.unique()
    return found


def _indices(count: int) -> TensorSpec:
    return TensorSpec((count,), torch.int64)


def _length(rows: tuple[int, int]) -> int:
    return rows[1] - rows[0]


declare(aten.index_add, aten.index_reduce, aten.index_copy, indexed=True, places_by=2)
declare(aten.index_put, places_by=1)
declare(aten.segment_reduce, indexed=True, has_linear_backward=False)
