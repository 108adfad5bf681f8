"""The cheapest moves from the layout in which a tensor is made to those in which it is used."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from autopar.convert.moves import canonical, moves
from autopar.convert.network import Network, Seconds
from autopar.core.move import Move
from autopar.core.placement import B, Layout, P, Placement, R, Shard
from autopar.errors import RuleError

Price = Callable[[Move], float]


def interesting(layouts: Iterable[Layout], *, differentiable: bool) -> tuple[tuple[Placement, ...], ...]:
    """For each axis the placements that `layouts` have there, and the hubs R, P and B."""
    columns = zip(*layouts, strict=True)
    hubs: tuple[Placement, ...] = (R, P, B) if differentiable else (R, P)
    return tuple((*hubs, *sorted({item for item in column if isinstance(item, Shard)})) for column in columns)


def tree(
    source: Layout,
    needs: Sequence[Layout],
    price: Price,
    *,
    legal: Callable[[Layout], bool],
    differentiable: bool,
    through: Sequence[Layout] = (),
) -> tuple[Move, ...]:
    """Moves that reach every layout of `needs` from `source`, shared where paths meet; they may lead through
    the placements of both, those of `through`, and the hubs.

    Each need in turn is joined to what is reached already by the cheapest path: optimal for one
    need, and for several as good as sharing in that order allows.
    """
    source = canonical(source, differentiable=differentiable)
    wanted = [canonical(need, differentiable=differentiable) for need in needs]
    placements = interesting([source, *wanted, *through], differentiable=differentiable)
    chosen: dict[Layout, Move] = {}
    for need in dict.fromkeys(wanted):
        reached = {source, *chosen}
        for move in _path(reached, need, price, placements, legal):
            chosen.setdefault(move.target, move)
    return tuple(chosen.values())


def _path(
    reached: set[Layout],
    need: Layout,
    price: Price,
    placements: tuple[tuple[Placement, ...], ...],
    legal: Callable[[Layout], bool],
) -> list[Move]:
    if need in reached:
        return []
    order = itertools.count()
    queue: list[tuple[float, int, Layout]] = [
        (0.0, next(order), layout) for layout in sorted(reached, key=str)
    ]
    best = dict.fromkeys(reached, 0.0)
    via: dict[Layout, Move] = {}
    while queue:
        cost, _, layout = heapq.heappop(queue)
        if layout == need:
            break
        if cost > best[layout]:
            continue
        for move in moves(layout, placements):
            total = cost + price(move)
            if legal(move.target) and total < best.get(move.target, float("inf")):
                best[move.target], via[move.target] = total, move
                heapq.heappush(queue, (total, next(order), move.target))
    if need not in best:
        raise _no_path(need)
    found: list[Move] = []
    while need not in reached:
        found.append(via[need])
        need = via[need].source
    return found[::-1]


def tree_within(
    network: Network,
    source: Layout,
    needs: Sequence[Layout],
    seconds: Seconds,
    *,
    differentiable: bool,
    anywhere: bool = False,
) -> tuple[Move, ...]:
    """What `tree` finds, among the moves of a network at so many `seconds` each; `anywhere` leads through all
    of its layouts."""
    source = canonical(source, differentiable=differentiable)
    wanted = [canonical(need, differentiable=differentiable) for need in needs]
    if anywhere:
        kept = np.ones(len(network.source), dtype=np.bool_)
    else:
        placements = interesting([source, *wanted], differentiable=differentiable)
        of_interest = [all(map(_contains, placements, layout)) for layout in network.layouts]
        kept = np.array(of_interest)[network.target]
    prices = np.where(kept, seconds, np.inf).tolist()
    chosen: dict[int, int] = {}
    for need in dict.fromkeys(wanted):
        reached = [network.place[source], *chosen]
        for move in _path_within(network, reached, network.place[need], prices):
            chosen.setdefault(int(network.target[move]), move)
    return tuple(map(network.move, chosen.values()))


def _contains(placements: tuple[Placement, ...], item: Placement) -> bool:
    return item in placements


def _path_within(network: Network, reached: Sequence[int], need: int, prices: Sequence[float]) -> list[int]:
    """The cheapest moves from what is reached to a need, all by their numbers."""
    if need in reached:
        return []
    order = itertools.count()
    by_text = sorted(reached, key=lambda layout: str(network.layouts[layout]))
    queue = [(0.0, next(order), layout) for layout in by_text]
    best = dict.fromkeys(reached, 0.0)
    via: dict[int, int] = {}
    targets, leaving = network.targets, network.leaving
    while queue:
        cost, _, layout = heapq.heappop(queue)
        if layout == need:
            break
        if cost > best[layout]:
            continue
        for move in leaving[layout]:
            total, target = cost + prices[move], targets[move]
            if total < best.get(target, math.inf):
                best[target], via[target] = total, move
                heapq.heappush(queue, (total, next(order), target))
    if need not in best:
        raise _no_path(network.layouts[need])
    found: list[int] = []
    while need not in reached:
        found.append(via[need])
        need = int(network.source[via[need]])
    return found[::-1]


def _no_path(need: Layout) -> RuleError:
    return RuleError(
        where="conversion", found=f"no path to {need}", wanted="a legal path", remedy="report this model"
    )
