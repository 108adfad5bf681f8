"""Fetching the rows that a window needs: halo exchange and recut are one thing.

           rank 0          rank 1          rank 2
    own    0 1 2 3 4 | 5 6 7 8 9 | 10 11 12 13        cut (0, 5, 10, 14)
    need  -1 0 1 2 3 4 5 | 4 5 .. 10 | 9 .. 13 14     kernel 3, padding 1
           ^ fill                             ^ fill

Every rank knows all cuts, so it knows what to send to whom; only neighbours talk unless the window
is wider than a shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from autopar.core.placement import Shard
from autopar.sharding.rule import Handle, Site
from autopar.sharding.window import RowMap


def result_rows(site: Site, dim: int) -> tuple[int, int]:
    """The rows [start, stop) of result 0 along `dim` that the rank computes."""
    result = site.operator.results[0]
    assert result is not None
    low, high = site.dims.rows(result, Shard(dim), site.result_layout(), site.coordinate)
    inner = math.prod(site.dims.atoms.of[result][dim][1:])
    return low * inner, high * inner


@dataclass(frozen=True, slots=True)
class Need:
    """Rows of one halo, by place along the axes that share one dim: the cuts of operand and result, and the
    operand's rows [start, stop) that the result's rows need; some may lie outside the tensor."""

    owned: list[int]
    made: list[int]
    starts: list[int]
    stops: list[int]

    @property
    def is_owned(self) -> bool:
        """Whether each rank needs just the rows that it owns."""
        return self.starts == self.owned[:-1] and self.stops == self.owned[1:]

    @property
    def before(self) -> list[int]:
        """Number of rows before its own that each rank needs."""
        return [max(0, own - max(0, start)) for own, start in zip(self.owned, self.starts, strict=False)]

    @property
    def after(self) -> list[int]:
        """Number of rows past its own that each rank needs."""
        end = self.owned[-1]
        return [max(0, min(end, stop) - own) for own, stop in zip(self.owned[1:], self.stops, strict=True)]

    @property
    def from_neighbours(self) -> bool:
        """Whether all rows that a rank needs are its own or its two neighbours'."""
        sizes = [0, *(stop - first for first, stop in pairwise(self.owned)), 0]
        fits = zip(self.before, sizes, self.after, sizes[2:], strict=False)
        return all(before <= left and after <= right for before, left, after, right in fits)


def needed(site: Site, dim: int, factor: str, window: RowMap) -> Need:
    """Rows of operand 0 that each rank along the axes of `factor` needs for its rows of result 0."""
    name, result = site.operands[0], site.operator.results[0]
    assert result is not None
    shard = Shard(dim)
    scale_in = math.prod(site.dims.atoms.of[name][dim][1:])
    scale_out = math.prod(site.dims.atoms.of[result][dim][1:])
    found = Need([0], [0], [], [])
    for place in places_along(site, factor):
        found.owned.append(site.dims.rows(name, shard, site.operand_layout(0), place)[1] * scale_in)
        low, high = site.dims.rows(result, shard, site.result_layout(), place)
        found.made.append(high * scale_out)
        start, stop = window.needs(low * scale_out, high * scale_out)
        found.starts.append(start)
        found.stops.append(stop)
    return found


def places_along(site: Site, factor: str) -> Iterator[tuple[int, ...]]:
    """The coordinates of the ranks that share the dim of `factor`, in order."""
    return site.mates(site.axes(factor))


def place_along(site: Site, factor: str) -> int:
    """The place that the rank has among those that share the dim of `factor`."""
    place = 0
    for axis in site.axes(factor):
        place = place * site.mesh.shape[axis] + site.coordinate[axis]
    return place


def fetch(site: Site, value: Handle, dim: int, factor: str, window: RowMap, *, fill: float = 0.0) -> Handle:
    """The operand's rows that the rank's result rows need along `dim`, padded with `fill`.

    `value` is operand 0, perhaps extended along other dims already: windows in two dims are
    fetched one after the other, and corners come free.
    """
    need = needed(site, dim, factor, window)
    if need.is_owned:
        return value
    mine = place_along(site, factor)
    shape = list(site.emitter.shape(value))
    shape[dim] = need.stops[mine] - need.starts[mine]
    key = site.key(site.axes(factor))
    args: list[Any] = [value, key, dim, 1, need.owned, need.starts, need.stops, fill]
    return site.emitter.collective(torch.ops.autopar.exchange.default, args, shape)
