"""When the conversions of a weight are made: the phases that its flow goes through.

    kept                  [LEADING ->] EVERY          r_to_b that lead from where it is stored, once a step
    gathered again  [LEADING_AGAIN ->] AGAIN          gathers count once more for each use that backward reads
    gathered once             ONCE -> SETTLED         gathers and r_to_b that lead, once a step

Of all other tensors every conversion is made in EVERY micro-batch. A flow leaves a phase for good. What
settles is gathered no more: a weight has one way of being gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto

from autopar.convert.table import gathers
from autopar.core.gathering import Gathering
from autopar.core.move import Move
from autopar.core.placement import Layout, Partial
from autopar.cost.values import can_lead


class Phase(Enum):
    """When a move is made."""

    EVERY = auto()
    LEADING = auto()
    AGAIN = auto()
    LEADING_AGAIN = auto()
    ONCE = auto()
    SETTLED = auto()

    @property
    def next(self) -> Phase | None:
        """The phase that follows; None if the flow ends in this one."""
        return _NEXT.get(self)


_NEXT = {Phase.LEADING: Phase.EVERY, Phase.LEADING_AGAIN: Phase.AGAIN, Phase.ONCE: Phase.SETTLED}

Arc = tuple[Move, Phase]
Place = tuple[Layout, Phase]


def first_phase(gathering: Gathering, *, waits: bool) -> Phase:
    """Where the flow of a weight begins; `waits` says whether there are things that are done once a step."""
    match gathering:
        case Gathering.ONCE:
            return Phase.ONCE
        case Gathering.AGAIN:
            return Phase.LEADING_AGAIN if waits else Phase.AGAIN
        case Gathering.KEEP:
            return Phase.LEADING if waits else Phase.EVERY


def phased(starts: Iterable[Place], moves: Sequence[Move], real: Callable[[Move], Move]) -> list[Arc]:
    """The moves in each phase of a flow that begins at `starts`; `real(move)` tells what a move does."""
    found: dict[Arc, None] = {}
    begun: dict[Phase, set[Layout]] = {}
    for layout, phase in starts:
        begun.setdefault(phase, set()).add(layout)
    for phase, layouts in begun.items():
        last = phase.next or phase
        found |= dict.fromkeys((move, last) for move in moves if _may_be_in(last, real(move)))
        if phase.next is not None:
            gathering = Gathering.ONCE if phase is Phase.ONCE else Gathering.KEEP
            able = [move for move in moves if can_lead(real(move), gathering)]
            found |= dict.fromkeys((move, phase) for move in _reached(layouts, able))
    return list(found)


def gathers_in_disguise(move: Move) -> bool:
    """Whether a weight's move could complete a gather by another name: zero-padded shards, S -> P, that are
    then summed."""
    return isinstance(move.placements[0], Partial)


def completes(move: Move) -> bool:
    """Whether a weight's move gathers it, by any name."""
    return gathers(move) or gathers_in_disguise(move)


def _may_be_in(phase: Phase, move: Move) -> bool:
    match phase:
        case Phase.AGAIN:
            return not gathers_in_disguise(move)
        case Phase.SETTLED:
            return not completes(move)
        case _:
            return True


def _reached(layouts: set[Layout], moves: Sequence[Move]) -> Iterator[Move]:
    """The moves that can follow each other from `layouts` on."""
    reached, left = set(layouts), list(moves)
    while ready := [move for move in left if move.source in reached]:
        yield from ready
        reached |= {move.target for move in ready}
        left = [move for move in left if move not in ready]
