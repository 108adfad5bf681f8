"""What shards or replicates a model refuses one that is parallel already."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import autopar
from autopar.errors import InputError
from tests.pool import Pool

WRAPPERS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("DistributedDataParallel", DistributedDataParallel),
    ("DistributedDataParallel", lambda model: DistributedDataParallel(module=nn.Sequential(model))),
    ("DataParallel", DataParallel),
    ("FullyShardedDataParallel", FullyShardedDataParallel),
    ("fully_shard", fully_shard),
    ("fully_shard", lambda model: fully_shard([nn.Linear(1, 1), model])),
)


def _wrap() -> list[str]:
    example = (torch.zeros(4, 3), torch.zeros(4, 2))
    parallel = autopar.parallelize(
        nn.Linear(3, 2),
        autopar.ClusterSpec.local(2),
        example,
        loss_fn=nn.functional.mse_loss,
        measure=False,
        quiet=True,
    )
    found = []
    for name, wrap in WRAPPERS:
        with pytest.raises(InputError) as raised:
            wrap(copy.deepcopy(parallel))  # torch notes in a module that fully_shard was tried
        assert raised.value.where.startswith(name) and len(str(raised.value)) <= 400
        found.append(str(raised.value))
    DistributedDataParallel(nn.Linear(2, 2))  # a serial one may be
    return found


def test_a_parallel_module_is_not_wrapped(pools: Callable[[int], Pool]) -> None:
    for message in pools(2).run(_wrap)[0]:
        assert "already parallel" in message and "autopar.integrations" in message
