"""The kinds of parallelism inside a stage, and how a user forces them or pins layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TypeAlias


class Parallelism(Enum):
    """The kinds of parallelism inside a stage, by what is sharded; model is filter or channel, as is best."""

    BATCH = "batch"
    DOMAIN = "domain"
    FILTER = "filter"
    CHANNEL = "channel"
    EXPERTS = "experts"
    MODEL = "model"

    def has(self, kind: Parallelism | None) -> bool:
        """Whether an option of that kind is one of this kind."""
        return kind is self or (
            self is Parallelism.MODEL and kind in (Parallelism.FILTER, Parallelism.CHANNEL)
        )


# Each shards one kind of factor, which most models have; experts are a mixture's alone.
PURE = tuple(kind for kind in Parallelism if kind not in (Parallelism.EXPERTS, Parallelism.MODEL))

Force: TypeAlias = Parallelism | tuple[Parallelism, ...]  # the kind on all axes, or one for each axis
# A layer's or an operator's name -> a factor, or None, for each axis.
Pins: TypeAlias = Mapping[str, Sequence[str | None]]


def name_of(force: Force) -> str:
    """Name a force as the command line writes it: `batch`, or `batch+filter` for two axes."""
    return force.value if isinstance(force, Parallelism) else "+".join(kind.value for kind in force)
