"""What a convolution split along a dim costs: that of its own rows, and those of its neighbours' rows.

`autopar.runtime.convolution` says how these add up. Rows that are few still take a convolution of their
own in each pass, which costs more than their share of the flops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from autopar.core.graph import Call, TensorSpec
from autopar.rewrite.emit import GraphEmitter
from autopar.runtime.collectives.convolution import ConvolutionArguments, Side, local_convolution, neighbours


def strip_calls(emitter: GraphEmitter) -> Iterator[Call]:
    """The convolutions of the neighbours' rows, of the rank that needs most of them."""
    for node in emitter.graph.nodes:
        if node.target is torch.ops.autopar.convolution.default:
            x, weight = emitter.described(node.args[:2])
            _, owned, starts, stops, *how = node.args[3:]
            rows = foreign(owned, starts, stops)
            both = neighbours(rows.index(max(rows)), owned, starts, stops)
            length = emitter.shape(node)[how[0]]
            yield from _convolutions(x, weight, both, ConvolutionArguments(*how), length)


def _convolutions(
    x: TensorSpec, weight: TensorSpec, both: Sequence[Side], call: ConvolutionArguments, length: int
) -> Iterator[Call]:
    stride, padding, dilation, transposed, output_padding, groups = call.of_strips
    for at in call.edges(both, weight.shape[call.dim], length):
        if at is not None:
            operands = _resized(x, call.dim, at.rows), _resized(weight, call.dim, at.taps), None
            how = stride, padding, dilation, transposed, output_padding, groups
            yield Call(*local_convolution(operands, how), {})


def _resized(spec: TensorSpec, dim: int, rows: tuple[int, int]) -> TensorSpec:
    shape = (*spec.shape[:dim], rows[1] - rows[0], *spec.shape[dim + 1 :])
    return dataclasses.replace(spec, shape=shape)


def strip_bytes(emitter: GraphEmitter) -> int:
    """Bytes of the neighbours' rows that convolutions save for backward."""
    total = 0
    for target, args, spec in emitter.collectives:
        if "convolution" in target:
            _, _, _, owned, starts, stops, dim, *_ = args
            total += max(foreign(owned, starts, stops)) * (spec.nbytes // spec.shape[dim])
    return total


def foreign(owned: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> list[int]:
    """Number of other ranks' rows that each rank needs."""
    found = []
    for index, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        low, high = max(start, 0), min(stop, owned[-1])
        found.append(max(0, min(high, owned[index]) - low) + max(0, high - max(low, owned[index + 1])))
    return found
