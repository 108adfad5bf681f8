"""How the published stack runs a split: where it cuts, what it keeps, what its host and its sums take.

    cuts        by multiply-adds; the head and the loss are the last stage's
    kept        for backward, of what tp gathers its own part; the rest is regathered. The loss works in
                place: bf16 and float32 logits are kept, and as many bytes made of them
    ranks       pipeline first, then data, then tensor: groups of tp are neighbours
    state       bf16 weights 2, float32 gradients 4, master weights 4, Adam 8 bytes; the last two in shards
                over dp with ZeRO 1
    gradients   float32 sums over dp: without ZeRO in buckets during the last backward; with ZeRO 1
                reduce-scattered after it, and bf16 weights gathered after the update
    exchanges   of tp run beside products: the longer counts, with what doesn't hide of the other
    host        Python takes longer for a block than a GPU for a small micro-batch: the larger counts

**Conditions.** The runs were made at different times, on machines in two conditions. In the slow one every
collective takes 0.2 to 0.4 ms more for each further rank of its group, whatever its size: bandwidths that
those jobs measured themselves fall with the number of ranks as a fixed time for each rank makes them, and by
the same time for all-reduces, all-gathers and reduce-scatters, within nodes too; large micro-batches hide it,
so the host waits and not the GPU. A check of each call among the ranks of its group, through their host, does
that (TORCH_DISTRIBUTED_DEBUG=DETAIL is one); the published table doesn't say what it was. Before the stack's
pipeline engine was mended, a message between stages took half a second.

The constants are those of that stack and its machines, not autopar's: `fit` finds them, within their bounds.
Those below lie between what it finds for each of two published models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from autopar.cluster import Link
from autopar.core.costs import Collective
from autopar.cost.machine import nccl
from tests.benchmarks.published.pieces import Exchanges, Piece, Pieces
from tests.benchmarks.published.runs import Run, Shape, Split

WEIGHT, GRADIENT, MASTER = 2, 4, 12  # bytes: in bfloat16, summed in float32, what the optimizer keeps
LOGIT = WEIGHT + GRADIENT  # bytes of one in both types
BUCKET = 25 << 20  # bytes of gradients in bfloat16, DistributedDataParallel's default
PER_NODE = 8  # devices
EMBED, BLOCK, HEAD, LOSS = range(4)  # numbers of pieces
LATENCY, CARD = 5e-6, 50e9  # of the network: seconds of a hop, bytes/s of a device's 400 Gbit/s card
# Seconds that a healthy job's all-gathers take for a byte, and for one on each node; slow ones take 2.4e-12.
HEALTHY, HEALTHY_NODE = 4.2e-12, 0.6e-12


@dataclass(frozen=True, slots=True)
class Stack:
    """Its constants; seconds, but for those that are parts, bytes, or bytes/s."""

    pace: float = 0.9  # of products, for one of autopar's
    host: float = 4.6e-3  # for a block and micro-batch, forward and backward
    fixed: float = 0.075  # a step
    updated: float = 150.0  # bytes read and written for each weight: clipping, Adam, casts, zeroing
    near: float = 250e9  # bytes/s between devices of a node
    hop: float = 0.56e-3  # of an exchange or a gather in a ring, for each node
    card: float = 45e9  # bytes/s of a device's way to other nodes in sums
    thin: float = 0.45e-12  # for each byte of a gather over dp and each node
    beside: float = 0.7  # of what is shorter, products or exchanges, behind the other
    overlap: float = 0.65  # of the last backward, behind which buckets are summed
    broken_hop: float = 0.486
    slow_exchange: float = 2.6e-4  # of the host, for each further rank of the group, in slow conditions
    slow_sum: float = 3.0e-4  # for each further rank and bucket of a sum, likewise


BOUNDS: dict[str, tuple[float, float]] = {
    "pace": (0.5, 1.3),
    "host": (1e-3, 1e-2),
    "fixed": (0.0, 0.2),
    "updated": (20.0, 400.0),
    "near": (100e9, 450e9),  # NVLink 4's
    "hop": (5e-6, 1.5e-3),
    "card": (5e9, CARD),
    "thin": (0.0, 3e-12),
    "beside": (0.0, 1.0),
    "overlap": (0.0, 1.0),
    "broken_hop": (0.05, 1.0),
    "slow_exchange": (0.0, 1e-3),
    "slow_sum": (0.0, 1e-3),
}
HOST_FORWARD = 1 / 3  # of the host's seconds: backward launches twice as many products


@dataclass(frozen=True, slots=True)
class RankPieces:
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
def stages(shape: Shape, count: int) -> tuple[RankPieces, ...]:
    """Cuts by multiply-adds: a stage ends with the block that brings the sum above its share."""
    total, done, stage = shape.layers * shape.layer_weights + shape.table_weights, 0, 0
    found = [[0, 0, 0, 0] for _ in range(count)]
    found[0][EMBED] = found[-1][HEAD] = found[-1][LOSS] = 1
    for _ in range(shape.layers):
        done += shape.layer_weights
        found[stage][BLOCK] += 1
        if stage < count - 1 and done * count > total * (stage + 1):
            stage += 1
    return tuple(RankPieces((embed, block, head, loss)) for embed, block, head, loss in found)


def is_slow(run: Run, *, by_links: bool) -> bool:
    """Whether the job ran in slow conditions: by bandwidths that it measured, else by what was run when."""
    if run.nodes == 1:
        return False
    if by_links and run.all_gather:
        return run.all_gather * (HEALTHY + HEALTHY_NODE * run.nodes) < 1
    return run.mended or run.split.pp > 1


@dataclass(frozen=True, slots=True)
class Way:
    """Links of a stage's devices: within a node, between nodes in rings, and in sums; and what each further
    rank of a group adds to a call, and to a sum."""

    near: Link
    ring: Link
    sums: Link
    checked: float = 0.0
    checked_sum: float = 0.0


def way(stack: Stack, *, slow: bool, near: float | None = None, card: float | None = None) -> Way:
    """The links by its constants, or as a job measured them, in bytes/s."""
    return Way(
        near=Link(LATENCY, min(stack.near, near or stack.near)),
        ring=Link(stack.hop, CARD),
        sums=Link(LATENCY, card or stack.card),
        checked=stack.slow_exchange if slow else 0.0,
        checked_sum=stack.slow_sum if slow else 0.0,
    )


@cache
def exchange_seconds(exchanges: Exchanges, tp: int, near: Link, ring: Link) -> float:
    """Seconds of what a group of tp neighbours exchanges, one after the other."""
    group = nccl.RankGroup(tp, -(-tp // PER_NODE), near, ring)
    return sum(nccl.seconds(kind, nbytes, group) or 0.0 for kind, nbytes in exchanges)


def pass_seconds(
    stage: RankPieces, pieces: Pieces, split: Split, stack: Stack, way: Way, *, backward: bool
) -> float:
    """Seconds of a stage for one micro-batch, forward or backward."""
    end = "_back" if backward else ""
    work = stack.pace * stage.total(pieces, f"products{end}") + stage.total(pieces, f"moves{end}")
    host = stage.counts[BLOCK] * stack.host * (1 - HOST_FORWARD if backward else HOST_FORWARD)
    exchanging = 0.0
    if split.tp > 1:
        parts = [(getattr(piece, f"exchanges{end}"), count) for piece, count in stage.parts(pieces)]
        exchanging = sum(
            count * exchange_seconds(each, split.tp, way.near, way.ring) for each, count in parts
        )
        host += sum(count * len(each) for each, count in parts) * (split.tp - 1) * way.checked
    busy = max(work, exchanging) + (1 - stack.beside) * min(work, exchanging)
    return max(busy, host)


def buckets(stage: RankPieces, shape: Shape, tp: int) -> int:
    """How many buckets of gradients a stage's tensors make, the last of them first."""
    kept = shape.hidden * shape.kv_heads // shape.heads
    mlp = shape.hidden * shape.inner
    block = (mlp, 2 * mlp, shape.hidden**2, shape.hidden * (shape.hidden + 2 * kept))
    table = () if shape.tied and stage.counts[EMBED] else (shape.table_weights,) * stage.counts[HEAD]
    found, filled = 0, 0.0
    for weights in (*table, *block * stage.counts[BLOCK], *(shape.table_weights,) * stage.counts[EMBED]):
        filled += WEIGHT * weights / tp
        if filled >= BUCKET:
            found, filled = found + 1, 0.0
    return max(1, found + (filled > 0))


def sum_seconds(weights: float, count: int, split: Split, stack: Stack, way: Way, *, behind: float) -> float:
    """Seconds to sum gradients, of so many weights on each device and in so many buckets, over dp that aren't
    hidden `behind` the last backward, and to gather the weights that were updated in shards."""
    if split.dp == 1:
        return 0.0
    inside = max(1, PER_NODE // split.tp)
    nodes = 1 if split.dp <= inside else -(-split.dp // inside)
    further = (split.dp - 1) * way.checked_sum if nodes > 1 else 0.0
    if split.zero:
        group = nccl.RankGroup(split.dp, nodes, way.near, Link(way.ring.latency, way.sums.bandwidth))
        scattered = nccl.seconds(Collective.REDUCE_SCATTER, int(GRADIENT * weights), group) or 0.0
        gathered = nccl.seconds(Collective.ALL_GATHER, int(WEIGHT * weights), group) or 0.0
        thin = (GRADIENT + WEIGHT) * weights * nodes * stack.thin if nodes > 1 else 0.0
        return scattered + gathered + thin + 2 * further
    group = nccl.RankGroup(split.dp, nodes, way.near, way.sums)
    each = nccl.seconds(Collective.ALL_REDUCE, int(GRADIENT * weights / count), group) or 0.0
    return max(each, count * each - stack.overlap * behind) + count * further


def kept_bytes(stage: RankPieces, pieces: Pieces, shape: Shape, split: Split) -> tuple[int, int]:
    """Bytes that a stage keeps of one micro-batch, and those with which it works."""
    embed, block, head, loss = stage.counts
    logits = loss * split.samples * shape.sequence * shape.vocabulary / split.tp * LOGIT
    without = RankPieces((embed, block, head, 0))
    kept = without.total(pieces, "kept") - without.total(pieces, "gathered") + logits
    inside = RankPieces((embed, block, 0, 0))
    working = max(inside.most(pieces, "working"), logits)
    return int(kept), int(working + stage.most(pieces, "gathered"))


def state_bytes(weights: float, split: Split) -> float:
    """Weights, gradients, and what the optimizer keeps."""
    return weights * (WEIGHT + GRADIENT + MASTER / (split.dp if split.zero else 1))


def update_seconds(weights: float, split: Split, bandwidth: float, stack: Stack) -> float:
    """The optimizer's step."""
    return weights / (split.dp if split.zero else 1) * stack.updated / bandwidth
