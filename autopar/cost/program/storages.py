"""What is known of a step's storages: when each is made, who reads it, and who keeps it for backward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """Memory that backward reads: `maker` is the operator where it first occurs, `keepers`
    those of the operators that keep it, none if it is made again, `for_weights` of those that keep it between
    the halves of a split backward too. A stage that has its `maker` and reaches to the operator `until` keeps
    it on the host."""

    name: str  # a tensor that lies in it
    nbytes: int
    maker: int
    keepers: tuple[int, ...]
    for_weights: tuple[int, ...]
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Footing:
    """What operators hold, one by one: storages kept for backward, bytes `own` of each operator that
    nobody else sees, `own_for_weights` those of them that stay between the halves of a split backward, bytes
    `held` of gradients then, and the `working` bytes beside what is kept while it runs, forward or
    backward, and those of `forward` alone."""

    saved: tuple[SavedStorage, ...]
    own: tuple[int, ...]
    own_for_weights: tuple[int, ...]
    held: tuple[int, ...]
    working: tuple[int, ...]
    forward: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Life:
    """Memory that is not at rest: `maker` makes it, -1 if users pass it; `uses` are the places of the
    operators that read it, `keepers` of those whose backward does. What ranks exchanged is `held` when an
    operator is recomputed."""

    nbytes: int
    maker: int
    held: bool
    uses: tuple[int, ...]
    keepers: tuple[int, ...]
