"""Solve the placement program, read the answer truthfully, and check it outside the solver."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.core.deadline import is_over
from autopar.core.graph import Graph
from autopar.core.offload import Offload
from autopar.core.recompute import Recompute
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import InfeasibleError, OverCapError, SolverError
from autopar.solve.assignment.goal import ANY_EFFORT, ANY_PLAN, Effort, Goal
from autopar.solve.assignment.least_memory import LEAN_WORK, infeasible, least
from autopar.solve.assignment.written_programs import WrittenPrograms
from autopar.solve.choices.fold import Folding
from autopar.solve.choices.memory_price import FREE, MemoryPrice
from autopar.solve.choices.space import Space
from autopar.solve.highs import SECOND, solve
from autopar.solve.linear_program import SolverAnswer
from autopar.solve.program.chosen import of_chosen
from autopar.solve.program.decode import is_whole, read
from autopar.solve.program.local_search import CandidatePlan, search_locally
from autopar.solve.program.problem import Problem
from autopar.solve.program.solution import (
    Solution,
    UnbeatenError,
    check_cutoff,
    check_promise,
    completed,
    judged,
)
from autopar.solve.tables.choice_tables import WideError
from autopar.solve.tables.priced_elimination import cheapest_at

MEMORY_ROUNDS = 8
FITTING_EFFORT = 24_000  # operators that are placed, in all, to find a plan that fits
KNOWN_EFFORT = 4  # times less of it where a plan that fits is known
FEWEST_ROUNDS = 4  # of the deepest programs
# Work of branching, in all, where memory is scarce and no time limit given; then answers are rounded.
BRANCHING = 12 * SECOND
PRICED_BRANCHING = 6 * SECOND  # of it for one price of memory
PRICED_GAP = 5e-3  # from the best where memory has a price, which is a guess itself
LARGE_PROGRAM = 4000  # rows from which on to branch takes seconds
MEMORY_PRICES = (1e-3, 30.0)  # of all memory that the fastest assignment takes, in its own seconds
PRICE_STEPS = 5  # of the bisection between them
MOST_ROUNDS = 2 * MEMORY_ROUNDS + PRICE_STEPS  # what there is to be tried, in programs that aren't deep
UNSOLVED = SolverAnswer(None, math.inf, -math.inf, "time_limit")


def choose(
    graph: Graph,
    prices: Prices,
    space: Space,
    folding: Folding,
    goal: Goal = ANY_PLAN,
    effort: Effort = ANY_EFFORT,
    programs: WrittenPrograms | None = None,
) -> Solution:
    """The plan that the `goal` asks for.

    Raises InfeasibleError if no plan that meets the cap is found, CutoffError if none takes less than
    the cutoff by the relaxation, SolverError if the time limit passed without an incumbent. The linear
    memory rows leave out short-lived tensors and know parts that are recomputed but roughly, so answers
    are completed and replayed exactly: those of the rows, tightened until one fits, and those in which memory
    has a price. Where branching takes too long, or more than the work, the relaxation is rounded: what is
    found is replayed all the same. Only the first bound, under the cap itself, holds for all plans. The
    deeper the program, the fewer rounds of this it gets, and fewest in a brief search. Where a plan of known
    seconds meets the cap, nothing is completed that takes more, and UnbeatenError is raised if nothing less
    is found.
    """
    deadline = None if effort.time_limit is None else time.monotonic() + effort.time_limit
    rounds = FITTING_EFFORT // max(1, len(graph.operators))
    brief = effort.brief and rounds < MOST_ROUNDS
    if goal.known < math.inf:
        rounds //= KNOWN_EFFORT
    rounds = FEWEST_ROUNDS if brief else max(FEWEST_ROUNDS, rounds)
    search = _PlacementSearch(
        graph,
        prices,
        space,
        folding,
        goal.cap,
        goal.gap,
        deadline,
        goal.recompute,
        goal.offload,
        rounds,
        brief,
        programs or WrittenPrograms(),
        work=effort.work,
        known=goal.known,
    )
    if goal.cap is None:
        return search.solved(memory_price=goal.memory_price, bounded=goal.bounded, cutoff=goal.cutoff)
    return search.under_cap(goal.cap, bounded=goal.bounded, cutoff=goal.cutoff)


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """A program without integrality, and its answer; no plan whose equal blocks aren't planned alike takes
    less than `others` seconds."""

    problem: Problem
    answer: SolverAnswer
    others: float
    is_bounded: bool

    @property
    def is_whole(self) -> bool:
        """Whether the relaxation has chosen whole strategies."""
        return self.answer.values is not None and is_whole(self.problem, self.answer)

    @property
    def bound(self) -> float:
        """Seconds that no plan takes less than."""
        return self.bound_of(self.answer.bound)

    def bound_of(self, alike: float) -> float:
        """The bound on all plans, by one on those that plan equal blocks alike."""
        proves = self.is_bounded and self.problem.memory_price == FREE
        return min(alike, self.others) if proves else -math.inf


def is_large(problem: Problem) -> bool:
    """Whether to branch takes seconds."""
    return len(problem.lp.lows) >= LARGE_PROGRAM


@dataclass(slots=True)
class _PlacementSearch:
    graph: Graph
    prices: Prices
    space: Space
    folding: Folding
    cap: int | None
    gap: float
    deadline: float | None
    recompute: Recompute
    offload: Offload
    rounds: int  # left, of solving for a plan that fits
    brief: bool  # whether those of few rounds will do, or none
    programs: WrittenPrograms
    leanest: Solution | None = None  # of all that were found
    branching: float = BRANCHING  # left
    work: float = math.inf  # for a relaxation, and for branching, at most
    known: float = math.inf  # seconds of a plan that meets the cap

    def under_cap(self, cap: int, *, bounded: bool, cutoff: float) -> Solution:
        """The best plan by rows and by prices of memory; of large programs, on whose rows to branch takes
        long and leads to no more, by prices alone if these find one."""
        rows = self.relaxation(rows=cap, bounded=bounded, cutoff=cutoff)
        first = self.placed(rows) if rows.is_whole or not is_large(rows.problem) else None
        bound = first.bound if first else rows.bound
        found = self.tightened(first, cap) if first else []
        if not found or bounded and found[0].seconds > bound * (1 + self.gap):
            with contextlib.suppress(SolverError):
                found += self.priced(cap)
            if first is None and not found:
                first = self.placed(rows)
                bound = max(bound, first.bound)
                found += self.tightened(first, cap)
            with contextlib.suppress(SolverError):
                found += self.without_regather(cap)
        if not found and self.known < math.inf:
            raise UnbeatenError.of(bound, self.known)
        if not found and self.brief:
            raise self.infeasible(cap)
        best = min(found, key=lambda each: each.seconds) if found else self.least()
        if best is not None and (not found or best.seconds > bound * (1 + self.gap)):
            best = self.best_neighbor([best, *([first] if first else []), *found], cap)
        if best is None or best.peak.nbytes > cap:
            self.note(best)
            raise self.infeasible(cap)
        best = replace(best, status=first.status if first else "gap_limit")
        return judged(best, bound, self.gap) if bounded else best

    def best_neighbor(self, known: Sequence[Solution], cap: int) -> Solution:
        """The best that changes of single choices lead to from these."""
        if self.recompute is Recompute.ALL or self.offload is Offload.ALL:
            return known[0]
        starts = [CandidatePlan(each.priced, each.seconds) for each in known]
        best = search_locally(
            self.problem(rows=cap),
            starts,
            cap,
            self.recompute,
            offload=self.offload,
            deadline=self.deadline,
        )
        return replace(known[0], priced=best.priced, seconds=best.seconds, held=best.priced)

    def tightened(self, solution: Solution, cap: int) -> list[Solution]:
        """The solution, or the first one under tighter rows, that fits; none if there is none."""
        rows = cap
        for _ in range(MEMORY_ROUNDS):
            if solution.peak.nbytes <= cap:
                return [solution]
            if solution.seconds >= self.known or not self.has_round():
                break
            rows -= max(solution.peak.nbytes - cap, cap // 200)
            try:
                solution = self.solved(rows=rows, bounded=False)
            except (InfeasibleError, SolverError):
                break
        return [solution] if solution.peak.nbytes <= cap else []

    def priced(self, cap: int) -> list[Solution]:
        """Assignments that fit, of those that are cheapest where memory has a price: the price is bisected
        to where they just do."""
        if not self.rounds:
            return []
        fastest = self.without_cap()
        unit = fastest.seconds / max(1, fastest.peak.nbytes)
        low, high = map(math.log, MEMORY_PRICES)
        found = []
        for _ in range(PRICE_STEPS):
            if not self.has_round():
                break
            middle = (low + high) / 2
            price = math.exp(middle) * unit
            solution = self.solved(memory_price=MemoryPrice(price, price), bounded=False)
            if solution.peak.nbytes <= cap:
                found.append(solution)
                self.known = min(self.known, solution.seconds)
            # Without recomputed parts it is the assignment that tells whether memory was priced high enough.
            plain = solution.peak.nbytes <= cap and not solution.program.recompute
            plain = plain or solution.seconds >= self.known
            low, high = (low, middle) if plain else (middle, high)
        fitted = self.completed(fastest)
        return [*found, fitted] if fitted.peak.nbytes <= cap else found

    def without_cap(self) -> PricedProgram:
        """The fastest program, whatever memory it takes."""
        return replace(self, cap=None, known=math.inf).solved(bounded=False).priced

    def has_round(self) -> bool:
        """Take another round, if there is one."""
        before = self.rounds
        self.rounds = max(0, before - 1)
        return before > 0

    def without_regather(self, cap: int) -> list[Solution]:
        """Solutions that fit and regather no weight: rows don't see what doing so holds for a moment."""
        other = replace(self, space=self.space.without_regather())
        if other.space is self.space or not self.rounds:
            return []
        try:
            return other.tightened(other.solved(rows=cap, bounded=False), cap)
        except InfeasibleError:
            return []

    def left(self) -> float | None:
        return None if self.deadline is None else max(0.1, self.deadline - time.monotonic())

    def least(self) -> Solution | None:
        """Return the leanest solution that is found while time lasts.

        Sought by `least` with regathered weights and without, with recomputed parts in the rows and
        without; all that were found on the way count."""
        spaces = dict.fromkeys((self.space.gatherings, self.space.without_regather().gatherings))
        rows = dict.fromkeys((self.recompute is not Recompute.NONE, False))
        work = LEAN_WORK
        for gatherings, recomputes in itertools.product(spaces, rows):
            with contextlib.suppress(SolverError):
                found, spent = least(
                    self.graph,
                    self.prices,
                    replace(self.space, gatherings=gatherings),
                    self.folding,
                    Goal(cap=self.cap, recompute=self.recompute, offload=self.offload),
                    Effort(self.left(), work),
                    recomputes=recomputes,
                )
                self.note(found)
                work -= spent
            if work <= 0 or is_over(self.deadline):
                break
        return self.leanest

    def note(self, solution: Solution | None) -> None:
        """Remember the plan if it is the leanest."""
        if solution and (self.leanest is None or solution.peak.nbytes < self.leanest.peak.nbytes):
            self.leanest = solution

    def problem(
        self, *, rows: int | None, memory_price: MemoryPrice = FREE, relaxed: bool = False
    ) -> Problem:
        return self.programs.problem(
            self.graph,
            self.prices,
            self.space,
            self.folding,
            cap=rows,
            relaxed=relaxed,
            memory_price=memory_price,
            recomputes=self.recompute is not Recompute.NONE,
            offloads=self.offload is not Offload.NONE,
        )

    def infeasible(self, cap: int) -> InfeasibleError:
        """The error, which seeks the least that would do when somebody reads it."""
        found = self.leanest

        def tell() -> InfeasibleError:
            return infeasible(
                self.prices,
                cap,
                self.least(),
                recompute=self.recompute,
                offload=self.offload,
            )

        return OverCapError(tell, known=found.peak.nbytes if found else math.inf)

    def solved(
        self,
        *,
        rows: int | None = None,
        memory_price: MemoryPrice = FREE,
        bounded: bool = True,
        cutoff: float = math.inf,
    ) -> Solution:
        """Solve for the best plan by the linear rows, under `rows` bytes of memory."""
        if memory_price != FREE and (exact := self.eliminated(memory_price)):
            self.note(exact)
            return exact
        return self.placed(
            self.relaxation(rows=rows, memory_price=memory_price, bounded=bounded, cutoff=cutoff)
        )

    def relaxation(
        self,
        *,
        rows: int | None,
        memory_price: MemoryPrice = FREE,
        bounded: bool,
        cutoff: float,
    ) -> _Relaxed:
        """Solve the relaxation, whose bound is one on all plans if they have to be `bounded`."""
        problem = self.problem(rows=rows, memory_price=memory_price)
        answer = solve(problem.lp, relaxed=True, time_limit=self.left(), work=self.work)
        others = math.inf  # the bound on plans whose equal blocks are not planned alike
        if bounded and memory_price == FREE and answer.status != "infeasible":
            if self.folding.count > 1:
                others = self.bound(self.problem(rows=rows, relaxed=True))
            check_cutoff(min(answer.bound, others), cutoff)
        if answer.status == "infeasible":
            raise self.infeasible(self.cap or 0)
        return _Relaxed(problem, answer, others, is_bounded=bounded)

    def placed(self, relaxed: _Relaxed) -> Solution:
        """The best plan in whole strategies, with what is recomputed and offloaded; that which the relaxation
        comes nearest to if it isn't found in time, or SolverError if that wasn't solved either."""
        problem, answer, bound = relaxed.problem, relaxed.answer, relaxed.answer.bound
        if answer.values is not None and not relaxed.is_whole:
            answer = self.branch(problem, answer)
            bound = max(bound, answer.bound)
        if answer.status == "infeasible":
            raise self.infeasible(self.cap or 0)
        rounded = answer.values is None
        if rounded:
            answer = replace(relaxed.answer, status="time_limit")
        if answer.values is None:
            raise SolverError(
                where="solver",
                found="no plan in time",
                wanted="an incumbent",
                remedy="give more with --time-limit",
            )
        priced = PricedProgram(self.prices, read(problem, answer))
        if not rounded:
            self.check(problem, answer, priced)
        bound = relaxed.bound_of(bound)
        solution = replace(self.completed(priced), bound=bound, status=answer.status)
        self.note(solution)
        return judged(solution, bound, self.gap) if relaxed.is_bounded else solution

    def eliminated(self, memory_price: MemoryPrice) -> Solution | None:
        """The best plan where bytes have a price, if blocks are unlike and it can be found by elimination."""
        if self.folding.count > 1:
            return None
        with contextlib.suppress(WideError):
            tables = self.programs.memory_tables(
                self.graph, self.prices, self.space, self.folding, offloads=False
            )
            program, _ = cheapest_at(tables, memory_price, recomputes=self.recompute is not Recompute.NONE)
            return self.completed(PricedProgram(self.prices, program))
        return None

    def completed(self, priced: PricedProgram) -> Solution:
        """The program with what is computed again so that it fits; as it is if it is too slow already."""
        cap = self.cap if priced.seconds < self.known else None
        return completed(priced, cap, recompute=self.recompute, offload=self.offload, below=self.known)

    def bound(self, free: Problem) -> float:
        """Lower bound on the seconds of all plans, by a relaxation; -inf if it can't be solved."""
        try:
            return solve(free.lp, relaxed=True, time_limit=self.left()).bound
        except SolverError:
            return -math.inf

    def branch(self, problem: Problem, relaxed: SolverAnswer) -> SolverAnswer:
        """The answer in whole strategies; where memory is scarce, which may take for ever, only what is found
        before the search has branched for long enough."""
        if problem.memory_price != FREE:
            near = self.near(problem, relaxed)
            if near or is_large(problem):
                return near or UNSOLVED
        if problem.cap is None and problem.memory_price == FREE:
            try:
                return solve(problem.lp, gap=self.gap, time_limit=self.left(), work=self.work)
            except SolverError:
                return UNSOLVED
        most = self.branching if problem.memory_price == FREE else min(self.branching, PRICED_BRANCHING)
        most = most if self.deadline is None else math.inf
        try:
            answer = solve(problem.lp, gap=self.gap, time_limit=self.left(), work=min(most, self.work))
        except SolverError:
            answer = UNSOLVED
        self.branching = max(0.0, self.branching - answer.work)
        return answer

    def near(self, problem: Problem, relaxed: SolverAnswer) -> SolverAnswer | None:
        """The best of what the relaxation has chosen in parts, if it comes close to it."""
        work = min(self.branching, PRICED_BRANCHING, self.work)
        try:
            few = of_chosen(problem.lp, relaxed)
            answer = solve(few, gap=self.gap, time_limit=self.left(), work=work)
        except SolverError:
            return None
        self.branching = max(0.0, self.branching - answer.work)
        if answer.values is None or answer.cost > relaxed.cost * (1 + max(self.gap, PRICED_GAP)):
            return None
        return replace(answer, bound=relaxed.bound, status="gap_limit")

    def check(self, problem: Problem, answer: SolverAnswer, priced: PricedProgram) -> None:
        """Raises CheckError if what the solver promised is not what the program costs."""
        assert answer.values is not None
        check_promise(
            problem,
            priced,
            answer.cost
            - problem.memory.cost(answer.values)
            - problem.operators.recompute_cost(answer.values),
        )
