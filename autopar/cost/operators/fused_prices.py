"""Seconds of a group's members: what each moves of the group's traffic, by the local shapes of one rank.

    forward     reads + writes + what is saved of its own, sums over all twice, at the device's bandwidth
    backward    gradients of what it wrote, what is reread, gradients of what it read

A group is launched once each way, which its first member answers for. A view takes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.core.costs import DeviceModel, OperatorCost
from autopar.core.graph import TensorSpec
from autopar.cost.operators.fused_groups import OperatorTraffic, TrafficKind, is_recomputed


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a member moves, forward and backward."""

    forward: int
    backward: int


def saved_own_bytes(member: OperatorTraffic, own: int, operands: Sequence[TensorSpec]) -> int:
    """Bytes that a fused operator saves of the `own` bytes that it would save alone: none if backward
    recomputes them."""
    return 0 if is_recomputed(member.kind, own, operands[0].nbytes if operands else 0) else own


def traffic(
    member: OperatorTraffic, operands: Sequence[TensorSpec], results: Sequence[TensorSpec | None], own: int
) -> Traffic:
    """Traffic of a member with local `operands` and `results`, which by itself saves `own` bytes beside
    them."""
    if member.kind is TrafficKind.VIEW:
        return Traffic(0, 0)
    own = saved_own_bytes(member, own, operands)
    given = [result for result in results if result is not None]
    trains = any(result.requires_grad for result in given)
    written = [results[place] for place in member.writes]
    read = [operands[place] for place in member.reads]
    forward = sum(spec.nbytes for spec in read) + sum(spec.nbytes for spec in written if spec)
    if member.kind is TrafficKind.WHOLE:
        forward += operands[0].nbytes
    if not trains:
        return Traffic(forward, 0)
    arriving = sum(spec.nbytes for spec in written if spec and spec.requires_grad)
    reread = sum(operands[place].nbytes for place in member.reread_operands)
    reread += sum(spec.nbytes for place in member.reread_results if (spec := results[place]))
    leaving = sum(spec.nbytes for spec in read if spec.requires_grad)
    backward = arriving + reread + leaving + own
    if _sums_twice(member, operands):
        backward += operands[0].nbytes + max(spec.nbytes for spec in given)
    return Traffic(forward + own, backward)


def _sums_twice(member: OperatorTraffic, operands: Sequence[TensorSpec]) -> bool:
    """Whether backward has sums that end before, or beside, the gradient of the operand."""
    weighted = any(spec.requires_grad and spec.nbytes < operands[0].nbytes for spec in operands[1:])
    return member.kind is TrafficKind.WHOLE or (member.kind is TrafficKind.ROWS and weighted)


def fused_cost(member: OperatorTraffic, moved: Traffic, device: DeviceModel) -> OperatorCost:
    """The estimated seconds of a member."""
    forward, backward = (
        _seconds(nbytes, launches=member.leads, device=device) for nbytes in (moved.forward, moved.backward)
    )
    return OperatorCost(forward, backward if moved.backward else 0.0, measured=False)


def _seconds(nbytes: int, *, launches: bool, device: DeviceModel) -> float:
    """Seconds of a kernel with its launch, which a GPU overlaps with earlier kernels."""
    seconds, launch = nbytes / device.bandwidth, launches * device.launch_seconds
    return max(seconds, launch) if device.kernels else seconds + launch
