"""The best step with stages on one mesh: of the fastest assignment, or of leaner ones under a memory cap."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from autopar.core.pipeline import kept_starts
from autopar.core.program import Program
from autopar.core.recompute import Recompute
from autopar.core.schedule import Schedule, ScheduleKind
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import InfeasibleError, SolverError
from autopar.planning.asked.ask import Ask, Limits
from autopar.planning.assignment_problem import AssignmentProblem
from autopar.planning.group_orders import orders_of, pace_of
from autopar.schedules.in_flight import mean_flight
from autopar.solve.assignment.search import MEMORY_PRICES
from autopar.solve.choices.memory_price import MemoryPrice
from autopar.solve.program.problem import Problem
from autopar.solve.program.solution import CutoffError, Solution, check_cutoff
from autopar.solve.stages.local_search import improved_step, is_worthwhile
from autopar.solve.stages.step import Step, staged

UNKNOWN_STEPS = 4  # of the bisection between `MEMORY_PRICES`
KNOWN_STEPS = 2  # the same, where a plan that fits is known
NEAR_BOUND_GAP = 0.03  # of the bound: so close to it a plan that recomputes is left as it is
MOVABLE = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)  # whose stages may lie on any part of the cluster
FAR = 1.5  # times the cap: what takes more is not brought below it by a few changes


@dataclass(frozen=True, slots=True)
class StagedStep:
    """The best step with stages, that share one assignment."""

    problem: AssignmentProblem

    def best(self, ask: Ask, limits: Limits) -> Step:
        """Find the best step; under a cap, of several assignments for which memory has a price."""
        fastest = self.problem.solve(ask.uncapped, limits)
        try:
            found = self.cut(fastest, ask, limits)
        except CutoffError:
            raise
        except InfeasibleError as error:
            hopeless = ask.cap is not None and FAR * ask.cap < error.would_do < math.inf
            better = self.improved(fastest, None, ask, limits) if ask.bounded and not hopeless else None
            if better is None:
                raise
            return better
        return (self.improved(fastest, found, ask, limits) if ask.bounded else None) or found

    def cut(self, fastest: Solution, ask: Ask, limits: Limits) -> Step:
        """The best step of the fastest assignment, or under a cap of others for which memory has a price."""
        cutoff = limits.cutoff if ask.bounded else math.inf
        check_cutoff(self.even_seconds(fastest.bound), cutoff)
        if not self.has_room(fastest, ask.cap):
            return min(self.leaner(fastest, ask, limits), key=lambda step: step.seconds)
        try:
            found = self.stage(fastest, ask.cap, limits, cutoff=cutoff)
        except CutoffError:
            raise
        except InfeasibleError:
            return min(self.leaner(fastest, ask, limits), key=lambda step: step.seconds)
        is_far = found.gap > max(NEAR_BOUND_GAP, self.problem.request.gap)
        if is_far and self.problem.request.recompute is Recompute.AUTO and found.solution.program.recompute:
            others = self.leaner(fastest, ask, limits, known=found)
            return min([found, *others], key=lambda step: step.seconds)
        return found

    def improved(self, fastest: Solution, found: Step | None, ask: Ask, limits: Limits) -> Step | None:
        """A step better than `found` whose assignment differs from it, or from the fastest, by few choices.
        None if there is none, or the graph is too large to try many."""
        scarce = found is None or bool(found.solution.program.recompute or found.solution.program.offload)
        if not is_worthwhile(len(self.problem.graph.operators), scarce=scarce):
            return None
        whole, solution = self.problem, found.solution if found else fastest

        def step_of(program: Program) -> Step:
            priced = PricedProgram(whole.prices, program)
            placed = dataclasses.replace(fastest, priced=priced, seconds=priced.seconds, held=priced)
            return self.stage(placed, ask.cap, limits, fastest.bound)

        scarce_cap = None if ask.cap is None else math.inf  # under which weights may be regathered
        space = whole.space(ask.force)
        problem = Problem(whole.graph, whole.prices, space, whole.folding, cap=scarce_cap)
        return improved_step(problem, solution.program, found, step_of, deadline=limits.deadline)

    def leaner(self, fastest: Solution, ask: Ask, limits: Limits, *, known: Step | None = None) -> list[Step]:
        """Steps of assignments that meet the cap; fewer if one that meets it is `known`.

        If they recompute parts for that, also those of assignments that are chosen with a view to it, which
        may promise more than parts hold.
        """
        flight = min(map(mean_flight, self.problem.schedules))
        unit = fastest.seconds / (fastest.peak.state + flight * fastest.peak.saved)

        def at(price: float, recompute: Recompute) -> Solution:
            memory_price = MemoryPrice(state=price * unit, saved=price * unit * flight)
            return self.problem.solve(Ask(ask.force, None, memory_price, recompute), limits)

        asked, best, found = self.problem.request.recompute, known, list[Step]()
        for recompute in (Recompute.NONE, asked) if asked is Recompute.AUTO else (asked,):
            if not found or best is None or best.solution.program.recompute:
                found += self.priced(fastest, partial(at, recompute=recompute), ask.cap, limits, known=best)
                best = min([*found, *([best] if best else [])], key=lambda step: step.seconds, default=None)
        return (
            found
            if found or known
            else [self.stage(at(MEMORY_PRICES[1], asked), ask.cap, limits, fastest.bound)]
        )

    def priced(
        self,
        fastest: Solution,
        at: Callable[[float], Solution],
        cap: int | None,
        limits: Limits,
        *,
        known: Step | None,
    ) -> list[Step]:
        """The steps of assignments `at` prices of memory that meet the cap.

        The price is bisected to where they just do without recomputing anything.
        """
        low, high = map(math.log, MEMORY_PRICES)
        found: dict[float, Step] = {}
        failed: list[Program] = []
        ruled_out: list[Program] = []
        for _ in range(KNOWN_STEPS if known else UNKNOWN_STEPS):
            middle = (low + high) / 2
            try:
                placed = at(math.exp(middle))
            except SolverError:
                if found or known:
                    break
                raise
            best = min(found, key=lambda price: found[price].seconds, default=None)
            if placed.program in failed:
                low = middle
            elif known and known.free * placed.seconds >= known.seconds * fastest.seconds:
                high = middle  # slower even if it computed nothing again
            elif not self.has_room(placed, cap):
                low = middle
            elif best is not None and (
                placed.program in ruled_out or self.even_seconds(placed.seconds) >= found[best].seconds
            ):
                low, high = (low, middle) if best < middle else (middle, high)
            else:
                try:
                    limit = math.inf if best is None else found[best].seconds
                    found[middle] = step = self.stage(placed, cap, limits, fastest.bound, limit=limit)
                except CutoffError:
                    ruled_out.append(placed.program)
                    low, high = (low, middle) if best is not None and best < middle else (middle, high)
                    continue
                except InfeasibleError:
                    low = middle
                    failed.append(placed.program)
                    continue
                plain = self.problem.request.recompute is Recompute.ALL or not step.solution.program.recompute
                low, high = (low, middle) if plain else (middle, high)
        return list(found.values())

    def even_seconds(self, seconds: float) -> float:
        """Seconds of a step if all stages of an assignment were as long, and none waited. `seconds` are those
        on the slowest devices of all ranks."""
        return self.pace * self.problem.request.micro_batches * seconds / self.problem.request.pipeline_ranks

    @property
    def pace(self) -> float:
        """Part of the slowest devices' seconds that a step takes if each rank does as much as it can: 1 where
        all are alike."""
        fastest = self.problem.solved.get(self.problem.ask(self.problem.request.force))
        if not self.problem.blocks or fastest is None or fastest.seconds <= 0:
            return 1.0
        return pace_of(fastest.priced)

    def in_orders(self, solution: Solution, cut: Callable[..., Step], schedules: Sequence[Schedule]) -> Step:
        """The best step over the orders in which groups of devices may hold stages."""
        best: Step | None = None
        failures: list[InfeasibleError] = []
        blocks, request = self.problem.blocks, self.problem.request
        own = tuple(range(len(blocks)))
        fixed = request.stages_of_uses is not None
        for hosts in [request.hosts or own] if fixed else orders_of(blocks):
            moved = hosts != own
            kinds = [each for each in schedules if not moved or each.kind in MOVABLE]
            if not kinds:
                continue
            prices = self.problem.prices.in_order([blocks[host] for host in hosts])
            priced = dataclasses.replace(solution, priced=solution.priced.at(prices))
            try:
                step = cut(priced, schedules=kinds)
            except InfeasibleError as error:
                failures.append(error)
                continue
            best = step if best is None or step.seconds < best.seconds else best
        if best is None:
            raise min(failures, key=lambda error: (isinstance(error, CutoffError), error.least or 0))
        return best

    def has_room(self, solution: Solution, cap: int | None) -> bool:
        """Whether the cap holds a rank's share of all state; without that no cut fits."""
        room, ranks = sum(self.problem.prices.room), self.problem.request.pipeline_ranks
        return cap is None or solution.peak.state <= cap * ranks + room

    def stage(
        self,
        solution: Solution,
        cap: int | None,
        limits: Limits,
        relaxed: float | None = None,
        *,
        cutoff: float = math.inf,
        limit: float = math.inf,
    ) -> Step:
        """The assignment's best step under any of the schedules; see `staged`."""
        problem, request = self.problem, self.problem.request
        starts, schedules, incumbent = None, problem.schedules, limits.incumbent
        if incumbent and incumbent.schedule and self.even_seconds(solution.seconds) >= incumbent.seconds:
            schedules = [incumbent.schedule]
        if request.stages_of_uses is not None:
            starts = kept_starts(problem.graph, request.stages_of_uses, problem.schedules[0].stages)
        cut = partial(
            staged,
            hop=problem.hop,
            cap=cap,
            relaxed=relaxed,
            starts=starts,
            places=problem.places,
            recompute=request.recompute,
            offload=problem.offload,
            cutoff=cutoff,
            limit=limit,
        )
        asked = cap, solution.bound if relaxed is None else relaxed, schedules, problem.places

        def best_order() -> Step:
            return self.in_orders(solution, cut, schedules)

        cuts_once = best_order if problem.blocks else partial(cut, solution, schedules=schedules)
        return problem.known_cuts.step(solution.program, asked, cuts_once, cutoff=cutoff, limit=limit)
