"""Recurrent layers over many steps, by what few show.

Without data torch runs a recurrent layer step by step, in Python: 256 steps of four layers take seconds, for
each shape. What it keeps grows by as much with each step but the first,

    bytes(T, n) = bytes(4, n) + (T - 4) (bytes(4, n) - bytes(3, n))            n samples

and what it makes on the way, at most, is a sum of three kinds of tensors: as large as weights, as a step, as
all steps. Which moment has most depends on which are larger, so T n stays as it is where T becomes less:

    most = w W + s n + t T n      of (8, n T/8) and (16, n T/16), which differ by s alone

An LSTM on a CPU runs in one kernel of oneDNN, whose workspace only real steps of real units show. What it
keeps, and makes, follows from four runs of few steps and few samples:

    bytes(T, n) = a + b T + c n + d T n
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopar.core.costs import Footprint, Passes, SavedByCall, Slope
from autopar.core.graph import Call
from autopar.ops.recurrent import resized, samples_of, steps_dim, with_steps
from costdb import operands

KEPT = (3, 4)  # steps that show what is kept
MADE = (8, 16)  # those that show what is made
RUN = (8, 32)  # steps that are run: workspaces come in pages
FEW = (8, 16)  # samples that are
RUNS = tuple((steps, samples) for steps in RUN for samples in FEW)


def footprint_of_steps(call: Call, steps: int, of: Callable[[Call], Footprint]) -> Footprint:
    """The footprint of a recurrent layer over many `steps`, by those `of` it over few."""
    before, last = (of(with_steps(call, few)) for few in KEPT)
    first, *states = last.results
    assert first is not None, "a recurrent layer gives what every step does"
    each = last.saved.extra_bytes - before.saved.extra_bytes
    extra = last.saved.extra_bytes + (steps - max(KEPT)) * each
    return replace(
        last,
        results=(resized(first, steps_dim(call), steps), *states),
        saved=replace(last.saved, extra_bytes=extra),
    )


def saved_in_runs(call: Call, of: Callable[[Call], SavedByCall]) -> SavedByCall:
    """What a recurrent layer keeps, by what is kept `of` a few steps of a few samples that are run."""
    runs = {each: of(with_steps(call, *each)) for each in RUNS}
    extra = {each: found.extra_bytes for each, found in runs.items()}
    return replace(runs[RUNS[0]], extra_bytes=_at(call, extra))


def passes_in_runs(call: Call, of: Callable[[Call], Passes]) -> Passes:
    """Both passes of a recurrent layer, by those `of` a few steps of a few samples that are run."""
    runs = {each: of(with_steps(call, *each)) for each in RUNS}
    return Passes(
        _at(call, {each: found.forward_bytes for each, found in runs.items()}),
        _at(call, {each: found.backward_bytes for each, found in runs.items()}),
        _slopes_of(call, with_steps(call, *RUNS[0]), runs[RUNS[0]]),
    )


def _at(call: Call, known: Mapping[tuple[int, int], int]) -> int:
    """The bytes of a call by those of `RUNS`."""
    steps, samples = call.args[0].shape[steps_dim(call)], samples_of(call)
    by_steps = [_on_the_line(FEW, [known[run, few] for few in FEW], samples) for run in RUN]
    return max(0, round(_on_the_line(RUN, by_steps, steps)))


def _on_the_line(places: tuple[int, int], values: Sequence[float], at: int) -> float:
    """The value at a place of the line through two others."""
    (first, last), (low, high) = places, values
    return low + (at - first) * (high - low) / (last - first)


def passes_of_steps(call: Call, steps: int, of: Callable[[Call], Passes]) -> Passes:
    """Both passes of a recurrent layer over many `steps`, by those `of` it over few."""
    samples = samples_of(call)
    more, less = (max(1, round(samples * steps / few)) for few in MADE)
    longest = with_steps(call, max(MADE), less)
    wide, narrow = of(with_steps(call, min(MADE), more)), of(longest)

    def of_samples(wide: int, narrow: int) -> int:
        return round(narrow - (less - samples) * (wide - narrow) / (more - less))

    return Passes(
        of_samples(wide.forward_bytes, narrow.forward_bytes),
        of_samples(wide.backward_bytes, narrow.backward_bytes),
        _slopes_of(call, longest, narrow),
    )


def _slopes_of(call: Call, other: Call, known: Passes) -> tuple[Slope | None, ...]:
    """The gradients of a call's operands, by those that are known of another's."""
    sizes = zip(operands.specs(call), operands.specs(other), strict=True)
    return tuple(
        slope and replace(slope, nbytes=slope.nbytes * whole.nbytes // part.nbytes)
        for slope, (whole, part) in zip(known.slopes, sizes, strict=True)
    )
