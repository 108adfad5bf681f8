"""Measures the collectives of a running process group as the programs call them: with their copies.

A price belongs to a move, and a move packs, sends and unpacks. So what is timed are the moves
themselves, along the second dim of a tensor, where a part is not contiguous, and for a message to a
neighbour a send and a receive at the same time, as in a halo exchange. Only a sum is timed without its
copy, which gradients do not need.

Groups smaller than the world are timed all at once, as the groups of one axis work in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from typing import assert_never

import torch

import autopar.runtime.collectives.placement_moves  # noqa: F401  (registers the moves)
from autopar.cluster import ClusterSpec
from autopar.core.costs import Collective
from autopar.core.mesh import Mesh
from autopar.runtime.collectives import groups, transport
from autopar.units import show_bytes
from costdb.collective_profiler import measure_collective
from costdb.measurement import CollectiveMeasurement

SIZES = (4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20)  # bytes; between and beyond by interpolation
BUDGET = 0.1  # seconds for one kind, size and group, beside its warm-up
ROWS = 8  # length of the dim before the split one

Point = tuple["Span", Collective, int]  # groups, kind, bytes
Progress = Callable[[int, int, str], None]  # done, all, what


@dataclass(frozen=True, slots=True)
class Span:
    """The groups along `axes` of a mesh of which each of `copies` pipeline ranks holds one; each group
    spans `nodes` nodes."""

    mesh: Mesh
    axes: tuple[int, ...]
    copies: int
    nodes: int

    @property
    def size(self) -> int:
        """Ranks in a group."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)


def wanted(cluster: ClusterSpec, nbytes: Sequence[int] = SIZES) -> list[Point]:
    """What plans need: every kind and size for every size of group, and number of nodes that it spans,
    that a mesh of the cluster or of a stage has."""
    return [(span, kind, each) for span in spans(cluster) for kind in Collective for each in nbytes]


def spans(cluster: ClusterSpec) -> list[Span]:
    """One for each size and number of nodes, of neighbouring ranks where there is a choice."""
    found: dict[tuple[int, int], Span] = {}
    for copies in cluster.stage_counts():
        stage = cluster.stage(copies)
        for mesh in stage.meshes():
            for count in range(1, len(mesh.shape) + 1):
                for axes in reversed(list(combinations(mesh.axes, count))):
                    span = Span(mesh, axes, copies, stage.nodes_of(mesh, axes))
                    found.setdefault((span.size, span.nodes), span)
    return [found[size, nodes] for size, nodes in sorted(found) if size > 1]


def measure(
    points: list[Point], timeout: timedelta, progress: Progress | None = None, *, device: str = "cpu"
) -> list[CollectiveMeasurement]:
    """Measure `points` on tensors of `device`; collective, with the same answer on every rank."""
    found: list[CollectiveMeasurement] = []
    for span, kind, nbytes in points:
        key = span.mesh.key(span.axes)
        groups.setup(span.mesh, [key], timeout=timeout, copies=span.copies)
        if progress:
            progress(len(found), len(points), f"{kind.value} of {show_bytes(nbytes)} over {span.size}")
        run = _move(kind, nbytes, key, device)
        found.append(
            measure_collective(
                kind, nbytes, groups.group(key), device=device, nodes=span.nodes, budget=BUDGET, run=run
            )
        )
    return found


def _move(kind: Collective, nbytes: int, key: str, device: str) -> Callable[[], object]:
    """The move on a float32 tensor of `nbytes` in all, `ROWS` x length."""
    size = groups.size(key)
    length = -(-nbytes // (4 * ROWS * size)) * size
    full, part = (torch.zeros(ROWS, wide, device=device) for wide in (length, length // size))
    sizes, rows = [length // size] * size, [ROWS // size + (rank < ROWS % size) for rank in range(size)]
    moves = torch.ops.autopar
    match kind:
        case Collective.ALL_REDUCE:
            return lambda: transport.all_reduce(full, groups.group(key))  # where it lies, as a gradient
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
