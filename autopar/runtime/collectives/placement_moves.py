"""The moves between placements as registered operators `torch.ops.autopar.<from>_to_<to>`.

One operator for each row of the table of placements (`autopar.core.placement`). The gradient of P
lies like the value of B and the other way round, so the backward of X -> Y is again a move: from
Y's gradient to X's. Call it the *transposed* move; each operator's backward calls the transposed one.

| operator | forward              | transposed |    | operator | forward         | transposed |
|----------|----------------------|------------|----|----------|-----------------|------------|
| p_to_r   | all-reduce           | r_to_b     |    | r_to_b   | nothing (alias) | p_to_r     |
| p_to_b   | all-reduce           | p_to_b     |    | b_to_r   | nothing (alias) | r_to_p     |
| s_to_r   | all-gather           | r_to_s     |    | r_to_p   | keep on rank 0  | b_to_r     |
| s_to_b   | all-gather           | p_to_s     |    | b_to_p   | keep on rank 0  | b_to_p     |
| p_to_s   | reduce-scatter       | s_to_b     |    | b_to_s   | slice           | s_to_p     |
| r_to_s   | slice                | s_to_r     |    | s_to_p   | zero-pad        | b_to_s     |
| s_to_s   | all-to-all           | s_to_s     |    | exchange | neighbours' rows| exchange_add |

`needed_rows` is an exchange of rows that a graph names, `needed_rows_add` its transposed.

`s_to_r_regather` and `s_to_b_regather` gather weights whose full copy does not stay between forward and
backward (`regather`).

`r_to_b_wide` and `s_to_b_wide` are those of weights that were cast to fewer bits: gradients of fewer bits are
summed in float32, and the sums rounded once. Those that end with `_bf16` or `_fp16` sum in fewer bits.

Arguments. `group` is a group key. A split dim is seen as (`blocks`, length), and of each block's
length the rank with index k owns `sizes[k]`:

    blocks=2, sizes=(2, 1), two ranks        full   [a0 a1 a2 b0 b1 b2]
                                             rank 0 [a0 a1 b0 b1]   rank 1 [a2 b2]

Every result is contiguous, that of a slice or an exchange in the memory format of its input: on
channels-last tensors convolutions run other kernels, often faster ones. Only `r_to_b` and `b_to_r`
return their input, as an alias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.core.precision import Precision
from autopar.runtime import registry, sparse_kernel
from autopar.runtime.collectives import (
    batch_norm,
    convolution,
    groups,
    ring_attention,
    transport,
    travelling_rows,
)
from autopar.runtime.collectives.memory_format import memory_format
from autopar.runtime.collectives.row_ranges import Rows, expect, overlap
from autopar.runtime.saved import regather

__all__ = [
    "batch_norm",
    "convolution",
    "ring_attention",
    "sparse_kernel",
    "travelling_rows",
]  # so that importing this module registers every operator

Arguments: TypeAlias = tuple[Any, ...]  # of an operator, after its tensor


# -- a split dim, seen as (blocks, length) ------------------------------------------------------


def in_blocks(x: Tensor, dim: int, blocks: int) -> Tensor:
    return x.unsqueeze(dim) if blocks == 1 else torch.unflatten(x, dim, (blocks, x.shape[dim] // blocks))


def parts_of_full(x: Tensor, dim: int, blocks: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Each rank's part of the full tensor, as views with the dim seen as (blocks, size)."""
    return torch.split(in_blocks(x, dim, blocks), list(sizes), dim + 1)


def _mine(x: Tensor, group: str, dim: int, blocks: int, sizes: Sequence[int]) -> Tensor:
    """The part of the full tensor that this rank holds, as such a view."""
    me = groups.index(group)
    return in_blocks(x, dim, blocks).narrow(dim + 1, sum(sizes[:me]), sizes[me])


def _resized(x: Tensor, dim: int, length: int) -> Tensor:
    """Make a new contiguous tensor like `x` with another length of one dim."""
    return x.new_empty(_shape(x, dim, length))


def _like(x: Tensor, dim: int, length: int) -> Tensor:
    """Resize as `_resized` does, in the memory format of `x`."""
    shape = _shape(x, dim, length)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def _shape(x: Tensor, dim: int, length: int) -> tuple[int, ...]:
    return (*x.shape[:dim], length, *x.shape[dim + 1 :])


def empty_full(x: Tensor, group: str, dim: int, blocks: int, sizes: Sequence[int]) -> Tensor:
    expect(x, dim, blocks * sizes[groups.index(group)])
    return _resized(x, dim, blocks * sum(sizes))


def _local(x: Tensor, group: str, dim: int, blocks: int, sizes: Sequence[int]) -> Tensor:
    expect(x, dim, blocks * sum(sizes))
    return _resized(x, dim, blocks * sizes[groups.index(group)])


def _sliced(x: Tensor, group: str, dim: int, blocks: int, sizes: Sequence[int]) -> Tensor:
    expect(x, dim, blocks * sum(sizes))
    return _like(x, dim, blocks * sizes[groups.index(group)])


def _same(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# -- kernels ------------------------------------------------------------------------------------


def _all_reduce(x: Tensor, group: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    transport.all_reduce(total, groups.group(group))
    return total


def _all_reduce_max(x: Tensor, group: str) -> Tensor:
    largest = x.clone(memory_format=torch.contiguous_format)
    transport.all_reduce(largest, groups.group(group), dist.ReduceOp.MAX)
    return largest


def _keep_on_first(x: Tensor, group: str) -> Tensor:
    if groups.index(group) == 0:
        return x.clone(memory_format=torch.contiguous_format)
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def _all_gather(x: Tensor, group: str, dim: int, blocks: int, sizes: Sequence[int]) -> Tensor:
    x, full = x.contiguous(), empty_full(x, group, dim, blocks, sizes)
    transport.all_gather(full, parts_of_full(full, dim, blocks, sizes), in_blocks(x, dim, blocks), group)
    return full


def _regather(operator: str) -> Callable[..., Tensor]:
    """Like the kernel of `operator`, and notes how the result can be made again by it."""

    def gather(x: Tensor, *arguments: Any) -> Tensor:
        full = _all_gather(x, *arguments)
        regather.note(full, operator, x, arguments)
        return full

    return gather


def _reduce_scatter(x: Tensor, group: str, dim: int, blocks: int, sizes: Sequence[int]) -> Tensor:
    expect(x, dim, blocks * sum(sizes))
    x = x.contiguous()
    return transport.reduce_scatter(x, parts_of_full(x, dim, blocks, sizes), group).flatten(dim, dim + 1)


def own_slice(x: Tensor, group: str, dim: int, blocks: int, sizes: Sequence[int]) -> Tensor:
    expect(x, dim, blocks * sum(sizes))
    out = _sliced(x, group, dim, blocks, sizes)
    in_blocks(out, dim, blocks).copy_(_mine(x, group, dim, blocks, sizes))
    return out


def _zero_pad(x: Tensor, group: str, dim: int, blocks: int, sizes: Sequence[int]) -> Tensor:
    full = empty_full(x, group, dim, blocks, sizes).zero_()
    _mine(full, group, dim, blocks, sizes).copy_(in_blocks(x, dim, blocks))
    return full


def _resplit(x: Tensor, group: str, *splits: Any) -> Tensor:
    dim_from, blocks_from, sizes_from, dim_to, blocks_to, sizes_to = splits
    out = _resplit_shape(x, group, *splits)
    x = x.contiguous()
    parts = parts_of_full(x, dim_to, blocks_to, sizes_to)
    before, after = out.shape[:dim_from], out.shape[dim_from + 1 :]
    shapes = [(*before, blocks_from, size, *after) for size in sizes_from]
    received = transport.all_to_all(x, parts, shapes, group)
    torch.cat(received, dim_from + 1, out=in_blocks(out, dim_from, blocks_from))
    return out


def _resplit_shape(x: Tensor, group: str, *splits: Any) -> Tensor:
    dim_from, blocks_from, sizes_from, dim_to, blocks_to, sizes_to = splits
    out = empty_full(x, group, dim_from, blocks_from, sizes_from)
    return _local(out, group, dim_to, blocks_to, sizes_to)


# -- halo exchange and recut --------------------------------------------------------------------
#
#     owned = (0, 4, 8)         rank 0: [0 1 2 3]           rank 1: [4 5 6 7]
#     windows (-1, 5), (3, 9)           [f 0 1 2 3 4]               [3 4 5 6 7 f]     f = fill
#
# Row numbers are global, within a block. Rank k's window takes from rank j the rows that lie in
# both k's window and j's cut; what lies in no cut is filled. Transposed, the same rows go back.


@dataclass(frozen=True, slots=True)
class Halo:
    """Who owns and who needs which rows of each block of `dim`, seen from rank `me` of the group."""

    me: int
    dim: int
    blocks: int
    cuts: tuple[Rows, ...]
    windows: tuple[Rows, ...]

    @staticmethod
    def of(
        group: str,
        dim: int,
        blocks: int,
        owned: Sequence[int],
        starts: Sequence[int],
        stops: Sequence[int],
    ) -> Halo:
        cuts, windows = tuple(pairwise(owned)), tuple(zip(starts, stops, strict=True))
        return Halo(groups.index(group), dim, blocks, cuts, windows)

    @property
    def others(self) -> list[int]:
        return [peer for peer in range(len(self.cuts)) if peer != self.me]

    @property
    def outside(self) -> list[Rows]:
        """The rows of my window that nobody owns: before the tensor and past its end."""
        (first, stop), end = self.windows[self.me], self.cuts[-1][1]
        return [(first, min(0, stop)), (max(end, first), stop)]

    def owned(self, x: Tensor, peer: int) -> Tensor:
        """A view of the rows of `x`, laid as my cut, that `peer` needs."""
        mine = self.cuts[self.me]
        return self._view(x, mine[0], overlap(mine, self.windows[peer]))

    def needed(self, x: Tensor, peer: int) -> Tensor:
        """A view of the rows of `x`, laid as my window, that `peer` owns."""
        window = self.windows[self.me]
        return self._view(x, window[0], overlap(self.cuts[peer], window))

    def to_window(self, x: Tensor) -> Tensor:
        """Copy `x`, laid as my cut, to a tensor laid as my window."""
        return self._from_to(x, self.cuts[self.me], self.windows[self.me])

    def to_cut(self, x: Tensor) -> Tensor:
        """Copy `x`, laid as my window, to a tensor laid as my cut."""
        return self._from_to(x, self.windows[self.me], self.cuts[self.me])

    def _from_to(self, x: Tensor, old: Rows, new: Rows) -> Tensor:
        expect(x, self.dim, self.blocks * (old[1] - old[0]))
        return _like(x, self.dim, self.blocks * (new[1] - new[0]))

    def fill(self, x: Tensor, value: float) -> None:
        for first, stop in self.outside:
            if first < stop:
                self._view(x, self.windows[self.me][0], (first, stop)).fill_(value)

    def clear(self, x: Tensor) -> None:
        """Zero the rows of `x`, laid as my cut, that my own window does not hold."""
        (first, stop), mine = self.windows[self.me], self.cuts[self.me]
        for rows in ((mine[0], min(first, mine[1])), (max(stop, mine[0]), mine[1])):
            if rows[0] < rows[1]:
                self._view(x, mine[0], rows).zero_()

    def _view(self, x: Tensor, origin: int, rows: Rows) -> Tensor:
        """Global `rows` of each block of `x`, whose own first row is global row `origin`."""
        length = rows[1] - rows[0]
        return in_blocks(x, self.dim, self.blocks).narrow(
            self.dim + 1, rows[0] - origin if length else 0, length
        )


def _exchange(x: Tensor, *arguments: Any) -> Tensor:
    *geometry, fill = arguments
    halo, group = Halo.of(*geometry), arguments[0]
    out = halo.to_window(x)
    halo.fill(out, fill)
    halo.needed(out, halo.me).copy_(halo.owned(x, halo.me))
    sends = [(peer, halo.owned(x, peer)) for peer in halo.others]
    transport.transfer(sends, [(peer, halo.needed(out, peer)) for peer in halo.others], group)
    return out


def _exchange_shape(x: Tensor, *arguments: Any) -> Tensor:
    return Halo.of(*arguments[:-1]).to_window(x)


def _exchange_add(x: Tensor, *arguments: Any) -> Tensor:
    halo, group = Halo.of(*arguments), arguments[0]
    out = halo.to_cut(x)
    halo.clear(out)
    halo.owned(out, halo.me).copy_(halo.needed(x, halo.me))
    targets = [(peer, halo.owned(out, peer)) for peer in halo.others]
    # Several peers may send to the same row, so each lands apart before it is added.
    landed = [(peer, torch.empty_like(rows, memory_format=torch.contiguous_format)) for peer, rows in targets]
    transport.transfer([(peer, halo.needed(x, peer)) for peer in halo.others], landed, group)
    for (_, target), (_, rows) in zip(targets, landed, strict=True):
        target.add_(rows)
    return out


def _exchange_add_shape(x: Tensor, *arguments: Any) -> Tensor:
    return Halo.of(*arguments).to_cut(x)


# -- rows that a graph names ----------------------------------------------------------------------
#
#     x [4, f]    rows = (1, 3 | 0), sends = (0, 2, 1)      own rows 1 and 3 to rank 1, row 0 to rank 2
#                 receives = (0, 1, 3)                      result [4 + 1 + 3, f]: own rows, theirs by owner


def _needed_rows(
    x: Tensor, group: str, rows: Tensor, sends: Sequence[int], receives: Sequence[int]
) -> Tensor:
    out = _needed_shape(x, group, rows, sends, receives)
    own, *slots = torch.split(out, [len(x), *receives])
    own.copy_(x)
    parts = torch.split(x.index_select(0, rows), list(sends))
    transport.transfer(enumerate(parts), enumerate(slots), group)
    return out


def _needed_shape(
    x: Tensor, group: str, rows: Tensor, sends: Sequence[int], receives: Sequence[int]
) -> Tensor:
    return _resized(x, 0, len(x) + sum(receives))


def _needed_back(
    x: Tensor, group: str, rows: Tensor, sends: Sequence[int], receives: Sequence[int]
) -> Tensor:
    own, *parts = torch.split(x, [len(x) - sum(receives), *receives])
    landed = x.new_empty(len(rows), *x.shape[1:])
    transport.transfer(enumerate(parts), enumerate(torch.split(landed, list(sends))), group)
    return own.clone(memory_format=torch.contiguous_format).index_add_(0, rows, landed)


def _needed_back_shape(
    x: Tensor, group: str, rows: Tensor, sends: Sequence[int], receives: Sequence[int]
) -> Tensor:
    return _resized(x, 0, len(x) - sum(receives))


# -- registration -------------------------------------------------------------------------------

# What ends the names of moves whose gradients are summed in another dtype than their own.
SUMMED = {Precision.FP32: "_wide", Precision.BF16: "_bf16", Precision.FP16: "_fp16"}
DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
WHOLE = "(Tensor x, str group) -> Tensor"
ALIAS = "(Tensor(a) x, str group) -> Tensor(a)"
SPLIT = "(Tensor x, str group, int dim, int blocks, int[] sizes) -> Tensor"
RESPLIT = (
    "(Tensor x, str group, int dim_from, int blocks_from, int[] sizes_from,"
    " int dim_to, int blocks_to, int[] sizes_to) -> Tensor"
)
WINDOWS = "(Tensor x, str group, int dim, int blocks, int[] owned, int[] starts, int[] stops) -> Tensor"
NAMED_ROWS = "(Tensor x, str group, Tensor rows, int[] sends, int[] receives) -> Tensor"
FILLED = WINDOWS.replace(")", ", float fill)", 1)


def _move(
    name: str,
    schema: str,
    kernel: Callable[..., Tensor],
    shape: Callable[..., Tensor],
    transposed: str | Callable[..., Tensor],
    turned: Callable[[Arguments], Arguments] = lambda arguments: arguments,
    *,
    is_local: bool = False,
) -> None:
    """Register a move; `turned` gives the transposed move's arguments from this one's."""

    def setup(ctx: Any, inputs: Arguments, output: Tensor) -> None:
        ctx.arguments = inputs[1:]

    def backward(ctx: Any, gradient: Tensor) -> Arguments:
        back = _called(transposed)(gradient, *turned(ctx.arguments))
        return (back, *(None for _ in ctx.arguments))

    registry.functional(name, schema, kernel, shape=shape, setup=setup, backward=backward, is_local=is_local)


def _called(move: str | Callable[..., Tensor]) -> Callable[..., Tensor]:
    called: Callable[..., Tensor] = registry.eager(move) if isinstance(move, str) else move
    return called


def _alias(name: str, transposed: str | Callable[..., Tensor]) -> None:
    """Register a move that does nothing forward: no copy, an alias with the transposed backward."""

    class Alias(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
            ctx.group = group
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return _called(transposed)(gradient, ctx.group), None

    apply: Any = Alias.apply  # ships without types
    registry.composite(name, ALIAS, lambda x, group: apply(x, group))


def summing_in(name: str, dtype: torch.dtype | None) -> Callable[..., Tensor]:
    """The move `name`, which sums, in `dtype` if any; doubles are summed as they are."""

    def move(gradient: Tensor, *arguments: Any) -> Tensor:
        other = gradient.dtype if dtype is None or gradient.dtype is torch.float64 else dtype
        total: Tensor = registry.eager(name)(gradient.to(other), *arguments)
        return total.to(gradient.dtype)

    return move


_move("p_to_r", WHOLE, _all_reduce, _same, "r_to_b")
_move("p_to_b", WHOLE, _all_reduce, _same, "p_to_b")
_move("r_to_p", WHOLE, _keep_on_first, _same, "b_to_r", is_local=True)
_move("b_to_p", WHOLE, _keep_on_first, _same, "b_to_p", is_local=True)
_alias("r_to_b", "p_to_r")
_alias("b_to_r", "r_to_p")

_move("s_to_r", SPLIT, _all_gather, empty_full, "r_to_s")
_move("s_to_b", SPLIT, _all_gather, empty_full, "p_to_s")
_move("s_to_r_regather", SPLIT, _regather("s_to_r"), empty_full, "r_to_s")
_move("s_to_b_regather", SPLIT, _regather("s_to_b"), empty_full, "p_to_s")
for _precision, _ending in SUMMED.items():
    _summed, _scattered = (summing_in(_name, DTYPES[_precision]) for _name in ("p_to_r", "p_to_s"))
    _alias("r_to_b" + _ending, _summed)
    _move("s_to_b" + _ending, SPLIT, _all_gather, empty_full, _scattered)
    _move("s_to_b" + _ending + "_regather", SPLIT, _regather("s_to_b"), empty_full, _scattered)
_move("p_to_s", SPLIT, _reduce_scatter, _local, "s_to_b")
_move("r_to_s", SPLIT, own_slice, _sliced, "s_to_r", is_local=True)
_move("b_to_s", SPLIT, own_slice, _sliced, "s_to_p", is_local=True)
_move("s_to_p", SPLIT, _zero_pad, empty_full, "b_to_s", is_local=True)

_move("s_to_s", RESPLIT, _resplit, _resplit_shape, "s_to_s", lambda a: (a[0], *a[4:], *a[1:4]))
_move("exchange", FILLED, _exchange, _exchange_shape, "exchange_add", lambda a: a[:-1])
_move("exchange_add", WINDOWS, _exchange_add, _exchange_add_shape, "exchange", lambda a: (*a, 0.0))
_move("needed_rows", NAMED_ROWS, _needed_rows, _needed_shape, "needed_rows_add")
_move("needed_rows_add", NAMED_ROWS, _needed_back, _needed_back_shape, "needed_rows")

registry.constant("max_reduce", WHOLE, _all_reduce_max, shape=_same)
