"""A rank's memory while a step is replayed: storages that are there, gradients that wait for their sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from autopar.cost.program.tape import Weight
from autopar.runtime.parameters.gradient_buckets import Bucket, BucketMember, assign


class Heap:
    """Storages by key, each there while somebody holds it; `now` bytes, and at `most` so far."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.sizes: dict[Hashable, int] = {}
        self.holds: Counter[Hashable] = Counter()

    def hold(self, key: Hashable, nbytes: int) -> None:
        if not self.holds[key]:
            self.sizes[key] = nbytes
            self.now += nbytes
            self.most = max(self.most, self.now)
        self.holds[key] += 1

    def drop(self, key: Hashable) -> None:
        self.holds[key] -= 1
        if not self.holds[key]:
            self.now -= self.sizes[key]


class GradientSums:
    """Memory of weights' gradients while they are summed, as gradient_buckets.py and bound_program.py do it.

    A gradient that ranks sum waits for the others of its bucket, whose memory a CPU keeps all the time; a
    large one is summed where it lies, unless it is in another dtype. Sums in another dtype are there until
    all gradients have been made of them. Those of earlier micro-batches are there from the start.
    """

    def __init__(self, heap: Heap, weights: Sequence[Weight], *, adding: bool, device: str) -> None:
        """`weights` in the order of their first use, on a type of device."""
        self.heap, self.adding, self.weights, self.keeps = heap, adding, weights, device == "cpu"
        members = [
            BucketMember(place, item.name, item.key, item.dtype, item.summed_bytes, item.reduce)
            for place, item in reversed(list(enumerate(weights)))
            if item.key is not None
        ]
        self.buckets = assign(members, device)
        self.bucket = {each.name: number for number, item in enumerate(self.buckets) for each in item.members}
        self.waiting = [len(item.members) for item in self.buckets]
        self.arrived: dict[int, list[Hashable]] = {}
        self.next = 0

    def begin(self) -> None:
        for number in range(len(self.buckets) if self.keeps else 0):
            self.hold_bucket(number)
        if self.adding:
            for item in self.weights:
                self.heap.hold(("sum", item.name), item.full or item.nbytes)

    def hold_bucket(self, number: int) -> None:
        """The memory of a bucket that is put together."""
        bucket = self.buckets[number]
        if _is_copied(bucket):
            self.heap.hold(("bucket", number), sum(item.nbytes for item in bucket.members))

    def scattered(self, weight: Weight, key: Hashable) -> Hashable:
        """Put the shard's gradient in place of the full one, that of all micro-batches."""
        if self.adding:
            self.heap.hold(("new sum", weight.name), weight.full)
            self.heap.drop(("sum", weight.name))
            self.heap.drop(key)
            key = "new sum", weight.name
        self.heap.hold(("shard", weight.name), weight.nbytes)
        self.heap.drop(key)
        return "shard", weight.name

    def arrive(self, weight: Weight, key: Hashable) -> None:
        """Take over a gradient, held once."""
        number = self.bucket.get(weight.name)
        if weight.full:
            key = self.scattered(weight, key)
        elif self.adding:
            if number is None:  # added to the parameter's own
                self.heap.drop(key)
                return
            self.heap.hold(("new sum", weight.name), weight.nbytes)
            self.heap.drop(("sum", weight.name))
            self.heap.drop(key)
            key = "new sum", weight.name
        if number is None:
            return
        self.arrived.setdefault(number, []).append(key)
        self.waiting[number] -= 1
        while self.next < len(self.buckets) and not self.waiting[self.next]:
            if not self.keeps:
                self.hold_bucket(self.next)
            if _is_copied(self.buckets[self.next]):
                for each in self.arrived[self.next]:
                    self.heap.drop(each)
            self.next += 1

    def finish(self) -> None:
        """Make gradients of the sums that are in another dtype, at the end of backward."""
        summed = {each.name for bucket in self.buckets for each in bucket.members if each.reduce is not None}
        for item in self.weights:
            if item.name in summed:
                self.heap.hold(("total", item.name), item.nbytes)


def _is_copied(bucket: Bucket) -> bool:
    """Whether gradients are copied in order to be summed."""
    return len(bucket.members) > 1 or bucket.members[0].reduce is not None
