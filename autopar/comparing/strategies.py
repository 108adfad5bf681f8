"""`autopar compare`: every pure strategy, two mixtures and the solver's own plan, side by side.

    serial         one device of the cluster
    batch          samples on all axes                       the batch factor wherever an operator has it
    domain         space or sequence on all axes
    pipeline       one device for each stage                 the best of a few micro-batches and schedules
    filter         output channels on all axes
    channel        input channels on all axes
    batch+filter   samples on the major axis, output channels on the minor, on the best mesh of two axes
    batch+domain   samples on the major axis, space or sequence on the minor
    hybrid         what `autopar plan` decides

Limits on devices are those up to which every layer that has the factor is split: P <= B for batch, the
least W H or sequence for domain, the least number of output (input) channels for filter (channel), one
operator for each stage. Layers with a single channel don't count: no strategy splits them.
Source: Kahira et al., "An Oracle for Guiding Large-Scale Model/Hybrid Parallel Training of Convolutional
Neural Networks", HPDC 2021, whose table this is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.cluster import ClusterSpec
from autopar.core.force import Force, Parallelism
from autopar.core.schedule import ScheduleKind, check_schedule
from autopar.cost.machine.measuring import CoRunners, Progress
from autopar.cost.machine.model import setting_of
from autopar.cost.machine.threads import using_threads
from autopar.errors import AutoparError, InfeasibleError, InputError, SolverError
from autopar.planning.asked.ask import SearchMeans
from autopar.planning.asked.request import Request
from autopar.planning.losses import search_form
from autopar.planning.planner import Planner
from autopar.planning.search import FoundPlan
from autopar.results.comparison.comparison import Comparison, Row
from autopar.solve.choices.kinds import Kinds
from autopar.solve.choices.space import split_by_force
from autopar.trace.export import Traced
from autopar.trace.target import Target
from autopar.units import show_bytes
from costdb.database import Database

FORCES: Mapping[str, Force] = {
    "batch": Parallelism.BATCH,
    "domain": Parallelism.DOMAIN,
    "filter": Parallelism.FILTER,
    "channel": Parallelism.CHANNEL,
    "batch+filter": (Parallelism.BATCH, Parallelism.FILTER),
    "batch+domain": (Parallelism.BATCH, Parallelism.DOMAIN),
}
SERIAL, PIPELINE, HYBRID = "serial", "pipeline", "hybrid"
ORDER = (SERIAL, "batch", "domain", PIPELINE, "filter", "channel", "batch+filter", "batch+domain", HYBRID)
SCHEDULES = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE, ScheduleKind.ZB1P)  # one stage for each rank
TIMES = (1, 2, 4)  # micro-batches for each stage, about


@dataclass(frozen=True, slots=True)
class StrategyOutcome:
    """Outcome of a strategy: a plan, a `reason` why there is none or it can't be used, or both."""

    found: FoundPlan | None
    reason: str | None = None
    error: AutoparError | None = None

    @property
    def order(self) -> tuple[bool, float, float]:
        """The best comes first: those that fit, then the faster, then the smaller."""
        if self.found is None:
            return True, math.inf, math.inf
        return self.reason is not None, self.found.plan.step_seconds, self.found.plan.peak_bytes


@dataclass(slots=True)
class Comparer:
    """Plans every strategy for one target, whose graphs it traces once for each micro-batch."""

    target: Target
    cluster: ClusterSpec
    request: Request
    database: Database
    progress: Progress | None = None
    co_runners: CoRunners | None = None  # for all but the serial row: one device runs alone
    _graphs: dict[tuple[bool, int], Traced] = field(default_factory=dict)

    def compare(self) -> Comparison:
        """All rows; raises the solver's InfeasibleError or SolverError if none fits."""
        candidates = {name: self.candidate(name) for name in ORDER}
        serial, hybrid = candidates[SERIAL], candidates[HYBRID]
        if hybrid.error and all(each.reason for each in candidates.values()):
            raise hybrid.error
        limits = self.limits(serial.found) if serial.found else dict.fromkeys(ORDER)
        return Comparison(
            cluster=str(self.cluster),
            memory_cap=self.cap,
            rows=tuple(
                Row(name, each.found.plan if each.found else None, limits[name], each.reason)
                for name, each in candidates.items()
            ),
            chosen=None if hybrid.reason else HYBRID,
        )

    @property
    def cap(self) -> int | None:
        """Bytes per device."""
        return self.request.cap(self.cluster)

    def traced(self, request: Request) -> Traced:
        """The graph of one micro-batch; with stages its loss is the only output."""
        key = request.pipeline_ranks > 1, request.micro_batches
        if key not in self._graphs:
            planner = Planner(self.cluster, request, self.target.loss_fn)
            target = self.target
            self._graphs[key] = planner.trace_step(target.model, target.args, target.kwargs)
        return self._graphs[key]

    # -- one strategy -----------------------------------------------------------------------------

    def candidate(self, name: str) -> StrategyOutcome:
        """The best plan of the strategy called so."""
        match name:
            case "serial":
                return self.serial()
            case "pipeline":
                return min((self.planned(each) for each in self.pipelines()), key=lambda each: each.order)
            case "hybrid":
                return self.planned(replace(self.request, alternatives=True))
            case _:
                return self.planned(replace(self.request, force=FORCES[name], alternatives=False))

    def serial(self) -> StrategyOutcome:
        """One device, with the threads that it has in the cluster."""
        with using_threads(setting_of(self.cluster).threads):
            alone = replace(self, cluster=self.cluster.stage(self.cluster.num_devices), co_runners=None)
            return alone.planned(replace(self.request, alternatives=False))

    def pipelines(self) -> Iterator[Request]:
        """One device for each stage: a few numbers of micro-batches, in every schedule that takes them."""
        ranks = self.cluster.num_devices
        batch = self.samples()
        divisors = [count for count in range(1, batch + 1) if batch % count == 0] or [1]
        counts = {max(each for each in divisors if each <= times * ranks) for times in TIMES}
        for count in sorted(counts):
            for schedule in SCHEDULES:
                try:
                    check_schedule(schedule, ranks=ranks, stages_per_rank=1, micro_batches=count)
                except InputError:
                    continue  # gpipe takes any number
                yield replace(
                    self.request,
                    pipeline_ranks=ranks,
                    micro_batches=count,
                    schedule=schedule,
                    alternatives=False,
                )

    def samples(self) -> int:
        """Number of samples in the batch, 1 if no dim is known to hold them."""
        target, planner = self.target, Planner(self.cluster, self.request, self.target.loss_fn)
        try:
            return planner.parts(target.model, target.args, target.kwargs).size
        except InputError:  # there is no loss, or no such dim: the rows of stages and micro-batches say so
            return 1

    def planned(self, request: Request) -> StrategyOutcome:
        """The best plan that fits; else the best that would without the cap, and the reason."""
        try:
            return StrategyOutcome(self.search(request, self.cluster))
        except InfeasibleError as error:
            failure = error
        except (InputError, SolverError) as error:
            return StrategyOutcome(None, f"{error.where}: {error.found}", error)
        if self.cap is None:
            return StrategyOutcome(None, failure.found, failure)
        try:
            found = self.search(replace(request, memory=None), replace(self.cluster, memory=None))
        except (InfeasibleError, SolverError) as error:
            return StrategyOutcome(None, error.found, error)
        least = f"needs {show_bytes(failure.least)}" if failure.least else "needs more memory"
        return StrategyOutcome(found, f"{least}, the cap is {show_bytes(self.cap)}", failure)

    def search(self, request: Request, cluster: ClusterSpec) -> FoundPlan:
        return search_form(
            self.traced(request).graph,
            cluster,
            request,
            SearchMeans(self.database, self.progress, self.co_runners),
        )

    # -- limits -----------------------------------------------------------------------------------

    def limits(self, serial: FoundPlan) -> dict[str, int | None]:
        """On how many devices each strategy can split all that it splits."""
        graph = serial.prices.graph
        splitting = split_by_force(graph, serial.prices)
        kinds = Kinds(graph, serial.dims)

        def limit(kind: Parallelism) -> int | None:
            lengths = [
                math.prod(found.values()) for item in splitting if (found := kinds.lengths(item, kind))
            ]
            return min((length for length in lengths if length > 1), default=1) if lengths else None

        def joint(force: Force) -> int | None:
            factors = [limit(kind) for kind in (force if isinstance(force, tuple) else (force,))]
            return None if None in factors else math.prod(factor for factor in factors if factor)

        return {
            SERIAL: 1,
            PIPELINE: len(graph.operators),
            HYBRID: None,
            **{name: joint(force) for name, force in FORCES.items()},
        }
