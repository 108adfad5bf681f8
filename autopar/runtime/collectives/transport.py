"""Tensors between the ranks of a group, by the fastest way of each backend.

On GPUs these are the library's collectives. On CPUs of one machine tensors travel by its ranks' own
`wires`, which took half of gloo's time at every size from 64 bytes to 64 MB (two processes); between
machines by gloo, of which only the all-reduce and the all-to-all are used: gathering two shards of 40 MB
took 28 ms by sends against 82 ms by gloo's own all-gather, and a reduce-scatter of 40 MB 20 ms by
all-to-all and a local sum against 49 ms. All take uneven sizes, which gloo's all-gather refuses.

Of small tensors messages count, not bytes, so a group of few ranks meets at its first one, and two ranks
just swap, in half the time:

    rank 1 --+        +--> rank 1        2 (P - 1) messages        rank 0 <--> rank 1
    rank 2 --+--> 0 --+--> rank 2
    rank 3 --+        +--> rank 3

By wires an all-reduce is an all-to-all, a local sum of one part by each rank, and a gathering of the sums:
64 kB over four ranks on two cores took 1.4 ms against gloo's 6. A larger tensor goes in pieces, one after the
other, which stay in the caches: of 64 MB over two ranks gloo took 38 ms, pieces 13, the tensor at once 57.

A *slot* is a view of a result into which a part is received; it need not be contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from autopar.runtime.collectives import groups
from autopar.runtime.collectives.local_sockets import SocketTransfer, bytes_of
from autopar.runtime.collectives.own_sums import chosen, start_own_sum
from autopar.runtime.launch.flight_record import note_exchange
from autopar.torch_seams.collectives import all_gather_single, reduce_scatter_single

SMALL_BYTES = 16 << 10  # of a result whose parts meet at one rank
FEW_RANKS = 8
PART_BYTES = 256 << 10  # of a piece that is summed by wires, for each rank to reduce
_REDUCED: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda parts: parts.sum(0, dtype=parts.dtype),
    dist.ReduceOp.MAX: lambda parts: parts.amax(0),
}
_REDUCED_PAIR: dict[Any, Any] = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}


@dataclass(frozen=True, slots=True)
class Transfer:
    """Tensors under way; what is sent must not change, and no slot be read, before `wait` returns."""

    works: Sequence[dist.Work | SocketTransfer]
    landing: list[tuple[Tensor, Tensor]]  # each slot with the buffer that is received into
    sent: list[Tensor]  # kept until they have left

    def wait(self) -> None:
        """Return when everything has left and every slot is filled."""
        for work in self.works:
            work.wait()
        for slot, buffer in self.landing:
            if buffer is not slot:
                slot.copy_(buffer)


def start(
    sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]], group: str
) -> Transfer:
    """Begin to send tensors to peers and to receive into slots; peers are places in the group.

    What one rank sends the other must receive, in the same order for each pair of ranks. Empty
    tensors do not travel, and without tensors nothing is called.
    """
    slots = [(peer, slot, _contiguous_like(slot)) for peer, slot in receives if slot.numel()]
    parts = [(peer, part.contiguous()) for peer, part in sends if part.numel()]
    works = _begin(parts, [(peer, buffer) for peer, _, buffer in slots], groups.group(group))
    return Transfer(works, [(slot, buffer) for _, slot, buffer in slots], [part for _, part in parts])


def _begin(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], group: ProcessGroup
) -> Sequence[dist.Work | SocketTransfer]:
    """Send and receive contiguous tensors, none of them empty."""
    if sends or receives:
        note_exchange(sum(tensor.nbytes for _, tensor in (*sends, *receives)))
    wires = groups.wires(group)
    if wires is not None and all(tensor.is_cpu for _, tensor in (*sends, *receives)):
        return [wires.start(sends, receives)]
    operations = [dist.P2POp(dist.isend, part, group=group, group_peer=peer) for peer, part in sends] + [
        dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer) for peer, buffer in receives
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def transfer(sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]], group: str) -> None:
    """Start a transfer and wait for its end."""
    start(sends, receives, group).wait()


def all_reduce(x: Tensor, group: ProcessGroup, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce the contiguous `x` over the ranks in place; all get the same bits."""
    size = group.size()
    if not x.numel():  # the same on all: another axis left these ranks without rows
        return
    if op not in _REDUCED or x.is_complex():
        note_exchange(x.nbytes)
        dist.all_reduce(x, op, group=group)
    elif size == 2 and x.is_cpu and x.nbytes <= (PART_BYTES if groups.wires(group) else SMALL_BYTES):
        theirs = torch.empty_like(x)
        _swap(x, theirs, group)
        _REDUCED_PAIR[op](x, theirs, out=x)
    elif _can_meet(x, size):

        def reduce(parts: Sequence[Tensor]) -> None:
            x.copy_(_REDUCED[op](torch.stack(list(parts))))

        _meet(x, [torch.empty_like(x) for _ in range(size)], x, reduce, group)
    elif x.is_cpu and groups.wires(group):
        for piece in x.view(-1).tensor_split(-(-x.nbytes // (size * PART_BYTES))):
            _reduce_by_parts(piece, group, op)
    else:
        note_exchange(x.nbytes)
        _start_sum(x, group, op)()


def start_all_reduce(x: Tensor, group: ProcessGroup) -> Callable[[], object]:
    """Begin `all_reduce`; what is returned waits until it has ended, as it has where the ranks' own streams
    or a first rank carry it. What travels is the same, so one rank may start what another awaits."""
    small = _can_meet(x, group.size())
    wired = x.is_cpu and groups.wires(group) is not None
    if not x.numel() or x.is_complex() or small or wired:
        all_reduce(x, group)
        return lambda: None
    note_exchange(x.nbytes)
    return _start_sum(x, group)


def start_sum(x: Tensor, group: ProcessGroup, *, later: bool) -> Callable[[], object]:
    """Begin to sum gradients as `all_reduce` does; the sum is there once what is returned has been called.

    The ranks' own streams end an exchange before they return, and so each waits for the slowest rank: `later`
    has them begin only when the sum is waited for.
    """
    if not x.is_cpu or x.is_complex() or not groups.wires(group):
        note_exchange(x.nbytes)
        return _start_sum(x, group)
    if later:
        return partial(all_reduce, x, group)
    all_reduce(x, group)
    return lambda: None


def _start_sum(x: Tensor, group: ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Callable[[], object]:
    """Begin a reduction by the library, or by steps of our own where these are chosen; returns its wait."""
    steps = chosen(x, group) if op == dist.ReduceOp.SUM and x.is_contiguous() else None
    if steps is not None:
        return start_own_sum(x, steps, group).result
    work: Any = dist.all_reduce(x, op, group=group, async_op=True)
    return work.wait  # type: ignore[no-any-return]


def _reduce_by_parts(x: Tensor, group: ProcessGroup, op: Any) -> None:
    """Rank k reduces part k of the flat `x` and sends it to all; no part is empty."""
    me, parts = group.rank(), x.tensor_split(group.size())
    mine, peers = parts[me], [peer for peer in range(group.size()) if peer != me]
    landed = mine.new_empty(1 if len(peers) == 1 else group.size(), len(mine))
    slots = [(peer, landed[peer % len(landed)]) for peer in peers]
    _exchange([(peer, parts[peer]) for peer in peers], slots, group)
    if len(peers) == 1:
        _REDUCED_PAIR[op](mine, landed[0], out=mine)
    else:
        landed[me] = mine
        mine.copy_(_REDUCED[op](landed))
    _exchange([(peer, mine) for peer in peers], [(peer, parts[peer]) for peer in peers], group)


def _can_meet(result: Tensor, size: int) -> bool:
    return result.is_cpu and result.nbytes <= SMALL_BYTES and size <= FEW_RANKS


def _meet(
    mine: Tensor,
    parts: Sequence[Tensor],
    result: Tensor,
    make: Callable[[Sequence[Tensor]], None],
    group: ProcessGroup,
) -> None:
    """Make the result of everybody's parts on the first rank, and send it to all.

    `make` makes the contiguous `result` of everybody's `mine`. `parts` are where everybody's land.
    """
    me, peers = group.rank(), range(1, group.size())
    if me == 0:
        _exchange([], [(peer, parts[peer]) for peer in peers], group)
        make([mine, *parts[1:]])
        _exchange([(peer, result) for peer in peers], [], group)
    else:
        _exchange([(0, mine)], [(0, result)], group)


def _swap(mine: Tensor, theirs: Tensor, group: ProcessGroup) -> None:
    """Send a contiguous tensor to the only other rank, and receive its own."""
    peer, wires = 1 - group.rank(), groups.wires(group)
    if wires is None or not mine.is_cpu:
        _exchange([(peer, mine)], [(peer, theirs)], group)
        return
    note_exchange(mine.nbytes + theirs.nbytes)
    wires.swap(peer, bytes_of(mine), bytes_of(theirs))


def _exchange(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], group: ProcessGroup
) -> None:
    for work in _begin(sends, receives, group):
        work.wait()


def all_gather(out: Tensor, slots: Sequence[Tensor], mine: Tensor, group: str) -> None:
    """Bring every rank's `mine` into its slot; the slots make up the contiguous `out`."""
    me = groups.index(group)
    if mine.is_cpu and len(slots) == 2 and slots[0].numel() and slots[1].numel():
        _swap(mine.contiguous(), landed := _contiguous_like(slots[1 - me]), groups.group(group))
        if landed is not slots[1 - me]:
            slots[1 - me].copy_(landed)
        slots[me].copy_(mine)
        return
    peers = [peer for peer in range(len(slots)) if peer != me]
    if _can_meet(out, len(slots)) and all(slot.numel() for slot in slots):

        def fill(parts: Sequence[Tensor]) -> None:
            for slot, part in zip(slots, parts, strict=True):
                slot.copy_(part)

        landing = [torch.empty_like(slot, memory_format=torch.contiguous_format) for slot in slots]
        _meet(mine.contiguous(), landing, out, fill, groups.group(group))
        return
    if mine.is_cpu:
        transfer([(peer, mine) for peer in peers], [(peer, slots[peer]) for peer in peers], group)
        slots[me].copy_(mine)
        return
    note_exchange(out.nbytes)
    in_place = all(slot.is_contiguous() for slot in slots)
    buffers: Sequence[Tensor]
    if all(slot.shape == mine.shape for slot in slots):
        flat = out.view(-1) if in_place else torch.empty_like(out).view(-1)
        all_gather_single(flat, mine.contiguous().view(-1), group=groups.group(group))
        buffers = flat.view(len(slots), *mine.shape).unbind()
    else:
        buffers = [_contiguous_like(slot) for slot in slots]
        dist.all_gather(list(buffers), mine.contiguous(), group=groups.group(group))
    for slot, buffer in zip(slots, buffers, strict=True):
        if not slot.is_contiguous():
            slot.copy_(buffer)


def reduce_scatter(x: Tensor, parts: Sequence[Tensor], group: str) -> Tensor:
    """The sum over ranks of this rank's part; the parts make up the contiguous `x`."""
    mine = parts[groups.index(group)]
    if mine.is_cpu:
        received = _all_to_all(x, parts, [mine.numel()] * len(parts), group)
        return received.view(len(parts), *mine.shape).sum(0, dtype=x.dtype)
    note_exchange(x.nbytes)
    out = torch.empty_like(mine, memory_format=torch.contiguous_format)
    if all(part.shape == mine.shape for part in parts):
        reduce_scatter_single(out.view(-1), _packed(x, parts), group=groups.group(group))
    else:
        dist.reduce_scatter(out, [part.contiguous() for part in parts], group=groups.group(group))
    return out


def start_all_gather(out: Tensor, slots: Sequence[Tensor], mine: Tensor, group: str) -> Callable[[], object]:
    """Begin `all_gather`; what is returned waits until it has ended.

    Streams of one machine carry one exchange after the other, so there it has ended already, as it has where
    small tensors meet at one rank.
    """
    me, wired = groups.index(group), groups.wires(groups.group(group)) is not None
    even = all(slot.shape == mine.shape and slot.is_contiguous() for slot in slots)
    small = _can_meet(out, len(slots)) and all(slot.numel() for slot in slots)
    if wired or small or (not mine.is_cpu and not even):
        all_gather(out, slots, mine, group)
        return lambda: None
    if mine.is_cpu:
        peers = [peer for peer in range(len(slots)) if peer != me]
        moving = start([(peer, mine) for peer in peers], [(peer, slots[peer]) for peer in peers], group)
        slots[me].copy_(mine)
        return moving.wait
    note_exchange(out.nbytes)
    source = mine.contiguous().view(-1)
    work: Any = all_gather_single(out.view(-1), source, group=groups.group(group), async_op=True)
    return work.wait  # type: ignore[no-any-return]


def start_reduce_scatter(x: Tensor, parts: Sequence[Tensor], group: str) -> Callable[[], Tensor]:
    """Begin `reduce_scatter`; what is returned waits for it and gives its result."""
    mine, process_group = parts[groups.index(group)], groups.group(group)
    even = all(part.shape == mine.shape for part in parts)
    if groups.wires(process_group) is not None or (not mine.is_cpu and not even):
        total = reduce_scatter(x, parts, group)
        return lambda: total
    note_exchange(x.nbytes)
    packed = _packed(x, parts)
    if mine.is_cpu:
        received = x.new_empty(len(parts) * mine.numel())
        work: Any = dist.all_to_all_single(
            received.view(torch.uint8),
            packed.view(torch.uint8),
            [mine.nbytes] * len(parts),
            [part.nbytes for part in parts],
            group=process_group,
            async_op=True,
        )

        def add_up() -> Tensor:
            work.wait()
            return received.view(len(parts), *mine.shape).sum(0, dtype=x.dtype)

        return add_up
    out = torch.empty_like(mine, memory_format=torch.contiguous_format)
    scattering: Any = reduce_scatter_single(out.view(-1), packed, group=process_group, async_op=True)

    def arrived() -> Tensor:
        scattering.wait()
        return out

    return arrived


def all_to_all(
    x: Tensor, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: str
) -> list[Tensor]:
    """Send part k of the contiguous `x` to rank k; returns rank k's part for us, of shape k."""
    sizes = [math.prod(shape) for shape in shapes]
    pieces = torch.split(_all_to_all(x, parts, sizes, group), sizes)
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def all_to_all_rows(x: Tensor, sends: Sequence[int], receives: Sequence[int], group: str) -> Tensor:
    """Send runs of rows of the contiguous `x`, `sends[k]` of them to rank k; returns those of all ranks for
    this one, `receives[k]` of rank k."""
    width = math.prod(x.shape[1:])
    flat = _all_to_all(x, torch.split(x, list(sends)), [rows * width for rows in receives], group)
    return flat.view(sum(receives), *x.shape[1:])


def _all_to_all(x: Tensor, parts: Sequence[Tensor], sizes: Sequence[int], group: str) -> Tensor:
    """Data of the other ranks for this one, flat; `sizes` in elements."""
    received, process_group = x.new_empty(sum(sizes)), groups.group(group)
    if x.is_cpu and groups.wires(process_group):
        slots, me = torch.split(received, list(sizes)), groups.index(group)
        peers = [peer for peer in range(len(parts)) if peer != me]
        transfer([(peer, parts[peer]) for peer in peers], [(peer, slots[peer]) for peer in peers], group)
        slots[me].view(parts[me].shape).copy_(parts[me])
        return received
    note_exchange(x.nbytes)
    dist.all_to_all_single(  # as bytes, so that every dtype can travel on every backend
        received.view(torch.uint8),
        _packed(x, parts).view(torch.uint8),
        [size * x.itemsize for size in sizes],
        [part.numel() * x.itemsize for part in parts],
        group=process_group,
    )
    return received


def _packed(x: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The parts of the contiguous `x` one after the other, flat; without a copy if they lie so."""
    if all(part.is_contiguous() for part in parts):
        return x.view(-1)
    return torch.cat([part.reshape(-1) for part in parts])


def _contiguous_like(slot: Tensor) -> Tensor:
    return slot if slot.is_contiguous() else torch.empty_like(slot, memory_format=torch.contiguous_format)
