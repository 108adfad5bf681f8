"""How the published stack runs a split: where it cuts, what it keeps, what its host and its sums take.

    kept        for backward, of what tp gathers its own part; the rest is gathered again
    ranks       pipeline first, then data, then tensor: groups of tp are neighbours
    state       bf16 weights 2, float32 gradients 4, master weights 4, Adam 8 bytes; the last two in shards
                over dp with ZeRO 1
    gradients   float32 sums over dp, in buckets during the last backward; with ZeRO 1 each tensor's are
                reduce-scattered, and bf16 weights gathered after the update
    exchanges   of tp run beside products
    host        Python takes longer for a block than a GPU for a small micro-batch: the larger counts

**Conditions.** The runs were made at different times. In some jobs on several nodes exchanges took longer the
more ranks took part, whatever its size, and bandwidths that they measured themselves fell with the number
of nodes. Before the stack's pipeline engine was mended, a message between stages took half a second.

The constants are fitted to published runs, not measured: they are those of that stack, not autopar's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from autopar.cluster import ClusterSpec
from autopar.core.costs import Collective
from autopar.core.mesh import Mesh
from autopar.cost.machine import nccl
from tests.benchmarks.published.pieces import Piece, Pieces
from tests.benchmarks.published.runs import Run, Shape, Split

WEIGHT, GRADIENT, MASTER = 2, 4, 12  # bytes: in bfloat16, summed in float32, what the optimizer keeps
PER_NODE = 8  # devices
EMBED, BLOCK, HEAD, LOSS = range(4)  # numbers of pieces
TENSORS = 6  # of a block: fused q k v, o, fused gate and up, down, and two norms
HEALTHY = {2: 420e9}  # bytes/s of bus bandwidth that healthy jobs measured, by nodes
HEALTHY_FAR = 190e9
NEAR_HEALTHY = 0.9


@dataclass(frozen=True, slots=True)
class Stack:
    """Its constants: seconds, but for those that are parts and bytes."""

    host: float = 4.4e-3  # for a block and micro-batch, forward and backward
    host_forward: float = 1 / 3  # a part of it
    fixed: float = 0.045  # a step
    updated: float = 100.0  # bytes read and written for each weight: clipping, Adam, casts, zeroing
    beside: float = 0.8  # of what exchanges send, behind products
    far_hop: float = 0.65e-3  # of an exchange, from node to node
    overlap: float = 0.5  # of the last backward, behind which buckets are summed
    hop: float = 0.4e-3
    broken_hop: float = 0.49
    slow_exchange: float = 2.3e-4  # of the host, for each rank of the group, in slow conditions
    slow_sum: float = 1.9e-4  # for each rank and tensor of a sum in buckets, likewise
    slow_tensors: tuple[float, float] = (20.0, 1.5)  # of these: how many, and for each block


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
    layers = [(EMBED, 0), *blocks, (HEAD, shape.table_weights)]
    total, done, stage = sum(work for _, work in layers), 0, 0
    found = [[0, 0, 0, 0] for _ in range(count)]
    for kind, work in layers:
        done += work
        found[stage][kind] += 1
        found[stage][LOSS] += kind == HEAD
        if stage < count - 1 and done * count > total * (stage + 1):
            stage += 1
    return tuple(Stage((embed, block, head, loss)) for embed, block, head, loss in found)


def is_slow(run: Run, *, by_links: bool) -> bool:
    """Whether the job ran in slow conditions: by bandwidths that it measured, else by what was run when."""
    if run.nodes == 1:
        return False
    if by_links and run.all_reduce:
        return run.all_reduce < NEAR_HEALTHY * HEALTHY.get(run.nodes, HEALTHY_FAR)
    return run.mended or run.split.pp > 1


def pass_seconds(
    stage: Stage, pieces: Pieces, split: Split, stack: Stack, *, backward: bool, slow: bool
) -> float:
    """Seconds of a stage for one micro-batch, forward or backward."""
    fields = ("backward", "exchanging_back", "exchanges_back")
    fields = fields if backward else ("forward", "exchanging", "exchanges")
    work, exchanging, number = (stage.total(pieces, field) for field in fields)
    hops = -(-split.tp // PER_NODE) - 1
    busy = work + exchanging * (1 - stack.beside) + number * hops * stack.far_hop
    part = 1 - stack.host_forward if backward else stack.host_forward
    host = stage.counts[BLOCK] * stack.host * part
    if slow and split.tp > 1:
        host += number * split.tp * stack.slow_exchange
    return max(busy, host)


def sum_seconds(
    stage: Stage,
    weights: float,
    split: Split,
    cluster: ClusterSpec,
    stack: Stack,
    *,
    slow: bool,
    behind: float,
) -> float:
    """Seconds to sum the gradients of so many weights on each device over dp that aren't hidden `behind`
    the last backward, and to gather the weights that were updated in shards; `cluster` is a stage's part."""
    if split.dp == 1:
        return 0.0
    nodes = cluster.nodes_of(Mesh((split.dp, split.tp)), (0,))
    group = nccl.Group(split.dp, nodes, cluster.intra, cluster.inter)

    def seconds(kind: Collective, nbytes: float) -> float:
        return nccl.seconds(kind, int(nbytes), group) or 0.0

    tensors = max(1, TENSORS * stage.counts[BLOCK] + stage.counts[EMBED] + stage.counts[HEAD])
    if split.zero:
        each = weights / tensors
        scattered = seconds(Collective.REDUCE_SCATTER, GRADIENT * each)
        return tensors * (scattered + seconds(Collective.ALL_GATHER, WEIGHT * each))
    summed = seconds(Collective.ALL_REDUCE, GRADIENT * weights)
    if slow and nodes > 1:
        some, more = stack.slow_tensors
        return summed + stack.slow_sum * split.dp * (some + more * stage.counts[BLOCK])
    return max(0.0, summed - stack.overlap * behind)


def state_bytes(weights: float, split: Split) -> float:
    """Weights, gradients, and what the optimizer keeps."""
    return weights * (WEIGHT + GRADIENT + MASTER / (split.dp if split.zero else 1))


def update_seconds(weights: float, split: Split, bandwidth: float, stack: Stack) -> float:
    """The optimizer's step."""
    return weights / (split.dp if split.zero else 1) * stack.updated / bandwidth
