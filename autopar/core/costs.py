"""What operators and collectives cost, and the devices and links that prices come from.

Times are seconds and sizes bytes throughout. A cost that is NaN, infinite or negative is refused
where it is made, so that none ever reaches the solver.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from autopar.errors import CostMissingError, InputError, show_value

if TYPE_CHECKING:
    import torch

    from autopar.core.graph import TensorSpec


# By how much seconds of operators may be wrong, relatively.
MEASURED_ERROR = 0.03  # less is noise
# From those of other sizes. Of 158 operators of ResNet-50, each left out and interpolated from the others on
# a loaded machine, single ones were off by 9 % in large batches and more in small ones, their sums by 4 %.
INTERPOLATED_ERROR = 0.06
ESTIMATED_ERROR = 0.1  # rooflines know no kernels, and no host that can't keep up


class Collective(Enum):
    """The collectives that are priced and measured; values are their names in the database."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"


class LinkLike(Protocol):
    """Anything with a latency (seconds per message) and a bandwidth (bytes per second)."""

    @property
    def latency(self) -> float: ...

    @property
    def bandwidth(self) -> float: ...

    def seconds(self, nbytes: float) -> float:
        """Seconds of one message."""


def refuse_bad(where: str, **costs: object) -> None:
    """Raise InputError naming every cost that isn't a finite number of at least 0."""
    bad = {
        name: cost
        for name, cost in costs.items()
        if not isinstance(cost, (int, float)) or not 0 <= cost <= sys.float_info.max
    }
    if bad:
        raise InputError(
            where=where,
            found=", ".join(f"{name} = {show_value(cost)}" for name, cost in bad.items()),
            wanted="finite costs of at least 0",
            remedy="measure again",
        )


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Seconds of one local operator call; `measured` is false for an estimate, which may be `interpolated`:
    made of what the same operator took on other sizes. Of what is measured `noise` is the standard error and
    `scatter` how far half of the laps lie from the median, both relative."""

    forward_seconds: float
    backward_seconds: float
    measured: bool
    interpolated: bool = False
    noise: float = 0.0
    scatter: float = 0.0

    def __post_init__(self) -> None:
        refuse_bad("operator cost", forward=self.forward_seconds, backward=self.backward_seconds)


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Seconds of one collective; `measured` is false for a closed form."""

    seconds: float
    measured: bool

    def __post_init__(self) -> None:
        refuse_bad("collective cost", seconds=self.seconds)


@dataclass(frozen=True, slots=True)
class SavedByCall:
    """Storages that one call saves for its backward, each named once.

    `operands` and `results` are positions; `extra_bytes` are the call's own tensors (masks, statistics,
    indices) that nobody else sees.
    """

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    extra_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Results and saved storages of a call, known without running it.

    `results` holds None for a result that is no tensor; `aliases` holds for each result the operand whose
    storage it shares (a view), or None if the storage is its own.
    """

    results: tuple[TensorSpec | None, ...]
    aliases: tuple[int | None, ...]
    saved: SavedByCall


@dataclass(frozen=True, slots=True)
class Slope:
    """The gradient of an operand: `nbytes` of its own, or in the storage of the gradient of result
    `alias`."""

    nbytes: int
    alias: int | None = None


@dataclass(frozen=True, slots=True)
class Passes:
    """A call forward and backward: the most bytes of new storages at once, in either, and the gradients of
    its operands in argument order, None where none is wanted."""

    forward_bytes: int
    backward_bytes: int
    slopes: tuple[Slope | None, ...]


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Bytes of an optimizer's state: `ratio` for each byte of a weight that learns, and `fixed` ones for each
    weight, such as a count of steps."""

    ratio: float
    fixed: int = 0


# Rows of the fullest rank of a mixture's experts, in even shares, where nobody says and the example's routers
# didn't run: an assumption that plans state.
IMBALANCE = 1.25
ADAM = OptimizerState(2.0, 4)
OPTIMIZERS: Mapping[str, OptimizerState] = {
    "sgd": OptimizerState(0.0),
    "sgd-momentum": OptimizerState(1.0),
    "adam": ADAM,
    "adamw": ADAM,
}


def named_optimizer(name: str) -> OptimizerState:
    """State sizes of an optimizer of `OPTIMIZERS`; raises InputError for another name."""
    if name not in OPTIMIZERS:
        raise wrong_optimizer(show_value(name), ", ".join(OPTIMIZERS))
    return OPTIMIZERS[name]


def wrong_optimizer(found: str, wanted: str) -> InputError:
    """The error for an optimizer whose state has no known size."""
    return InputError(
        where="optimizer",
        found=found,
        wanted=wanted,
        remedy=f"name the one of {', '.join(OPTIMIZERS)} whose state is as large as yours, or larger",
    )


@dataclass(frozen=True, slots=True)
class Kernels:
    """Rates of a GPU's kernels, beside its roofline: its multiprocessors, the part of a product's rate that
    fused attention reaches forward and backward, and the part of a backward pass behind which gradient sums
    may hide. Estimates, all but the first. `tf32` is the flop/s of convolutions in float32 on tensor cores,
    which torch allows unless told otherwise; 0 without."""

    units: int
    attention: float
    attention_backward: float
    overlap: float
    tf32: float = 0.0

    def __post_init__(self) -> None:
        parts = {"attention": self.attention, "attention_backward": self.attention_backward}
        refuse_bad("kernels of a GPU", overlap=self.overlap, **parts)
        if self.units < 1 or not min(parts.values()) > 0 or self.overlap > 1:
            raise InputError(
                where="kernels of a GPU",
                found=str(self),
                wanted="units and parts above 0, and an overlap of at most 1",
                remedy="measure again",
            )


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A roofline: what a device reaches on large matrix products and on plain memory traffic.

    `kind` is the torch device type; `flops` are (dtype, flop/s) pairs; `bandwidth` is bytes read
    plus bytes written per second; `launch_seconds` is the least that any operator takes; `kernels` says how
    a known GPU runs them, None where products of all sizes have one rate.
    """

    name: str
    kind: str
    flops: tuple[tuple[torch.dtype, float], ...]
    bandwidth: float
    launch_seconds: float
    kernels: Kernels | None = None

    def __post_init__(self) -> None:
        rates = {str(dtype).removeprefix("torch."): rate for dtype, rate in self.flops}
        where = f"device {self.name}"
        refuse_bad(where, bandwidth=self.bandwidth, launch_seconds=self.launch_seconds, **rates)
        if not min(self.bandwidth, *rates.values()) > 0:
            raise InputError(where=where, found="a rate of 0", wanted="rates above 0", remedy="measure again")

    def rate(self, dtype: torch.dtype) -> float:
        """Flop/s of matrix products in `dtype`."""
        for known, rate in self.flops:
            if known == dtype:
                return rate
        raise CostMissingError(
            where=f"device {self.name}",
            found=f"no flop rate for {dtype}",
            wanted="one of " + ", ".join(str(known) for known, _ in self.flops),
            remedy="profile the model on the device",
        )
