"""Gathers and scatters of a list are those of its tensors, on real processes and on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.core.mesh import Mesh
from autopar.errors import CheckError
from autopar.proof.simulated import simulate
from autopar.runtime.collectives import groups
from autopar.runtime.collectives.placement_moves import SUMMED
from tests.pool import Pool
from tests.runtime.collectives.cases import TIMEOUT

Pools = Callable[[int], Pool]
KEY = "a@3"
DIMS, BLOCKS = [0, 1, 0, 1], [1, 1, 2, 1]
SIZES = [[2, 2, 1], [1, 1, 1], [1, 1, 0], [0, 2, 0]]  # of each tensor on each rank
OPERATORS = ("s_to_r", "s_to_b", *("s_to_b" + ending for ending in SUMMED.values()))
autopar = torch.ops.autopar


def _shards(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    found = []
    for dim, blocks, sizes in zip(DIMS, BLOCKS, SIZES, strict=True):
        shape = [4, 3]
        shape[dim] = blocks * sizes[rank]
        found.append(torch.randn(shape, generator=generator).requires_grad_())
    return found


def _arguments() -> tuple[str, list[int], list[int], list[int]]:
    return KEY, DIMS, BLOCKS, [size for sizes in SIZES for size in sizes]


def _compare(name: str, suffix: str) -> None:
    """On a worker: values and gradients, where some results have none."""
    groups.setup(Mesh((3,)), [KEY], timeout=TIMEOUT)
    rank = groups.index(KEY)
    alone, together = _shards(rank), _shards(rank)
    fulls = [
        getattr(autopar, name).default(x, KEY, dim, blocks, sizes)
        for x, dim, blocks, sizes in zip(alone, DIMS, BLOCKS, SIZES, strict=True)
    ]
    grouped = getattr(autopar, f"{name}_together{suffix}").default(together, *_arguments())
    for one, other in zip(fulls, grouped, strict=True):
        assert torch.equal(one, other) and other.is_contiguous()
    for results in (fulls, grouped):
        parts = [(rank + 1) * each.square().sum() for each in results[:-1]]
        torch.stack(parts).sum().backward()
    for one, other in zip(alone[:-1], together[:-1], strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert together[-1].grad is None


@pytest.mark.parametrize("suffix", ["", "_regather"])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_list_is_gathered_and_scattered_as_its_tensors_are(name: str, suffix: str, pools: Pools) -> None:
    pools(3).run(_compare, name, suffix)


def _refuse() -> None:
    groups.setup(Mesh((3,)), [KEY], timeout=TIMEOUT)
    shards = _shards(groups.index(KEY))
    with pytest.raises(CheckError, match="length"):
        autopar.s_to_b_together(shards, KEY, DIMS, BLOCKS, [2 * size for sizes in SIZES for size in sizes])


def test_parts_of_another_length_are_refused(pools: Pools) -> None:
    pools(3).run(_refuse)


def test_simulated_ranks_gather_a_list_as_its_tensors() -> None:
    ranks = [_shards(rank) for rank in range(Mesh((3,)).num_devices)]
    calls = [((shards, *_arguments()), {}) for shards in ranks]
    results = simulate(autopar.s_to_b_together.default, calls)
    for index, (dim, blocks, sizes) in enumerate(zip(DIMS, BLOCKS, SIZES, strict=True)):
        alone = [((shards[index], KEY, dim, blocks, sizes), {}) for shards in ranks]
        wanted = simulate(autopar.s_to_b.default, alone)
        assert all(torch.equal(mine[index], theirs) for mine, theirs in zip(results, wanted, strict=True))
