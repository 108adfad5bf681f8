"""Assignments under a cap that nothing else meets: some weights lie in the host's memory.

With their gradients and optimizer state they do; the larger come first. Fewer of them leave less room on the
device, where more is recomputed then: of the numbers that a bisection for the fewest comes by the fastest is
taken. The host holds weights and gradients in pinned memory, which comes in powers of two.

As many of them, the smallest, are copied ahead of their use as the cap leaves room for. An assignment is
sought at prices of copies that are waited for; what may hide of a step that takes T is at most T / 2, as it
hides behind the rest, and no more than all copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.cost.operators.host_weights import weights_of
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.program.streams import most_streamed
from autopar.errors import InfeasibleError
from autopar.solve.program.solution import CutoffError, Solution
from autopar.units import show_bytes

Assign = Callable[[Prices], Solution]
Complete = Callable[[PricedProgram], Solution]  # recomputes and offloads so that a program fits, if it can


def out_of_core(assign: Assign, prices: Prices, cap: int, complete: Complete) -> Solution:
    """The best assignment, with weights on the host if none fits without; raises what `assign` does if none
    fits so either."""
    try:
        return assign(prices)
    except CutoffError:
        raise
    except InfeasibleError as error:
        try:
            found = assign(prices.hosting(weights_of(prices)))
        except InfeasibleError:
            raise error from None
        best = fewest_on_host(coming_ahead(found, cap), cap, complete)
        if best is None:
            raise
        return best


def coming_ahead(found: Solution, cap: int | None) -> Solution:
    """The solution with as many weights copied ahead, the smallest, as fit the cap, if that is faster. On
    CPUs, which make copies themselves, none is."""
    priced = found.priced
    program, prices = priced.program, priced.prices
    if prices.cluster.host is None or program.offload:
        return found
    names = sorted(program.on_host, key=lambda name: prices.local_bytes(name, program.inputs[name]))
    low, high = 0, len(names) + 1  # so many fit, so many don't
    while high - low > 1:
        middle = high - 1 if high > len(names) else (low + high) // 2
        fits = cap is None or priced.remedied(ahead=tuple(names[:middle])).peak.nbytes <= cap
        low, high = (middle, high) if fits else (low, middle)
    early = priced.remedied(ahead=tuple(names[:low]))
    if early.seconds >= found.seconds:
        return found
    return replace(found, priced=early, seconds=early.seconds, held=early)


def most_hidden(prices: Prices, seconds: float) -> float:
    """The most seconds of copies that hide in a step which takes so many without."""
    return max(0.0, min(seconds / 2, _most_ahead(prices)))


def before_hiding(prices: Prices, seconds: float) -> float:
    """The most seconds that a step takes without hiding copies if it takes less than so many with it."""
    return min(2 * seconds, seconds + _most_ahead(prices))


def _most_ahead(prices: Prices) -> float:
    return most_streamed(prices) if prices.cluster.host is not None else 0.0


def fewest_on_host(found: Solution, cap: int, complete: Complete) -> Solution | None:
    """The fastest of solutions with the largest weights of `found` on the host, or all of its: about as few
    as fit, and as few as do so if all of them come ahead. None if those find no room there."""
    inputs, prices = found.program.inputs, found.priced.prices
    names = sorted(found.program.on_host, key=lambda name: -prices.owned_bytes(name, inputs[name]))
    if not has_room(found.priced, names):
        return None
    best, few = found, 0
    for all_ahead in (False, True) if prices.cluster.host is not None else (False,):
        low, high = few, len(names)
        while high - low > 1:
            middle = (low + high) // 2
            trial = coming_ahead(complete(found.priced.hosting(names[:middle])), cap)
            if trial.peak.nbytes <= cap:
                best = min(best, trial, key=lambda each: each.seconds)
            fits = trial.peak.nbytes <= cap and not (all_ahead and len(trial.program.ahead) < middle)
            low, high = (low, middle) if fits else (middle, high)
        few = low
    return best


def check_room(priced: PricedProgram) -> None:
    """Raise InfeasibleError where weights that are to lie on the host find no room there."""
    if not has_room(priced, names := priced.program.on_host):
        cluster = priced.prices.cluster
        raise InfeasibleError(
            where="--offload state",
            found=f"{show_bytes(_needed(priced, names))} per device, some of it pinned",
            wanted=f"at most {show_bytes(cluster.host_memory or 0)} for {cluster.devices_per_node} devices",
            remedy="raise host_memory in the cluster's file, write --offload auto, or use more nodes",
        )


def has_room(priced: PricedProgram, names: Sequence[str]) -> bool:
    """Whether a device's share of its node's memory holds these weights, gradients and optimizer state."""
    cluster = priced.prices.cluster
    if cluster.host_memory is None:
        return True
    return _needed(priced, names) <= cluster.host_memory // cluster.devices_per_node


def _needed(priced: PricedProgram, names: Sequence[str]) -> int:
    return sum(_held(priced, name) for name in names)


def _held(priced: PricedProgram, name: str) -> int:
    prices, layout = priced.prices, priced.program.inputs[name]
    nbytes, owned = prices.local_bytes(name, layout), prices.owned_bytes(name, layout)
    pinned = 1 << max(0, nbytes - 1).bit_length()
    return owned + min(owned // max(1, nbytes), 2) * (pinned - nbytes)
