"""Only the rows that are needed of a tensor that is split by rows: a halo whose rows a graph names.

                rank 0         rank 1
    own         0 1 2 3    |   4 5 6 7
    read        1 3 5 6    |   0 4 6
    fetched     0 1 2 3 5 6    4 5 6 7 0        own rows first, then those of others by owner

Who reads what is structure, known to every rank when its program is written: so each knows what it sends
to whom. Backward the gradients of fetched rows go back to their owners, who add them up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from autopar.core.graph import TensorSpec
from autopar.core.placement import Shard
from autopar.sharding.rule import Handle, Site

NEEDED = "r"  # the factor of which each rank fetches the rows that it reads
KEYS = "k"  # the factor of keys that are split alone, of which each rank's results are merged
RING = "ring"  # the factor of queries and keys that are split alike: the keys of all come to each rank
EXPERTS = "experts"  # the factor of experts to which rows travel
OWN = "own"  # the factor of experts of which each rank runs its own on the rows that all have
AT_RUN_TIME = frozenset((EXPERTS, OWN))  # sizes of a rank's tensors by them are known at run time alone
FETCHED = frozenset(
    (NEEDED, RING, EXPERTS)
)  # ranks have rows of others by them: samples along them aren't apart
Made = TypeVar("Made")
Rows = tuple[int, int]  # [first, stop)
Reads = Callable[[Sequence[int]], Tensor]  # the rows, rising, that the rank at a coordinate reads


@dataclass(frozen=True, slots=True)
class NeededRows:
    """Exchange of one rank with its group: its own rows, rows that it receives, by owner the rows that it
    sends, counted from its first, and how many from and to each."""

    own: Rows
    foreign: Tensor
    sent: Tensor
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    is_silent: bool  # whether no rank of the mesh reads a row of another

    @property
    def length(self) -> int:
        """Number of rows on the rank after the exchange."""
        return self.own[1] - self.own[0] + len(self.foreign)

    def places(self, rows: Tensor) -> Tensor:
        """Places of these rows of the whole tensor after the exchange: own rows first, then fetched ones."""
        first, stop = self.own
        order = torch.argsort(self.foreign)
        found = torch.searchsorted(self.foreign[order], rows)
        among = order[found.clamp(max=len(order) - 1)] if len(order) else torch.zeros_like(rows)
        return torch.where((rows >= first) & (rows < stop), rows - first, stop - first + among)


def members(site: Site, axes: Sequence[int], *, of: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """Coordinates of the group along `axes` of the rank with coordinate `of`, by default this one, in the
    group's order."""
    found = []
    for indices in itertools.product(*(range(site.mesh.shape[axis]) for axis in axes)):
        place = list(site.coordinate if of is None else of)
        for axis, index in zip(axes, indices, strict=True):
            place[axis] = index
        found.append(tuple(place))
    return found


def owned_rows(site: Site, operand: int, coordinate: Sequence[int]) -> Rows:
    """The rows of an operand that the rank at a coordinate has."""
    name, layout = site.operands[operand], site.operand_layout(operand)
    if Shard(0) not in layout:
        return 0, site.shape(operand)[0]
    return site.dims.rows(name, Shard(0), layout, coordinate)


def cut_key(site: Site, operand: int) -> object:
    """Equal where the rows of an operand and of the result are cut alike, on all ranks."""
    result = site.operator.results[0]
    assert result is not None
    ends = (site.operands[operand], site.operand_layout(operand)), (result, site.result_layout())
    axes = [tuple(axis for axis, each in enumerate(layout) if each == Shard(0)) for _, layout in ends]
    lengths = [site.dims.graph.specs[name].shape[0] for name, _ in ends]
    ways = [
        site.dims.way_of_cutting(site.dims.component(name, Shard(0))) if along else length
        for (name, _), along, length in zip(ends, axes, lengths, strict=True)
    ]
    return site.axes(NEEDED), *axes, *ways


def needed_rows(site: Site, operand: int, axes: Sequence[int], reads: Reads) -> NeededRows:
    """The exchange by which all ranks along `axes` get the rows of an operand that they read."""
    group = members(site, axes)
    me = group.index(site.coordinate)
    owned = [owned_rows(site, operand, place) for place in group]
    mine, read = owned[me], reads(site.coordinate)
    foreign = [_within(read, rows) if rank != me else read[:0] for rank, rows in enumerate(owned)]
    sent = [_within(reads(place), mine) - mine[0] if place != group[me] else read[:0] for place in group]
    counts = tuple(map(len, foreign)), tuple(map(len, sent))
    everyone = members(site, site.mesh.axes)  # programs of all ranks have the same calls
    silent = all(_lies_in(reads(place), owned_rows(site, operand, place)) for place in everyone)
    return NeededRows(mine, torch.cat(foreign), torch.cat(sent), *counts, silent)


def _lies_in(rows: Tensor, span: Rows) -> bool:
    return not len(rows) or bool(span[0] <= int(rows[0]) and int(rows[-1]) < span[1])


def fetch_needed(site: Site, value: Handle, needed: NeededRows, axes: Sequence[int], key: object) -> Handle:
    """The rank's rows of a value and those that it needs of others, if any rank does; `key` tells which."""
    if needed.is_silent:
        return value
    spec = TensorSpec((len(needed.sent),), torch.int64)
    sent = site.emitter.constant((key, "sent"), spec, lambda: needed.sent)
    args = value, site.key(axes), sent, list(needed.sends), list(needed.receives)
    shape = needed.length, *site.emitter.shape(value)[1:]
    return site.emitter.collective(torch.ops.autopar.needed_rows.default, args, shape)


def _within(rows: Tensor, span: Rows) -> Tensor:
    """The rows, of rising ones, that lie in a range."""
    low, high = torch.searchsorted(rows, torch.tensor(span)).tolist()
    return rows[low:high]


def remembered(site: Site, key: object, make: Callable[[], Made]) -> Made:
    """The value of `make` for an operator's constants, made once for all ranks and strategies with this
    key."""
    memo = site.dims.memo
    if key not in memo:
        memo[key] = make()
    found: Made = memo[key]
    return found
