"""What attention costs whose keys travel round a ring: the blocks of the priced rank, hops, and what is
held in passing.

`autopar.runtime.collectives.ring_attention` draws the steps. The rank's own block is the operator's stand-in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.core.graph import Call, TensorSpec
from autopar.rewrite.emit import GraphEmitter
from autopar.runtime.attention.merging import wide
from autopar.runtime.attention.row_attention import plain_calls
from autopar.runtime.collectives.ring_attention import Ring


@dataclass(frozen=True, slots=True)
class RingScratch:
    """Bytes that a ring holds in passing, each way."""

    forward: int = 0
    backward: int = 0


def hops(query: TensorSpec, args: Sequence[Any]) -> Iterator[tuple[int, list[Call]]]:
    """Bytes of keys and values that travel for each step after the first, and the calls beside which they do.

    They are those of the rank that takes most; the calls are those of the step before.
    """
    key, value, _, place, *rest = args
    ring = Ring(*rest[:-1])
    for step in range(1, len(ring.starts)):
        blocks = list(ring.blocks(place, step - 1))
        rows = max(_length(ring.keys(at, ring.owner(at, step))) for at in range(len(ring.starts)))
        yield rows * _row_bytes(key, value), list(plain_calls(query, key, value, blocks))


def ring_calls(emitter: GraphEmitter) -> Iterator[Call]:
    """The priced rank's blocks with the keys of others."""
    for node in emitter.graph.nodes:
        if node.target is torch.ops.autopar.ring_attention.default:
            query, key, value, _, place, *how, _ = emitter.described(node.args)
            ring = Ring(*how)
            for step in range(1, len(ring.starts)):
                yield from plain_calls(query, key, value, list(ring.blocks(place, step)))


def ring_scratch(emitter: GraphEmitter, node: fx.Node) -> RingScratch:
    """Bytes beside operands and results: two parts of keys and values forward, of which one is under way; in
    backward also their gradients, and all sums in as many bits as they are taken in."""
    if node.target is not torch.ops.autopar.ring_attention.default:
        return RingScratch()
    query, key, value, _, place, *how, _ = emitter.described(node.args)
    ring = Ring(*how)
    taken = [_length(ring.keys(place, ring.owner(place, step))) for step in range(1, len(ring.starts))]
    rows = max(taken, default=0) * min(2, len(taken))
    wider = wide(query.dtype).itemsize // query.dtype.itemsize
    parts, out = rows * _row_bytes(key, value), query.nbytes // query.shape[-1] * value.shape[-1]
    sums = wider * (query.nbytes + key.nbytes + value.nbytes)
    return RingScratch(parts + wider * out, parts * (1 + wider) + sums)


def _row_bytes(*specs: TensorSpec) -> int:
    return sum(spec.nbytes // max(1, spec.shape[-2]) for spec in specs)


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]
