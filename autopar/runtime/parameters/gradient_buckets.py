"""Sums gradients over ranks in buckets, while backward still runs.

Buckets are assigned once, before the first backward, in the reverse order of first use, which is
about the order in which autograd delivers gradients. They are launched in that fixed order, so that
ranks agree whatever the engine does; what has not gone out when backward ends goes out then.

    backward    |-- grad 9 --|-- grad 8 --|-- grad 7 --|-- ...                      --| end
    bucket 0                              |== all-reduce of 9, 8, 7 ==|
    bucket 1                                                          |== ... ==|       wait, deliver

A parameter that gets no gradient in a backward is left out of its bucket: every rank runs the same
program, so all ranks leave out the same ones.

CPUs of one machine sum by streams of their own, which no other thread carries: while backward runs a bucket
is put together, and summed when it has ended. Stages, which wait for each other, sum at once.

Where gradients come in backward decides which of the program's own collectives a bucket follows, and
that must be alike on all ranks too. It is: autograd runs what was made last first, and gives a leaf its
gradient as soon as its last use has run, so that the order is that of the program, which ranks share.

A bucket is a copy of its gradients, side by side, in the dtype in which they are summed. A large gradient is
a bucket of its own, and summed where it lies, unless something else holds its storage too, or its dtype is
another.

    device    full at                              a gradient alone from
    CPU       25 MiB                               4 MiB: copying takes as long as sending
    GPU       25 MiB, or 1/2 MiB for each rank     as much: messages of many ranks wait long, copies are quick

A rank of a ring sends its part of a bucket, which latency rules where it is small.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.core.mesh import parse_key
from autopar.errors import InputError
from autopar.runtime.collectives import groups, transport
from autopar.runtime.parameters.parameters import plainly
from autopar.torch_seams.autograd import graph_task, queue_callback
from autopar.torch_seams.tensors import copy_all, num_uses, unflattened

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default: large enough for full bandwidth
ALONE_BYTES = 4 * 2**20  # copying so much takes a CPU longer than starting one more all-reduce
RANK_BYTES = 2**19  # a rank's part of a GPU's bucket: what NCCL's rings send at a time, 4 MiB in 8 steps


@dataclass(frozen=True, slots=True)
class BucketMember:
    """A parameter whose gradient, of `nbytes`, is summed over the ranks of `key`.

    In the dtype `reduce` if that isn't its own; `index` is the caller's."""

    index: int
    name: str
    key: str
    dtype: torch.dtype
    nbytes: int
    reduce: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Members of one key, dtype, and dtype of sums, summed together."""

    key: str
    members: tuple[BucketMember, ...]


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """Bytes at which a bucket is full, and from which a gradient is one by itself."""

    full: int
    alone: int


def bucket_sizes(device: str, ranks: int) -> BucketSizes:
    """Sizes of buckets that so many ranks sum, on a type of device."""
    if device == "cpu":
        return BucketSizes(BUCKET_BYTES, ALONE_BYTES)
    full = max(BUCKET_BYTES, ranks * RANK_BYTES)
    return BucketSizes(full, full)


def assign(
    members: Sequence[BucketMember], device: str, bucket_bytes: int | None = None
) -> tuple[Bucket, ...]:
    """Put members into buckets in launch order: large ones alone, the others together.

    Buckets have at least `bucket_bytes` if given, else what suits the type of device and the ranks (the last
    of each kind may be smaller). `members` come in the order in which their gradients are expected.
    """
    open_: dict[tuple[str, torch.dtype, torch.dtype | None], list[BucketMember]] = {}
    buckets: list[Bucket] = []
    for member in members:
        sizes = bucket_sizes(device, ranks_of(member.key))
        if member.nbytes >= sizes.alone:
            buckets.append(Bucket(member.key, (member,)))
            continue
        kind = (member.key, member.dtype, member.reduce)
        filling = open_.setdefault(kind, [])
        filling.append(member)
        if sum(item.nbytes for item in filling) >= (bucket_bytes or sizes.full):
            buckets.append(Bucket(member.key, tuple(open_.pop(kind))))
    return (*buckets, *(Bucket(key, tuple(rest)) for (key, *_), rest in open_.items()))


def ranks_of(key: str) -> int:
    """Number of ranks in a group."""
    mesh, axes = parse_key(key)
    return math.prod(mesh.shape[axis] for axis in axes)


def _new(bucket: Bucket, length: int, like: Tensor) -> Tensor:
    return like.new_empty(length, dtype=bucket.members[0].reduce)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A sum under way: what waits for it, and views of what it makes, by their members."""

    arrived: Callable[[], object]
    totals: dict[int, Tensor]
    dtype: torch.dtype | None  # of gradients that are summed in another


class Sums:
    """The sums of one round of gradients: each is added once, or in shares, each bucket launched when all
    its members have come and the buckets before it are on their way.

    `memory(bucket, length, like)` is a vector for a bucket that is put together. `later` is for who computes
    to the end without waiting: sums that this thread carries begin then.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        memory: Callable[[Bucket, int, Tensor], Tensor] = _new,
        *,
        later: bool = False,
    ) -> None:
        self._buckets, self._memory, self._later = buckets, memory, later
        self._numbers = {
            member.index: number for number, bucket in enumerate(buckets) for member in bucket.members
        }
        self.next = 0  # the bucket to be launched next
        self._arrived: list[dict[int, Tensor]] = [{} for _ in buckets]  # not launched yet
        self._shared: set[int] = set()  # buckets of one gradient, whose storage something else holds too
        self._flights: list[_Flight] = []

    def add(self, index: int, gradient: Tensor, *, fresh: bool) -> None:
        """Take over one member's local gradient; a `fresh` one comes from a hook in the backward that made
        all of it."""
        self.fill(self._numbers[index], {index: gradient}, fresh=fresh)

    def fill(self, number: int, gradients: dict[int, Tensor], *, fresh: bool) -> None:
        """Take over gradients of a bucket's members, by their indices."""
        arrived = self._arrived[number]
        for index in arrived.keys() & gradients.keys():
            # A checkpoint recomputed inside backward gives a second share.
            gradients[index] = arrived[index] + gradients[index]
        arrived.update(gradients)
        if len(self._buckets[number].members) == 1 and any(
            _is_shared(gradient, fresh=fresh) for gradient in gradients.values()
        ):
            self._shared.add(number)
        while self.next < len(self._buckets) and self._is_full(self.next):
            self._launch(self.next)
            self.next += 1

    def launch_rest(self) -> None:
        """Launch what has come, in buckets that are not full too."""
        for number in range(len(self._buckets)):
            self._launch(number)

    def totals(self) -> Iterator[dict[int, Tensor]]:
        """Wait for the sums and give those of each bucket, by their members' indices, in the order of
        launching."""
        for flight in self._flights:
            flight.arrived()
            if flight.dtype is None:
                yield flight.totals
            else:
                yield {index: total.to(flight.dtype) for index, total in flight.totals.items()}

    def _is_full(self, number: int) -> bool:
        return len(self._arrived[number]) == len(self._buckets[number].members)

    def _launch(self, number: int) -> None:
        arrived, bucket = self._arrived[number], self._buckets[number]
        members = [member for member in bucket.members if member.index in arrived]
        if not members:
            return
        self._arrived[number] = {}
        parts = [arrived[member.index] for member in members]
        for member, part in zip(members, parts, strict=True):
            if part.layout is not torch.strided:
                raise _sparse(member, part)
        alone = len(bucket.members) == 1 and members[0].reduce in (None, parts[0].dtype)
        with torch.no_grad():
            if alone and number not in self._shared and parts[0].is_contiguous():
                flat, totals = parts[0].view(-1), parts
            else:
                sizes = list(map(Tensor.numel, parts))
                flat = self._memory(bucket, sum(sizes), parts[0])
                totals = side_by_side(flat, parts, sizes)
        waiting = transport.start_sum(flat, groups.group(bucket.key), later=self._later)
        by_index = {member.index: total for member, total in zip(members, totals, strict=True)}
        dtype = None if flat.dtype is parts[0].dtype else parts[0].dtype
        self._flights.append(_Flight(waiting, by_index, dtype))


def side_by_side(flat: Tensor, parts: list[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Copy tensors of these sizes into a vector one after the other; returns where they lie in it, each in
    its shape."""
    places = unflattened(flat, parts)
    if 0 in sizes:
        places = [place.view_as(part) for place, part in zip(places, parts, strict=True)]
    copy_all(places, parts)
    return places


def _sparse(member: BucketMember, gradient: Tensor) -> InputError:
    return InputError(
        where=f"gradient of {member.name}",
        found=f"layout {gradient.layout}",
        wanted="a dense gradient",
        remedy="build the embedding with sparse=False",
    )


@dataclass(slots=True)
class _Round:
    """The gradients of one backward."""

    sums: Sums
    own: list[tuple[int, Tensor]] = field(default_factory=list)  # that no other rank has a share of


def _nothing() -> Iterable[tuple[int, dict[int, Tensor]]]:
    return ()


class GradientSync:
    """Takes local gradients and delivers their sums over ranks when backward ends.

    One comes from a hook of its own (`add`), or those of a bucket together, as its last one has come
    (`fill`); `rest()` gives what is left then, by buckets. `deliver` is called with the totals of each
    bucket, in the autograd engine's last step, on the thread that called `backward`. Whatever a collective
    raises leaves through `backward`.
    """

    def __init__(
        self,
        members: Sequence[BucketMember],
        deliver: Callable[[dict[int, Tensor]], None],
        *,
        device: str = "cpu",
        bucket_bytes: int | None = None,
        rest: Callable[[], Iterable[tuple[int, dict[int, Tensor]]]] = _nothing,
    ) -> None:
        self.buckets = assign(members, device, bucket_bytes)
        self._deliver, self._rest = deliver, rest
        self._kept: dict[int, tuple[Tensor, int]] = {}  # by the bucket's id: to hash it takes 0.1 ms
        self._rounds: dict[int, _Round] = {}  # by the engine's task: backward may run inside backward

    def add(self, index: int, gradient: Tensor) -> None:
        """Called by a hook, inside backward, with one member's local gradient."""
        self._round().sums.add(index, gradient, fresh=True)

    def fill(self, number: int, gradients: dict[int, Tensor], *, fresh: bool) -> None:
        """Called inside backward with those of a bucket, `fresh` by the hook of its last one."""
        self._round().sums.fill(number, gradients, fresh=fresh)

    def begin(self) -> None:
        """Called inside backward before any gradient comes: they are delivered as it ends."""
        self._round()

    @property
    def next(self) -> int:
        """Number of the bucket that is to be launched next in the backward that runs now."""
        return self._round().sums.next

    def keep(self, index: int, gradient: Tensor) -> None:
        """Deliver a gradient that is not summed over ranks with the others: all in a row take half as long as
        one by one between operators that fill the caches."""
        self._round().own.append((index, gradient))

    def forget(self) -> bool:
        """Drop what a backward that raised has left behind, outside of any; whether there was something."""
        raised = bool(self._rounds)
        self._rounds.clear()
        return raised

    def _round(self) -> _Round:
        task: int = graph_task()
        if task not in self._rounds:
            self._rounds[task] = _Round(Sums(self.buckets, self._memory, later=True))
            queue_callback(lambda: self._finish(task))
        return self._rounds[task]

    def _memory(self, bucket: Bucket, length: int, like: Tensor) -> Tensor:
        """The bucket's memory of the last backward if nobody holds its gradients any more, else new:
        fresh pages for 100 MB of gradients cost a CPU as much as copying them; torch keeps a GPU's."""
        if like.device.type != "cpu":
            return _new(bucket, length, like)
        kept, uses = self._kept.get(id(bucket), (None, 0))
        if kept is None or kept.shape != (length,) or kept.device != like.device or num_uses(kept) > uses:
            kept = _new(bucket, length, like)
            self._kept[id(bucket)] = kept, num_uses(kept)
        return kept.view(length)  # an alias, which counts as a use while it lives

    def _finish(self, task: int) -> None:
        current = self._rounds.pop(task)
        with plainly():
            for number, gradients in self._rest():
                current.sums.fill(number, gradients, fresh=False)
            current.sums.launch_rest()
            for index, gradient in current.own:
                self._deliver({index: gradient})
            for totals in current.sums.totals():
                self._deliver(totals)


def _is_shared(gradient: Tensor, *, fresh: bool) -> bool:
    """Whether something else holds the storage of a gradient that its leaf has let go of."""
    return num_uses(gradient) > (_uses_of_fresh() if fresh else _uses_at_rest())


@functools.cache
@torch.enable_grad()
def _uses_of_fresh() -> int:
    """`num_uses` of a gradient that nothing else holds, as a hook on a leaf sees it after the first backward:
    the engine itself may hold it for as long as its hooks run. What is added later it lets go of before."""
    seen: list[int] = []
    leaf = torch.zeros(1, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(num_uses(leaf.grad)))
    (2 * leaf).backward()
    return seen[0]


@functools.cache
def _uses_at_rest() -> int:
    """`num_uses` of a tensor that nothing else holds."""
    return num_uses(torch.zeros(1))
