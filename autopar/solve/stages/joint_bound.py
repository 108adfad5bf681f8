"""What a step with stages takes at least, whatever its assignment and wherever it is cut.

The fastest assignment * of the whole graph is known, or a bound T on its seconds; but as stages a slower one
may be faster, if they are more even. A stage can't be much faster than what * has in its place, though, or *
would have it too. For the operators [p, q) of any assignment x, put what x makes of them between what * makes
of all others, with conversions at both borders: that is an assignment, too, so

    *  *  *  *|x  x  x|*  *  *  *        T <= a[0,p] + x[p,q] + a[q,n] + k[p] + k[q]
              p       q

with a[p,q] the seconds of * as a stage, and k[p] what conversions at p take at most. So for every x

    x[p,q]  >=  c[p,q] = max(T - a[0,p] - a[q,n] - k[p] - k[q], sum of the fastest strategies of [p,q))

Seconds are those that assignments are compared by: of a micro-batch, F + B, and w (`step_weight`) times those
of gradient sums and updates, E, of which a stage has at most e[p,q]; t[p,q] = c[p,q] - w e[p,q] bounds F + B
alone. For a schedule of M micro-batches on K ranks that gives, by the same paths through its actions as in
cut_costs.py,

    M T / K                                        a rank works no less than the average
    M c[p,q] + F of the stages before              all its work, after the first micro-batch came
    M t[p,q] + t[0,p]                              ... and the last gradient went, if B is not split
    (M - w) t[p,q] + (w - 1) B[p,q] + t[0,n]       it waits for its first gradient, after w forwards

with F and B those of the fastest strategies. The least largest of these on any path is the bound.

It is for graphs of few operators, of which no cut may be even. Where they are many some cut is about even for
any assignment, and what the bound gives away at every border is more than another assignment could gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from autopar.convert.moves import canonical
from autopar.convert.network import Flags, Numbers, Seconds
from autopar.convert.path import interesting
from autopar.core.graph import Graph, GraphInput, InputKind, Operator
from autopar.core.placement import Layout
from autopar.core.schedule import SPLIT_BACKWARD, Schedule, ScheduleKind
from autopar.cost.interval_table import Rectangles, Row, Table
from autopar.cost.operators.prices import Price, Prices
from autopar.cost.program.values import Values
from autopar.cost.stages.intervals import Intervals
from autopar.schedules.in_flight import forwards_before
from autopar.solve.choices.fold import Folding
from autopar.solve.choices.space import Space
from autopar.solve.program.solution import Solution

MOST_OPERATORS = 40
WHOLE = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)  # one stage for each rank, backward in one


@dataclass(slots=True)
class ExchangeTables:
    """The tables above for the fastest assignment, `solution`, and its stages, `table`."""

    graph: Graph
    prices: Prices
    space: Space
    folding: Folding
    solution: Solution
    table: Intervals
    seconds: Table = field(init=False)  # c
    micro_batch: Table = field(init=False)  # t
    forward: Table = field(init=False)
    backward: Table = field(init=False)
    least: float = field(init=False)  # t[0,n]
    known: dict[object, float] = field(default_factory=dict)
    values: Values = field(init=False)
    own: dict[str, set[Layout]] = field(init=False)  # the layouts of a tensor in *
    given: dict[str, GraphInput] = field(init=False)
    makers: dict[str, tuple[Operator, int]] = field(init=False)
    uses: dict[str, list[tuple[Operator, int]]] = field(init=False)
    users: dict[str, list[int]] = field(init=False)  # places of operators; who takes outputs comes last

    def __post_init__(self) -> None:
        graph, total, weight = self.graph, self.solution.bound, self.prices.step_weight
        self.values = self.solution.priced.values
        self.given = {item.name: item for item in graph.inputs}
        self.own = {}
        for name, layout in self.values.of:
            self.own.setdefault(name, set()).add(layout)
        self.makers = {
            made: (item, i) for item in graph.operators for i, made in enumerate(item.results) if made
        }
        self.uses, last = graph.consumers(), len(graph.operators) - 1
        place = {item.name: number for number, item in enumerate(graph.operators)}
        self.users = {name: [place[item.name] for item, _ in uses] for name, uses in self.uses.items()}
        for name in (*graph.outputs, *(value for _, value in graph.writes)):
            self.users[name].append(last)
        self.forward = self.fastest(lambda price: price.forward)
        self.backward = self.fastest(lambda price: price.backward)
        fastest = self.fastest(lambda price: price.seconds)
        given = self.table.seconds + weight * (self.table.sync + self.table.update)
        borders, late = self.borders(), self.once_at_most()
        left = total - given[0][:, None] - given[:, -1][None, :] - borders[:, None] - borders[None, :]
        self.seconds = np.triu(np.maximum(left, fastest), 1)
        self.micro_batch = np.triu(np.maximum(left - weight * late, fastest), 1)
        self.least = max(total - weight * late[0, -1], fastest[0, -1])

    def bound(self, schedules: Iterable[Schedule]) -> float:
        """Seconds that no step takes less than, under any of the schedules, of any assignment and cut."""
        return min(self.bound_of(schedule) for schedule in schedules)

    def bound_of(self, schedule: Schedule) -> float:
        """Seconds that no step under one schedule takes less than."""
        count, stages = schedule.micro_batches, schedule.stages
        calls = 3 if schedule.kind in SPLIT_BACKWARD else 2
        calling = calls * float(np.max(self.table.calling))
        average = count * (self.solution.bound + stages * calling) / schedule.ranks
        possible = np.tril(np.full_like(self.seconds, np.inf))
        onward: Row = np.full(len(self.table.places), np.inf)
        onward[-1] = 0.0
        for stage in reversed(range(stages)):
            bounds = [count * (self.seconds + calling) + self.forward[0][:, None]]
            if schedule.kind in WHOLE:
                ahead = stage * calling
                bounds.append(count * (self.micro_batch + calling) + self.micro_batch[0][:, None] + ahead)
                waiting = forwards_before(schedule, stage) - 1
                work = (count - 1 - waiting) * (self.micro_batch + calling)
                bounds.append(work + waiting * self.backward + self.least + stages * calling)
            onward = (np.maximum(np.maximum.reduce(bounds) + possible, onward[None, :])).min(axis=1)
        return max(average, float(onward[0]))

    def fastest(self, part: Callable[[Price], float]) -> Table:
        """Least sums of operators' prices over their strategies; values that every stage can make for itself
        count nothing."""
        sums, free = Rectangles(self.table.places), self.values.free
        known: dict[str, float] = {}
        for place, item in enumerate(self.graph.operators):
            made = [name for name in item.results if name]
            if made and free.issuperset(made):
                continue
            name = self.folding.class_of[item.name]
            if name not in known:
                offered = self.space.strategies[name]
                known[name] = min(part(self.prices.operator(item, strategy)) for strategy in offered)
            sums.add(-1, place, known[name])
        return sums.total()

    def once_at_most(self) -> Table:
        """Seconds of a stage's sums of gradients and updates, at most."""
        sums = Rectangles(self.table.places)
        for item in self.graph.inputs:
            if item.kind is InputKind.PARAMETER:
                update = max(self.prices.update(item.name, each) for each in self.space.inputs[item.name])
                moves = len(self.users[item.name]) * self.farthest(item.name)
                sums.add_each(self.values.source(item.name).carriers, update + moves)
        return sums.total()

    def borders(self) -> Row:
        """k: at each cut the conversions of all that crosses it. On one side a tensor lies as in *, in as
        many layouts; on the other every user may want it in one of its own."""
        places = np.asarray(self.table.places)
        last = len(self.graph.operators) - 1
        found = np.zeros(len(places))
        for name, uses in self.users.items():
            source = self.values.source(name)
            if name in self.given:
                users = np.asarray(source.carriers)
                maker = users.min(initial=last)
            else:
                users, maker = np.asarray(uses), source.maker
            crosses = (places > maker) & (places <= users.max(initial=-1))
            if crosses.any() and (name in self.given or name not in self.values.free):
                ahead = len(users) - np.searchsorted(np.sort(users), places)
                found += np.where(crosses, (ahead + len(self.own[name])) * self.dearest(name), 0.0)
        return found

    def dearest(self, name: str) -> float:
        """Seconds of the dearest conversion, as `farthest` has them; infinite where the space has no
        conversion."""
        item = self.given.get(name)
        fixed = item is not None and (
            item.mutated or item.kind is InputKind.PARAMETER and not self.space.gatherings
        )
        far = self.farthest(name)
        return math.inf if fixed and far else far

    def farthest(self, name: str) -> float:
        """Seconds of the dearest conversion of a tensor between a layout in * and any other, either way. The
        others are those that somebody may make or want."""
        requires_grad = self.prices.training and self.graph.specs[name].requires_grad
        own = self.own[name]
        ends = {canonical(layout, differentiable=requires_grad) for layout in self.layouts(name)} | own
        if len(ends) == 1:
            return 0.0
        fixed = frozenset(end for end in ends if not self.prices.dims.legal(name, end))
        placements = interesting(sorted(ends, key=str), differentiable=requires_grad)
        key = self.prices.kind(name), placements, frozenset(own), frozenset(ends), fixed
        if key not in self.known:
            network = self.prices.network(name, placements, fixed=fixed)
            begin, stop = network.flags(list(own)), network.flags(list(ends))
            ways = ((network.source, network.target), (network.target, network.source))
            self.known[key] = max(_farthest(begin, stop, *way, network.seconds) for way in ways)
        return self.known[key]

    def layouts(self, name: str) -> Iterator[Layout]:
        """In which the tensor may be made or wanted."""
        offered, class_of = self.space.strategies, self.folding.class_of
        for item, position in self.uses[name]:
            for strategy in offered[class_of[item.name]]:
                yield tuple(option.operands[position] for option in strategy)
        if name in self.makers:
            item, index = self.makers[name]
            for strategy in offered[class_of[item.name]]:
                yield tuple(option.results[index] for option in strategy)
        yield from self.space.inputs.get(name, ())
        yield from self.space.outputs.get(name, ())
        for buffer, value in self.graph.writes:
            if value == name:
                yield from self.space.inputs[buffer]


def _farthest(begin: Flags, stop: Flags, source: Numbers, target: Numbers, seconds: Seconds) -> float:
    """The most that a shortest way takes from any of `begin` to any of `stop`."""
    most = 0.0
    for start in np.flatnonzero(begin):
        distances = np.full(len(begin), np.inf)
        distances[start], before = 0.0, None
        while before is None or (distances < before).any():
            before = distances.copy()
            np.minimum.at(distances, target, distances[source] + seconds)
        most = max(most, float(distances[stop].max()))
    return most
