"""Gathers of several weights by one exchange, and of their gradients by one scatter.

    rank 0    w [a a]   v [c]          full_w [a a b b]     back: of each rank's parts of the gradients
    rank 1    w [b b]   v [d]  -->     full_v [c d]               one flat sum, of which a rank has its own

    flat      [ rank 0: a a c | rank 1: b b d ]

Every rank puts its parts side by side; what arrives is joined weight by weight. `dims` and `blocks` are those
of each weight, `sizes` those of each weight on each rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.runtime import registry
from autopar.runtime.collectives import groups, transport
from autopar.runtime.collectives import placement_moves as moves
from autopar.runtime.collectives.row_ranges import expect
from autopar.runtime.saved import regather

TOGETHER = "_together"  # ends the names of moves of several tensors, but for REGATHER
_SCHEMA = "(Tensor[] xs, str group, int[] dims, int[] blocks, int[] sizes) -> Tensor[]"
MOST_GEOMETRIES = 4096  # whose geometry is remembered
Shape = tuple[int, ...]


class _Geometry(NamedTuple):
    """By weight: its dim, its blocks, and each rank's part, as (..., blocks, size, ...) and in elements."""

    dims: Sequence[int]
    blocks: Sequence[int]
    sizes: Sequence[Sequence[int]]
    shapes: Sequence[Sequence[Shape]]
    lengths: Sequence[Sequence[int]]

    def of_rank(self, rank: int) -> list[int]:
        """Elements of each weight's part on a rank."""
        return [lengths[rank] for lengths in self.lengths]

    @property
    def by_rank(self) -> list[int]:
        """Elements of all parts on each rank."""
        return [sum(lengths) for lengths in zip(*self.lengths, strict=True)]


def _geometry(
    xs: Sequence[Tensor], dims: Sequence[int], blocks: Sequence[int], sizes: Sequence[int]
) -> _Geometry:
    return _geometry_of(tuple(x.shape for x in xs), tuple(dims), tuple(blocks), tuple(sizes))


@functools.lru_cache(maxsize=MOST_GEOMETRIES)
def _geometry_of(shapes: tuple[Shape, ...], dims: Shape, blocks: Shape, sizes: Shape) -> _Geometry:
    ranks = len(sizes) // len(shapes)
    parts = [sizes[index * ranks :][:ranks] for index in range(len(shapes))]
    seen = [
        [(*shape[:dim], count, size, *shape[dim + 1 :]) for size in own]
        for shape, dim, count, own in zip(shapes, dims, blocks, parts, strict=True)
    ]
    return _Geometry(dims, blocks, parts, seen, [list(map(math.prod, each)) for each in seen])


def _start_gather(
    xs: Sequence[Tensor], group: str, dims: Sequence[int], blocks: Sequence[int], sizes: Sequence[int]
) -> Callable[[], list[Tensor]]:
    """Begin to gather; what is returned waits, and gives the full tensors."""
    all_parts, me = _geometry(xs, dims, blocks, sizes), groups.index(group)
    for x, dim, count, own in zip(xs, dims, blocks, all_parts.sizes, strict=True):
        expect(x, dim, count * own[me])
    mine = torch.cat([x.reshape(-1) for x in xs])
    by_rank = all_parts.by_rank
    flat = mine.new_empty(sum(by_rank))
    slots = flat.split(by_rank)
    arrived = transport.start_all_gather(flat, slots, mine, group)

    def finish() -> list[Tensor]:
        arrived()
        pieces = [slot.split(all_parts.of_rank(rank)) for rank, slot in enumerate(slots)]
        return [
            torch.cat([piece.view(shape) for piece, shape in zip(each, shapes, strict=True)], dim + 1).flatten(
                dim, dim + 1
            )
            for dim, shapes, *each in zip(dims, all_parts.shapes, *pieces, strict=True)
        ]

    return finish


def _gather(xs: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    return _start_gather(xs, *arguments)()


def _start_scatter(
    xs: Sequence[Tensor],
    group: str,
    dims: Sequence[int],
    blocks: Sequence[int],
    sizes: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
) -> Callable[[], list[Tensor]]:
    """Begin to sum, in `dtype` if any, and to scatter; doubles are summed as they are."""
    own = xs[0].dtype
    other = own if dtype is None or own is torch.float64 else dtype
    xs = [x.to(other) for x in xs]
    all_parts, me = _geometry(xs, dims, blocks, sizes), groups.index(group)
    parts = [
        moves.parts_of_full(x, dim, count, own)
        for x, dim, count, own in zip(xs, dims, blocks, all_parts.sizes, strict=True)
    ]
    flat = torch.cat([part.reshape(-1) for of_rank in zip(*parts, strict=True) for part in of_rank])
    added = transport.start_reduce_scatter(flat, flat.split(all_parts.by_rank), group)

    def finish() -> list[Tensor]:
        pieces = added().to(own).split(all_parts.of_rank(me))
        return [
            piece.view(shapes[me]).flatten(dim, dim + 1)
            for piece, shapes, dim in zip(pieces, all_parts.shapes, dims, strict=True)
        ]

    return finish


def _scatter(xs: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    return _start_scatter(xs, *arguments)()


def _full(
    xs: Sequence[Tensor], group: str, dims: Sequence[int], blocks: Sequence[int], sizes: Sequence[int]
) -> list[Tensor]:
    ranks = len(sizes) // len(xs)
    return [
        moves.empty_full(x, group, dim, count, sizes[index * ranks :][:ranks])
        for index, (x, dim, count) in enumerate(zip(xs, dims, blocks, strict=True))
    ]


def _local(
    xs: Sequence[Tensor], group: str, dims: Sequence[int], blocks: Sequence[int], sizes: Sequence[int]
) -> list[Tensor]:
    ranks, me = len(sizes) // len(xs), groups.index(group)
    return [
        x.new_empty((*x.shape[:dim], count * sizes[index * ranks + me], *x.shape[dim + 1 :]))
        for index, (x, dim, count) in enumerate(zip(xs, dims, blocks, strict=True))
    ]


def _keep_arguments(ctx: Any, inputs: moves.Arguments, _: Any) -> None:
    ctx.arguments = inputs[1:]


def _slices(gradients: Sequence[Tensor | None], arguments: moves.Arguments) -> list[Tensor | None]:
    """Parts that are this rank's of gradients that are the same everywhere."""
    slices = registry.eager("r_to_s")
    return [
        None if each is None else slices(each, group, dims[0], blocks[0], sizes)
        for index, each in enumerate(gradients)
        for group, dims, blocks, sizes in [regather.arguments_of(arguments, (index,))]
    ]


def _sums(
    gradients: Sequence[Tensor | None], arguments: moves.Arguments, *, dtype: torch.dtype | None = None
) -> list[Tensor | None]:
    """Parts that are this rank's of sums of gradients, in `dtype` if any; doubles stay doubles."""
    there = {index: each for index, each in enumerate(gradients) if each is not None}
    if not there:
        return list(gradients)
    own = next(iter(there.values())).dtype
    other = own if dtype is None or own is torch.float64 else dtype
    summed = registry.eager("p_to_s" + TOGETHER)(
        [each.to(other) for each in there.values()], *regather.arguments_of(arguments, there)
    )
    found: list[Tensor | None] = [None] * len(gradients)
    for index, total in zip(there, summed, strict=True):
        found[index] = total.to(own)
    return found


def _register(name: str, back: Callable[..., list[Tensor | None]]) -> None:
    """Register a gather of several weights, whose gradients go `back`, and one whose results don't stay."""

    def regathered(xs: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
        full = _gather(xs, *arguments)
        regather.note_together(full, "s_to_b" + TOGETHER, xs, arguments)
        return full

    def backward(ctx: Any, *gradients: Tensor | None) -> list[Tensor | None]:
        return back(gradients, ctx.arguments)

    for kernel, suffix in ((_gather, ""), (regathered, regather.REGATHER)):
        registry.functional_of_list(
            name + TOGETHER + suffix, _SCHEMA, kernel, shape=_full, setup=_keep_arguments, backward=backward
        )


registry.functional_of_list("p_to_s" + TOGETHER, _SCHEMA, _scatter, shape=_local)
_register("s_to_r", _slices)
_register("s_to_b", _sums)
for _precision, _ending in moves.SUMMED.items():
    _register("s_to_b" + _ending, functools.partial(_sums, dtype=moves.DTYPES[_precision]))
