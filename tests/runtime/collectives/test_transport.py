"""Tensors small and large between ranks: the same result by every way, the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.core.mesh import Mesh
from autopar.runtime.collectives import groups, transport
from tests.pool import Pool

SIZES = (1, 129, 2 * transport.SMALL_BYTES)  # elements: the last do not meet at one rank
PIECES = 3 * transport.PART_BYTES // 4 + 1  # which two or three ranks sum in two pieces
NONE = 0  # of a rank that another axis left without rows


@contextmanager
def _group(ranks: int, streams: bool) -> Iterator[str]:
    """The key of the group of all ranks, within which they do without their streams if asked to."""
    mesh = Mesh((ranks,))
    key = mesh.key((0,))
    groups.setup(mesh, [key], timeout=timedelta(seconds=60))
    group = groups.group(key)
    before = groups._wires[group]
    groups._wires[group] = before if streams else None
    try:
        yield key
    finally:
        groups._wires[group] = before


def _part(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def _reduced(ranks: int, size: int, largest: bool, streams: bool) -> Tensor:
    mine = _part(dist.get_rank(), size)
    operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    with _group(ranks, streams) as key:
        transport.all_reduce(mine, groups.group(key), operation)
    return mine


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("size", [NONE, *SIZES, PIECES])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_get_the_same_bits(
    ranks: int, size: int, largest: bool, streams: bool, pools: Callable[[int], Pool]
) -> None:
    found = pools(ranks).run(_reduced, ranks, size, largest, streams)
    parts = torch.stack([_part(rank, size) for rank in range(ranks)])
    torch.testing.assert_close(found[0], parts.amax(0) if largest else parts.sum(0))
    assert all(torch.equal(each, found[0]) for each in found)


def _gathered(ranks: int, size: int, streams: bool) -> Tensor:
    sizes = [size + rank for rank in range(ranks)]
    out = torch.empty(3, sum(sizes))  # whose slots are not contiguous
    mine = _part(dist.get_rank(), 3 * sizes[dist.get_rank()]).view(3, -1)
    with _group(ranks, streams) as key:
        transport.all_gather(out, torch.split(out, sizes, 1), mine, key)
    return out


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_parts_are_gathered_in_their_order(
    ranks: int, size: int, streams: bool, pools: Callable[[int], Pool]
) -> None:
    wanted = torch.cat([_part(rank, 3 * (size + rank)).view(3, -1) for rank in range(ranks)], 1)
    for found in pools(ranks).run(_gathered, ranks, size, streams):
        assert torch.equal(found, wanted)


def _exchanged(ranks: int, streams: bool) -> list[Tensor]:
    """Everybody's [rank, k] rows for us, of which rank k takes k + 1."""
    me = dist.get_rank()
    x = torch.arange(float(sum(range(ranks + 1)))) + 100 * me
    parts = torch.split(x, [1 + peer for peer in range(ranks)])
    with _group(ranks, streams) as key:
        return transport.all_to_all(x, parts, [(1 + me,)] * ranks, key)


@pytest.mark.parametrize("streams", [True, False])
def test_all_give_to_all(streams: bool, pools: Callable[[int], Pool]) -> None:
    for rank, found in enumerate(pools(3).run(_exchanged, 3, streams)):
        first = torch.arange(float(sum(range(rank + 1))), float(sum(range(rank + 2))))
        assert all(torch.equal(part, first + 100 * peer) for peer, part in enumerate(found))


def _summed_parts(ranks: int, streams: bool) -> Tensor:
    x = _part(dist.get_rank(), 4 * ranks).view(ranks, 4)
    with _group(ranks, streams) as key:
        return transport.reduce_scatter(x, x.unbind(), key)


@pytest.mark.parametrize("streams", [True, False])
def test_each_rank_gets_the_sum_of_its_part(streams: bool, pools: Callable[[int], Pool]) -> None:
    total = torch.stack([_part(rank, 12).view(3, 4) for rank in range(3)]).sum(0)
    for rank, found in enumerate(pools(3).run(_summed_parts, 3, streams)):
        torch.testing.assert_close(found, total[rank])
