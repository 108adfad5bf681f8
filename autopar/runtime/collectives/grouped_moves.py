"""Gathers of several weights by one exchange, and of their gradients by one scatter.

    rank 0    w [a a]   v [c]          full_w [a a b b]     back: of each rank's parts of the gradients
    rank 1    w [b b]   v [d]  -->     full_v [c d]               one flat sum, of which a rank has its own

    flat      [ rank 0: a a c | rank 1: b b d ]

In halves (started_moves.py) a handle is a list of one, and a wait takes it before the tensors.

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
from autopar.runtime.collectives import groups, started_moves, transport
from autopar.runtime.collectives import placement_moves as moves
from autopar.runtime.collectives.row_ranges import expect
from autopar.runtime.saved import regather

TOGETHER = "_together"  # ends the names of moves of several tensors, but for REGATHER
_SCHEMA = "(Tensor[] xs, str group, int[] dims, int[] blocks, int[] sizes) -> Tensor[]"
GROUPED = [  # which programs start early, as they do those of single tensors
    name.removesuffix(regather.REGATHER) + TOGETHER + regather.REGATHER * name.endswith(regather.REGATHER)
    for name in started_moves.HALVED
]
MOST_GEOMETRIES = 4096  # whose geometry is remembered
Shape = tuple[int, ...]
_Back = Callable[[Sequence[Tensor | None], moves.Arguments], list[Tensor | None]]
_Start = Callable[..., Callable[[], list[Tensor]]]


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
            _joined(each, shapes, dim)
            for dim, shapes, *each in zip(dims, all_parts.shapes, *pieces, strict=True)
        ]

    return finish


def _joined(parts: Sequence[Tensor], shapes: Sequence[Shape], dim: int) -> Tensor:
    """The full tensor of each rank's part."""
    seen = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return torch.cat(seen, dim + 1).flatten(dim, dim + 1)


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
    all_parts, me = _geometry(xs, dims, blocks, sizes), groups.index(group)
    parts = [
        moves.parts_of_full(x, dim, count, own)
        for x, dim, count, own in zip(xs, dims, blocks, all_parts.sizes, strict=True)
    ]
    flat = xs[0].new_empty(sum(all_parts.by_rank), dtype=other)
    torch.cat([part.reshape(-1) for of_rank in zip(*parts, strict=True) for part in of_rank], out=flat)
    added = transport.start_reduce_scatter(flat, flat.split(all_parts.by_rank), group)

    def finish() -> list[Tensor]:
        pieces = added().to(own).split(all_parts.of_rank(me))
        return [
            piece.view(shapes[me]).flatten(dim, dim + 1)
            for piece, shapes, dim in zip(pieces, all_parts.shapes, dims, strict=True)
        ]

    return finish


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
    gradients: Sequence[Tensor | None], arguments: moves.Arguments, *, scatter: str
) -> list[Tensor | None]:
    """Parts that are this rank's of sums of gradients."""
    there, others = _there(gradients, arguments)
    return _filled(gradients, registry.eager(scatter)(there, *others) if there else [])


def _there(
    gradients: Sequence[Tensor | None], arguments: moves.Arguments
) -> tuple[list[Tensor], moves.Arguments]:
    """The gradients that there are, and a move's arguments for these alone."""
    indices = [index for index, each in enumerate(gradients) if each is not None]
    there = [each for each in gradients if each is not None]
    return there, regather.arguments_of(arguments, indices)


def _filled(gradients: Sequence[Tensor | None], results: Sequence[Tensor]) -> list[Tensor | None]:
    """What came of gradients, and None where there was none."""
    found = iter(results)
    return [None if each is None else next(found) for each in gradients]


def _register(name: str, back: _Back, start: _Start | None = None) -> None:
    """Register a gather of several weights, whose gradients go `back`, one whose results don't stay, and both
    in halves: there gradients `start` where they are at hand, and arrive where the gather started."""

    def regathered(xs: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
        return _noted(_gather(xs, *arguments), xs, arguments)

    def waited(xs: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
        full: list[Tensor] = started_moves.end(xs[0])
        return full

    def waited_noted(xs: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
        return _noted(waited(xs, *arguments), xs[1:], arguments)

    def backward(ctx: Any, *gradients: Tensor | None) -> list[Tensor | None]:
        return back(gradients, ctx.arguments)

    def begin_back(ctx: Any, *gradients: Tensor | None) -> list[Tensor | None]:
        there, others = _there(gradients, ctx.arguments)
        if start is None or not there or torch.is_grad_enabled() or not all(map(registry.is_real, there)):
            return [None, *back(gradients, ctx.arguments)]
        finish, shape = start(there, *others), [None if each is None else each[:0] for each in gradients]
        handle = started_moves.begin(there[0].new_empty(1), lambda: _filled(shape, finish()))
        return [handle, *(None for _ in gradients)]

    def end_back(ctx: Any, handle: Tensor | None) -> list[Tensor | None]:
        if handle is None:
            return [None for _ in ctx.arguments[1]]
        parts: list[Tensor | None] = started_moves.end(handle)
        return parts

    def register(half: str, kernel: Any, shape: Any, slope: Any, suffix: str) -> None:
        named, setup = half + name + TOGETHER + suffix, _keep_arguments
        registry.functional_of_list(named, _SCHEMA, kernel, shape=shape, setup=setup, backward=slope)

    for suffix, whole, rest in (("", _gather, waited), (regather.REGATHER, regathered, waited_noted)):
        register("", whole, _full, backward, suffix)
        register(started_moves.START, _begin, _handle, end_back, suffix)
        register(started_moves.WAIT, rest, lambda xs, *others: _full(xs[1:], *others), begin_back, suffix)


def _noted(full: list[Tensor], xs: Sequence[Tensor], arguments: moves.Arguments) -> list[Tensor]:
    regather.note_together(full, "s_to_b" + TOGETHER, xs, arguments)
    return full


def _begin(xs: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    return [started_moves.begin(xs[0].new_empty(1), _start_gather(xs, *arguments))]


def _handle(xs: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return [xs[0].new_empty(1)]


def _register_sums(ending: str, dtype: torch.dtype | None) -> None:
    """Register a gather whose gradients are summed, in `dtype` if any, and what sums them."""
    start = functools.partial(_start_scatter, dtype=dtype)
    scatter = "p_to_s" + ending + TOGETHER
    registry.functional_of_list(
        scatter, _SCHEMA, lambda xs, *arguments: start(xs, *arguments)(), shape=_local
    )
    _register("s_to_b" + ending, functools.partial(_sums, scatter=scatter), start)


_register("s_to_r", _slices)
_register_sums("", None)
for _precision, _ending in moves.SUMMED.items():
    _register_sums(_ending, moves.DTYPES[_precision])
