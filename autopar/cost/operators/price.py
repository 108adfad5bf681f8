"""What one operator costs under one strategy, and what else is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.core.graph import Call
from autopar.cost.operators.calls import OperatorCalls
from autopar.cost.operators.saved import SavedTensors


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of one operator under one strategy on one rank, forward and backward, for one micro-batch.

    `forward` is the part of `seconds` before the loss, `weights` the part of the backward pass that
    only gradients of weights need. `flops` are forward flops; `calls` the local calls, for measuring;
    `missing_seconds` the part of `compute` that isn't measured, `interpolated_seconds` what of it follows
    from other sizes; `saved` what stays in memory for backward.
    `recompute` are the forward seconds that recomputing in backward repeats: what ranks exchanged is kept.
    Sums of gradients may hide `behind` so many seconds, of which `late` ones may end late; `credit` is taken
    off for what hides.
    """

    compute: float
    communication: float
    missing_seconds: float
    flops: int
    calls: tuple[Call, ...]
    saved: SavedTensors
    tie: float = 0.0  # seconds that only break ties: of equally fast plans the one that keeps less
    forward: float = 0.0
    weights: float = 0.0
    recompute: float = 0.0
    behind: float = 0.0
    late: float = 0.0
    credit: float = 0.0
    interpolated_seconds: float = 0.0
    launches: int = 0  # each way, about

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.tie - self.credit

    @property
    def backward(self) -> float:
        return self.seconds - self.forward

    @property
    def hiding(self) -> tuple[float, float, float]:
        """Seconds behind which exchanges may hide, each for a credit of its own (`Prices.credits`)."""
        return self.behind, self.compute, self.late


@dataclass(frozen=True, slots=True)
class PartBytes:
    """Bytes of each tensor that a rank's program holds from the start for an operator, and operands read."""

    parts: Mapping[object, int]
    reads: frozenset[str]


@dataclass(slots=True)
class KnownOperator:
    """What is known of an operator under a strategy, each part once it was asked for; `calls` by the operands
    and results of a fused group's member that moves take and give."""

    price: Price | None = None
    calls: dict[tuple[tuple[int, ...], ...], OperatorCalls] = field(default_factory=dict)
