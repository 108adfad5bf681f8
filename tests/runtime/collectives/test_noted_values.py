"""What torch has only noted, conjugates and negatives, travels as the values that they are."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.core.mesh import Mesh
from autopar.runtime import registry
from autopar.runtime.collectives import groups
from tests.pool import Pool

Pools = Callable[[int], Pool]
MESH = Mesh((2,))
KEY = MESH.key((0,))
NOTED: dict[str, Callable[[Tensor], Tensor]] = {
    "conjugates": lambda x: x.conj(),
    "negatives": lambda x: x.conj().imag,
}


def gathered(name: str) -> list[list[complex]]:
    """What rank 0 and rank 1 have gathered, by the operator and past the dispatcher."""
    groups.setup(MESH, [KEY], timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    mine = NOTED[name](torch.tensor([1 + 2j, 3 + 4j]) * (1 + rank))
    assert mine.is_conj() or mine.is_neg()
    return [
        call(mine, KEY, 0, 1, [2, 2]).tolist()
        for call in (registry.operator("s_to_r"), registry.eager("s_to_r"))
    ]


@pytest.mark.parametrize("name", NOTED)
def test_they_travel_as_values(pools: Pools, name: str) -> None:
    wanted = torch.cat([NOTED[name](torch.tensor([1 + 2j, 3 + 4j]) * factor) for factor in (1, 2)]).tolist()
    for found in pools(2).run(gathered, name):
        assert found == [wanted, wanted]
