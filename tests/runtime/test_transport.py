"""Tensors small and large between ranks: the same result by every way, the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.core.mesh import Mesh
from autopar.runtime import groups, transport
from tests.pool import Pool

SIZES = (1, 129, 2 * transport.SMALL_BYTES)  # elements: the last travels by the library's collectives


def _part(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def _reduced(ranks: int, size: int, largest: bool) -> Tensor:
    mesh = Mesh((ranks,))
    groups.setup(mesh, [mesh.key((0,))], timeout=timedelta(seconds=60))
    mine = _part(dist.get_rank(), size)
    operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    transport.all_reduce(mine, groups.group(mesh.key((0,))), operation)
    return mine


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_get_the_same_bits(
    ranks: int, size: int, largest: bool, pools: Callable[[int], Pool]
) -> None:
    found = pools(ranks).run(_reduced, ranks, size, largest)
    parts = torch.stack([_part(rank, size) for rank in range(ranks)])
    torch.testing.assert_close(found[0], parts.amax(0) if largest else parts.sum(0))
    assert all(torch.equal(each, found[0]) for each in found)


def _gathered(ranks: int, size: int) -> Tensor:
    mesh = Mesh((ranks,))
    key = mesh.key((0,))
    groups.setup(mesh, [key], timeout=timedelta(seconds=60))
    sizes = [size + rank for rank in range(ranks)]
    out = torch.empty(3, sum(sizes))  # whose slots are not contiguous
    mine = _part(dist.get_rank(), 3 * sizes[dist.get_rank()]).view(3, -1)
    transport.all_gather(out, torch.split(out, sizes, 1), mine, key)
    return out


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_parts_are_gathered_in_their_order(
    ranks: int, size: int, pools: Callable[[int], Pool]
) -> None:
    wanted = torch.cat([_part(rank, 3 * (size + rank)).view(3, -1) for rank in range(ranks)], 1)
    for found in pools(ranks).run(_gathered, ranks, size):
        assert torch.equal(found, wanted)
