"""How the published stack runs a split: where it cuts, what it keeps, how it sums gradients.

ranks       pipeline first, then data, then tensor: groups of tp are neighbours
state       bf16 weights 2, float32 gradients 4, master weights 4, Adam 8 bytes; the last two in shards
            over dp with ZeRO 1
gradients   float32 sums over dp, in buckets during the last backward; with ZeRO 1 they are
            reduce-scattered, and bf16 weights gathered after the update
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from autopar.cluster import ClusterSpec
from autopar.core.costs import Collective
from autopar.core.mesh import Mesh
from autopar.cost.machine.model import CostModel
from tests.benchmarks.published.pieces import Piece, Pieces
from tests.benchmarks.published.runs import Shape, Split

WEIGHT, GRADIENT, MASTER = 2, 4, 12  # bytes: in bfloat16, summed in float32, what the optimizer keeps
UPDATED = 50  # bytes read and written for each weight: clipping, Adam, casts, zeroing
EMBED, BLOCK, HEAD, LOSS = range(4)  # numbers of pieces


@dataclass(frozen=True, slots=True)
class Stage:
    """How many of each piece a pipeline rank has."""

    counts: tuple[int, int, int, int]

    def total(self, pieces: Pieces, field: str) -> float:
        """The sum of a field of its pieces."""
        return sum(count * float(getattr(piece, field)) for piece, count in self.parts(pieces))

    def most(self, pieces: Pieces, field: str) -> float:
        """The largest of its pieces' fields."""
        return max((float(getattr(piece, field)) for piece, _ in self.parts(pieces)), default=0.0)

    def parts(self, pieces: Pieces) -> Iterator[tuple[Piece, int]]:
        """Its pieces with their numbers."""
        return ((piece, count) for piece, count in zip(pieces, self.counts, strict=True) if count)


@cache
def stages(shape: Shape, count: int) -> tuple[Stage, ...]:
    """Cuts by multiply-adds: a stage ends with the layer that brings the sum above its share."""
    blocks = [(BLOCK, shape.layer_weights)] * shape.layers
    layers = [(EMBED, 0), *blocks, (HEAD, shape.table_weights), (LOSS, 0)]
    total, done, stage = sum(work for _, work in layers), 0, 0
    found = [[0, 0, 0, 0] for _ in range(count)]
    for kind, work in layers:
        done += work
        found[stage][kind] += 1
        if stage < count - 1 and done * count > total * (stage + 1):
            stage += 1
    return tuple(Stage((embed, block, head, loss)) for embed, block, head, loss in found)


def sum_seconds(weights: float, split: Split, cluster: ClusterSpec, model: CostModel) -> float:
    """Seconds to sum the gradients of so many weights on each device over dp, and to gather the weights
    where they were updated in shards; `cluster` is a stage's part."""
    if split.dp == 1:
        return 0.0
    mesh = Mesh((split.dp, split.tp))
    link, nodes = cluster.link(mesh, 0), cluster.nodes_of(mesh, (0,))

    def seconds(kind: Collective, nbytes: float) -> float:
        return model.collectives.cost(kind, int(nbytes), split.dp, link, nodes=nodes).seconds

    if not split.zero:
        return seconds(Collective.ALL_REDUCE, GRADIENT * weights)
    scattered = seconds(Collective.REDUCE_SCATTER, GRADIENT * weights)
    return scattered + seconds(Collective.ALL_GATHER, WEIGHT * weights)


def state_bytes(weights: float, split: Split) -> float:
    """Weights, gradients, and what the optimizer keeps."""
    return weights * (WEIGHT + GRADIENT + MASTER / (split.dp if split.zero else 1))


def update_seconds(weights: float, split: Split, model: CostModel) -> float:
    """The optimizer's step."""
    return weights / (split.dp if split.zero else 1) * UPDATED / model.device.bandwidth
