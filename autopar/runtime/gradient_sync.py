"""Sums gradients over ranks in buckets, while backward still runs.

Buckets are assigned once, before the first backward, in the reverse order of first use, which is
about the order in which autograd delivers gradients. They are launched in that fixed order, so that
ranks agree whatever the engine does; what has not gone out when backward ends goes out then.

    backward    |-- grad 9 --|-- grad 8 --|-- grad 7 --|-- ...                      --| end
    bucket 0                              |== all-reduce of 9, 8, 7 ==|
    bucket 1                                                          |== ... ==|       wait, deliver

A parameter that gets no gradient in a backward is left out of its bucket: every rank runs the same
program, so all ranks leave out the same ones.

A bucket is a copy of its gradients, side by side. A large gradient is a bucket of its own, and one
gradient alone is summed where it lies, unless something else holds its storage too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import InputError
from autopar.runtime import groups

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default: large enough for full bandwidth
ALONE_BYTES = 4 * 2**20  # copying so much takes a CPU longer than starting one more all-reduce


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter whose gradient is summed over the ranks of `key`; `index` is the caller's."""

    index: int
    name: str
    key: str
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Members of one key and dtype, summed together."""

    key: str
    members: tuple[Member, ...]


def assign(members: Sequence[Member], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Buckets in launch order: large members alone, the others together in buckets of at least
    `bucket_bytes` (the last of each kind may be smaller).

    `members` come in the order in which their gradients are expected.
    """
    open_: dict[tuple[str, torch.dtype], list[Member]] = {}
    buckets: list[Bucket] = []
    for member in members:
        if member.nbytes >= ALONE_BYTES:
            buckets.append(Bucket(member.key, (member,)))
            continue
        kind = (member.key, member.dtype)
        filling = open_.setdefault(kind, [])
        filling.append(member)
        if sum(item.nbytes for item in filling) >= bucket_bytes:
            buckets.append(Bucket(member.key, tuple(open_.pop(kind))))
    return (*buckets, *(Bucket(key, tuple(rest)) for (key, _), rest in open_.items()))


@dataclass(slots=True)
class _Round:
    """The gradients of one backward."""

    waiting: list[int]  # for each bucket, how many of its members have yet to come
    next: int = 0  # the bucket to be launched next
    arrived: dict[int, Tensor] = field(default_factory=dict)  # not launched yet
    shared: set[int] = field(default_factory=set)  # those whose storage something else holds too
    flights: list[tuple[tuple[Member, ...], Tensor, list[torch.Size], Any]] = field(default_factory=list)
    own: list[tuple[int, Tensor]] = field(default_factory=list)  # that no other rank has a share of


class GradientSync:
    """Takes local gradients from hooks and delivers their sums over ranks when backward ends.

    `deliver(index, total)` is called once for each gradient, in the autograd engine's last step, on
    the thread that called `backward`. Whatever a collective raises leaves through `backward`.
    """

    def __init__(
        self,
        members: Sequence[Member],
        deliver: Callable[[int, Tensor], None],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.buckets = assign(members, bucket_bytes)
        self._deliver = deliver
        self._place = {
            member.index: (number, member)
            for number, bucket in enumerate(self.buckets)
            for member in bucket.members
        }
        self._own_uses = _uses_of_own_gradient()
        self._kept: dict[Bucket, tuple[Tensor, int]] = {}
        self._rounds: dict[int, _Round] = {}  # by the engine's task: backward may run inside backward

    def add(self, index: int, gradient: Tensor) -> None:
        """Called by a hook, inside backward, with one member's local gradient."""
        number, member = self._place[index]
        if gradient.layout != torch.strided:
            raise InputError(
                where=f"gradient of {member.name}",
                found=f"layout {gradient.layout}",
                wanted="a dense gradient",
                remedy="build the embedding with sparse=False",
            )
        current = self._round()
        if index in current.arrived:  # a checkpoint recomputed inside backward gives a second share
            current.arrived[index] = current.arrived[index] + gradient
            return
        current.arrived[index] = gradient
        if _uses(gradient) > self._own_uses:
            current.shared.add(index)
        current.waiting[number] -= 1
        while current.next < len(self.buckets) and current.waiting[current.next] == 0:
            self._launch(current, self.buckets[current.next])
            current.next += 1

    def keep(self, index: int, gradient: Tensor) -> None:
        """Deliver a gradient that is not summed over ranks with the others: all in a row take half as long as
        one by one between operators that fill the caches."""
        self._round().own.append((index, gradient))

    def forget(self) -> None:
        """Drop what a backward that raised has left behind; called outside backward."""
        self._rounds.clear()

    def _round(self) -> _Round:
        task: int = torch._C._current_graph_task_id()
        if task not in self._rounds:
            self._rounds[task] = _Round([len(bucket.members) for bucket in self.buckets])
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._finish(task))
        return self._rounds[task]

    def _launch(self, current: _Round, bucket: Bucket) -> None:
        members = tuple(member for member in bucket.members if member.index in current.arrived)
        if not members:
            return
        parts = [current.arrived.pop(member.index) for member in members]
        copied = len(parts) > 1 or members[0].index in current.shared or not parts[0].is_contiguous()
        with torch.no_grad():
            if copied:
                flat = self._memory(bucket, sum(part.numel() for part in parts), parts[0])
                torch.cat([part.reshape(-1) for part in parts], out=flat)
            else:
                flat = parts[0].view(-1)
        work = dist.all_reduce(flat, group=groups.group(bucket.key), async_op=True)
        current.flights.append((members, flat, [part.shape for part in parts], work))

    def _memory(self, bucket: Bucket, length: int, like: Tensor) -> Tensor:
        """The bucket's memory of the last backward if nobody holds its gradients any more, else new:
        fresh pages for 100 MB of gradients cost a CPU as much as copying them."""
        kept, uses = self._kept.get(bucket, (None, 0))
        if kept is None or kept.shape != (length,) or kept.device != like.device or _uses(kept) > uses:
            kept = torch.empty(length, dtype=like.dtype, device=like.device)
            self._kept[bucket] = kept, _uses(kept)
        return kept.view(length)  # an alias, which counts as a use while it lives

    def _finish(self, task: int) -> None:
        current = self._rounds.pop(task)
        for bucket in self.buckets:
            self._launch(current, bucket)
        for index, gradient in current.own:
            self._deliver(index, gradient)
        for members, flat, shapes, work in current.flights:
            work.wait()
            totals = torch.split(flat, [shape.numel() for shape in shapes])
            for member, total, shape in zip(members, totals, shapes, strict=True):
                self._deliver(member.index, total.view(shape))


@functools.cache
@torch.enable_grad()
def _uses_of_own_gradient() -> int:
    """`_uses` of a gradient that nothing else holds, as a hook on a leaf sees it: the engine itself
    may hold it for as long as its hooks run."""
    seen: list[int] = []
    leaf = torch.zeros(1, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(_uses(leaf.grad)))
    (2 * leaf).backward()
    return seen[0]


def _uses(tensor: Tensor) -> int:
    """How many tensors and handles hold the tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
