"""Where no plan fits: what to change first. Every remedy that is told was planned.

First come changes that cost nothing, then those that change what is computed in a step, then hardware:

    options that were said are left out  <  micro-batches  <  a smaller batch  <  more memory  <  more devices
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import InfeasibleError
from autopar.explaining.asked import REFUSED, AskedPlan
from autopar.explaining.constraints import options
from autopar.explaining.what_if import batch_of, what_if
from autopar.results.explanation.explanation import Change

MOST_MICRO_BATCHES = 64
LEAST_BATCH = 8  # parts of the batch down to which it is halved


def remedies(asked: AskedPlan, error: InfeasibleError) -> Iterator[Change]:
    """Changes with which there is a plan, those that change least first."""
    found = [*options(asked), *_one(_micro_batches(asked)), *_one(_batches(asked))]
    if error.least is not None:
        found.append(what_if(asked, f"memory={error.least}B"))
    if not asked.cluster.groups:
        found.append(what_if(asked, f"devices={2 * asked.cluster.num_devices}"))
    yield from (each for each in found if each.outcome)


def _one(changes: Iterator[Change]) -> list[Change]:
    """The first that has a plan."""
    first = next((each for each in changes if each.outcome), None)
    return [first] if first else []


def _micro_batches(asked: AskedPlan) -> Iterator[Change]:
    count = 2
    while count <= MOST_MICRO_BATCHES:
        yield asked.saying(micro_batches=count).change(f"--micro-batches {count}")
        count *= 2


def _batches(asked: AskedPlan) -> Iterator[Change]:
    try:
        size = batch_of(asked)
    except REFUSED:
        return
    part = 2
    while part <= LEAST_BATCH and size // part:
        yield what_if(asked, f"batch={size // part}")
        part *= 2
