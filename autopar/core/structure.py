"""Which tensors a program is made for the values of: edges of a graph, masks made of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Structure:
    """Tensors of a call and its model that are structure: by position among the call's, by name."""

    users: frozenset[int] = frozenset()
    buffers: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.users or self.buffers)

    def __or__(self, other: Structure) -> Structure:
        return Structure(self.users | other.users, self.buffers | other.buffers)

    def __le__(self, other: Structure) -> bool:
        return self.users <= other.users and self.buffers <= other.buffers
