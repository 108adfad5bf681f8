"""The last touches to a step with stages, each for as long as it makes the step faster.

    shifted   stages begin at any operator around where they begin now
    filled    ranks that wait make gradients of weights meanwhile (fill_bubbles.py)
    mixed     operators follow faster assignments as far as there is memory (mixture.py)

The bound is on cuts at all places that were looked at, as close as is known. It holds for any order of W:
what it knows of schedules is what must come before a rank's work and after it. Memory has its part in it by
what `scarcity` says of all assignments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.core.costs import LinkLike
from autopar.core.deadline import is_over
from autopar.core.graph import Graph
from autopar.core.offload import Offload
from autopar.core.pipeline import inseparable
from autopar.core.program import Program
from autopar.core.recompute import Recompute
from autopar.core.schedule import SPLIT_BACKWARD, Schedule
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.stages.intervals import Intervals, choose_places, crossing_bytes, intervals
from autopar.errors import InfeasibleError
from autopar.schedules.fill_bubbles import filled
from autopar.solve.stages.cut_search import MOST_CUT_PLACES, Cut, closer_bound, cut_at, cuts
from autopar.solve.stages.mixture import Mixture
from autopar.solve.stages.rank_bounds import Scarcity
from autopar.solve.stages.step import Parting, Step, levels, share_of, staged, step_of

MOST_NEIGHBORS = 360  # places around those of a cut
RECUTS = 2
MOST_SETTLED_SHARE = 0.3  # of operators; if more can't follow other assignments, conversions join them
WORTHWHILE = 2e-3  # of a step's seconds


@dataclass(frozen=True, slots=True)
class _SearchedCuts:
    """Places at which cuts under `schedules` were sought, and a bound on the seconds of all of them."""

    bound: float
    places: Sequence[int]
    schedules: Sequence[Schedule]


@dataclass(slots=True)
class Refinement:
    """Makes steps of one mesh faster. `schedules` are all that were looked at, `others` assignments
    that are faster and take more memory; `relaxed` are seconds that no assignment takes less than. After the
    `deadline` nothing more is tried."""

    prices: Prices
    hop: LinkLike
    cap: int | None
    recompute: Recompute
    offload: Offload
    schedules: Sequence[Schedule]
    relaxed: float
    others: Sequence[Program] = ()
    scarcity: Scarcity | None = None
    deadline: float | None = None
    sought: list[_SearchedCuts] = field(default_factory=list)

    @property
    def graph(self) -> Graph:
        return self.prices.graph

    def of(self, step: Step) -> Step:
        """The step with all that makes it faster, and its bound."""
        places = choose_places(crossing_bytes(step.solution.priced), MOST_CUT_PLACES)
        self.sought = [_SearchedCuts(step.bound, places, self.schedules)]
        step = self.filled(self.shifted(step))
        if not is_over(self.deadline) and (mixed := self.mixed(step)):
            step = self.filled(mixed)
        return self.bounded(step)

    def bounded(self, step: Step) -> Step:
        """The step with the closest bound that is known, or that is found in time."""
        plain, bounds = step.solution.priced.plain, []
        scarcity = self.scarcity  # in seconds of the step's assignment, of which all take a share
        if scarcity and step.share:
            scarcity = replace(scarcity, cap=scarcity.cap / step.share)
        for each in self.sought:
            if is_over(self.deadline):
                bounds.append(each.bound)
                continue
            table = intervals(plain, self.hop, places=each.places)
            closer = self.closer_bound(table, each.schedules, step.seconds, scarcity)
            bounds.append(max(each.bound, step.share * closer))
        return replace(step, bound=min(step.seconds, *bounds))

    def closer_bound(
        self, table: Intervals, schedules: Sequence[Schedule], most: float, scarcity: Scarcity | None
    ) -> float:
        """The bound on cuts under the schedules. Memory has no price where what is moved may hide."""
        if self.offload is Offload.NONE:
            return closer_bound(table, schedules, most=most, scarcity=scarcity)
        split = [each for each in schedules if each.kind in SPLIT_BACKWARD]
        whole = [each for each in schedules if each.kind not in SPLIT_BACKWARD]
        most = closer_bound(table, split, most=most, scarcity=scarcity)
        return closer_bound(table, whole, most=most)

    def shifted(self, step: Step) -> Step:
        """The step with its stages cut at any operator around where they are cut now. Only if they were
        sought at some of many places."""
        assert step.cut is not None and step.schedule is not None
        solution, operators = step.solution, len(self.graph.operators)
        recompute = () if self.recompute is Recompute.AUTO else None
        solution = replace(solution, priced=solution.priced.remedied(recompute=recompute, offload=()))
        for _ in range(RECUTS):
            if step.cut.places == operators or is_over(self.deadline):
                break
            starts = step.cut.starts
            places = _around(starts, operators)
            try:
                shifted = staged(
                    solution,
                    schedules=[step.schedule],
                    hop=self.hop,
                    cap=self.cap,
                    relaxed=self.relaxed,
                    places=places,
                    known=starts,
                    recompute=self.recompute,
                    offload=self.offload,
                )
            except InfeasibleError:  # by what tables and replays differ
                break
            assert shifted.cut is not None
            unfilled = self.plain(step.schedule)
            known = shifted.bound if unfilled is step.schedule else 0.0
            self.sought.append(_SearchedCuts(known, places, [unfilled]))
            gain = 1 - shifted.seconds / step.seconds
            step = replace(shifted, filling=step.filling) if gain > 0 else step
            assert step.cut is not None
            if gain < WORTHWHILE or not _at_edge(shifted.cut.starts, starts, places):
                break
        return step

    def plain(self, schedule: Schedule) -> Schedule:
        """The schedule before its waits were filled with work."""
        return next(each for each in self.schedules if each.kind is schedule.kind)

    def filled(self, step: Step) -> Step:
        """The step with its waits filled, and with its stages moved to where that makes them even."""
        for _ in range(RECUTS):
            before, step = step, self.refilled(step)
            if step is before or is_over(self.deadline):
                break
            step = self.shifted(step) if self.moves(step) else step
        return step

    def moves(self, step: Step) -> bool:
        """Whether stages may begin elsewhere: cuts were sought at some places only."""
        return bool(self.sought) and step.cut is not None and step.cut.places < len(self.graph.operators)

    def refilled(self, step: Step) -> Step:
        """The step with its waits filled as they are now; itself if that isn't faster, or doesn't fit."""
        assert step.cut is not None and step.schedule is not None
        schedule = filled(self.plain(step.schedule), step.cut.stages)
        if schedule == step.schedule:
            return step
        places = _around(step.cut.starts, len(self.graph.operators))
        table = intervals(step.solution.priced, self.hop, places=places)
        found = cut_at(table, schedule, step.cut.starts)
        fits = self.cap is None or found.over(self.cap) <= 0
        if not fits or found.seconds >= step.seconds:
            return step
        found = replace(found, mixes=step.cut.mixes, places=step.cut.places)
        return replace(self.with_cut(step, found, schedule), filling=step.cut.stages)

    def with_cut(self, step: Step, cut: Cut, schedule: Schedule) -> Step:
        """The step with another cut, of which no more is known than that it can't beat the bound."""
        share = share_of(step.solution, self.relaxed)
        cut = replace(cut, bound=min(cut.seconds, step.bound / share) if share else 0.0)
        found = step_of(step.solution, cut, schedule, free=step.free, share=share)
        return replace(found, filling=step.filling)

    def mixed(self, step: Step) -> Step | None:
        """A faster step whose stages follow, as far as memory goes, one of the `others`; None if none is
        found."""
        if not self.others or self.cap is None:
            return None
        assert step.cut is not None and step.schedule is not None
        graph, prices, schedule = self.graph, self.prices, step.schedule
        plain = step.solution.priced.plain
        mixture = Mixture([plain.program, *self.others], prices)
        if len(mixture.settled) > MOST_SETTLED_SHARE * len(graph.operators):
            mixture = Mixture([plain.program, *self.others], prices, joins=True)
        apart = inseparable(graph)
        around = _around(step.cut.starts, len(graph.operators))
        places = mixture.seams([place for place in around if place not in apart])
        if len(places) <= schedule.stages:
            return None
        allowed = Recompute.AUTO if step.solution.program.recompute else Recompute.NONE
        lean = levels(
            plain,
            recompute=allowed if self.recompute is Recompute.AUTO else Recompute.NONE,
            offloads=bool(step.solution.program.offload),
        )
        programs = [*lean, *(PricedProgram(prices, each) for each in self.others)]
        tables = [intervals(each, self.hop, places=places) for each in programs]
        known = _nearest(step.cut.starts, places)
        try:
            ((found, _),) = cuts(tables, [schedule], cap=self.cap, known=known)
            parting = Parting(programs, self.hop, schedule, self.cap, places, mixture, places)
            priced, exact = parting.of(found)
        except InfeasibleError:
            return None
        if exact.seconds >= step.seconds:
            return None
        solution = replace(
            step.solution,
            priced=priced,
            seconds=priced.plain.seconds,
            held=priced,
        )
        exact = replace(exact, places=len(places) - 1)
        return self.with_cut(replace(step, solution=solution, free=exact.seconds), exact, schedule)


def _nearest(starts: Sequence[int], places: Sequence[int]) -> tuple[int, ...] | None:
    """The starts of stages moved to places, which begin with 0; None if some fall together."""
    found = tuple(min(places, key=lambda place: abs(place - start)) for start in starts)
    return found if len(set(found)) == len(found) and found[-1] < places[-1] else None


def _at_edge(starts: Sequence[int], before: Sequence[int], places: Sequence[int]) -> bool:
    """Whether a start may want to move further than the places around it allow."""
    known = set(places)
    return any(
        old != new and not known.issuperset((new - 1, new + 1))
        for new, old in zip(starts, before, strict=True)
    )


def _around(starts: Sequence[int], operators: int) -> tuple[int, ...]:
    """The most places that may be, next to those where stages start."""
    inner = starts[1:]
    reach = max(1, (MOST_NEIGHBORS // max(1, len(inner)) - 1) // 2)
    around = {start + by for start in inner for by in range(-reach, reach + 1)}
    return (0, *sorted(place for place in around if 0 < place < operators), operators)
