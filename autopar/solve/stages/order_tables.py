"""Tables of stages in every order in which unlike devices may hold them: each kind's are made once.

kinds     fast            slow                      a table each, of every level of an assignment
orders    fast fast slow  |  slow fast fast         the same tables, on other ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from autopar.cluster import ClusterSpec
from autopar.core.costs import LinkLike
from autopar.core.offload import OffloadedTensor
from autopar.core.recompute import Segment
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.stages.intervals import Intervals, intervals

Remedies: TypeAlias = tuple[tuple[Segment, ...], tuple[OffloadedTensor, ...]]


@dataclass(frozen=True, slots=True)
class _KindTables:
    """A level's tables: on the slowest devices of all, and on each part of an unlike cluster."""

    slowest: Intervals
    of: Mapping[ClusterSpec, Intervals]


@dataclass(frozen=True, slots=True)
class OrderTables:
    """The tables of one assignment at some places, by what is recomputed and offloaded."""

    hop: LinkLike
    made: dict[tuple[Sequence[int], Remedies], _KindTables] = field(default_factory=dict)

    def at(self, priced: PricedProgram, places: Sequence[int]) -> Intervals:
        """The tables of a program, its ranks on the devices that its prices say."""
        ranks, program = priced.prices.ranks, priced.program
        key = places, (program.recompute, program.offload)
        if key not in self.made:
            table = intervals(priced, self.hop, places=places)
            self.made[key] = _KindTables(table, dict(zip(ranks, table.of_ranks, strict=True)))
        found = self.made[key]
        of_ranks = tuple(found.of[part] for part in ranks)
        return replace(found.slowest, of_ranks=of_ranks, room=priced.prices.room)
