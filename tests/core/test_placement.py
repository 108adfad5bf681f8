"""Placements are compared by identity, so whatever makes an equal one gives the same object."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

from autopar.core.placement import B, Broadcast, P, Partial, Placement, R, Replicate, Shard


@pytest.mark.parametrize("placement", [Shard(1), Shard(0, 2), R, P, B], ids=str)
def test_equal_placements_are_one_object_however_they_are_made(placement: Placement) -> None:
    copies = [pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement), replace(placement)]
    assert all(each is placement for each in copies)
    assert Shard(dim=0, atom=2) is Shard(0, 2)
    assert Replicate() is R and Partial() is P and Broadcast() is B


def test_placements_that_differ_are_unequal_and_shards_are_in_the_order_of_dims() -> None:
    every = [Shard(2), Shard(0, 1), Shard(0), R, P, B]
    assert len(set(every)) == len(every)
    assert len({hash(each) for each in every}) == len(every)  # tables of layouts are as fast as their hashes
    assert sorted(every[:3]) == [Shard(0), Shard(0, 1), Shard(2)]
