"""Measures the collectives of a running process group as the programs call them: with their copies.

A price belongs to a move, and a move packs, sends and unpacks. So what is timed are the moves
themselves, along the second dim of a tensor, where a part is not contiguous, and for a message to a
neighbour a send and a receive at the same time, as in a halo exchange. Only a sum is timed without its
copy, which gradients do not need.

Groups smaller than the world are timed all at once, as the groups of one axis work in a step.

On CPUs between two exchanges a product runs and memory is walked through, as operators do in a step, and what
is sent is then written: that, and the exchange's own code, is what a step finds in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import accumulate, combinations
from typing import assert_never

import torch
from torch import Tensor

import autopar.runtime.collectives.placement_moves  # noqa: F401  (registers the moves)
from autopar.cluster import ClusterSpec
from autopar.core.costs import Collective
from autopar.core.mesh import Mesh
from autopar.runtime.collectives import groups, transport
from autopar.runtime.launch.glibc_heap import keep_freed_memory
from autopar.units import show_bytes
from costdb.collective_profiler import Exchange, measure_collective, measure_in_rounds
from costdb.measurement import CollectiveMeasurement

SIZES = (4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20)  # bytes; between and beyond by interpolation
BUDGET = 0.1  # seconds for one kind, size and group, beside its warm-up
TOGETHER_BYTES = 256 << 20  # of what exchanges hold that take turns
ROWS = 8  # length of the dim before the split one
PRODUCT_ROWS, PASS_NUMBERS = 256, 1 << 20  # of what runs between exchanges: about a millisecond of either

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
    """Measurements that plans need: every kind and size, for each size of group and number of nodes in a mesh
    of the cluster or of a stage."""
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
    for span, _, _ in points:
        groups.setup(span.mesh, [span.mesh.key(span.axes)], timeout=timeout, copies=span.copies)
    if device == "cpu":
        return _in_rounds(points, progress)
    found: list[CollectiveMeasurement] = []
    for span, kind, nbytes in points:
        key = span.mesh.key(span.axes)
        if progress:
            progress(len(found), len(points), f"{kind.value} of {show_bytes(nbytes)} over {span.size}")
        run = _move(kind, nbytes, key, device).run or (lambda: None)
        found.append(
            measure_collective(
                kind, nbytes, groups.group(key), device=device, nodes=span.nodes, budget=BUDGET, run=run
            )
        )
    return found


def _in_rounds(points: Sequence[Point], progress: Progress | None) -> list[CollectiveMeasurement]:
    """Measure points on CPUs, between operators: as many together as memory may hold."""
    keep_freed_memory()
    found: list[CollectiveMeasurement] = []
    while rest := points[len(found) :]:
        sizes = accumulate(2 * nbytes for _, _, nbytes in rest)  # with what arrives
        portion = rest[: max(1, sum(held <= TOGETHER_BYTES for held in sizes))]
        if progress:
            progress(len(found), len(points), f"{len(portion)} exchanges in rounds")
        with torch.enable_grad():
            found += measure_in_rounds([_exchange(*point) for point in portion], _RankWork(), budget=BUDGET)
    return found


def _exchange(span: Span, kind: Collective, nbytes: int) -> Exchange:
    key = span.mesh.key(span.axes)
    move = _move(kind, nbytes, key, "cpu")
    return Exchange(kind, move.nbytes, groups.group(key), span.nodes, move.run, move.arrive)


@dataclass(frozen=True, slots=True)
class _RankWork:
    """Computation of a rank between two exchanges."""

    factor: Tensor = field(default_factory=lambda: torch.randn(PRODUCT_ROWS, PRODUCT_ROWS))
    numbers: Tensor = field(default_factory=lambda: torch.zeros(PASS_NUMBERS))

    @torch.no_grad()
    def __call__(self) -> None:
        for _ in range(2):
            self.factor @ self.factor
        self.numbers.add_(1)


@dataclass(frozen=True, slots=True)
class _Move:
    """A move of a tensor of `nbytes` in all, on this rank; `run` is None where it has no part in it."""

    run: Callable[[], object] | None
    sent: Tensor
    nbytes: int

    @torch.no_grad()
    def arrive(self) -> None:
        """Write what is sent."""
        self.sent.mul_(1)


def _move(kind: Collective, nbytes: int, key: str, device: str) -> _Move:
    """The move of a float32 tensor of `nbytes` in all, `ROWS` x length, that learns where moves do."""
    size = groups.size(key)
    length = -(-nbytes // (4 * ROWS * size)) * size
    sizes, rows = [length // size] * size, [ROWS // size + (rank < ROWS % size) for rank in range(size)]
    moves, learns = torch.ops.autopar, kind not in (Collective.ALL_REDUCE, Collective.SEND_RECV)
    part = kind in (Collective.ALL_GATHER, Collective.ALL_TO_ALL)
    sent = torch.zeros(ROWS, length // size if part else length, device=device, requires_grad=learns)
    moved = partial(_Move, sent=sent, nbytes=4 * ROWS * length)
    match kind:
        case Collective.ALL_REDUCE:  # where it lies, as a gradient
            return moved(lambda: transport.all_reduce(sent, groups.group(key)))
        case Collective.ALL_GATHER:
            return moved(lambda: moves.s_to_r(sent, key, 1, 1, sizes))
        case Collective.REDUCE_SCATTER:
            return moved(lambda: moves.p_to_s(sent, key, 1, 1, sizes))
        case Collective.ALL_TO_ALL:
            return moved(lambda: moves.s_to_s(sent, key, 1, 1, sizes, 0, 1, rows))
        case Collective.SEND_RECV:
            landing, peer = torch.zeros_like(sent), groups.index(key) ^ 1
            if peer >= size:  # the last of an odd number
                return moved(None)
            return moved(lambda: transport.transfer([(peer, sent)], [(peer, landing)], key))
        case _:
            assert_never(kind)
