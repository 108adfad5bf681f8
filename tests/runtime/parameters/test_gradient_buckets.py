"""Buckets: assigned once, launched in order, each gradient delivered once for all its shares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.core.mesh import Mesh
from autopar.runtime.collectives import groups
from autopar.runtime.parameters.gradient_buckets import (
    ALONE_BYTES,
    BUCKET_BYTES,
    Bucket,
    BucketMember,
    GradientSync,
    Sums,
    assign,
    side_by_side,
)
from tests.pool import Pool
from tests.runtime.collectives.cases import TIMEOUT

Pools = Callable[[int], Pool]


def member(index: int, key: str = "a@2", dtype: torch.dtype = torch.float32, nbytes: int = 8) -> BucketMember:
    return BucketMember(index, f"p{index}", key, dtype, nbytes)


def test_buckets_fill_in_order_and_hold_one_key_and_dtype() -> None:
    members = [member(0), member(1, "b@2x2"), member(2), member(3, dtype=torch.float64), member(4)]
    found = [[item.index for item in bucket.members] for bucket in assign(members, "cpu", 16)]
    assert found == [[0, 2], [1], [3], [4]]


def test_large_members_go_alone_in_their_turn() -> None:
    members = [member(0), member(1, nbytes=ALONE_BYTES), member(2), member(3)]
    found = [[item.index for item in bucket.members] for bucket in assign(members, "cpu", 24)]
    assert found == [[1], [0, 2, 3]]


@pytest.mark.parametrize(
    "key, full",
    [
        ("a@8", BUCKET_BYTES),
        ("b@32x8", BUCKET_BYTES),
        ("a@64x4", 64 * 2**19),
        ("ab@32x8", 256 * 2**19),
    ],
)
def test_a_gpu_sums_in_messages_that_latency_does_not_rule(key: str, full: int) -> None:
    """Half a MiB or more for each rank, and no gradient alone that is smaller than a bucket."""
    quarters = [member(index, key, nbytes=full // 4) for index in range(6)]
    members = [*quarters[:3], member(6, key, nbytes=full), *quarters[3:]]
    found = [[item.index for item in bucket.members] for bucket in assign(members, "cuda")]
    assert found == [[6], [0, 1, 2, 3], [4, 5]]


def _shares(order: list[int], parts: int) -> list[int]:
    """Weights whose gradients come in any order, and in several parts; returns the order of delivery."""
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    rank = dist.get_rank()
    totals: dict[int, Tensor] = {}

    def deliver(sums: dict[int, Tensor]) -> None:
        for index, total in sums.items():
            totals[index] = totals[index] + total if index in totals else total.clone()

    sync = GradientSync([member(index) for index in range(4)], deliver, bucket_bytes=16)
    root = torch.ones(1, requires_grad=True)

    def feed(gradient: Tensor) -> None:
        for _ in range(parts):
            for index in order:
                sync.add(index, torch.full((2,), float(10 * rank + index)))

    root.register_hook(feed)
    for _ in range(2):
        totals.clear()
        (root * 2).sum().backward()
        for index in order:
            assert torch.equal(totals[index], torch.full((2,), parts * (10.0 + 2 * index)))
    return sorted(totals)


def test_every_share_is_summed_once_in_any_order(pools: Pools) -> None:
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0], [1]):
        for parts in (1, 2):
            assert pools(2).run(_shares, order, parts) == [sorted(order)] * 2


def _storage_of_its_own() -> None:
    """Two matrices of one bucket each; one's gradient is a view of the tensor that backward starts from."""
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    leaves = [torch.zeros(2, 3, requires_grad=True) for _ in range(2)]
    local: dict[int, int] = {}
    totals: dict[int, Tensor] = {}
    sync = GradientSync([member(0), member(1)], totals.update, bucket_bytes=1)

    def receive(index: int, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        local[index] = gradient.data_ptr()
        sync.add(index, gradient)

    for index, leaf in enumerate(leaves):
        leaf.register_post_accumulate_grad_hook(lambda leaf, index=index: receive(index, leaf))
    start = torch.full((6,), 1.0 + dist.get_rank())
    (leaves[0].reshape(6) + 2 * leaves[1].reshape(6)).backward(start)
    assert torch.equal(start, torch.full((6,), 1.0 + dist.get_rank()))
    assert torch.equal(totals[0], torch.full((2, 3), 3.0))
    assert torch.equal(totals[1], torch.full((2, 3), 6.0))
    assert [totals[index].data_ptr() == local[index] for index in range(2)] == [False, True]


def test_a_gradient_alone_is_summed_in_place_unless_its_storage_is_shared(pools: Pools) -> None:
    pools(2).run(_storage_of_its_own)


def _at_rest() -> None:
    """Two that have added up: a view of what something else holds, and one that nothing else holds."""
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    held = torch.full((6,), 1.0 + dist.get_rank())
    for gradient, in_place in ((held.view(2, 3), False), (held.view(2, 3).clone(), True)):
        sums, place = Sums(assign([member(0)], "cpu", 1)), gradient.data_ptr()
        sums.add(0, gradient, fresh=False)
        (totals,) = sums.totals()
        ((index, total),) = totals.items()
        assert index == 0 and torch.equal(total, torch.full((2, 3), 3.0))
        assert (total.data_ptr() == place) == in_place
    assert torch.equal(held, torch.full((6,), 1.0 + dist.get_rank()))


def test_a_gradient_at_rest_is_summed_in_place_unless_its_storage_is_shared(pools: Pools) -> None:
    pools(2).run(_at_rest)


def _in_turn() -> list[int]:
    """How many of three buckets have started with each member; the second is filled too late."""
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    sums = Sums(assign([member(index) for index in range(5)], "cpu", 16))  # 0 and 1, 2 and 3, 4
    started: list[int] = []
    for index in (4, 0, 2, 1):
        sums.add(index, torch.full((2,), float(index)), fresh=False)
        started.append(len(sums._flights))
    sums.launch_rest()
    sums.add(3, torch.full((2,), 3.0), fresh=False)  # comes late, and goes out by itself
    sums.launch_rest()
    assert [{index: total[0].item() for index, total in each.items()} for each in sums.totals()] == [
        {0: 0.0, 1: 2.0}, {2: 4.0}, {4: 8.0}, {3: 6.0}
    ]  # fmt: skip
    return started


def test_a_bucket_waits_for_those_before_it_and_the_rest_goes_out_when_told(pools: Pools) -> None:
    assert pools(2).run(_in_turn) == [[0, 0, 0, 1]] * 2


def _asked_for() -> list[int]:
    """Two buckets, of three gradients and of one that is copied; and how many numbers their memory has."""
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    asked: list[int] = []

    def memory(_: Bucket, count: int, like: Tensor) -> Tensor:
        asked.append(count)
        return torch.full((count,), torch.nan, dtype=like.dtype)

    sums = Sums(
        assign([member(0, nbytes=8), member(1, nbytes=24), member(2, nbytes=12), member(3)], "cpu", 44),
        memory,
    )
    for index, count in enumerate((2, 6, 3)):
        sums.add(index, torch.full((count,), float(index)), fresh=False)
    sums.add(3, torch.full((2, 2), 3.0).t()[:, :1], fresh=False)  # a view, which is not contiguous
    assert [{index: total.flatten().tolist() for index, total in each.items()} for each in sums.totals()] == [
        {0: [0.0] * 2, 1: [2.0] * 6, 2: [4.0] * 3}, {3: [6.0] * 2}
    ]  # fmt: skip
    return asked


def test_a_bucket_takes_memory_for_all_its_numbers(pools: Pools) -> None:
    assert pools(2).run(_asked_for) == [[2 + 6 + 3, 2]] * 2


def test_tensors_that_lie_side_by_side_keep_their_shapes() -> None:
    """Also what has no elements, a number, and a view that isn't contiguous."""
    parts = [torch.randn(2, 3), torch.empty(0, 5), torch.tensor(7.0), torch.randn(2, 2).t()]
    flat = torch.empty(11)
    places = side_by_side(flat, parts, [6, 0, 1, 4])
    assert all(map(torch.equal, places, parts))
    assert torch.equal(flat, torch.cat([part.reshape(-1) for part in parts]))
    flat.fill_(1.0)
    assert all(torch.equal(place, torch.ones_like(place)) for place in places)
