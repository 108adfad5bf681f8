"""Process groups by key."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
import torch.distributed as dist

from autopar.core.mesh import Mesh, parse_key
from autopar.errors import InputError
from autopar.runtime.collectives import groups
from tests.pool import Pool, PoolError
from tests.runtime.collectives.cases import TIMEOUT, all_keys

Pools = Callable[[int], Pool]


def _ranks(shape: tuple[int, ...]) -> dict[str, tuple[list[int], int, int]]:
    mesh = Mesh(shape)
    groups.setup(mesh, all_keys(mesh), timeout=TIMEOUT)
    return {
        key: (dist.get_process_group_ranks(groups.group(key)), groups.index(key), groups.size(key))
        for key in all_keys(mesh)
    }


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1), (1, 4), (1, 2, 2)])
def test_groups_are_those_of_the_mesh(shape: tuple[int, ...], pools: Pools) -> None:
    for rank, found in enumerate(pools(4).run(_ranks, shape)):
        for key, (ranks, index, size) in found.items():
            mesh, axes = parse_key(key)
            assert tuple(ranks) == mesh.group(axes, rank)
            assert (ranks[index], size) == (rank, len(ranks))


def test_the_minor_axis_has_consecutive_ranks(pools: Pools) -> None:
    found = pools(4).run(_ranks, (2, 2))
    assert [one["b@2x2"][0] for one in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [one["a@2x2"][0] for one in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def _everybody() -> bool:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    return groups.group("a@2") is dist.group.WORLD


def test_everybody_is_the_world_group(pools: Pools) -> None:
    assert all(pools(2).run(_everybody))


def _unknown() -> str:
    with pytest.raises(groups.GroupError) as caught:
        groups.group("b@1x1x2")
    return str(caught.value)


def test_a_key_that_was_not_set_up_is_named(pools: Pools) -> None:
    assert all("b@1x1x2" in message for message in pools(2).run(_unknown))


def test_without_a_world_setup_and_use_are_refused() -> None:
    with pytest.raises(InputError, match="mesh 2"):
        groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    with pytest.raises(groups.GroupError, match="a@2"):
        groups.group("a@2")


def test_the_place_in_a_group_needs_no_world() -> None:
    with groups.as_rank(4):
        assert (groups.index("b@2x3"), groups.size("b@2x3")) == (1, 3)
        assert (groups.index("a@2x3"), groups.size("a@2x3")) == (1, 2)


def _new_world(port: int) -> bool:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    rank = dist.get_rank()
    dist.destroy_process_group()
    with pytest.raises(groups.GroupError):
        groups.group("a@2")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    with pytest.raises(groups.GroupError):
        groups.group("a@2")
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    return groups.group("a@2") is dist.group.WORLD


def test_groups_end_with_their_world() -> None:
    pool = Pool(2)
    try:
        assert all(pool.run(_new_world, _free_port()))
    finally:
        pool.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fails_on_last() -> None:
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.barrier()


def test_a_failing_rank_fails_the_call_and_ends_the_others() -> None:
    pool = Pool(2)
    try:
        with pytest.raises(PoolError, match="on purpose"):
            pool.run(_fails_on_last)
        assert pool.run(dist.get_rank) == [0, 1]
    finally:
        pool.close()


def test_a_hanging_call_is_ended() -> None:
    pool = Pool(2)
    try:
        pool.run(dist.get_rank)
        with pytest.raises(PoolError, match="no answer"):
            pool.run(_hangs_on_last, timeout=1.0)
    finally:
        pool.close()


def _hangs_on_last() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
