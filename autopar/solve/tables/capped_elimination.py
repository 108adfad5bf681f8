"""The cheapest plan under a cap where choices can be eliminated: bytes have prices, and plans are mixed.

    D(p) = min over assignments of  seconds + sum over rows r of p[r] (bytes[r] - cap)

    D |        .  .   line of one that holds more than the cap
      |     .      .
      |  .            .  line of one that holds less
      +-----------+------ p

No plan that meets the cap takes less than D(p), whatever the prices p >= 0. Every assignment that is found
gives a plane that D lies below; where the lowest of them are highest is the most that D can be, and those
are the next prices (Kelley's cutting planes, 1960). What holds too much and what holds less than it may are
equally good there. So the first operators run as in the one and the last ones as in the other, as many as
the cap allows: between them lie only the conversions at one place. The replay of the step (peak_memory.py)
says what fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from autopar.core.offload import Offload
from autopar.core.recompute import Recompute
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import RuleError
from autopar.solve.highs import solve
from autopar.solve.linear_program import LinearProgram
from autopar.solve.program.solution import Solution, check_cutoff, check_promise, completed
from autopar.solve.tables.choice_tables import WideError
from autopar.solve.tables.elimination import least
from autopar.solve.tables.memory_tables import UNPRICED, Chosen, MemoryTables, RowPrices, Totals
from autopar.solve.tables.priced_elimination import program_of

CUTS = 10  # prices that are tried
ENOUGH = 2e-3  # of the seconds: the bound rises by no more
FIRST_PRICE_SHARE = 0.3  # of the fastest assignment's seconds, what its bytes cost at first
HIGHEST = 30.0  # the same, at most
REPLAYS = 4  # mixtures that are replayed
NEAR_CAP_SHARE = 0.01  # of the cap: a plan that holds so much less is replayed no more
LOWER = (1.0, 0.7)  # times the best prices: for a bound on plans that compute something again


@dataclass(frozen=True, slots=True)
class PricedAssignment:
    """An assignment, and what it takes and holds."""

    chosen: Chosen
    totals: Totals


@dataclass(slots=True)
class CappedElimination:
    """The search for the cheapest plan under `cap` bytes; raises WideError where none is found so."""

    tables: MemoryTables
    cap: int
    recompute: Recompute
    offload: Offload
    found: list[PricedAssignment] = field(default_factory=list)
    bounds: dict[RowPrices, float] = field(default_factory=dict)  # least costs
    plans: list[Solution] = field(default_factory=list)

    def solution(self, *, start: RowPrices, bounded: bool, cutoff: float) -> tuple[Solution, RowPrices]:
        """The best plan, and the prices at which the bound is highest."""
        prices = start
        if prices == UNPRICED:
            self.at(UNPRICED)
            prices = self.first_prices()
        else:
            self.check(prices, cutoff)
        prices = self.climb(prices, self.cap)
        self.mix(prices)
        if not self.plans:
            raise WideError
        best = min(self.plans, key=lambda each: each.seconds)
        bound = self.bound(prices) if bounded else -math.inf
        check_cutoff(bound, cutoff)
        return replace(best, bound=min(bound, best.seconds), status="gap_limit"), prices

    def check(self, prices: RowPrices, cutoff: float) -> None:
        """Raise CutoffError if no plan takes less than `cutoff`."""
        if math.isfinite(cutoff):
            check_cutoff(self.proved(prices), cutoff)

    def first_prices(self) -> RowPrices:
        totals = self.found[0].totals
        price = FIRST_PRICE_SHARE * totals.seconds / max(1.0, totals.most)
        return RowPrices(price / 2, price / 2)

    # -- prices -----------------------------------------------------------------------------------------

    def climb(self, prices: RowPrices, cap: float) -> RowPrices:
        """The prices at which the bound is highest, about."""
        best = prices
        for _ in range(CUTS):
            self.at(prices)
            best = max(self.bounds, key=lambda each: self.bounds[each] - each.sum * cap)
            most, prices = self.highest(cap)
            if most - (self.bounds[best] - best.sum * cap) <= ENOUGH * most or prices in self.bounds:
                break
        return best

    def at(self, prices: RowPrices) -> None:
        """Note the cheapest assignment at these prices."""
        tables = self.tables
        cost, taken = least(tables.priced_tables(prices, recomputes=False), list(map(len, tables.choices)))
        if not math.isfinite(cost):
            raise WideError
        chosen = tables.chosen(taken, tables.priced_costs(prices), tables.price_of(prices))
        self.bounds[prices] = cost
        self.found.append(PricedAssignment(chosen, tables.totals(chosen)))

    def highest(self, cap: float) -> tuple[float, RowPrices]:
        """The most that the bound can be by all that is found, and the prices at which it would be."""
        lp, second = LinearProgram(), max(each.totals.seconds for each in self.found)
        bound = lp.variable(-1.0, upper=HIGHEST)
        held, rests = lp.variable(upper=HIGHEST), lp.variable(upper=HIGHEST)
        for each in self.found:
            totals = each.totals
            over = [(1.0, bound), (1.0 - totals.held / cap, held), (1.0 - totals.rests / cap, rests)]
            lp.at_most(over, totals.seconds / second)
        values = solve(lp, relaxed=True).values
        if values is None:
            raise WideError
        price = second / cap
        return values[bound] * second, RowPrices(values[held] * price, values[rests] * price)

    def bound(self, prices: RowPrices) -> float:
        """Seconds that no plan under the cap takes less than."""
        if self.recompute is Recompute.NONE:
            return max(cost - each.sum * self.cap for each, cost in self.bounds.items())
        lower = (RowPrices(times * prices.held, times * prices.rests) for times in LOWER)
        return max(map(self.proved, lower))

    def proved(self, prices: RowPrices) -> float:
        """The bound at some prices, also on plans that compute something again."""
        again = self.recompute is not Recompute.NONE
        tables = self.tables.priced_tables(prices, recomputes=again)
        cost, _ = least(tables, list(map(len, self.tables.choices)))
        return cost - prices.sum * self.cap

    # -- plans ------------------------------------------------------------------------------------------

    def mix(self, prices: RowPrices) -> None:
        """Replay assignments that hold no more than the cap by the tables, then less if they hold more."""
        cap, tried = float(self.cap), list[PricedAssignment]()
        for _ in range(REPLAYS):
            each = self.fullest(prices, cap)
            if each is None or each in tried or (plan := self.plan(each)) is None:
                break
            tried.append(each)
            beyond = plan.peak.nbytes - each.totals.most
            if plan.peak.nbytes <= self.cap:
                self.plans.append(plan)
                if each.totals.most >= (self.cap - beyond) * (1 - NEAR_CAP_SHARE):
                    break
            cap = min(cap * (1 - NEAR_CAP_SHARE), self.cap - beyond)
            prices = self.climb(prices, cap)
        if not self.plans and tried and (plan := self.plan(tried[-1])) is not None:
            plan = completed(plan.priced, self.cap, recompute=self.recompute, offload=self.offload)
            self.plans += [plan] if plan.peak.nbytes <= self.cap else []

    def fullest(self, prices: RowPrices, cap: float) -> PricedAssignment | None:
        """The fastest that holds no more than a cap, of those that are found and mixtures of two."""
        fits = [each for each in self.found if each.totals.most <= cap]
        beyond = [each for each in self.found if each.totals.most > cap]
        if not fits:
            return None
        near = sorted(fits, key=lambda each: each.totals.at(prices, cap))[:2]
        over = sorted(beyond, key=lambda each: each.totals.at(prices, cap))[:2]
        mixed = (self.mixture(one, other, cap) for one in near for other in over)
        return min([*fits, *mixed], key=lambda each: each.totals.seconds)

    def mixture(self, fits: PricedAssignment, beyond: PricedAssignment, cap: float) -> PricedAssignment:
        """The assignment whose operators run as in `beyond` up to the last place at which that fits."""
        low, high, best = 0, len(self.tables.graph.operators), fits
        while high - low > 1:
            middle = (low + high) // 2
            chosen = self.turning(fits.chosen, beyond.chosen, middle)
            each = PricedAssignment(chosen, self.tables.totals(chosen))
            if each.totals.most <= cap and math.isfinite(each.totals.seconds):
                low, best = middle, min(best, each, key=lambda found: found.totals.seconds)
            else:
                high = middle
        return best

    def turning(self, behind: Chosen, before: Chosen, place: int) -> Chosen:
        """Choices of `before` for the operators up to a place and what they take first, and then others."""
        order = {item.name: number for number, item in enumerate(self.tables.graph.operators)}
        names = list(self.tables.operators.x)
        taken = [
            (before if number < len(names) and order[names[number]] < place else behind).taken[number]
            for number in range(len(behind.taken))
        ]
        uses = self.tables.wiring.uses
        kept = {}
        for number in behind.kept:
            users = [order[item.name] for item, _ in uses[self.tables.tensors[number].name]]
            kept[number] = (before if users and min(users) < place else behind).kept[number]
        return Chosen(taken, kept)

    def plan(self, found: PricedAssignment) -> Solution | None:
        """The plan of an assignment; None if there is none."""
        try:
            priced = PricedProgram(self.tables.prices, program_of(self.tables, found.chosen))
        except RuleError:
            return None
        check_promise(self.tables, priced, found.totals.seconds)
        return completed(priced, None, recompute=Recompute.NONE)


def eliminated_under(
    tables: MemoryTables,
    cap: int,
    *,
    recompute: Recompute,
    offload: Offload,
    start: RowPrices = UNPRICED,
    bounded: bool = True,
    cutoff: float = math.inf,
) -> tuple[Solution, RowPrices]:
    """The cheapest plan under a cap, or one that is close to it, with its bound; and the prices of bytes that
    gave it, with which to `start` where costs are about the same.

    Raises WideError where it can't be found so, CutoffError if none takes less than `cutoff` seconds.
    """
    search = CappedElimination(tables, cap, recompute, offload)
    return search.solution(start=start, bounded=bounded, cutoff=cutoff)
