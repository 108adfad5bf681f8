"""Schedules of every kind and of all small numbers that it allows."""

from __future__ import annotations

from hypothesis import strategies as st

from autopar.core.schedule import Schedule, ScheduleKind, check_schedule
from autopar.errors import InputError
from autopar.schedules.orders import build_schedule

STAGES_PER_RANK = {
    ScheduleKind.GPIPE: 1,
    ScheduleKind.ONE_F_ONE_B: 1,
    ScheduleKind.ZBV: 2,
    ScheduleKind.DUALPIPEV: 2,
}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Up to 4 ranks and 12 micro-batches."""
    kind, ranks = draw(st.sampled_from(ScheduleKind)), draw(st.integers(1, 4))
    several = STAGES_PER_RANK.get(kind) or draw(st.integers(1, 3))
    allowed = []
    for count in range(1, 13):
        try:
            check_schedule(kind, ranks=ranks, stages_per_rank=several, micro_batches=count)
            allowed.append(count)
        except InputError:
            pass
    count = draw(st.sampled_from(allowed))
    return build_schedule(kind, ranks=ranks, stages_per_rank=several, micro_batches=count)
