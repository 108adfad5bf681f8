"""What runs on each host where weights lie in shards: losses beside the serial model's, then times."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import autopar
from autopar.cluster import Link
from autopar.runtime.launch import worker
from tests.benchmarks import host_contest
from tests.benchmarks.contest import Contestant, Timed, compete

OURS = "shards, overlap"
NAMES = (OURS, "shards", "fsdp2")
COUNT, SEQUENCE = 4, 32  # few tokens beside 25 MB of weights: at 1 Gbit/s most of a step is communication
LINK = Link(latency=200e-6, bandwidth=125e6)


def contest(rounds: int, costdb: str) -> Timed:
    """The contenders on this rank; the same on every rank."""
    torch.set_num_threads(1)
    worker.init()
    serial, contenders = host_contest.serial_losses(COUNT, SEQUENCE), {}
    for name in NAMES:
        host_contest.say(name)
        step = _fsdp() if name == "fsdp2" else _planned(costdb, overlap=name == OURS)
        host_contest.check_losses(name, [float(step()) for _ in range(host_contest.STEPS)], serial)
        contenders[name] = Contestant(step)
    host_contest.say(f"{rounds} rounds")
    return compete(contenders, rounds=rounds, keep=NAMES)


def _planned(costdb: str, *, overlap: bool) -> Callable[[], Tensor]:
    batch = host_contest.make_batch(COUNT, SEQUENCE)
    cluster = host_contest.cluster_of(LINK)
    parallel = autopar.parallelize(
        host_contest.make_model(SEQUENCE),
        cluster,
        batch,
        force="batch",
        shard_state="weights",
        optimizer="sgd-momentum",
        measure=False,
        costdb=costdb,
        overlap=overlap,
    )

    def learn() -> Tensor:
        loss: Tensor = parallel(*batch)
        loss.backward()
        return loss.detach()

    return host_contest.trained(parallel, learn)


def _fsdp() -> Callable[[], Tensor]:
    """FSDP2, block by block, on this rank's samples."""
    model = host_contest.make_model(SEQUENCE)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    share = [item.chunk(size)[rank].contiguous() for item in host_contest.make_batch(COUNT, SEQUENCE)]

    def learn() -> Tensor:
        loss: Tensor = model(*share)
        loss.backward()
        total = loss.detach()
        dist.all_reduce(total)
        return total / size

    return host_contest.trained(model, learn)
