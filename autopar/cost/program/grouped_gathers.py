"""Weights that one exchange gathers: those that a block uses one after the other, up to a bucket's size.

    alone       gather w   linear   gather v   norm   gather u   linear    three latencies, one copy at a time
    together    gather w v u   linear   norm   linear                      one latency, three copies

Backward gathers those together that it reads, and scatters all gradients of a group at once. A group is there
as a whole while one of it is used: so groups end where blocks do, and are as small as memory asks for. Of
weights that are cast first the shards are cast where the group is gathered. A weight that is large, or that
several blocks use, travels alone.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from autopar.convert.moves import canonical, effect, gathers
from autopar.core.gathering import Gathering
from autopar.core.graph import InputKind
from autopar.core.move import Move
from autopar.core.placement import Layout
from autopar.core.program import Program
from autopar.runtime.parameters.gradient_buckets import BucketSizes, bucket_sizes

if TYPE_CHECKING:
    from autopar.cost.program.priced_program import PricedProgram

_BLOCK = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")  # blocks.3 of blocks.3.mlp.0
Groups = tuple[tuple[str, ...], ...]


def gathered_together(priced: PricedProgram, cap: int | None, starts: Sequence[int] = ()) -> PricedProgram:
    """The program with weights in groups, as large ones as `cap` bytes allow; none spans stages."""
    groups = tuple(_groups(priced, starts))
    extra = {names: _extra(priced, names) for names in groups}
    for most in sorted(set(extra.values()), reverse=True):
        program = _with(priced.program, tuple(names for names in groups if extra[names] <= most))
        grouped = type(priced)(priced.prices, program)
        if cap is None or grouped.peak.nbytes <= cap:
            return grouped
    return priced


def grouped_seconds(priced: PricedProgram) -> Mapping[tuple[str, Layout], tuple[float, float]]:
    """Seconds of each gather of a group, forward and backward: its share of the group's."""
    found: dict[tuple[str, Layout], tuple[float, float]] = {}
    for names in priced.program.together:
        moves = {name: gather_of(priced.program, name) for name in names}
        shares = priced.prices.together(moves)
        found |= {(name, moves[name].target): seconds for name, seconds in shares.items()}
    return found


def gather_of(program: Program, name: str) -> Move:
    """The move by which a weight of a group is gathered."""
    return next(filter(gathers, program.moves[name]))


def _groups(priced: PricedProgram, starts: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Groups of at least two, block by block."""
    for _, block in itertools.groupby(_candidates(priced, starts), key=lambda each: each.block):
        filling: dict[Hashable, list[_Candidate]] = {}
        for each in block:
            sizes = _sizes(priced, each.move)
            if each.nbytes >= sizes.alone:
                continue
            group = filling.setdefault(each.kind, [])
            if each.nbytes + sum(other.nbytes for other in group) > sizes.full:
                yield from _several(filling.pop(each.kind))
                group = filling.setdefault(each.kind, [])
            group.append(each)
        for group in filling.values():
            yield from _several(group)


def _several(group: Sequence[_Candidate]) -> Iterator[tuple[str, ...]]:
    if len(group) > 1:
        yield tuple(each.name for each in group)


class _Candidate(NamedTuple):
    """A weight that may be in a group: the gather that it takes there, the block that uses it, and a `kind`
    that those of a group have in common."""

    name: str
    move: Move
    nbytes: int
    block: str
    kind: Hashable


def _candidates(priced: PricedProgram, starts: Sequence[int]) -> Iterator[_Candidate]:
    """Weights that may be in groups, in the order of first use."""
    graph, program, prices = priced.graph, priced.program, priced.prices
    weights = {item.name for item in graph.inputs if item.kind is InputKind.PARAMETER} | graph.cast_weights
    segments = {place: first for first, stop in program.recompute for place in range(first, stop)}
    places: dict[str, set[tuple[str, int, int]]] = {}
    needs: dict[str, set[Layout]] = {}
    for place, item in enumerate(graph.operators):
        where = _block(item.module), segments.get(place, -1), bisect_right(starts, place)
        for index, name in enumerate(item.operands):
            if name in weights:
                layout = tuple(option.operands[index] for option in program.strategies[item.name])
                learns = prices.training and graph.specs[name].requires_grad
                needs.setdefault(name, set()).add(canonical(layout, differentiable=learns))
                places.setdefault(name, set()).add(where)
        for name in weights.intersection(item.results):
            places[name] = {where}
    for name, used in places.items():
        move, spec = _only_gather(program, name), graph.specs[name]
        if move is None or len(used) != 1 or name in graph.outputs:
            continue
        learns = prices.training and spec.requires_grad
        if needs[name] == {canonical(move.target, differentiable=learns)}:
            ((block, *part),) = used
            way, wide = program.gathering(name), prices.widening(name)
            kind = effect(move).name, move.axes, spec.dtype, spec.requires_grad, way, wide, *part
            yield _Candidate(name, move, prices.local_bytes(name, move.target), block, kind)


def _only_gather(program: Program, name: str) -> Move | None:
    """The one gather, on one axis, of a weight that is used in one way: S -> R -> B and S -> P -> B are
    S -> B in a group."""
    moves = program.moves.get(name, ())
    if not moves or program.gathering(name) is Gathering.ONCE:
        return None
    onward = all(one.target == other.source for one, other in itertools.pairwise(moves))
    if not onward or len({move.axes for move in moves}) > 1:
        return None
    whole = Move(moves[0].axis, moves[0].source, moves[-1].target)
    return whole if gathers(whole) else None


def _with(program: Program, groups: Groups) -> Program:
    """The program with these groups, the gather of each weight being its only move."""
    moves = dict(program.moves)
    for name in itertools.chain.from_iterable(groups):
        moves[name] = (Move(moves[name][0].axis, moves[name][0].source, moves[name][-1].target),)
    return replace(program, moves=moves, together=groups)


def _extra(priced: PricedProgram, names: tuple[str, ...]) -> int:
    """Bytes of full copies that a group holds beside one of them."""
    sizes = [priced.prices.local_bytes(name, priced.program.moves[name][-1].target) for name in names]
    return sum(sizes) - max(sizes)


def _sizes(priced: PricedProgram, move: Move) -> BucketSizes:
    ranks = math.prod(priced.prices.dims.mesh.shape[axis] for axis in move.axes)
    return bucket_sizes(priced.prices.device.kind, ranks)


def _block(module: str) -> str:
    """The block that a module is a part of, by the first number in its name; what has none is in none."""
    found = _BLOCK.match(module)
    return found[0] if found else ""
