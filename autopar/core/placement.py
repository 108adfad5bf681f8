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
from typing import TypeAlias


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Split on atom number `atom` of `dim`."""

    dim: int
    atom: int = 0

    def __str__(self) -> str:
        return f"S({self.dim})" if not self.atom else f"S({self.dim}.{self.atom})"


@dataclass(frozen=True, slots=True, order=True)
class Replicate:
    """Every rank has the same value and the same gradient."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, order=True)
class Partial:
    """Values that must be summed over the axis; the gradient is the same on every rank."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, slots=True, order=True)
class Broadcast:
    """Every rank has the same value; gradients must be summed over the axis."""

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
