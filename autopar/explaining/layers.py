"""Why a layer is split as it is: every other way to split it is pinned, and the program solved again.

    blocks.0 … 3.mlp.0   filter o    69.9 ms    gap 0.0 %       solved: the base
                         batch n     71.2 ms    gap 0.1 %       pinned and solved: + 1.3 ms
                         channel i   75.0 ms    gap 0.0 %

Equal layers of equal blocks are planned alike, and pinned alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.cluster import ClusterSpec
from autopar.core.deadline import after
from autopar.core.graph import Call, Graph, Operator
from autopar.core.strategy import Strategy
from autopar.errors import InputError, show_value
from autopar.explaining.asked import REFUSED, SHARE_OF_REST, reason_of
from autopar.planning.asked.ask import Limits
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.report import report
from autopar.results.explanation.explanation import Choice, LayerChoices
from autopar.results.plan.plan import Layer, Plan
from autopar.sharding.strategies import strategies_of
from autopar.solve.choices.fold import fold
from autopar.solve.choices.kinds import Kinds
from autopar.solve.choices.space import forced, split_by_force, undominated

MOST_WAYS = 12  # ways to split a layer that are solved, the cheapest by themselves
WAYS_OF_SEVERAL_LAYERS = 3  # for each, where several layers are explained
DEAREST = 3  # layers that are explained where none is named
SOLVING = 10.0  # seconds for one way, where no time limit is said
WAYS_SECONDS = 60.0  # seconds after which no further way is solved

Factors = tuple[str | None, ...]  # of each axis


@dataclass(slots=True)
class Alternatives:
    """Solves one mesh's problem, as it is and with layers pinned, as far as time lasts: `until` that moment
    on the monotonic clock, and of layers for at most `patience` seconds."""

    problem: MeshProblem
    cluster: ClusterSpec
    patience: float = WAYS_SECONDS
    begun: float = field(default_factory=time.monotonic)
    until: float = math.inf
    calls: list[Call] = field(default_factory=list)  # of all that was solved

    @property
    def graph(self) -> Graph:
        return self.problem.graph

    def solved(self, problem: MeshProblem, *, cap: int | None) -> Plan:
        """The plan of a problem under a cap; raises what the search does."""
        seconds = problem.request.time_limit or SOLVING
        limits = Limits(after(min(seconds, max(1.0, SHARE_OF_REST * (self.until - time.monotonic())))))
        step = problem.plan(problem.ask(problem.request.force, cap=cap), limits)
        step = problem.refined(step, limits.deadline)
        self.calls += (call for price in step.solution.priced.operator_prices for call in price.calls)
        return report(step, self.cluster, [], cap, problem.request)

    @property
    def is_over(self) -> bool:
        """Whether the time for further ways is over."""
        return time.monotonic() >= self.until

    def base(self) -> Plan:
        """The plan with nothing pinned but what was asked."""
        return self.solved(self.problem, cap=self.problem.cap)

    def pinned(self, names: Sequence[str], factors: Factors) -> Plan:
        """The plan in which these operators are split so."""
        before = self.problem
        request = replace(
            before.request, pins={**(before.request.pins or {}), **dict.fromkeys(names, factors)}
        )
        problem = self.like(request=request, cap=before.cap)
        problem.folding = fold(self.graph, before.dims, request.pins, problem.roles)
        return self.solved(problem, cap=problem.cap)

    def like(self, **changes: object) -> MeshProblem:
        """The problem with some fields changed; what operators cost is known."""
        before = self.problem
        fresh: dict[str, object] = {"spaces": {}, "solved": {}}
        problem = replace(before, **(fresh | changes))  # type: ignore[arg-type]
        problem.dims, problem.prices, problem.folding = before.dims, before.prices, before.folding
        return problem

    # -- layers ---------------------------------------------------------------------------------------

    def explained(self, index: int, base: Plan, most: int) -> LayerChoices:
        """The operator at `index` with other ways to split it, of which at most so many are solved."""
        item, chosen = self.graph.operators[index], base.layers[index]
        names = self.equal(item)
        ways = [each for each in self.ways(item) if each != chosen.strategy]
        others = list(self.tried(index, names, ways[:most]))
        return LayerChoices(
            name=item.module or item.name,
            op=chosen.op,
            equal=tuple(name for name in names if name != item.name),
            chosen=Choice.of(chosen, base, names),
            others=tuple(sorted(others, key=_order)),
            untried=len(ways) - len(others),
            late=len(ways[:most]) - len(others),
            unforced=len({*self.every_way(item)} - {*ways, chosen.strategy}),
        )

    def tried(self, index: int, names: Sequence[str], ways: Sequence[Factors]) -> Iterator[Choice]:
        """The choices among `ways`, as long as patience lasts."""
        for number, factors in enumerate(ways):
            late = time.monotonic() - self.begun > self.patience
            if self.is_over or (number and late):
                return
            try:
                plan = self.pinned(names, factors)
            except REFUSED as error:
                yield Choice(factors, self.kinds(index, factors), reason=reason_of(error))
                continue
            yield Choice.of(plan.layers[index], plan, names)

    def kinds(self, index: int, factors: Factors) -> tuple[str | None, ...]:
        """The kind of parallelism on each axis."""
        item, kinds = self.graph.operators[index], Kinds(self.graph, self.problem.dims)
        by_factor = {
            option.factor: kinds.of(item, option)
            for strategy in strategies_of(item, self.problem.dims)
            for option in strategy
        }
        found = (by_factor.get(factor) if factor else None for factor in factors)
        return tuple(kind.value if kind else None for kind in found)

    def equal(self, item: Operator) -> list[str]:
        """The operators that are planned like this one, itself among them."""
        class_of = self.problem.folding.class_of
        return [each.name for each in self.graph.operators if class_of[each.name] == class_of[item.name]]

    def ways(self, item: Operator) -> list[Factors]:
        """The ways to split an operator that keep to the forced kinds, the cheapest by themselves first."""
        problem = self.problem
        every: Sequence[Strategy] = strategies_of(item, problem.dims)
        force, kinds = problem.request.force, Kinds(self.graph, problem.dims)
        if force is not None:
            splitting = {each.name for each in split_by_force(self.graph, problem.prices)}
            every = forced(item, every, force, kinds, most=item.name in splitting)
        return self.cheapest_first(item, every)

    def every_way(self, item: Operator) -> list[Factors]:
        """The ways to split an operator, whatever is forced."""
        return self.cheapest_first(item, strategies_of(item, self.problem.dims))

    def cheapest_first(self, item: Operator, offered: Sequence[Strategy]) -> list[Factors]:
        """Factors that strategies split, those of the cheapest strategy first."""
        prices, found = self.problem.prices, dict[Factors, float]()
        for strategy in undominated(item, offered, prices):
            factors = tuple(option.factor if option.shards else None for option in strategy)
            seconds = prices.operator(item, strategy).seconds
            found[factors] = min(seconds, found.get(factors, seconds))
        return sorted(found, key=lambda factors: found[factors])

    def named(self, layer: str) -> list[int]:
        """The operators of a layer, or the one that is called so; raises InputError if there is none."""
        found = [
            index
            for index, item in enumerate(self.graph.operators)
            if layer in (item.name, item.module) or item.module.startswith(f"{layer}.")
        ]
        if not found:
            names = dict.fromkeys(item.module or item.name for item in self.graph.operators)
            raise InputError(
                where="LAYER",
                found=show_value(layer),
                wanted="a layer or an operator of the plan",
                remedy=f"take one from autopar plan, such as {', '.join(list(names)[:4])}",
            )
        return found

    def dearest(self, base: Plan, among: Sequence[int], count: int) -> list[int]:
        """The operators that take most seconds, with all that are planned like them; one of each class."""
        class_of, total = self.problem.folding.class_of, dict[str, float]()
        for layer in base.layers:
            name = class_of[layer.name]
            total[name] = total.get(name, 0.0) + _seconds(layer)
        firsts: dict[str, int] = {}
        for index in among:
            firsts.setdefault(class_of[self.graph.operators[index].name], index)
        return sorted(firsts.values(), key=lambda at: -total[class_of[self.graph.operators[at].name]])[:count]


def _seconds(layer: Layer) -> float:
    return layer.compute + layer.communication


def _order(choice: Choice) -> tuple[bool, float]:
    return choice.outcome is None, choice.outcome.step_seconds if choice.outcome else 0.0
