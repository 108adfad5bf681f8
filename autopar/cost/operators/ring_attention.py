"""What attention costs whose keys travel round a ring: the blocks of the priced rank, and hops.

`autopar.runtime.collectives.ring_attention` draws the steps. The rank's own block is the operator's stand-in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autopar.core.graph import Call, TensorSpec
from autopar.core.score_blocks import Span
from autopar.rewrite.emit import GraphEmitter
from autopar.runtime.collectives.ring_attention import Ring, swapped_bytes
from autopar.trace.attention.row_attention import plain_calls, row_bytes


def hops(query: TensorSpec, args: Sequence[Any]) -> Iterator[tuple[int, list[Call]]]:
    """Bytes of keys and values that travel for each step after the first, and the calls beside which they do.

    They are those of the rank that takes most; the calls are those of the step before.
    """
    key, value, mask, _, place, *rest = args
    ring = Ring.of(rest[:-1], mask)
    for step in range(1, len(ring.starts)):
        blocks = list(ring.blocks(place, step - 1))
        rows = max(_length(ring.keys(at, ring.owner(at, step))) for at in range(len(ring.starts)))
        yield rows * row_bytes(key, value), list(plain_calls(query, key, value, mask, blocks))


def ring_calls(emitter: GraphEmitter) -> Iterator[Call]:
    """The priced rank's blocks with the keys of others."""
    for node in emitter.graph.nodes:
        if node.target is torch.ops.autopar.ring_attention.default:
            query, key, value, mask, _, place, *how, _ = emitter.described(node.args)
            ring = Ring.of(how, mask)
            for step in range(1, len(ring.starts)):
                yield from plain_calls(query, key, value, mask, list(ring.blocks(place, step)))


def swaps(query: TensorSpec, args: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Bytes that a rank swaps with its mirror before and after its steps, forward and backward."""
    key, value, mask, _, place, *rest = args
    return swapped_bytes(Ring.of(rest[:-1], mask), place, query, key, value)


def _length(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)
