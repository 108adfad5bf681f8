"""One mesh's problem: what the best step on it is, its assignment and its cut into stages.

Every assignment is solved once, whatever is asked of the step. All stages have the same mesh and share one
assignment, in which a memory cap may have its part; refined, they may turn to others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from autopar.cluster import ClusterSpec, Link
from autopar.core.costs import MEASURED_ERROR
from autopar.core.deadline import is_over, left
from autopar.core.force import Force, name_of
from autopar.core.graph import Graph, InputKind
from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.offload import Offload
from autopar.core.pipeline import kept_starts, stages_per_rank
from autopar.core.placement import B, R
from autopar.core.program import Program
from autopar.core.recompute import Recompute
from autopar.core.schedule import Schedule, ScheduleKind
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.fused_groups import FusedGroups, OperatorTraffic, find_groups
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.stages.intervals import choose_places, crossing_bytes, intervals
from autopar.errors import AutoparError, InfeasibleError, InputError, SolverError
from autopar.planning.apart import margin
from autopar.planning.asked.ask import UNLIMITED, Ask, Limits
from autopar.planning.asked.request import Request
from autopar.planning.group_orders import orders_of, pace_of
from autopar.planning.known_cuts import KnownCuts
from autopar.planning.out_of_core import before_hiding, check_room, coming_ahead, most_hidden, out_of_core
from autopar.schedules.in_flight import mean_flight, scheduled
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import dims_of
from autopar.solve.assignment.goal import Effort, Goal
from autopar.solve.assignment.memory_frontier import MemoryPricedProgram
from autopar.solve.assignment.multipliers import MultiplierSearch
from autopar.solve.assignment.search import MEMORY_PRICES
from autopar.solve.assignment.symmetry import choose_named
from autopar.solve.assignment.written_programs import WrittenPrograms
from autopar.solve.choices.fold import Folding, fold
from autopar.solve.choices.kinds import Kinds, kind_by_axis
from autopar.solve.choices.memory_price import FREE, MemoryPrice
from autopar.solve.choices.space import Borders, Space, build_space, has_sizes, split_by_force
from autopar.solve.program.problem import Problem
from autopar.solve.program.solution import CutoffError, Solution, UnbeatenError, check_cutoff, completed
from autopar.solve.stages.cut_search import MOST_CUT_PLACES
from autopar.solve.stages.joint_bound import MOST_OPERATORS, ExchangeTables
from autopar.solve.stages.local_search import improved_step, is_worthwhile
from autopar.solve.stages.rank_bounds import Scarcity
from autopar.solve.stages.refine import Refinement
from autopar.solve.stages.step import Step, staged, step_weight, unstaged
from autopar.solve.stages.unlike_blocks import turned
from autopar.solve.stages.user_checkpoints import respect

UNKNOWN_STEPS = 4  # of the bisection between `MEMORY_PRICES`
KNOWN_STEPS = 2  # the same, where a plan that fits is known
BOUNDED = (0.5, 0.8, 1.0, 1.2, 1.6)  # times what a byte has cost: prices for a bound
SECONDS_TOLERANCE = 1e-9  # of seconds: less is rounding
NEAR_BOUND_GAP = 0.03  # of the bound: so close to it a plan that recomputes is left as it is
MULTIPLIERS = 5  # tried of what hides: 1, 0, and between
UNLIKE = 5e-3  # gap that blocks which are unlike may close
MIXED = 3  # assignments, beside a step's own, that its operators may follow
LONG_GRAPH_OPERATORS = 1000  # that are unlike
MOVABLE = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)  # whose stages may lie on any part of the cluster
FAR = 1.5  # times the cap: what takes more is not brought below it by a few changes


@dataclass(slots=True)
class MeshProblem:
    """One mesh's problem; each assignment is solved once, whatever is asked of the step."""

    graph: Graph
    mesh: Mesh
    cluster: ClusterSpec
    model: CostModel
    request: Request
    cap: int | None
    hop: Link
    blocks: tuple[ClusterSpec, ...] = ()  # of each pipeline rank, where devices are unlike

    def __post_init__(self) -> None:
        request = self.request
        self.schedules = [
            scheduled(kind, request.pipeline_ranks, stages_per_rank(kind), request.micro_batches)
            for kind in stageable(self.graph, request)
        ]
        self.dims = dims_of(self.graph, self.mesh, self.request.imbalance)
        self.groups = find_groups(self.graph) if request.compile else None
        self.prices = self.plain_prices()
        pins, stored, on_host = self.request.pins, self.request.stored, self.prices.on_host
        self.folding = fold(self.graph, self.dims, pins, self.roles, stored, on_host)

    dims: Dims = dataclasses.field(init=False)
    groups: FusedGroups | None = dataclasses.field(init=False)
    prices: Prices = dataclasses.field(init=False)
    folding: Folding = dataclasses.field(init=False)
    schedules: list[Schedule] = dataclasses.field(init=False)
    first: Solution | None = None  # one that meets the cap
    places: tuple[int, ...] | None = None  # where stages may begin or end; None for the planner's own
    spaces: dict[Force | None, Space] = dataclasses.field(default_factory=dict)
    solved: dict[Ask, Solution] = dataclasses.field(default_factory=dict)
    known_cuts: KnownCuts = dataclasses.field(default_factory=KnownCuts)
    priced_programs: WrittenPrograms = dataclasses.field(
        default_factory=WrittenPrograms
    )  # for prices of bytes

    @property
    def roles(self) -> Mapping[str, OperatorTraffic] | None:
        """Each operator's part in fused groups, where programs are compiled; else None."""
        return self.groups.members if self.groups else None

    @property
    def is_long(self) -> bool:
        """Whether there are so many unlike operators that planning takes most of a minute."""
        return len(set(self.folding.class_of.values())) >= LONG_GRAPH_OPERATORS

    def plain_prices(self) -> Prices:
        """The prices, without multipliers."""
        return Prices(
            self.graph,
            self.dims,
            self.cluster,
            self.model,
            training=self.request.training,
            optimizer=self.request.optimizer,
            step_weight=step_weight(self.request.pipeline_ranks, self.request.micro_batches),
            micro_batches=self.request.micro_batches,
            accumulates=self.request.training and self.request.micro_batches > 1,
            early=self.request.overlap and self.request.training and self.request.pipeline_ranks == 1,
            reduce=self.request.reduce_dtype,
            groups=self.groups,
            ranks=self.blocks,
            on_host=self.on_host,
        )

    @property
    def on_host(self) -> frozenset[str]:
        """The weights that lie in the host's memory whatever the assignment."""
        weights = (item for item in self.graph.inputs if item.kind is InputKind.PARAMETER)
        if (lie := self.request.on_host) is not None:
            return frozenset(item.name for item in weights if item.target in lie)
        is_asked = self.request.offload is Offload.STATE
        return frozenset(item.name for item in weights if is_asked)

    def row_prices(self, multiplier: float, late: float = 0.0) -> Prices:
        """The prices under multipliers, together at most 1, of what hides: by them no assignment costs more
        than its step."""
        theta = self.prices.overlap
        if not self.prices.early:
            return self.prices.under(shown=multiplier, credit=multiplier * theta * self.prices.step_weight)
        return self.prices.under(
            shown=multiplier,
            compute_credit=multiplier * theta,
            late_credit=late * theta,
            late_shown=multiplier + late,
        )

    def ask(self, force: Force | None = None, *, cap: int | None = None, bounded: bool = True) -> Ask:
        """Ask for an assignment with parts recomputed as the request says."""
        return Ask(force, cap, recompute=self.request.recompute, bounded=bounded)

    def plan(self, ask: Ask, limits: Limits = UNLIMITED) -> Step:
        """Find the best step; in it the model's own checkpoints, if no others are asked for.

        Its bound is none if it need not be `bounded`.
        """
        found = self.fastest(ask, limits)
        if self.request.training and self.request.recompute is Recompute.AUTO:
            count = self.request.micro_batches
            found = respect(found, micro_batches=count, hop=self.hop, cap=ask.cap)
        few = len(self.graph.operators) <= MOST_OPERATORS and not self.blocks
        if ask.bounded and found.cut is not None and few:
            with contextlib.suppress(SolverError):
                found = dataclasses.replace(found, bound=min(found.seconds, self.least(ask.force, limits)))
        return found

    def least(self, force: Force | None, limits: Limits) -> float:
        """Seconds that no step with stages takes less than, whatever the assignment and the cut."""
        fastest = self.solve(self.ask(force), limits)
        places = self.places or choose_places(crossing_bytes(fastest.priced), MOST_CUT_PLACES)
        table = intervals(fastest.priced, self.hop, places=places)
        space = self.spaces[force]
        return ExchangeTables(self.graph, self.prices, space, self.folding, fastest, table).bound(
            self.schedules
        )

    def fastest(self, ask: Ask, limits: Limits) -> Step:
        """Find the best step; with stages under a cap, of several assignments for which memory has a
        price."""
        if self.request.relay:
            return unstaged(self.solve(self.ask(ask.force), limits), 1)
        if self.request.pipeline_ranks == 1:
            return self.whole(ask, limits)
        fastest = self.solve(ask.uncapped, limits)
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

    def whole(self, ask: Ask, limits: Limits) -> Step:
        """The best step without stages.

        Sums S of gradients hide behind backward B: E >= S - theta B and E >= 0. With a multiplier on that
        row, in [0, 1], a solve is one of other costs, and bounds all plans: 1 is right where sums show, 0
        where they hide, and between the two it is where the lines of known assignments meet (multipliers.py).

        Where other exchanges start early, there are two rows: of all of them, A, behind all that is computed,
        C, and of sums of activations, T, behind the gradients of weights, W: E >= A - theta C,
        E >= T - theta W. The second one counts once, by itself, where the first leaves a gap.
        """
        count = self.request.micro_batches
        if not self.prices.overlap:
            return unstaged(self.solve(ask, limits), count)
        found, bound = self.hidden(ask.uncapped, limits)
        if ask.cap is not None and self.quickest(found).peak.nbytes > ask.cap:
            check_cutoff(bound, limits.cutoff)
            found, capped = self.hidden(ask, limits)
            bound = max(bound, capped)
        step = unstaged(self.quickest(found), count)
        step = dataclasses.replace(step, bound=min(max(bound, step.calls), step.seconds))
        return self.unlike(step, found, ask) if step.gap > max(UNLIKE, self.request.gap) else step

    def quickest(self, found: Sequence[Solution]) -> Solution:
        """The one with the shortest step."""
        return min(found, key=lambda each: each.priced.cost.of(self.request.micro_batches))

    def hidden(self, ask: Ask, limits: Limits) -> tuple[list[Solution], float]:
        """Assignments that are best under multipliers, and seconds that no step takes less than."""
        count = self.request.micro_batches
        found, bound, programs = list[Solution](), 0.0, WrittenPrograms()
        search = MultiplierSearch(self.request.gap, bisects=self.prices.early)
        for number in range(MULTIPLIERS + self.prices.early):
            late = float(number == MULTIPLIERS)
            try:
                row = dataclasses.replace(ask, multiplier=search.multiplier * (1.0 - late), late=late)
                solution = self.solve(row, limits, programs)
            except (InfeasibleError, SolverError) as error:
                if not found:
                    raise
                bound = max(bound, proved(error, limits.cutoff, count))
                break
            priced = solution.priced.at(self.prices)
            found.append(dataclasses.replace(solution, priced=priced, seconds=priced.seconds))
            seconds = priced.cost.of(count)
            quickest = self.quickest(found)
            if ask.cap is not None and ask.force == self.request.force:
                self.first = quickest
            least = quickest.priced.cost.of(count)
            bound = max(bound, count * solution.bound)
            if least - bound <= max(self.request.gap, SECONDS_TOLERANCE) * least:
                break
            search.note(solution.seconds, seconds / count, shows=priced.cost.exposed_sums)
            if search.is_over:
                break
        return found, bound

    def unlike(self, best: Step, found: Sequence[Solution], ask: Ask) -> Step:
        """The best step, or one whose blocks mix two of those `found`, if that can be told apart.

        These are the last ones whose sums show and whose sums hide. Blocks that are alike are simpler.
        """
        shows, hides = (
            [each for each in found if each.priced.cost.exposed_sums is shown] for shown in (True, False)
        )
        if self.folding.count == 1 or not shows or not hides:
            return best
        count = self.request.micro_batches
        hiding, showing = (unstaged(each[-1], count) for each in (hides, shows))
        priced = turned(hiding, showing, self.folding, count=count, cap=ask.cap)
        if priced is None or priced.cost.of(count) >= (1 - SECONDS_TOLERANCE) * best.seconds:
            return best
        solution = dataclasses.replace(
            best.solution, priced=priced, seconds=priced.seconds, held=priced, status="gap_limit"
        )
        mixed = dataclasses.replace(unstaged(solution, count), bound=best.bound)
        apart = max(MEASURED_ERROR, margin(priced, best.solution.priced))
        return (
            mixed if best.seconds > mixed.seconds * (1 + apart) else dataclasses.replace(best, passed=mixed)
        )

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
        is_far = found.gap > max(NEAR_BOUND_GAP, self.request.gap)
        if is_far and self.request.recompute is Recompute.AUTO and found.solution.program.recompute:
            others = self.leaner(fastest, ask, limits, known=found)
            return min([found, *others], key=lambda step: step.seconds)
        return found

    def improved(self, fastest: Solution, found: Step | None, ask: Ask, limits: Limits) -> Step | None:
        """A step better than `found` whose assignment differs from it, or from the fastest, by few choices.
        None if there is none, or the graph is too large to try many."""
        scarce = found is None or bool(found.solution.program.recompute or found.solution.program.offload)
        if not is_worthwhile(len(self.graph.operators), scarce=scarce):
            return None
        space, solution = self.space(ask.force), found.solution if found else fastest

        def step_of(program: Program) -> Step:
            priced = PricedProgram(self.prices, program)
            placed = dataclasses.replace(fastest, priced=priced, seconds=priced.seconds, held=priced)
            return self.stage(placed, ask.cap, limits, fastest.bound)

        scarce_cap = None if ask.cap is None else math.inf  # under which weights may be regathered
        problem = Problem(self.graph, self.prices, space, self.folding, cap=scarce_cap)
        return improved_step(problem, solution.program, found, step_of, deadline=limits.deadline)

    def leaner(self, fastest: Solution, ask: Ask, limits: Limits, *, known: Step | None = None) -> list[Step]:
        """Steps of assignments that meet the cap; fewer if one that meets it is `known`.

        If they recompute parts for that, also those of assignments that are chosen with a view to it, which
        may promise more than parts hold.
        """
        flight = min(map(mean_flight, self.schedules))
        unit = fastest.seconds / (fastest.peak.state + flight * fastest.peak.saved)

        def at(price: float, recompute: Recompute) -> Solution:
            memory_price = MemoryPrice(state=price * unit, saved=price * unit * flight)
            return self.solve(Ask(ask.force, None, memory_price, recompute), limits)

        asked, best, found = self.request.recompute, known, list[Step]()
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
                plain = self.request.recompute is Recompute.ALL or not step.solution.program.recompute
                low, high = (low, middle) if plain else (middle, high)
        return list(found.values())

    def even_seconds(self, seconds: float) -> float:
        """Seconds of a step if all stages of an assignment were as long, and none waited. `seconds` are those
        on the slowest devices of all ranks."""
        return self.pace * self.request.micro_batches * seconds / self.request.pipeline_ranks

    @property
    def pace(self) -> float:
        """Part of the slowest devices' seconds that a step takes if each rank does as much as it can: 1 where
        all are alike."""
        fastest = self.solved.get(self.ask(self.request.force))
        if not self.blocks or fastest is None or fastest.seconds <= 0:
            return 1.0
        return pace_of(fastest.priced)

    def in_orders(self, solution: Solution, cut: Callable[..., Step], schedules: Sequence[Schedule]) -> Step:
        """The best step over the orders in which groups of devices may hold stages."""
        best: Step | None = None
        failures: list[InfeasibleError] = []
        own = tuple(range(len(self.blocks)))
        fixed = self.request.stages_of_uses is not None
        for hosts in [self.request.hosts or own] if fixed else orders_of(self.blocks):
            moved = hosts != own
            kinds = [each for each in schedules if not moved or each.kind in MOVABLE]
            if not kinds:
                continue
            prices = self.prices.in_order([self.blocks[host] for host in hosts])
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
        return cap is None or solution.peak.state <= cap * self.request.pipeline_ranks + sum(self.prices.room)

    def refined(self, step: Step, deadline: float | None = None, others: float = math.inf) -> Step:
        """The step with all that makes it faster where it is, with a closer bound, as far as time goes; no
        step on another mesh takes less than `others` seconds."""
        with contextlib.suppress(SolverError):  # there is a step already
            step = self.touched(step, deadline, others)
        return step

    def touched(self, step: Step, deadline: float | None, others: float) -> Step:
        """The step refined, as by `refined`; raises SolverError if the solver fails."""
        if step.cut is None or is_over(deadline):
            return step
        fastest = self.solve(self.ask(self.request.force), Limits(deadline))
        refinement = Refinement(
            step.solution.priced.prices,
            self.hop,
            self.cap,
            self.request.recompute,
            self.offload,
            self.schedules,
            fastest.bound,
            deadline=deadline,
        )
        fixed = self.request.stages_of_uses is not None or self.places is not None
        few = len(self.graph.operators) <= MOST_OPERATORS  # with a bound of their own
        if few or fixed or self.graph.checkpoints or self.blocks:
            return refinement.refilled(step)
        if self.cap is not None and step.solution.seconds > fastest.seconds * (1 + SECONDS_TOLERANCE):
            refinement.others, refinement.scarcity = self.others_than(step, fastest)
        found = refinement.of(step)
        return dataclasses.replace(found, bound=min(found.bound, others))

    def others_than(self, step: Step, fastest: Solution) -> tuple[list[Program], Scarcity | None]:
        """For a step that memory made slower, assignments that are faster and take more.

        With them, what memory makes all assignments take, by prices around what a byte has cost.
        """
        force, flight, solution = self.request.force, min(map(mean_flight, self.schedules)), step.solution
        ask = partial(MemoryPricedProgram, self.graph, self.prices, self.spaces[force], self.folding)
        corners = list(ask().corners(flight, solution.seconds * (1 - SECONDS_TOLERANCE)))
        spared = (
            fastest.peak.state - solution.peak.state + flight * (fastest.peak.saved - solution.peak.saved)
        )
        others = [*corners[:1], *corners[1:][1 - MIXED :]]
        if spared <= 0:
            return others, None
        recomputes = self.request.recompute is not Recompute.NONE
        price = self.request.micro_batches * (solution.seconds - fastest.seconds) / spared
        return others, Scarcity(
            cap=float(self.cap or 0),
            free=fastest.bound,
            prices=[factor * price for factor in BOUNDED],
            least=cache(ask(relaxed=True, recomputes=recomputes).least),
        )

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
        starts, schedules, incumbent = None, self.schedules, limits.incumbent
        if incumbent and incumbent.schedule and self.even_seconds(solution.seconds) >= incumbent.seconds:
            schedules = [incumbent.schedule]
        if self.request.stages_of_uses is not None:
            starts = kept_starts(self.graph, self.request.stages_of_uses, self.schedules[0].stages)
        cut = partial(
            staged,
            hop=self.hop,
            cap=cap,
            relaxed=relaxed,
            starts=starts,
            places=self.places,
            recompute=self.request.recompute,
            offload=self.offload,
            cutoff=cutoff,
            limit=limit,
        )
        asked = cap, solution.bound if relaxed is None else relaxed, schedules, self.places

        def best_order() -> Step:
            return self.in_orders(solution, cut, schedules)

        cuts_once = best_order if self.blocks else partial(cut, solution, schedules=schedules)
        return self.known_cuts.step(solution.program, asked, cuts_once, cutoff=cutoff, limit=limit)

    @property
    def offload(self) -> Offload:
        """What activations may wait in host memory: none where there is no backward or no host link."""
        may = self.request.training and self.cluster.host is not None
        asked = Offload.AUTO if self.request.offload is Offload.STATE else self.request.offload
        return asked if may else Offload.NONE

    def solve(
        self, ask: Ask, limits: Limits = UNLIMITED, programs: WrittenPrograms | None = None
    ) -> Solution:
        """The best assignment of the whole graph; see `choose`."""
        for proven in (True, False)[: 1 if ask.bounded else 2]:
            if (known := dataclasses.replace(ask, bounded=proven)) in self.solved:
                return self.solved[known]
        if ask.cap is not None:
            free = self.ask(ask.force, bounded=ask.bounded)
            free = dataclasses.replace(free, multiplier=ask.multiplier, late=ask.late)
            fastest = self.solve(free, limits, programs)
            if fastest.peak.nbytes <= ask.cap:
                return fastest
        found = self.chosen(ask, limits, programs)
        if ask.cap is not None and found.program.on_host != fastest.program.on_host:
            found = dataclasses.replace(found, bound=min(found.bound, fastest.bound), status="gap_limit")
        if ask.multiplier is None:
            found = dataclasses.replace(found, bound=found.bound - self.most_hidden(found.bound))
        self.solved[ask] = found
        return found

    def chosen(self, ask: Ask, limits: Limits, programs: WrittenPrograms | None) -> Solution:
        """The best assignment by the costs that are asked for; where none fits, with weights on the host."""
        prices = self.prices if ask.multiplier is None else self.row_prices(ask.multiplier, ask.late)
        assign = partial(self.assigned, ask, limits, programs)
        alone = self.request.pipeline_ranks == 1 and self.request.on_host is None
        if ask.cap is None or not alone or self.offload is not Offload.AUTO or prices.on_host:
            found = assign(prices)
            if self.request.on_host is None:
                check_room(found.priced)
            bound = found.bound - most_hidden(prices, found.bound)
            return dataclasses.replace(coming_ahead(found, ask.cap), bound=bound)
        complete = partial(completed, cap=ask.cap, recompute=ask.recompute, offload=self.offload)
        return out_of_core(assign, prices, ask.cap, complete)

    def assigned(
        self, ask: Ask, limits: Limits, programs: WrittenPrograms | None, prices: Prices
    ) -> Solution:
        """The best assignment by these prices, or the first one if that is better."""
        alone, count = self.request.pipeline_ranks == 1, self.request.micro_batches
        cutoff = limits.cutoff / count if ask.bounded and alone else math.inf
        first = self.first if ask.cap is not None and ask.force == self.request.force else None
        if first is not None and ask.multiplier is not None:
            priced = first.priced.at(prices)
            first = dataclasses.replace(first, priced=priced, seconds=priced.seconds)
        known = cutoff if first is None else min(cutoff, first.seconds)
        cutoff, known = before_hiding(prices, cutoff), before_hiding(prices, known)
        try:
            found = choose_named(
                self.graph,
                prices,
                self.space(ask.force),
                self.folding,
                Goal(
                    ask.cap,
                    self.request.gap,
                    ask.memory_price,
                    ask.bounded,
                    ask.recompute,
                    self.offload if alone else Offload.NONE,
                    cutoff,
                    known if ask.cap is not None else math.inf,
                ),
                Effort(
                    None if limits.deadline is None else max(0.1, left(limits.deadline)),
                    limits.work,
                    brief=ask.multiplier is not None and ask.multiplier < 1.0,
                ),
                programs if ask.memory_price == FREE else self.priced_programs,
            )
        except UnbeatenError as error:
            if first is None:
                raise
            return dataclasses.replace(first, bound=min(error.bound, first.seconds))
        if first is not None and first.seconds < found.seconds:
            return dataclasses.replace(first, bound=min(found.bound, first.seconds))
        return found

    def most_hidden(self, bound: float) -> float:
        """Seconds of an assignment that sums of gradients may overlap, at most.

        They are those of all weights that require gradients over all axes, or the overlap's part of the least
        that an assignment takes.
        """
        prices, mesh = self.prices, self.mesh
        if not prices.overlap:
            return 0.0
        if prices.early:
            return prices.overlap * bound
        whole = (R,) * len(mesh.shape)
        sums = sum(
            prices.gradient_sync(item.name, Move(axis, whole, (*whole[:axis], B, *whole[axis + 1 :])))
            for item in self.graph.inputs
            if item.kind is InputKind.PARAMETER and item.spec.requires_grad
            for axis in mesh.axes
            if mesh.shape[axis] > 1
        )
        return prices.step_weight * min(sums, prices.overlap * bound)

    def space(self, force: Force | None) -> Space:
        """The strategies and layouts to choose from; made once."""
        if force not in self.spaces:
            if force is not None:
                check_force(self.graph, self.prices, force)
            self.spaces[force] = build_space(
                self.graph,
                self.prices,
                self.folding,
                force=force,
                pins=self.request.pins if force is self.request.force else None,
                borders=Borders(
                    self.request.stored,
                    self.request.local_inputs,
                    self.request.user_layouts,
                    self.request.leaves_parts(self.graph),
                    self.request.shard_state,
                ),
            )
        return self.spaces[force]


def proved(error: AutoparError, cutoff: float, micro_batches: int) -> float:
    """Seconds that no step takes less than, by the error of a search that ended without one."""
    if isinstance(error, UnbeatenError):
        return micro_batches * error.bound
    return cutoff if isinstance(error, CutoffError) else -math.inf


def stageable(graph: Graph, request: Request) -> list[ScheduleKind]:
    """The schedules whose stages have an operator each; raises InputError if none are left."""
    kinds, most = request.kinds(), len(graph.operators)
    found = [kind for kind in kinds if request.pipeline_ranks * stages_per_rank(kind) <= most]
    if kinds and not found:
        least = min(request.pipeline_ranks * stages_per_rank(kind) for kind in kinds)
        raise InputError(
            where="--stages",
            found=f"{least} stages for {most} operators",
            wanted=f"at most {most}",
            remedy="use fewer stages",
        )
    return found


def check_force(graph: Graph, prices: Prices, force: Force) -> None:
    """Raise InfeasibleError for a forced kind if none of its operators has a factor as long as an axis."""
    kinds, mesh = Kinds(graph, prices.dims), prices.dims.mesh
    splitting = split_by_force(graph, prices)
    by_axis = kind_by_axis(force, mesh)
    compiled = "" if prices.groups is None else " of a compiled program, whose sizes are fixed,"
    for wanted in dict.fromkeys(by_axis):
        least = min((mesh.shape[axis] for axis in kinds.axes() if by_axis[axis] is wanted), default=1)
        lengths = [kinds.lengths(item, wanted) for item in splitting]
        fixed = (size for each in lengths for factor, size in each.items() if has_sizes(factor, prices))
        longest = max(fixed, default=0)
        if longest < least or not longest:
            raise InfeasibleError(
                where=f"--force {name_of(force)} on mesh {mesh}",
                found=f"no {wanted.value} dim longer than {longest}"
                if longest
                else f"no operator{compiled} that can be split by {wanted.value}",
                wanted=f"one of at least {least}, the size of an axis",
                remedy="choose another kind, a smaller mesh or larger inputs",
            )
