"""How a tensor lies on a mesh: its value and its gradient together.

| placement      | value                    | gradient                 | pairing over ranks |
|----------------|--------------------------|--------------------------|--------------------|
| Shard(dim)   S | split on dim             | split on dim             | sum                |
| Replicate    R | same everywhere          | same everywhere          | mean               |
| Partial      P | to be summed on the axis | same everywhere          | sum                |
| Broadcast    B | same everywhere          | to be summed on the axis | sum                |

The set is closed under transposition: the gradient of P is laid like the value of B, and the
other way round. A *layout* is one placement for each mesh axis, the major axis first.

A dim may be a product of *atoms* (a fused qkv projection is 3 x heads x head size); `Shard`
says which atom is split, 0 being the outermost. A dim that nobody views otherwise is one atom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, TypeAlias

_SHARDS: dict[tuple[int, int], Shard] = {}
_OTHERS: dict[type, Any] = {}


class _Only:
    """A class of one value, of which tables are keyed by thousands: it is compared by identity."""

    __slots__ = ()

    def __new__(cls) -> Self:
        if cls not in _OTHERS:
            _OTHERS[cls] = object.__new__(cls)
        only: Self = _OTHERS[cls]
        return only


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Split on atom number `atom` of `dim`; equal ones are one object."""

    dim: int
    atom: int = 0

    def __new__(cls, dim: int, atom: int = 0) -> Shard:
        found = _SHARDS.get((dim, atom))
        if found is None:
            found = _SHARDS.setdefault((dim, atom), object.__new__(cls))
        return found

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        return Shard, (self.dim, self.atom)

    def __hash__(self) -> int:
        return hash((self.dim, self.atom))

    def __lt__(self, other: Shard) -> bool:
        return (self.dim, self.atom) < (other.dim, other.atom)

    def __str__(self) -> str:
        return f"S({self.dim})" if not self.atom else f"S({self.dim}.{self.atom})"


@dataclass(frozen=True, slots=True, eq=False)
class Replicate(_Only):
    """Every rank has the same value and the same gradient."""

    def __hash__(self) -> int:
        return 1

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, eq=False)
class Partial(_Only):
    """Values that must be summed over the axis; the gradient is the same on every rank."""

    def __hash__(self) -> int:
        return 2

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast(_Only):
    """Every rank has the same value; gradients must be summed over the axis."""

    def __hash__(self) -> int:
        return 3

    def __str__(self) -> str:
        return "B"


Placement: TypeAlias = Shard | Replicate | Partial | Broadcast
Layout: TypeAlias = tuple[Placement, ...]

R, P, B = Replicate(), Partial(), Broadcast()


def replicated(num_axes: int) -> Layout:
    """The layout of a tensor that nothing shards."""
    return (R,) * num_axes


def show(layout: Layout) -> str:
    """A layout as the plan prints it: `S(0)·R`."""
    return "·".join(map(str, layout))
