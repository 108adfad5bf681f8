"""The cheapest conversions of a tensor of several uses: a tree, whose shared part is paid once.

    made  S(0) ── R ─┬─ P          What is yet to be reached from a layout m, a set U of uses, is split there,
                     └─ S(1)       or the tree goes on by one move to n.

    T[m, U] = min( min over parts A, B of U of  T[m, A] + T[m, B],   min over n of  seconds[m, n] + T[n, U] )

The first line is known where all smaller sets are; the second one is Bellman's and Ford's.
Source: Dreyfus and Wagner, The Steiner problem in graphs, 1971.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from autopar.convert.network import Flags, Network, Numbers, Seconds
from autopar.core.move import Move
from autopar.solve.choices.direct_ways import distances, settled

EVERY_MOVE = 1e-12  # of the dearest move: of equally cheap trees that of fewest moves
Uses: TypeAlias = tuple[int, ...]


def tree_seconds(network: Network, uses: Sequence[Numbers], allowed: Flags) -> dict[Uses, Seconds]:
    """T [layout, use, ...] for all sets of uses, each a dim over the layouts that it may ask for."""
    found: dict[Uses, Seconds] = {
        (number,): distances(network, use, allowed, backward=True) for number, use in enumerate(uses)
    }
    for count in range(2, len(uses) + 1):
        for wanted in itertools.combinations(range(len(uses)), count):
            split = np.minimum.reduce([_joined(found, parts, wanted) for parts in _parts(wanted)])
            flat = settled(network, split.reshape(len(split), -1), allowed, backward=True)
            found[wanted] = flat.reshape(split.shape)
    return found


def cheapest_tree(
    network: Network, seconds: Seconds, source: int, needs: Sequence[int]
) -> tuple[Move, ...] | None:
    """The moves of the cheapest tree from a layout to all of `needs`; None if there is none.

    Layouts are given by number; moves take so many `seconds` each, inf where one can't be made."""
    allowed = np.isfinite(seconds)
    least = EVERY_MOVE * max(float(seconds[allowed].max(initial=0.0)), np.finfo(np.float64).tiny / EVERY_MOVE)
    other = replace(network, seconds=seconds + least)
    wanted = [need for need in dict.fromkeys(needs) if need != source]
    found = {
        uses: values.reshape(len(network.layouts))
        for uses, values in tree_seconds(other, [np.array([need]) for need in wanted], allowed).items()
    }
    everything = tuple(range(len(wanted)))
    if not wanted or not np.isfinite(found[everything][source]):
        return None if wanted else ()
    chosen: dict[int, None] = {}
    waiting = [(source, everything)]
    while waiting:
        layout, uses = waiting.pop()
        if len(uses) == 1 and layout == wanted[uses[0]]:
            continue
        parts = min(
            _parts(uses), key=lambda pair: found[pair[0]][layout] + found[pair[1]][layout], default=None
        )
        if parts and found[parts[0]][layout] + found[parts[1]][layout] <= found[uses][layout]:
            waiting += [(layout, part) for part in parts]
            continue
        move = min(
            (move for move in network.leaving[layout] if allowed[move]),
            key=lambda move: other.seconds[move] + found[uses][network.targets[move]],
        )
        chosen[move] = None
        waiting.append((network.targets[move], uses))
    return tuple(map(network.move, chosen))


def _parts(uses: Uses) -> Iterator[tuple[Uses, Uses]]:
    """The ways of splitting a set in two."""
    first, *others = uses
    for count in range(len(others)):
        for beside in itertools.combinations(others, count):
            ours = (first, *beside)
            yield ours, tuple(use for use in uses if use not in ours)


def _joined(found: dict[Uses, Seconds], parts: tuple[Uses, Uses], wanted: Uses) -> Seconds:
    """Seconds of two trees from one layout."""
    return sum((_along(found[part], part, wanted) for part in parts), start=np.zeros(()))


def _along(seconds: Seconds, own: Uses, wanted: Uses) -> Seconds:
    """The array with a dim for each of the wanted uses, of length 1 for those of others."""
    sizes = iter(seconds.shape[1:])
    return seconds.reshape(len(seconds), *(next(sizes) if use in own else 1 for use in wanted))
