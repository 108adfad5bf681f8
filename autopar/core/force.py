"""What a user forces: a kind of parallelism on each axis, or factors of single layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum


class Parallelism(Enum):
    """The kinds of parallelism inside a stage, by what is sharded."""

    BATCH = "batch"
    DOMAIN = "domain"
    FILTER = "filter"
    CHANNEL = "channel"


Force = Parallelism | tuple[Parallelism, ...]  # the kind on all axes, or one for each axis


def name_of(force: Force) -> str:
    """As the command line writes it: `batch`, or `batch+filter` for two axes."""
    return force.value if isinstance(force, Parallelism) else "+".join(kind.value for kind in force)


Pins = Mapping[str, Sequence[str | None]]  # layer or operator name -> a factor, or None, for each axis
