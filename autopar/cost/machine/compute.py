"""Seconds of an operator: measured, or by a roofline where no measurement is at hand.

    seconds = launch + max(flops / rate(dtype), bytes moved / bandwidth)

    forward    reads the operands, writes the results; a view moves nothing
    backward   reads the results' gradients and what was saved, writes the operands' gradients;
               a product launches one kernel for each of these

On known GPUs products take as long as their tiles (kernels.py), launches go on while kernels run, so that
an operator takes the larger of the two, and views take nothing. Bytes that caches save, and elsewhere the
inefficiency of small or thin products, are not in it: the answer is an estimate and marked so.
Source: Williams, Waterman and Patterson, Roofline, 2009.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.core.costs import DeviceModel, Footprint, OperatorCost
from autopar.core.graph import Call, TensorSpec, may_learn
from autopar.core.operator_facts import facts_of
from autopar.core.work import Flops
from autopar.cost.machine.flops import sized, training_flops
from autopar.cost.machine.kernels import rate_of, work_seconds
from autopar.runtime.compiled.fused_kernel import FUSED
from costdb import operands
from costdb.footprint import footprint, saved_bytes
from costdb.measurement import Measurement

# Of a compiled function that is called by itself, forward and backward, what a whole program pays once: one
# of four numbers took 54 and 40 us where a launch took 1.9.
CALL_LAUNCHES = (28, 21)

_KNOWN: dict[tuple[DeviceModel, str], OperatorCost] = {}


def cost(call: Call, device: DeviceModel, measured: Mapping[str, Measurement]) -> OperatorCost:
    """The measured cost of `call` if there is one (by key, as the database gives them), else the
    estimate. A GPU was measured without the host's launches."""
    found = measured.get(call.key())
    if found is None:
        return estimate(call, device)
    forward, backward = found.forward_seconds, found.backward_seconds
    if device.kind == "cpu" and call.target is FUSED:
        around = [count * device.launch_seconds for count in CALL_LAUNCHES]
        forward, backward = forward - min(around[0], forward / 2), backward - min(around[1], backward / 2)
    if device.kind != "cpu":
        guess, launch = estimate(call, device), device.launch_seconds
        forward = max(forward, launch) if guess.forward_seconds else 0.0
        backward = max(backward, launch) if guess.backward_seconds else 0.0
    return OperatorCost(forward, backward, measured=True, noise=found.noise, scatter=found.spread / 2)


def estimate(call: Call, device: DeviceModel) -> OperatorCost:
    """The estimated cost of `call` on one device; remembered by device and key.

    Raises CostMissingError if the operator refuses its operands, or the device has no rate for a
    product's dtype.
    """
    known = device, call.key()
    if call.target is FUSED:
        return _of_group(call, device)
    if known not in _KNOWN:
        found, work = footprint(call, device.kind), training_flops(call)
        _KNOWN[known] = OperatorCost(
            forward_seconds=_forward(call, found, work, device),
            backward_seconds=_backward(call, found, work, device),
            measured=False,
        )
    return _KNOWN[known]


def _of_group(call: Call, device: DeviceModel) -> OperatorCost:
    """Estimate a compiled group by the bytes that it moves."""
    _, *moved, _ = call.args
    forward, backward = (_launched(1, nbytes / device.bandwidth, device) for nbytes in moved)
    return OperatorCost(forward, backward if moved[1] else 0.0, measured=False)


def _forward(call: Call, found: Footprint, work: Flops, device: DeviceModel) -> float:
    moved = forward_bytes(call, found)
    return _launched(1, _roof(call, work.forward, moved, device), device)


def _backward(call: Call, found: Footprint, work: Flops, device: DeviceModel) -> float:
    wanted = [spec for spec in operands.specs(call) if spec.requires_grad]
    if not (wanted and any(result and result.requires_grad for result in found.results)):
        return 0.0
    launches, moved = len(wanted) if work.backward else 1, backward_bytes(call, found)
    return _launched(launches, _roof(call, work.backward, moved, device, backward=True), device)


def _launched(launches: int, seconds: float, device: DeviceModel) -> float:
    """Seconds with launches: a GPU launches while earlier kernels run, and runs none for a view."""
    if device.kernels is None:
        return launches * device.launch_seconds + seconds
    return max(launches * device.launch_seconds, seconds) if seconds else 0.0


def _roof(call: Call, work: int, moved: int, device: DeviceModel, *, backward: bool = False) -> float:
    if not work:
        return moved / device.bandwidth
    dtype = next(spec.dtype.to_real() for spec in operands.specs(call) if may_learn(spec.dtype))
    rate = device.rate(dtype)
    if device.kernels is not None:
        rate = rate_of(call, device.kernels, rate)
    seconds = work_seconds(call, device.kernels, rate, backward=backward) if device.kernels else None
    return max(work / rate if seconds is None else seconds, moved / device.bandwidth)


def forward_bytes(call: Call, found: Footprint) -> int:
    """Bytes of operands read and results written; 0 for a view."""
    written = sum(result.nbytes for result in _own(found))
    if not written:
        return 0
    given = [spec.nbytes for spec in operands.specs(call)]
    if facts_of(call.target).gathers:
        given[0] = min(given[0], written)
    return sum(given) + written + reread_bytes(call)


def backward_bytes(call: Call, found: Footprint) -> int:
    """Bytes of gradients and saved tensors read and gradients written; 0 for a reshaping view."""
    wanted = sum(spec.nbytes for spec in operands.specs(call) if spec.requires_grad)
    arriving = sum(result.nbytes for result in found.results if result and result.requires_grad)
    if not _own(found) and wanted == arriving:
        return 0
    gradients = sum(spec.requires_grad for spec in operands.specs(call))
    return arriving + saved_bytes(call, found) + wanted + gradients * reread_bytes(call)


def reread_bytes(call: Call) -> int:
    """Bytes that a call reads more than once, as a sparse product does a row for each entry."""
    rereads = facts_of(call.target).rereads
    return rereads(sized(call)) if rereads else 0


def _own(found: Footprint) -> list[TensorSpec]:
    """The results that aren't views of operands."""
    pairs = zip(found.results, found.aliases, strict=True)
    return [result for result, alias in pairs if result is not None and alias is None]
