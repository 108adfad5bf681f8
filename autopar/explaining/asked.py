"""What was asked for, as a value: a target, a cluster and options, planned as it is or changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.compiler import Compiler
from autopar.cost.machine.measuring import Progress
from autopar.errors import InfeasibleError, InputError, OverCapError, SolverError, TraceError
from autopar.planning.options import PLAN, Options
from autopar.planning.request import Auto, Request, request_of
from autopar.results.explanation import Change, Outcome
from autopar.results.plan import Plan
from autopar.trace.target import Target

LEAST_PATIENCE = 20.0  # seconds for another plan, or twice those that the first one took
REFUSED = (InfeasibleError, InputError, SolverError, TraceError)
SHOWN = 160  # characters of why there is no plan


@dataclass(frozen=True, slots=True)
class Asked:
    """A plan that is asked for; `options` are those that were said, by name."""

    target: Target
    cluster: ClusterSpec
    options: Mapping[str, Any]
    progress: Progress | None = None
    patience: float | None = None  # seconds for each other plan, where no time limit is said

    def request(self) -> tuple[Request, Auto | None]:
        """What the search takes."""
        return request_of(Options(PLAN, **self.options), self.cluster)

    def compiler(self, request: Request) -> Compiler:
        """The compiler for a request."""
        costdb = self.options.get("costdb")
        return Compiler(self.cluster, request, self.target.loss_fn, costdb=costdb, progress=self.progress)

    def plan(self, *, alternatives: bool = False) -> Plan:
        """The best plan; raises what `autopar.plan` does."""
        request, auto = self.request()
        compiler = self.compiler(replace(request, alternatives=alternatives))
        return compiler.find_plan(self.target.model, self.target.args, self.target.kwargs, auto)

    def saying(self, **options: Any) -> Asked:
        """The same with options said otherwise; None says nothing."""
        return replace(self, options={**self.options, **options})

    def change(self, what: str) -> Change:
        """The plan of what is asked here as a change from something else."""
        limit = self.options.get("time_limit") or self.patience
        try:
            return Change(what, Outcome.of(self.saying(time_limit=limit).plan()))
        except REFUSED as error:
            return Change(what, None, reason_of(error))


def reason_of(error: InfeasibleError | InputError | SolverError) -> str:
    """Why there is no plan, in few words; the least memory that would do takes long to find."""
    if isinstance(error, OverCapError):
        return "it doesn't fit the memory cap"
    text = f"{error.where}: {error.found}; wanted {error.wanted}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
