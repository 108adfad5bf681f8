"""Weights in the host's memory: the serial model's numbers, and little of them on the device at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from autopar.core.gathering import Gathering
from autopar.core.mesh import Mesh
from tests.pool import Pool
from tests.runtime.saved.test_regather import PLANS, train

Pools = Callable[[int], Pool]


@pytest.mark.parametrize(
    "plan, gathering",
    [
        ("one batch", None),
        ("one batch", Gathering.REGATHER),
        ("one batch", Gathering.KEEP),
        ("recomputed", None),
        ("recomputed", Gathering.REGATHER),
        ("micro-batches", None),
        ("micro-batches", Gathering.KEEP),
    ],
)
def test_training_equals_serial_training(plan: str, gathering: Gathering | None, pools: Pools) -> None:
    pools(Mesh(PLANS[plan][0]).num_devices).run(partial(train, on_host=True), plan, gathering)
