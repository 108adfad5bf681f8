"""The grid of devices that one stage runs on.

Ranks lie on the grid in row-major order, so the last axis is the minor one: its neighbours
have consecutive ranks and the fastest links.

    Mesh((2, 3)):          axis b (minor)
                           0   1   2
        axis a (major)  0  r0  r1  r2
                        1  r3  r4  r5

Where devices are unlike, an axis may have *shares*: how many rows each of its ranks gets for those of the
others. "1:2x2" is a mesh of 2x2 whose second row gets twice as much as the first; "1*12:3*4" are twelve
ranks, then four that get thrice as much.

A *group key* names a set of process groups for every mesh that one world can hold: the axes,
an at sign, the shape. "b@2x3" are the groups {0,1,2} and {3,4,5}; "ab@2x3" is everybody.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby

from autopar.errors import InputError, show_value

LONGEST_AXIS = 1_000_000  # devices of an axis
MOST_SHARE = 1_000_000  # of rows, against the least of an axis
AXIS_NAMES = "abc"  # one to three axes; more have never paid on real clusters
_SHARES = r"(\d{1,9}(\*\d{1,9})?:)+\d{1,9}(\*\d{1,9})?"
MESH_PATTERN = rf"^(\d{{1,9}}|{_SHARES})(x(\d{{1,9}}|{_SHARES}))*$"  # as a mesh is written
_MESH = re.compile(rf"(-?\d{{1,9}}|{_SHARES})([xX](-?\d{{1,9}}|{_SHARES}))*")


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of `num_devices` devices with one to three axes, the major axis first.

    `shares` are those of each axis, () for an axis, or for all, whose ranks get equally many rows.
    """

    shape: tuple[int, ...]
    shares: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.shape) <= len(AXIS_NAMES) or not all(
            1 <= size <= LONGEST_AXIS for size in self.shape
        ):
            raise InputError(
                where="mesh",
                found="x".join(map(show_value, self.shape)) or "no axes",
                wanted=f"1 to {len(AXIS_NAMES)} axes of 1 to {LONGEST_AXIS:,} devices",
                remedy="write the mesh as 4, 2x2 or 2x2x2",
            )
        if self.shares:
            object.__setattr__(self, "shares", self._reduced_shares())

    @staticmethod
    def parse(text: str) -> Mesh:
        """Read a mesh from `4`, `2x2` or `2x2x2`."""
        if not _MESH.fullmatch(text):
            raise InputError(
                where="mesh",
                found=show_value(text),
                wanted="whole numbers joined by x, or in the place of one 1:2, shares of rows",
                remedy="write 2x2, or 1:2x2 where the second has twice the rows",
            )
        axes = [_read_axis(axis) for axis in text.lower().split("x")]
        return Mesh(tuple(size for size, _ in axes), tuple(shares for _, shares in axes))

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    @property
    def axes(self) -> tuple[int, ...]:
        """The indices of the axes, the major one first."""
        return tuple(range(len(self.shape)))

    @property
    def even(self) -> Mesh:
        """The mesh whose ranks get equally many rows."""
        return Mesh(self.shape) if self.shares else self

    def shares_of(self, axis: int) -> tuple[int, ...]:
        """The shares of an axis, 1 for each of its ranks where they get equally many rows."""
        return (self.shares[axis] if self.shares else ()) or (1,) * self.shape[axis]

    def __str__(self) -> str:
        shares = self.shares or ((),) * len(self.shape)
        return "x".join(map(_show_axis, self.shape, shares))

    def _reduced_shares(self) -> tuple[tuple[int, ...], ...]:
        """The shares in least terms, () for an axis whose ranks are alike, or for all; raises InputError."""
        fits = len(self.shares) == len(self.shape) and all(
            not shares or (len(shares) == size and all(1 <= share <= MOST_SHARE for share in shares))
            for size, shares in zip(self.shape, self.shares, strict=True)
        )
        if not fits:
            raise InputError(
                where="mesh",
                found=f"shares {show_value(self.shares)} of a mesh of {'x'.join(map(str, self.shape))}",
                wanted=f"for each axis none, or one for each of its ranks, from 1 to {MOST_SHARE:,}",
                remedy="write 1:2x2 for a mesh of 2x2 whose second row gets twice as much as its first",
            )
        reduced = tuple(_least_terms(shares) for shares in self.shares)
        return reduced if any(reduced) else ()

    def name(self, axis: int) -> str:
        return AXIS_NAMES[axis]

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Coordinate of `rank` on the grid, one index for each axis."""
        place: list[int] = []
        for size in reversed(self.shape):
            rank, index = divmod(rank, size)
            place.append(index)
        return tuple(reversed(place))

    def rank(self, coordinate: Iterable[int]) -> int:
        total = 0
        for size, index in zip(self.shape, coordinate, strict=True):
            total = total * size + index
        return total

    def key(self, axes: Iterable[int]) -> str:
        """The group key of `axes` (in major-minor order) on this mesh."""
        return "".join(AXIS_NAMES[axis] for axis in sorted(axes)) + "@" + "x".join(map(str, self.shape))

    def group(self, axes: Iterable[int], rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, in major-minor order."""
        chosen = sorted(axes)
        here = self.coordinate(rank)
        groups = [here]
        for axis in chosen:
            groups = [
                (*place[:axis], index, *place[axis + 1 :])
                for place in groups
                for index in range(self.shape[axis])
            ]
        return tuple(self.rank(place) for place in groups)

    def groups(self, axes: Iterable[int]) -> Iterator[tuple[int, ...]]:
        """Every group of ranks that differ only along `axes`, once."""
        axes = tuple(axes)
        for rank in range(self.num_devices):
            place = self.coordinate(rank)
            if not any(place[axis] for axis in axes):
                yield self.group(axes, rank)


def _least_terms(shares: tuple[int, ...]) -> tuple[int, ...]:
    """Shares without a common divisor; () if all are equal."""
    if len(set(shares)) < 2:
        return ()
    divisor = math.gcd(*shares)
    return tuple(share // divisor for share in shares)


def _show_axis(size: int, shares: tuple[int, ...]) -> str:
    runs = [(share, len(list(run))) for share, run in groupby(shares)]
    return ":".join(f"{share}*{count}" if count > 1 else str(share) for share, count in runs) or str(size)


def _read_axis(text: str) -> tuple[int, tuple[int, ...]]:
    """Size and shares of an axis."""
    if ":" not in text:
        return int(text), ()
    runs = [run.partition("*") for run in text.split(":")]
    if any(count and not int(count) for _, _, count in runs):
        return 0, ()  # which no axis may have
    if sum(int(count or 1) for _, _, count in runs) > LONGEST_AXIS:
        return LONGEST_AXIS + 1, ()  # which no axis may have
    shares = tuple(chain.from_iterable([int(share)] * int(count or 1) for share, _, count in runs))
    return len(shares), shares


def parse_key(key: str) -> tuple[Mesh, tuple[int, ...]]:
    """The mesh and the axes that a group key names."""
    names, _, shape = key.partition("@")
    return Mesh.parse(shape), tuple(AXIS_NAMES.index(name) for name in names)


@lru_cache(maxsize=4096)
def runs_of(shape: tuple[int, ...], axes: tuple[int, ...], length: int) -> int:
    """Most runs of `length` ranks, nodes say, that a group along `axes` of a mesh has ranks in."""
    import numpy as np  # here, so that a description of machines needs none

    runs = np.arange(math.prod(shape)).reshape(shape) // length
    size = math.prod(shape[axis] for axis in axes)
    groups = np.moveaxis(runs, axes, range(-len(axes), 0)).reshape(-1, size)
    return 1 + int((np.diff(groups) != 0).sum(axis=1).max())  # ranks of a group rise, and so do their runs


def factorisations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """All ordered products of `num_factors` factors >= 2, the smaller first factor first."""
    if num_factors == 1:
        yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            for rest in factorisations(number // first, num_factors - 1):
                yield (first, *rest)
