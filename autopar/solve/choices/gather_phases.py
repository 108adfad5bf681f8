"""When the conversions of a weight are made: the phases that its flow goes through.

    kept                [LEADING ->] EVERY        r_to_b that lead from where it is stored, once a step
    regathered [LEADING_REGATHER ->] REGATHER     gathers count once more for each use that backward reads
    gathered once           ONCE -> SETTLED       gathers and r_to_b that lead, once a step

Of all other tensors every conversion is made in EVERY micro-batch. A flow leaves a phase for good. What
settles is gathered no more: a weight has one way of being gathered.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

import numpy as np

from autopar.convert.moves import gathers
from autopar.convert.network import Flags, Network
from autopar.core.gathering import Gathering
from autopar.core.move import Move
from autopar.core.placement import Layout, Partial


class GatherPhase(Enum):
    """Moment at which a move is made."""

    EVERY = auto()
    LEADING = auto()
    REGATHER = auto()
    LEADING_REGATHER = auto()
    ONCE = auto()
    SETTLED = auto()

    @property
    def next(self) -> GatherPhase | None:
        """The phase that follows; None if the flow ends in this one."""
        return _NEXT.get(self)


_NEXT = {
    GatherPhase.LEADING: GatherPhase.EVERY,
    GatherPhase.LEADING_REGATHER: GatherPhase.REGATHER,
    GatherPhase.ONCE: GatherPhase.SETTLED,
}

Place = tuple[Layout, GatherPhase]


def first_phase(gathering: Gathering, *, waits: bool) -> GatherPhase:
    """Phase in which the flow of a weight begins; `waits` says whether anything is done once a step."""
    match gathering:
        case Gathering.ONCE:
            return GatherPhase.ONCE
        case Gathering.REGATHER:
            return GatherPhase.LEADING_REGATHER if waits else GatherPhase.REGATHER
        case Gathering.KEEP:
            return GatherPhase.LEADING if waits else GatherPhase.EVERY


def phased(network: Network, starts: Iterable[Place], moves: Flags) -> dict[GatherPhase, Flags]:
    """Moves that a flow from `starts` can take, by phase."""
    found: dict[GatherPhase, Flags] = {}
    begun: dict[GatherPhase, list[Layout]] = {}
    for layout, phase in starts:
        begun.setdefault(phase, []).append(layout)
    for phase, layouts in begun.items():
        last = phase.next or phase
        found[last] = moves & _may_be_in(last, network)
        if phase.next is not None:
            able = network.sums | network.gathers if phase is GatherPhase.ONCE else network.sums
            found[phase] = network.following(network.flags(layouts), moves & able)
    return found


def gathers_in_disguise(move: Move) -> bool:
    """Whether a weight's move completes a gather by another name: zero-padded shards, S -> P, that are summed
    afterwards."""
    return isinstance(move.placements[0], Partial)


def completes(move: Move) -> bool:
    """Whether a weight's move gathers it, by all-gather or by sum."""
    return gathers(move) or gathers_in_disguise(move)


def completing(network: Network) -> Flags:
    """The moves of which `completes` is true."""
    return network.gathers | network.from_partial


def _may_be_in(phase: GatherPhase, network: Network) -> Flags:
    match phase:
        case GatherPhase.REGATHER:
            return ~network.from_partial
        case GatherPhase.SETTLED:
            return ~completing(network)
        case _:
            return np.ones(len(network.source), dtype=np.bool_)
