"""What was asked for, as a value: a target, a cluster and options, planned as it is or changed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.cost.machine.measuring import Progress
from autopar.errors import InfeasibleError, InputError, OverCapError, SolverError, TraceError
from autopar.planning.asked.options import PLAN, Options
from autopar.planning.asked.request import Auto, Request, request_of
from autopar.planning.planner import Planner
from autopar.results.explanation.explanation import Change, Outcome
from autopar.results.plan.plan import Plan
from autopar.trace.target import Target

LEAST_ALTERNATIVES_SECONDS = 60.0  # for all other plans; as many as the first one took, if that is more
SHARE_OF_REST = 0.5  # of the seconds that are left, for one of them
OVER = "the time for explaining was over; ask for less at once, or give more by --seconds"
REFUSED = (InfeasibleError, InputError, SolverError, TraceError)
LONGEST_FAILURE = 160  # characters of why there is no plan


@dataclass(frozen=True, slots=True)
class AskedPlan:
    """A plan that is asked for; `options` are those that were said, by name."""

    target: Target
    cluster: ClusterSpec
    options: Mapping[str, Any]
    progress: Progress | None = None
    until: float | None = None  # on the monotonic clock, when no further plan is sought

    def request(self) -> tuple[Request, Auto | None]:
        """The request of these options, and the numbers to choose if any are auto."""
        return request_of(Options(PLAN, **self.options), self.cluster)

    def planner(self, request: Request) -> Planner:
        """The planner of the target for a request."""
        costdb = self.options.get("costdb")
        return Planner(self.cluster, request, self.target.loss_fn, costdb=costdb, progress=self.progress)

    def plan(self, *, alternatives: bool = False) -> Plan:
        """The best plan; raises what `autopar.plan` does."""
        request, auto = self.request()
        planner = self.planner(replace(request, alternatives=alternatives))
        return planner.find_plan(self.target.model, self.target.args, self.target.kwargs, auto)

    def saying(self, **options: Any) -> AskedPlan:
        """Copy the question with options said otherwise; None says nothing."""
        return replace(self, options={**self.options, **options})

    @property
    def is_over(self) -> bool:
        """Whether the time for further plans is over."""
        return self.until is not None and time.monotonic() >= self.until

    def seconds(self) -> float | None:
        """Seconds for one more plan: those that were said, at most a share of what is left."""
        said: float | None = self.options.get("time_limit")
        if self.until is None:
            return said
        share = max(1.0, SHARE_OF_REST * (self.until - time.monotonic()))
        return share if said is None else min(said, share)

    def hurried(self) -> AskedPlan:
        """Copy the question with a limit for one more plan."""
        return self.saying(time_limit=self.seconds())

    def change(self, what: str) -> Change:
        """The plan of what is asked here as a change from something else."""
        if self.is_over:
            return Change(what, None, OVER)
        if self.progress:
            self.progress(0, 0, f"planning {what}")
        try:
            return Change(what, Outcome.of(self.hurried().plan()))
        except REFUSED as error:
            return Change(what, None, reason_of(error))


def reason_of(error: InfeasibleError | InputError | SolverError) -> str:
    """Short reason why there is no plan, without the least memory that would do, which takes long to find."""
    if isinstance(error, OverCapError):
        return "it doesn't fit the memory cap"
    text = f"{error.where}: {error.found}; wanted {error.wanted}"
    return text if len(text) <= LONGEST_FAILURE else f"{text[: LONGEST_FAILURE - 3]}..."
