"""A tensor with one use goes straight from where it is made to where it is needed.

    made      S(0)   R            needed    S(1)   R         one variable for each of the four ways,
                                                             at the cost of its cheapest moves

Nothing shares its conversions and nothing bounds their flow, so a flow over single moves parts into cheapest
ways: the program is the same, of as many variables as there are pairs instead of moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.convert.network import Flags, Network, Numbers, Seconds


@dataclass(frozen=True, slots=True)
class DirectWays:
    """The ways from the layouts numbered `starts` to those numbered `ends`, over `allowed` moves; `variables`
    [start, end] has the flow of each, -1 where there is no way."""

    starts: Numbers
    ends: Numbers
    allowed: Flags
    variables: Numbers

    def seconds(self, network: Network) -> Seconds:
        """Seconds of each way in `network`, in the order of `variables`; inf where there is none."""
        return ways(network, self.starts, self.ends, self.allowed)


def ways(network: Network, starts: Numbers, ends: Numbers, allowed: Flags) -> Seconds:
    """Seconds of the cheapest ways [start, end] over `allowed` moves."""
    return np.ascontiguousarray(distances(network, starts, allowed)[ends].T)


def distances(network: Network, ends: Numbers, allowed: Flags, *, backward: bool = False) -> Seconds:
    """Seconds [layout, end] of the cheapest ways from each end to every layout over `allowed` moves.

    They lead from every layout to each end if it is `backward`."""
    begun = np.full((len(network.layouts), len(ends)), np.inf)
    begun[ends, np.arange(len(ends))] = 0.0
    return settled(network, begun, allowed, backward=backward)


def settled(network: Network, begun: Seconds, allowed: Flags, *, backward: bool = False) -> Seconds:
    """The least of what ways cost that begin, or `backward` end, in a layout at `begun` [layout, ...]; by
    Bellman and Ford."""
    moves = network.grouped(allowed, backward=backward)
    seconds = network.seconds[moves.moves, None]
    found = begun.copy()
    while len(moves.moves):
        arriving = np.minimum.reduceat(found[moves.begins] + seconds, moves.first)
        known = found[moves.ends]
        if not (arriving < known).any():
            break
        found[moves.ends] = np.minimum(known, arriving)
    return found
