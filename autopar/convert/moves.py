"""The table of moves: what each does to the value and to its gradient.

| from -> to  | forward        | backward       | known as                                   |
|-------------|----------------|----------------|--------------------------------------------|
| P -> R      | all-reduce     | -              | Megatron's g                               |
| R -> B      | -              | all-reduce     | Megatron's f; gradient sync on a weight    |
| P -> B      | all-reduce     | all-reduce     |                                            |
| S -> R      | all-gather     | slice          |                                            |
| S -> B      | all-gather     | reduce-scatter | FSDP on a weight                           |
| P -> S      | reduce-scatter | all-gather     | sequence parallelism                       |
| R -> S      | slice          | all-gather     |                                            |
| B -> S      | slice          | zero-pad       | free                                       |
| S -> P      | zero-pad       | slice          | free                                       |
| R -> P      | keep on one    | -              | free; how a bias joins a partial sum       |
| B -> R      | -              | keep on one    | free                                       |
| B -> P      | keep on one    | keep on one    | free                                       |
| S(i)->S(j)  | all-to-all     | all-to-all     | Ulysses; batch <-> domain                  |

**Several axes.** P -> R, R -> B and P -> B on several axes at once are one sum over their joint group, which
takes less than one sum after the other. Two axes may shard one dim, the major one first. A move on an axis is
legal only if no axis minor to it shards the atom that it splits or joins; otherwise the part would not be one
block of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from autopar.core.move import Move
from autopar.core.placement import B, Broadcast, Layout, P, Partial, Placement, R, Replicate, Shard


class MoveAction(Enum):
    """Action of ranks on a tensor; the first four communicate."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    SLICE = "slice"  # a copy of the rank's part
    COPY = "copy"  # of all, or of a part among zeros
    NOTHING = "-"


@dataclass(frozen=True, slots=True)
class MoveEffect:
    """A row of the table; `name` is the registered operator."""

    name: str
    forward: MoveAction
    backward: MoveAction


_A = MoveAction
_TABLE: dict[tuple[type, type], MoveEffect] = {
    (Partial, Replicate): MoveEffect("p_to_r", _A.ALL_REDUCE, _A.NOTHING),
    (Replicate, Broadcast): MoveEffect("r_to_b", _A.NOTHING, _A.ALL_REDUCE),
    (Partial, Broadcast): MoveEffect("p_to_b", _A.ALL_REDUCE, _A.ALL_REDUCE),
    (Shard, Replicate): MoveEffect("s_to_r", _A.ALL_GATHER, _A.SLICE),
    (Shard, Broadcast): MoveEffect("s_to_b", _A.ALL_GATHER, _A.REDUCE_SCATTER),
    (Partial, Shard): MoveEffect("p_to_s", _A.REDUCE_SCATTER, _A.ALL_GATHER),
    (Replicate, Shard): MoveEffect("r_to_s", _A.SLICE, _A.ALL_GATHER),
    (Broadcast, Shard): MoveEffect("b_to_s", _A.SLICE, _A.COPY),
    (Shard, Partial): MoveEffect("s_to_p", _A.COPY, _A.SLICE),
    (Replicate, Partial): MoveEffect("r_to_p", _A.COPY, _A.NOTHING),
    (Broadcast, Replicate): MoveEffect("b_to_r", _A.NOTHING, _A.COPY),
    (Broadcast, Partial): MoveEffect("b_to_p", _A.COPY, _A.COPY),
    (Shard, Shard): MoveEffect("s_to_s", _A.ALL_TO_ALL, _A.ALL_TO_ALL),
}


JOINT = ((P, R), (R, B), (P, B))  # sums, of values or of gradients: on several axes they may be one
EFFECTS = {each.name: each for each in _TABLE.values()}


def effect(move: Move) -> MoveEffect:
    """The table's row for `move`."""
    return effect_of(*move.placements)


def effect_of(source: Placement, target: Placement) -> MoveEffect:
    """The table's row for a change of placement."""
    return _TABLE[type(source), type(target)]


def gathers(move: Move) -> bool:
    """Whether `move` is an all-gather."""
    return effect(move).forward is MoveAction.ALL_GATHER


def sums_gradients(move: Move) -> bool:
    """Whether backward of `move` sums the ranks' gradients, and forward no values."""
    return effect(move).name in ("r_to_b", "s_to_b")


def exists(source: Placement, target: Placement) -> bool:
    """Whether the table has a row for this change of placement."""
    if isinstance(source, Shard) and isinstance(target, Shard):
        return source.dim != target.dim
    return (type(source), type(target)) in _TABLE


def legal(move: Move) -> bool:
    """Whether a move leaves alone all atoms that axes minor to the move's shard."""
    touched = {placement for placement in move.placements if isinstance(placement, Shard)}
    return touched.isdisjoint(move.source[move.axis + 1 :])


def moves(layout: Layout, placements: tuple[tuple[Placement, ...], ...]) -> Iterator[Move]:
    """The legal moves from `layout`, given the placements of interest for each axis."""
    for axis, choices in enumerate(placements):
        for target in choices:
            if exists(layout[axis], target):
                move = Move(axis, layout, (*layout[:axis], target, *layout[axis + 1 :]))
                if legal(move):
                    yield move
    yield from _joint_moves(layout, placements)


def _joint_moves(layout: Layout, placements: tuple[tuple[Placement, ...], ...]) -> Iterator[Move]:
    """The sums over several axes at once."""
    for source, target in JOINT:
        able = [axis for axis, each in enumerate(layout) if each == source and target in placements[axis]]
        for axes in several_of(able):
            after = tuple(target if axis in axes else each for axis, each in enumerate(layout))
            yield Move(axes[0], layout, after)


def several_of(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Each choice of at least two of some axes."""
    return itertools.chain.from_iterable(
        itertools.combinations(axes, count) for count in range(2, len(axes) + 1)
    )


def canonical(layout: Layout, *, differentiable: bool) -> Layout:
    """Without a gradient B is R."""
    return layout if differentiable else tuple(R if item == B else item for item in layout)
