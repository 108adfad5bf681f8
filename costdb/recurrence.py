"""Recurrent layers over many steps, by what few show.

Without data torch runs a recurrent layer step by step, in Python: 256 steps of four layers take seconds, for
each shape. What it keeps grows by as much with each step but the first,

    bytes(T, n) = bytes(4, n) + (T - 4) (bytes(4, n) - bytes(3, n))            n samples

and what it makes on the way, at most, is a sum of three kinds of tensors: as large as weights, as a step, as
all steps. Which moment has most depends on which are larger, so T n stays as it is where T becomes less:

    most = w W + s n + t T n      of (8, n T/8) and (16, n T/16), which differ by s alone
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.core.costs import Footprint, Passes
from autopar.core.graph import Call
from autopar.ops.recurrent import resized, samples_of, steps_dim, with_steps
from costdb import operands

KEPT = (3, 4)  # steps that show what is kept
MADE = (8, 16)  # those that show what is made


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


def passes_of_steps(call: Call, steps: int, of: Callable[[Call], Passes]) -> Passes:
    """Both passes of a recurrent layer over many `steps`, by those `of` it over few."""
    samples = samples_of(call)
    more, less = (max(1, round(samples * steps / few)) for few in MADE)
    longest = with_steps(call, max(MADE), less)
    wide, narrow = of(with_steps(call, min(MADE), more)), of(longest)

    def of_samples(wide: int, narrow: int) -> int:
        return round(narrow - (less - samples) * (wide - narrow) / (more - less))

    sizes = zip(operands.specs(call), operands.specs(longest), strict=True)
    slopes = (
        slope and replace(slope, nbytes=slope.nbytes * whole.nbytes // part.nbytes)
        for slope, (whole, part) in zip(narrow.slopes, sizes, strict=True)
    )
    return Passes(
        of_samples(wide.forward_bytes, narrow.forward_bytes),
        of_samples(wide.backward_bytes, narrow.backward_bytes),
        tuple(slopes),
    )
