"""All moves between the layouts of interest of one tensor, as arrays: what its flows may take.

    placements   axis 0: R P B S(0)    axis 1: R P B S(0) S(1)        20 layouts, numbered row by row
    a move       from one number to another that differs in one digit, or alike in several: a joint sum

Without names (`alike`) layouts are multisets of placements on axes that are alike, so a move stands for
all that some naming allows, and only the numbers of layouts in one fixed order are used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.convert.moves import JOINT, MoveAction, MoveEffect, effect_of, exists, several_of
from autopar.core.move import Move
from autopar.core.placement import Layout, Partial, Placement, Shard

Numbers: TypeAlias = NDArray[np.intp]
Flags: TypeAlias = NDArray[np.bool_]
Alike: TypeAlias = tuple[tuple[int, ...], ...]  # groups of axes whose names are forgotten
Placements: TypeAlias = tuple[tuple[Placement, ...], ...]  # of interest, on each axis
Seconds: TypeAlias = NDArray[np.float64]
MOST_UNPRICED = 256  # networks whose moves are remembered
MOST_ASKED = 64  # answers about the moves of one, whatever they take


@dataclass(frozen=True, slots=True)
class PlacementChange:
    """A change of placement on an axis, or the same on several."""

    axes: tuple[int, ...]
    source: Placement
    target: Placement

    @property
    def effect(self) -> MoveEffect:
        return effect_of(self.source, self.target)


@dataclass(frozen=True, slots=True)
class MoveGroups:
    """Moves in groups, and the layouts from which they come; each group leads to one of `ends`, and begins
    with move number `first`."""

    moves: Numbers
    begins: Numbers
    ends: Numbers
    first: Numbers


@dataclass(frozen=True, slots=True)
class Network:
    """Layouts and the moves between them, each from number `source` to number `target`. Each has its seconds
    and what the forward pass has of them; flags say which end in a shard, begin in a partial sum, are
    `r_to_b` (`sums`), and are all-gathers."""

    layouts: tuple[Layout, ...]
    place: dict[Layout, int]
    source: Numbers
    target: Numbers
    axis: Numbers
    seconds: Seconds
    forward: Seconds
    into_shard: Flags
    from_partial: Flags
    sums: Flags
    gathers: Flags
    leaving: tuple[list[int], ...]  # the numbers of the moves from each layout
    targets: list[int]  # the same as `target`
    asked: dict[object, Any]  # what was found of its moves, whatever they take

    def move(self, number: int) -> Move:
        return Move(
            int(self.axis[number]),
            self.layouts[self.source[number]],
            self.layouts[self.target[number]],
        )

    def scaled(self, shown: float) -> Network:
        """The network in which of `sums` so much counts as is `shown`."""
        return replace(self, seconds=np.where(self.sums, shown * self.seconds, self.seconds))

    def flags(self, layouts: Sequence[Layout]) -> Flags:
        """Flags of the network's layouts: True for those given."""
        found = np.zeros(len(self.layouts), dtype=np.bool_)
        found[[self.place[layout] for layout in layouts]] = True
        return found

    def between(self, sources: Flags, needs: Flags, allowed: Flags) -> Flags:
        """The allowed moves that lie on ways from some source to some need."""
        key = "between", sources.tobytes(), needs.tobytes(), allowed.tobytes()
        if key not in self.asked:
            ahead = _reach(sources, self.source, self.target, allowed)
            behind = _reach(needs, self.target, self.source, allowed & ahead[self.source])
            self._note(key, allowed & ahead[self.source] & behind[self.target])
        found: Flags = self.asked[key]
        return found

    def grouped(self, allowed: Flags, *, backward: bool) -> MoveGroups:
        """The allowed moves by the layout to which they lead, or `backward` from which."""
        key = "grouped", backward, allowed.tobytes()
        if key not in self.asked:
            near, far = (self.target, self.source) if backward else (self.source, self.target)
            moves = np.flatnonzero(allowed)
            moves = moves[np.argsort(far[moves], kind="stable")]
            self._note(key, MoveGroups(moves, near[moves], *np.unique(far[moves], return_index=True)))
        found: MoveGroups = self.asked[key]
        return found

    def _note(self, key: object, found: object) -> None:
        """Remember an answer, beside the latest others."""
        while len(self.asked) >= MOST_ASKED:
            del self.asked[next(iter(self.asked))]
        self.asked[key] = found

    def following(self, sources: Flags, allowed: Flags) -> Flags:
        """The allowed moves that can follow each other from a source on."""
        return allowed & _reach(sources, self.source, self.target, allowed)[self.source]


def _reach(begin: Flags, source: Numbers, target: Numbers, allowed: Flags) -> Flags:
    reached, count = begin.copy(), -1
    source, target = source[allowed], target[allowed]
    while count != (count := int(np.count_nonzero(reached))):
        reached[target[reached[source]]] = True
    return reached


def priced(unpriced: UnpricedNetwork, seconds: Seconds, forward: Seconds) -> Network:
    """The network with what its moves take, all of it and of that the forward pass."""
    return Network(
        layouts=unpriced.layouts,
        place=unpriced.place,
        source=unpriced.source,
        target=unpriced.target,
        axis=unpriced.axis,
        seconds=seconds,
        forward=forward,
        into_shard=unpriced.into_shard,
        from_partial=unpriced.from_partial,
        sums=unpriced.sums,
        gathers=unpriced.gathers,
        leaving=unpriced.leaving,
        targets=unpriced.targets,
        asked=unpriced.asked,
    )


@dataclass(frozen=True, slots=True)
class UnpricedNetwork:
    """A network without its seconds: `numbers` says which of all layouts it has, `kind` for each move which
    of the `kinds` of changes it is, by effect and axis."""

    layouts: tuple[Layout, ...]
    numbers: Numbers
    place: dict[Layout, int]
    kinds: tuple[PlacementChange, ...]
    kind: Numbers
    source: Numbers
    target: Numbers
    axis: Numbers
    into_shard: Flags
    from_partial: Flags
    sums: Flags
    gathers: Flags
    leaving: tuple[list[int], ...]
    targets: list[int]
    asked: dict[object, Any] = field(default_factory=dict)


@lru_cache(maxsize=MOST_UNPRICED)
def paths(placements: Placements, alike: Alike, good: tuple[bool, ...]) -> UnpricedNetwork:
    """The moves between all layouts of `placements` that are `good`; tensors of other sizes share them."""
    return _Builder(placements, alike).build(good)


class _Builder:
    """Layouts by their digits; `slots` has, for each number, that of its fixed order among axes alike."""

    def __init__(self, placements: Placements, alike: Alike) -> None:
        self.placements, self.alike = placements, alike
        self.axes = range(len(placements))
        self.group = {axis: axes for axes in alike for axis in axes}
        self.sizes = tuple(map(len, placements))
        self.digits = np.indices(self.sizes).reshape(len(placements), -1)  # [axis, number]
        self.count = self.digits.shape[1]

    def build(self, legal: Sequence[bool]) -> UnpricedNetwork:
        layouts = list(itertools.product(*self.placements))
        ordered = self.ordered()
        good = np.array(legal) & (ordered == np.arange(self.count))
        kept = np.flatnonzero(good)
        number = np.full(self.count, -1)
        number[kept] = np.arange(len(kept))
        own = tuple(layouts[index] for index in kept)
        found = []
        for axis in self.axes:
            for source, target in itertools.permutations(self.placements[axis], 2):
                if exists(source, target):
                    change = PlacementChange((axis,), source, target)
                    found.append((change, *self.ends(change, kept, ordered, number)))
        for change in self.joint():
            found.append((change, *self.ends(change, kept, ordered, number)))
        return self.unpriced(own, kept, tuple(found))

    def joint(self) -> Iterator[PlacementChange]:
        """The sums over several axes."""
        for source, target in JOINT:
            able = [axis for axis in self.axes if {source, target} <= set(self.placements[axis])]
            yield from (PlacementChange(axes, source, target) for axes in several_of(able))

    def ends(
        self, change: PlacementChange, kept: Numbers, ordered: Numbers, number: Numbers
    ) -> tuple[Numbers, Numbers]:
        """The layouts from which a change is made, and those to which it leads."""
        begin, shift = kept, 0
        for axis in change.axes:
            old, new = map(self.placements[axis].index, (change.source, change.target))
            begin = begin[self.digits[axis, begin] == old]
            shift += (new - old) * self.stride(axis)
        begin = begin[~self.blocked(begin, change)]
        end = number[ordered[begin + shift]]
        return number[begin[end >= 0]], end[end >= 0]

    def unpriced(
        self,
        layouts: tuple[Layout, ...],
        numbers: Numbers,
        steps: tuple[tuple[PlacementChange, Numbers, Numbers], ...],
    ) -> UnpricedNetwork:
        lengths = [len(start) for _, start, _ in steps]
        source = np.concatenate([start for _, start, _ in steps])
        target = np.concatenate([end for _, _, end in steps])
        first = np.arange(len(source))
        if self.alike:  # on axes alike a move has a twin on each
            _, first = np.unique(source * len(layouts) + target, return_index=True)

        def of(ask: Callable[[PlacementChange], Any]) -> NDArray[Any]:
            return np.repeat([ask(change) for change, _, _ in steps], lengths)[first]

        kinds: dict[tuple[str, tuple[int, ...]], tuple[int, PlacementChange]] = {}
        for change, _, _ in steps:
            kinds.setdefault((change.effect.name, change.axes), (len(kinds), change))
        return UnpricedNetwork(
            layouts,
            numbers,
            {layout: index for index, layout in enumerate(layouts)},
            tuple(change for _, change in kinds.values()),
            of(lambda change: kinds[change.effect.name, change.axes][0]),
            source[first],
            target[first],
            of(lambda change: change.axes[0]),
            of(lambda change: isinstance(change.target, Shard)),
            of(lambda change: isinstance(change.source, Partial)),
            of(lambda change: change.effect.name == "r_to_b"),
            of(lambda change: change.effect.forward is MoveAction.ALL_GATHER),
            _leaving(source[first], len(layouts)),
            target[first].tolist(),
        )

    def stride(self, axis: int) -> int:
        return int(np.prod(self.sizes[axis + 1 :], dtype=np.intp))

    def ordered(self) -> Numbers:
        """Number of each layout with alike axes in order, shards first; a layout in order maps to itself."""
        digits = self.digits.copy()
        for axes in self.alike:
            assert len({self.placements[axis] for axis in axes}) == 1
            choices = self.placements[axes[0]]
            rank = np.argsort(sorted(range(len(choices)), key=lambda each: order(choices[each])))
            back = np.argsort(rank)
            digits[list(axes)] = back[np.sort(rank[digits[list(axes)]], axis=0)]
        return np.asarray(np.ravel_multi_index(tuple(digits), self.sizes), dtype=np.intp)

    def blocked(self, numbers: Numbers, change: PlacementChange) -> Flags:
        """Whether a change splits or joins an atom that a minor axis shards. Axes that are alike are called
        by any name."""
        found = np.zeros(len(numbers), dtype=np.bool_)
        own = self.group.get(change.axes[0], change.axes)
        for shard in {change.source, change.target}:
            if not isinstance(shard, Shard):
                continue
            for axes in (*self.alike, *((axis,) for axis in self.axes if axis not in self.group)):
                if axes == own:
                    continue
                sharding = sum(
                    self.digits[axis, numbers] == self.placements[axis].index(shard)
                    for axis in axes
                    if shard in self.placements[axis]
                )
                # Some of them must be minor, even if as many as can be are called major.
                found |= sharding > sum(axis < max(own) for axis in axes)
        return found


def _leaving(source: Numbers, count: int) -> tuple[list[int], ...]:
    """For each of `count` layouts the moves from it, in their order."""
    moves = np.argsort(source, kind="stable")
    bounds = np.searchsorted(source[moves], np.arange(1, count))
    return tuple(each.tolist() for each in np.split(moves, bounds))


def order(item: Placement) -> tuple[int, str]:
    """Among axes alike shards come first."""
    return (0 if isinstance(item, Shard) else 1), str(item)


def unnamed(layout: Layout, alike: Alike) -> Layout:
    """`layout` in an order that forgets which of the axes alike is which, shards first."""
    placed = list(layout)
    for axes in alike:
        items = sorted((placed[axis] for axis in axes), key=order)
        for axis, item in zip(axes, items, strict=True):
            placed[axis] = item
    return tuple(placed)
