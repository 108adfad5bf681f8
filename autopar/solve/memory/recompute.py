"""Which parts of a placed program are recomputed in backward, so that it needs less memory.

    F[i,j]   seconds that it takes to compute operators [i, j) again
    S[i,j]   bytes that they then keep no longer, less what has to be kept for them instead
    W[i,j]   bytes that are all there at once when backward comes to [i, j)

For a price of memory and a limit L the best set of disjoint parts

    minimise  sum of (F - price * S)    over parts with W <= L

is a shortest path over positions, as all terms add up. Prices and limits on a grid give the candidates, from
the fastest to the leanest; the exact replay of the step (peak_memory.py) says which of them fit. Equal layers
of a deep model join all at the same price, so the fastest that fit then give up the parts that they don't
need. Source of the path: Chen et al., 2016; of the prices: Lagrange.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from autopar.core.graph import InputKind
from autopar.core.program import Program
from autopar.core.recompute import Segment
from autopar.cost.program.peak_memory import Peak
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.program.recompute import Savings, savings
from autopar.cost.stages.intervals import choose_places, crossing_bytes

MOST_PART_PLACES = 600  # where parts may begin and end; tables grow with the square
PRICES = (0.05, 0.15, 0.3, 0.5, 0.7, 1.0, 1.5, 3.0, 10.0, 100.0)  # of seconds per byte over the whole graph
LIMITS = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.015)  # of all bytes that can be spared
MODERATE = 0.12  # the limit of parts for an estimate
REFINED = 3  # of the fastest candidates that fit
CHANGES = 240  # of single parts that are tried in the end
CHANGE_EFFORT = 6000  # operators that are replayed for that
PART_TRIALS = 24  # single parts that each of the fastest tries to give up
TRIAL_EFFORT = 12_000  # operators that are replayed for that
SLACK = 0.02  # of the cap, by which tables and replays may differ
FALLBACKS = 8


@dataclass(frozen=True, slots=True)
class FittedProgram:
    """A program with its recomputed parts, and the `seconds` that these take for each micro-batch."""

    priced: PricedProgram
    seconds: float

    @property
    def program(self) -> Program:
        return self.priced.program

    @property
    def peak(self) -> Peak:
        return self.priced.peak


def fit(priced: PricedProgram, cap: int, *, spare: float = math.inf) -> FittedProgram:
    """The program with the parts recomputed that make it fit `cap` bytes per device at least expense; if
    none do in less than `spare` seconds, with those that need least of what was tried."""
    return _Fitting(priced, spare).under(cap)


def everything(priced: PricedProgram) -> PricedProgram:
    """The program with all its parts recomputed, cut where that needs least memory."""
    table = _table(priced)
    candidates = [
        priced.remedied(recompute=parts)
        for limit in LIMITS
        if (parts := _parts(table, float("inf"), limit * float(table.spared[0, -1])))
    ]
    return min(candidates, key=lambda each: _size(each.peak), default=priced)


def sparing(priced: PricedProgram) -> tuple[float, int]:
    """About how many seconds it takes to recompute whatever spares memory, and the bytes. Parts are of
    moderate size."""
    table = _table(priced)
    parts = _parts(table, float("inf"), MODERATE * float(table.spared[0, -1]))
    seconds, spared = _totals(table, parts)
    return seconds, -int(spared)


def ladder(priced: PricedProgram, rungs: int) -> list[PricedProgram]:
    """The program without recomputed parts, and up to so many more that keep less and less. Each keeps less
    than the one before for the seconds that it adds.

    Equal layers join all at the same price, so a quarter, a half and three quarters of the parts of each
    candidate stand for the stages in between.
    """
    table = _table(priced)
    found: dict[tuple[Segment, ...], tuple[float, float]] = {}
    for parts in (*_candidates(table), *_mixed(list(_candidates(table)))):
        found[parts] = _totals(table, parts)
    best: list[tuple[Segment, ...]] = []
    spared = 0.0
    for parts in sorted(found, key=lambda each: found[each]):
        if -found[parts][1] > spared * 1.02:
            best.append(parts)
            spared = -found[parts][1]
    if len(best) > rungs:
        best = [best[round(index * (len(best) - 1) / (rungs - 1))] for index in range(rungs)]
    return [priced.remedied(recompute=parts) for parts in ((), *best)]


def _size(peak: Peak) -> tuple[int, int]:
    return peak.nbytes, peak.saved


@dataclass(slots=True)
class _Fitting:
    priced: PricedProgram
    spare: float = math.inf  # seconds that recomputing may take
    known: dict[tuple[Segment, ...], FittedProgram] = field(default_factory=dict)

    @property
    def trials(self) -> int:
        """Number of single parts that a candidate tries to give up: fewer in deep programs, which replay
        slowly."""
        return min(PART_TRIALS, TRIAL_EFFORT // len(self.priced.graph.operators))

    @property
    def refined(self) -> int:
        """Number of fitting candidates, the fastest, that are refined."""
        return max(1, REFINED * self.trials // PART_TRIALS)

    def under(self, cap: int) -> FittedProgram:
        plain = self.fitted((), 0.0)
        if plain.peak.nbytes <= cap:
            return plain
        table = _table(self.priced)
        least = plain
        good: list[FittedProgram] = []
        for parts in self.promising(plain.peak, table, cap):
            if (seconds := _totals(table, parts)[0]) >= self.spare:
                if not good:
                    return least
                break
            found = self.fitted(parts, seconds)
            least = min(least, found, key=lambda each: _size(each.peak))
            if found.peak.nbytes <= cap:
                good.append(self.without_idle(found, table, cap))
                if len(good) >= self.refined:
                    break
        if not good:
            least = self.descend(least, table, cap)
            good = [least] if least.peak.nbytes <= cap else []
        if not good:
            return least
        return self.descend(min(good, key=lambda each: each.seconds), table, cap)

    def promising(self, plain: Peak, table: Savings, cap: int) -> list[tuple[Segment, ...]]:
        """Candidates, the fastest first, without those that keep more than fits when backward begins; if that
        leaves none, some of those that keep least."""
        totals = {parts: _totals(table, parts) for parts in _candidates(table)}
        before = plain.state + plain.saved - (0 if self.priced.prices.accumulates else self.gradients())
        few = [parts for parts, (_, spared) in totals.items() if before + spared <= cap * (1 + SLACK)]
        few = few or sorted(totals, key=lambda each: totals[each][1])[:FALLBACKS]
        return sorted(few, key=lambda each: totals[each])

    def gradients(self) -> int:
        """Bytes of the gradients of all weights."""
        weights = [item for item in self.priced.graph.inputs if item.kind is InputKind.PARAMETER]
        return sum(
            self.priced.prices.local_bytes(item.name, self.priced.program.inputs[item.name])
            for item in weights
            if item.spec.requires_grad
        )

    def descend(self, found: FittedProgram, table: Savings, cap: int) -> FittedProgram:
        """Change one part at a time for as long as that helps: to fit first, then to be faster."""

        def worth(each: FittedProgram) -> tuple[float, float, int]:
            return max(0, each.peak.nbytes - cap), each.seconds, each.peak.nbytes

        left = min(CHANGES, CHANGE_EFFORT // len(self.priced.graph.operators))
        while left > 0:
            neighbors = list(islice(_neighbors(found.program.recompute, table.places), left))
            left -= max(1, len(neighbors))
            tried = [self.fitted(parts, _totals(table, parts)[0]) for parts in neighbors]
            best = min(tried, key=worth, default=found)
            if worth(best) >= worth(found):
                break
            found = best
        return found

    def fitted(self, parts: tuple[Segment, ...], seconds: float) -> FittedProgram:
        if parts not in self.known:
            self.known[parts] = FittedProgram(self.priced.remedied(recompute=parts), seconds)
        return self.known[parts]

    def without_idle(self, found: FittedProgram, table: Savings, cap: int) -> FittedProgram:
        """Leave out parts as long as the rest still fit: as many as can be of the dearest, then single
        ones."""

        def left(parts: Sequence[Segment]) -> FittedProgram:
            ordered = tuple(sorted(parts))
            return self.fitted(ordered, _totals(table, ordered)[0])

        parts = sorted(found.program.recompute, key=lambda part: -_price(table, part))
        low, high = 0, len(parts)
        while high - low > 1:
            middle = (low + high) // 2
            trial = left(parts[middle:])
            if trial.peak.nbytes <= cap:
                low, found = middle, trial
            else:
                high = middle
        for part in sorted(parts[low:], key=lambda part: -_totals(table, [part])[0])[: self.trials]:
            trial = left([each for each in found.program.recompute if each != part])
            if trial.peak.nbytes <= cap:
                found = trial
        return found


def _table(priced: PricedProgram) -> Savings:
    crossing = crossing_bytes(priced)
    return savings(priced, choose_places(crossing, MOST_PART_PLACES))


def _candidates(table: Savings) -> Iterator[tuple[Segment, ...]]:
    """The best parts for every price and limit; some come more than once."""
    seconds, spared = float(table.seconds[0, -1]), float(table.spared[0, -1])
    if not spared:
        return
    for limit in LIMITS:
        for price in PRICES:
            if parts := _parts(table, price * seconds / spared, limit * spared):
                yield parts


def _mixed(ladder: Sequence[tuple[Segment, ...]]) -> Iterator[tuple[Segment, ...]]:
    """A half, a quarter and three quarters of the parts of each."""
    for parts in dict.fromkeys(ladder):
        for kept in ((0,), (0, 2), (0, 1, 2)):
            some = tuple(part for index, part in enumerate(parts) if index % 4 in kept)
            if 0 < len(some) < len(parts):
                yield some


def _parts(table: Savings, price: float, limit: float) -> tuple[Segment, ...]:
    """The disjoint parts that minimise seconds less `price` times the bytes spared; at an infinite price
    all that spare anything."""
    gain = table.spared - table.taken
    good = (gain > 0) & (table.spared <= limit)
    cost = -gain if np.isinf(price) else table.seconds - price * gain
    cost = np.where(good, cost, np.inf)
    size = len(table.places)
    best, come = np.zeros(size), np.zeros(size, dtype=int)
    for stop in range(1, size):
        ways = best[:stop] + cost[:stop, stop]
        first = int(ways.argmin())
        part = ways[first] < best[stop - 1]
        best[stop], come[stop] = (ways[first], first) if part else (best[stop - 1], -1)
    parts, stop = [], size - 1
    while stop > 0:
        first = int(come[stop])
        if first >= 0:
            parts.append((table.places[first], table.places[stop]))
        stop = first if first >= 0 else stop - 1
    return tuple(reversed(parts))


def _neighbors(parts: tuple[Segment, ...], places: Sequence[int]) -> Iterator[tuple[Segment, ...]]:
    """The parts with one left out, moved at one end by one place, parted in two, or added."""
    number = {place: index for index, place in enumerate(places)}
    for index, (first, stop) in enumerate(parts):
        before, after = parts[:index], parts[index + 1 :]
        yield before + after
        low, high = number[first], number[stop]
        for start, end in ((low + 1, high), (low - 1, high), (low, high + 1), (low, high - 1)):
            if 0 <= start < end < len(places) and _is_apart(before, after, places[start], places[end]):
                yield (*before, (places[start], places[end]), *after)
        for middle in places[low + 1 : high]:
            yield (*before, (first, middle), (middle, stop), *after)
    for start in range(len(places) - 1):
        for end in range(start + 1, min(len(places), start + 3)):
            new = places[start], places[end]
            if all(stop <= new[0] or first >= new[1] for first, stop in parts):
                yield tuple(sorted((*parts, new)))


def _is_apart(before: Sequence[Segment], after: Sequence[Segment], first: int, stop: int) -> bool:
    return (not before or before[-1][1] <= first) and (not after or after[0][0] >= stop)


def _totals(table: Savings, parts: Sequence[Segment]) -> tuple[float, float]:
    """Seconds of the parts, and the bytes that they spare, negative: the better the less."""
    numbers = np.searchsorted(table.places, np.asarray(parts, dtype=int).reshape(-1, 2))
    first, stop = numbers[:, 0], numbers[:, 1]
    spared = (table.spared - table.taken)[first, stop].sum()
    return float(table.seconds[first, stop].sum()), -float(spared)


def _price(table: Savings, part: Segment) -> float:
    seconds, spared = _totals(table, [part])
    return seconds / max(1.0, -spared)
