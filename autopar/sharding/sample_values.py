"""What is known of a tensor with regard to the samples of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from autopar.core.graph import Operator
from autopar.sharding.sorted_rows import Order, SortingRelation


class Role(Enum):
    """Role of a tensor with regard to the batch's samples."""

    WHOLE = "the same whatever the samples"
    FIXED = "as many rows as samples, which stay when fewer samples come"
    ROWS = "a row for each sample"
    SORTED = "rows of all samples, each of its own, in an order that depends on them"
    SUM = "a sum over samples"
    MEAN = "a mean over samples"
    BENT = "of all samples, and no sum or mean of them"
    MIXED = "rows that depend on other samples"


TAKEN = (Role.SUM, Role.MEAN, Role.BENT)


@dataclass(frozen=True, slots=True)
class Scale:
    """An operator that divides a sum over samples by what the inputs count to, or multiplies it.

    `count` is the tensor that says how much; None for a mean over labels, whose count is inside.
    """

    operator: str
    count: str | None
    multiplies: bool = False


@dataclass(frozen=True, slots=True)
class SampleValue:
    """Knowledge of a tensor: its role, the operator that took samples together, whether inputs alone make it,
    the scale that is still to be applied where its own is a part's, and its relation to sorted rows."""

    role: Role
    by: Operator | None = None
    given: bool = False
    scale: Scale | None = None
    sorted: SortingRelation | None = None

    @property
    def in_order(self) -> SortingRelation | None:
        """Relation to sorted rows; None if it has none to their order."""
        return None if self.sorted and self.sorted.order is Order.NOTHING else self.sorted
