"""Fetching the rows that a window needs: halo exchange and recut are one thing.

           rank 0          rank 1          rank 2
    own    0 1 2 3 4 | 5 6 7 8 9 | 10 11 12 13        cut (0, 5, 10, 14)
    need  -1 0 1 2 3 4 5 | 4 5 .. 10 | 9 .. 13 14     kernel 3, padding 1
           ^ fill                             ^ fill

Every rank knows all cuts, so it knows what to send to whom; only neighbours talk unless the window
is wider than a shard.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from autopar.core.placement import Shard
from autopar.ops.rule import Handle, Site
from autopar.ops.window import RowMap


def result_rows(site: Site, dim: int) -> tuple[int, int]:
    """The rows [start, stop) of result 0 along `dim` that the rank computes."""
    result = site.operator.results[0]
    assert result is not None
    low, high = site.dims.rows(result, Shard(dim), site.result_layout(), site.coordinate)
    inner = math.prod(site.dims.atoms.of[result][dim][1:])
    return low * inner, high * inner


def fetch(site: Site, value: Handle, dim: int, factor: str, window: RowMap, *, fill: float = 0.0) -> Handle:
    """The operand's rows that the rank's result rows need along `dim`, padded with `fill`.

    `value` is operand 0, perhaps extended along other dims already: windows in two dims are
    fetched one after the other, and corners come free.
    """
    axes = site.axes(factor)
    name, result = site.operands[0], site.operator.results[0]
    assert result is not None
    shard = Shard(dim)
    scale_in = math.prod(site.dims.atoms.of[name][dim][1:])
    scale_out = math.prod(site.dims.atoms.of[result][dim][1:])
    owned, starts, stops = [0], [], []
    for indices in itertools.product(*(range(site.mesh.shape[axis]) for axis in axes)):
        place = list(site.coordinate)
        for axis, index in zip(axes, indices, strict=True):
            place[axis] = index
        owned.append(site.dims.rows(name, shard, site.operand_layout(0), place)[1] * scale_in)
        low, high = site.dims.rows(result, shard, site.result_layout(), place)
        start, stop = window.needs(low * scale_out, high * scale_out)
        starts.append(start)
        stops.append(stop)
    if starts == owned[:-1] and stops == owned[1:]:
        return value
    mine = 0
    for axis in axes:
        mine = mine * site.mesh.shape[axis] + site.coordinate[axis]
    shape = list(site.emitter.shape(value))
    shape[dim] = stops[mine] - starts[mine]
    args: list[Any] = [value, site.key(axes), dim, 1, owned, starts, stops, fill]
    return site.emitter.collective(torch.ops.autopar.exchange.default, args, shape)
