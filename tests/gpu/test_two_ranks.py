"""Programs of two ranks on one GPU: gloo carries what NCCL would between two, everything else is as there.

NCCL refuses two ranks of one GPU, and gloo's messages take no tensors of a GPU, so these go by the host here.
"""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

import autopar
from autopar.cluster import Link
from autopar.runtime.collectives import transport
from tests.gpu.nets import NETS
from tests.gpu.test_training import EXACT, without_dropout

OPTIONS: dict[str, dict[str, Any]] = {
    "batch": {"force": "batch"},
    "filter": {"force": "filter"},
    "domain": {"force": "domain"},
    "weights in shards": {"force": "batch", "shard_state": "weights"},
    "the same, early": {"force": "batch", "shard_state": "weights", "overlap": True},
    "offload": {"force": "batch", "offload": "all"},
    "recompute": {"force": "filter", "recompute": "all"},
    "compiled": {"force": "batch", "compile": True},
    "compiled, filter": {"force": "filter", "compile": True},
}


class ByHost:
    """Messages under way between hosts' copies."""

    def __init__(self, works: Sequence[dist.Work], landing: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.works, self.landing = works, landing

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for buffer, copied in self.landing:
            buffer.copy_(copied)


def begin(sends: Any, receives: Any, group: dist.ProcessGroup) -> list[ByHost]:
    sent = [(peer, part.cpu()) for peer, part in sends]
    landing = [(peer, buffer, torch.empty_like(buffer, device="cpu")) for peer, buffer in receives]
    operations = [dist.P2POp(dist.isend, part, group=group, group_peer=peer) for peer, part in sent]
    operations += [
        dist.P2POp(dist.irecv, copied, group=group, group_peer=peer) for peer, _, copied in landing
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return [ByHost(works, [(buffer, copied) for _, buffer, copied in landing])]


def train(rank: int, port: int, net: str, options: dict[str, Any]) -> None:
    """Three steps beside the serial model's, on this rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    transport._begin = begin  # type: ignore[assignment]
    memory = torch.cuda.get_device_properties(0).total_memory // 2
    cluster = autopar.ClusterSpec(devices_per_node=2, device="h100", memory=memory, host=Link(1e-5, 25e9))
    torch.manual_seed(0)
    model, (x, y) = NETS[net](torch.float64)
    without_dropout(model)
    x, y = x.cuda(), y.cuda()
    serial = copy.deepcopy(model).cuda()
    ours = autopar.parallelize(
        model, cluster, (x, y), loss_fn=F.cross_entropy, quiet=True, measure=False, **options
    )
    sides = [(ours, lambda: ours(x, y)), (serial, lambda: F.cross_entropy(serial(x), y))]
    optimizers = [torch.optim.SGD(side.parameters(), 1e-2) for side, _ in sides]
    for _ in range(3):
        losses = []
        for (side, loss_of), optimizer in zip(sides, optimizers, strict=True):
            side.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], abs=EXACT)
    dist.destroy_process_group()


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("net", ["images", "words"])
def test_two_ranks_train_as_the_serial_model(net: str, option: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(train, (port, net, OPTIONS[option]), nprocs=2)
