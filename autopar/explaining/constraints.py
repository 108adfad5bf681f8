"""What binds: the memory cap and the options that were said, each by solving without it.

    12 MB a device          72 ms
    without a cap           61 ms        so memory binds
    with 1 MB more          69 ms        solved at 13 MB: no dual price, which holds for no whole step

Without the cap, and with more of it, mesh, stages and micro-batches are the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.explaining.asked import OVER, REFUSED, AskedPlan, reason_of
from autopar.explaining.layers import Alternatives
from autopar.planning.asked.options import NARROWING, OPTIONS
from autopar.results.explanation.explanation import Change, Outcome, binds
from autopar.results.plan.plan import Plan
from autopar.units import show_bytes

MOST_MORE_BYTES = 2**30  # of "a little more": 1 GiB
MORE_CAP_DIVISOR = 10  # or the tenth part of the cap, if that is less


def memory(alternatives: Alternatives, base: Plan) -> Iterator[Change]:
    """The plan without the cap, and if that is faster with a little more memory; nothing without a cap."""
    cap = alternatives.problem.cap
    if cap is None:
        return
    free = _solved(alternatives, "without a memory cap", None)
    yield free
    if free.outcome and binds(cap, free.outcome, Outcome.of(base)):
        more = min(MOST_MORE_BYTES, max(1, cap // MORE_CAP_DIVISOR))
        yield _solved(alternatives, f"with {show_bytes(more)} more a device", cap + more)


def _solved(alternatives: Alternatives, what: str, cap: int | None) -> Change:
    if alternatives.is_over:
        return Change(what, None, OVER)
    problem = alternatives.like(cap=cap)
    try:
        return Change(what, Outcome.of(alternatives.solved(problem, cap=cap)))
    except REFUSED as error:
        return Change(what, None, reason_of(error))


def options(asked: AskedPlan) -> Iterator[Change]:
    """The plan without each option that was said and that narrows what may be chosen."""
    for name in NARROWING:
        said = asked.options.get(name)
        if said is not None and said != OPTIONS[name].default:
            yield asked.saying(**{name: None}).change(f"without {flag(name, said)}")


def flag(name: str, said: object) -> str:
    """An option as the command line says it."""
    text = said if isinstance(said, str | int) else "..."
    return f"--{name.replace('_', '-')} {text}"
