"""Measures the collectives of a running process group as the programs call them: with their copies.

A price belongs to a move, and a move packs, sends and unpacks. So what is timed are the moves
themselves, along the second dim of a tensor, where a part is not contiguous, and for a message to a
neighbour a send and a receive at the same time, as in a halo exchange.

Groups smaller than the world are timed all at once, as the groups of one axis work in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import combinations
from typing import assert_never

import torch
import torch.distributed as dist

import autopar.runtime.collectives  # noqa: F401  (registers the moves)
from autopar.cluster import ClusterSpec
from autopar.core.costs import Collective
from autopar.core.mesh import Mesh
from autopar.runtime import groups, transport
from autopar.units import show_bytes
from costdb.collective_profiler import measure_collective
from costdb.measurement import CollectiveMeasurement

SIZES = (4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20)  # bytes; between and beyond by interpolation
BUDGET = 0.1  # seconds for one kind, size and group, beside its warm-up
ROWS = 8  # length of the dim before the split one

Point = tuple[int, Collective, int]  # ranks, kind, bytes
Progress = Callable[[int, int, str], None]  # done, all, what


def wanted(cluster: ClusterSpec, nbytes: Sequence[int] = SIZES) -> list[Point]:
    """What plans on one node need: every kind and size for every group that a mesh has."""
    sizes = {
        math.prod(mesh.shape[axis] for axis in axes)
        for mesh in cluster.meshes()
        for count in range(1, len(mesh.shape) + 1)
        for axes in combinations(mesh.axes, count)
    }
    return [(size, kind, each) for size in sorted(sizes - {1}) for kind in Collective for each in nbytes]


def measure(
    points: list[Point], timeout: timedelta, progress: Progress | None = None
) -> list[CollectiveMeasurement]:
    """Measure `points`; collective, with the same answer on every rank."""
    world = dist.get_world_size()
    found: list[CollectiveMeasurement] = []
    for size in sorted({point[0] for point in points}):
        mesh = Mesh((world,) if size == world else (world // size, size))
        key = mesh.key((len(mesh.shape) - 1,))
        groups.setup(mesh, [key], timeout=timeout)
        group = groups.group(key)
        for _, kind, nbytes in (point for point in points if point[0] == size):
            if progress:
                progress(len(found), len(points), f"{kind.value} of {show_bytes(nbytes)} over {size}")
            run = _move(kind, nbytes, key)
            found.append(measure_collective(kind, nbytes, group, budget=BUDGET, run=run))
    return found


def _move(kind: Collective, nbytes: int, key: str) -> Callable[[], object]:
    """The move on a float32 tensor of `nbytes` in all, `ROWS` x length."""
    size = groups.size(key)
    length = -(-nbytes // (4 * ROWS * size)) * size
    full, part = torch.zeros(ROWS, length), torch.zeros(ROWS, length // size)
    sizes, rows = [length // size] * size, [ROWS // size + (rank < ROWS % size) for rank in range(size)]
    moves = torch.ops.autopar
    match kind:
        case Collective.ALL_REDUCE:
            return lambda: moves.p_to_r(full, key)
        case Collective.ALL_GATHER:
            return lambda: moves.s_to_r(part, key, 1, 1, sizes)
        case Collective.REDUCE_SCATTER:
            return lambda: moves.p_to_s(full, key, 1, 1, sizes)
        case Collective.ALL_TO_ALL:
            return lambda: moves.s_to_s(part, key, 1, 1, sizes, 0, 1, rows)
        case Collective.SEND_RECV:
            landing, peer = torch.zeros_like(full), groups.index(key) ^ 1
            if peer >= size:  # the last of an odd number
                return lambda: None
            return lambda: transport.transfer([(peer, full)], [(peer, landing)], key)
        case _:
            assert_never(kind)
