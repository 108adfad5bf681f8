"""The cheapest moves from the layout in which a tensor is made to those in which it is used."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from autopar.convert.moves import canonical, moves
from autopar.convert.network import Network, Seconds
from autopar.core.move import Move
from autopar.core.placement import B, Layout, P, Placement, R, Shard
from autopar.errors import RuleError

Price = Callable[[Move], float]
Node = TypeVar("Node", bound=Hashable)
Taken = TypeVar("Taken")
Step: TypeAlias = tuple[Node, Taken, float]  # where it leads, what it takes, and its seconds


def interesting(layouts: Iterable[Layout], *, differentiable: bool) -> tuple[tuple[Placement, ...], ...]:
    """Placements of `layouts` on each axis, and the hubs R, P and B."""
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

    def leaving(layout: Layout) -> Iterator[Step[Layout, Move]]:
        for move in moves(layout, placements):
            if legal(move.target):
                yield move.target, move, price(move)

    chosen: dict[Layout, Move] = {}
    for need in dict.fromkeys(wanted):
        for target, move in _path({source, *chosen}, need, leaving, str):
            chosen.setdefault(target, move)
    return tuple(chosen.values())


def _path(
    reached: Iterable[Node],
    need: Node,
    leaving: Callable[[Node], Iterable[Step[Node, Taken]]],
    text: Callable[[Node], str],
) -> list[tuple[Node, Taken]]:
    """The cheapest steps from what is reached to a need: where each leads, and what it takes.

    `leaving` gives the steps from a node. Of equal paths the first counts, in the order of `text`.
    """
    order = itertools.count()
    best = dict.fromkeys(sorted(reached, key=text), 0.0)
    if need in best:
        return []
    queue = [(0.0, next(order), node) for node in best]
    via: dict[Node, tuple[Node, Taken]] = {}
    while queue:
        cost, _, node = heapq.heappop(queue)
        if node == need:
            break
        if cost > best[node]:
            continue
        for target, taken, seconds in leaving(node):
            total = cost + seconds
            if total < best.get(target, math.inf):
                best[target], via[target] = total, (node, taken)
                heapq.heappush(queue, (total, next(order), target))
    if need not in best:
        raise RuleError(
            where="conversion",
            found=f"no path to {text(need)}",
            wanted="a legal path",
            remedy="report this model",
        )
    steps: list[tuple[Node, Taken]] = []
    while need in via:
        node, taken = via[need]
        steps.append((need, taken))
        need = node
    return steps[::-1]


def tree_within(
    network: Network,
    source: Layout,
    needs: Sequence[Layout],
    seconds: Seconds,
    *,
    differentiable: bool,
    anywhere: bool = False,
) -> tuple[Move, ...]:
    """Moves as by `tree`, chosen from a network with `seconds` for each. With `anywhere` they lead through
    all of its layouts."""
    source = canonical(source, differentiable=differentiable)
    wanted = [canonical(need, differentiable=differentiable) for need in needs]
    if anywhere:
        kept = np.ones(len(network.source), dtype=np.bool_)
    else:
        placements = interesting([source, *wanted], differentiable=differentiable)
        of_interest = [all(map(_contains, placements, layout)) for layout in network.layouts]
        kept = np.array(of_interest)[network.target]
    prices = np.where(kept, seconds, np.inf).tolist()

    def leaving(layout: int) -> Iterator[Step[int, int]]:
        return ((network.targets[move], move, prices[move]) for move in network.leaving[layout])

    def text(layout: int) -> str:
        return str(network.layouts[layout])

    chosen: dict[int, int] = {}
    for need in dict.fromkeys(wanted):
        for target, move in _path({network.place[source], *chosen}, network.place[need], leaving, text):
            chosen.setdefault(target, move)
    return tuple(map(network.move, chosen.values()))


def _contains(placements: tuple[Placement, ...], item: Placement) -> bool:
    return item in placements
