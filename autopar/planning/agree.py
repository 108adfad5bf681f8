"""One plan for all ranks: rank 0 plans, the others measure along until it has one.

    rank 0   links ── search ── measure ── search ── measure ── search ── plan ┐
    rank 1   links            ── measure           ── measure                  ┘ the same plan

An operator is timed while every rank runs it, as in a step: the ranks of one machine share memory
bandwidth and caches. A failure on rank 0 is sent too, so that nobody waits for a plan that will
not come.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.cluster import ClusterSpec, gpu_kind
from autopar.core.graph import Call
from autopar.cost.machine import measure_collectives
from autopar.cost.machine.measuring import CoRunners, measure_portion
from autopar.cost.machine.model import is_here, network_of, setting_of
from autopar.errors import AutoparError
from autopar.torch_seams.schemas import named_overload, overload_names
from costdb.database import Database

Answer = TypeVar("Answer")


def agree(find: Callable[[CoRunners], Answer], cluster: ClusterSpec) -> Answer:
    """Run `find(co_runners)` on rank 0; its answer or its AutoparError reaches every rank; collective."""
    answer = (
        _lead(find) if dist.get_rank() == 0 else _follow(setting_of(cluster).threads, cluster.device_type)
    )
    if isinstance(answer, AutoparError):
        raise answer
    found: Answer = answer
    return found


def _lead(find: Callable[[CoRunners], Answer]) -> Answer | AutoparError:
    def co_runners(calls: list[Call]) -> None:
        _tell((True, [packed(call) for call in calls]))

    try:
        answer: Answer | AutoparError = find(co_runners)
    except AutoparError as error:
        answer = error
    _tell((False, answer))
    return answer


def _follow(threads: int, device: str) -> Any:
    while True:
        measuring, value = _tell(None)
        if not measuring:
            return value
        measure_portion([unpacked(item) for item in value], threads, device)


def _tell(message: Any) -> Any:
    box = [message]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def packed(call: Call) -> bytes:
    """Overloads don't pickle, their names do."""
    return pickle.dumps((overload_names(call.target), call.args, call.kwargs))


def unpacked(data: bytes) -> Call:
    """The call that was packed."""
    parts, args, kwargs = pickle.loads(data)
    return Call(named_overload(*parts), args, kwargs)


def kinds_of_ranks(device_type: str) -> list[str]:
    """Kind of each rank's device, in their order; collective."""
    here = gpu_kind(torch.cuda.get_device_name()) if device_type == "cuda" else device_type
    found = [here] * dist.get_world_size()
    dist.all_gather_object(found, here)
    return found


def measure_links(cluster: ClusterSpec, costdb: str | None, timeout: timedelta) -> None:
    """Measure what the database lacks of the cluster's collectives, if rank 0 has its devices; collective."""
    missing: list[measure_collectives.Point] = []
    if dist.get_rank() == 0 and is_here(cluster):
        with Database.open(costdb) as database:
            known = {
                (item.size, item.nodes, item.kind)
                for item in database.collectives(network_of(cluster))
                if item.backend == dist.get_backend()
            }
        missing = [
            (span, kind, nbytes)
            for span, kind, nbytes in measure_collectives.wanted(cluster)
            if (span.size, span.nodes, kind) not in known
        ]
    missing = _tell(missing)
    found = measure_collectives.measure(missing, timeout, device=cluster.device_type)
    if found and dist.get_rank() == 0:
        with Database.open(costdb) as database:
            database.write_collectives(network_of(cluster), found)
