"""Axes of one size and one link are interchangeable: choose without naming them, then name them.

    2 x 2 x 2, a tensor as {S(0), S(1), S(1)}        216 layouts of 6 placements become 56 multisets

Forgetting the names relaxes the program: a plan with names is one without, of equal cost, but two
operands of one operator may have been given different names. So the relaxation gives a lower bound
for all plans; the plan itself is the best among all namings of what the relaxation chose.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.convert.network import Alike, unnamed
from autopar.core.graph import Graph
from autopar.core.offload import Offload
from autopar.core.placement import Layout
from autopar.core.recompute import Recompute
from autopar.core.strategy import Strategy
from autopar.cost.operators.prices import Prices
from autopar.errors import InfeasibleError, SolverError
from autopar.solve.assignment.goal import ANY_EFFORT, Effort, Goal
from autopar.solve.assignment.search import choose
from autopar.solve.assignment.written_programs import WrittenPrograms
from autopar.solve.choices.fold import Folding
from autopar.solve.choices.memory_price import FREE
from autopar.solve.choices.space import Space
from autopar.solve.highs import SECOND, solve
from autopar.solve.linear_program import SolverAnswer
from autopar.solve.program.chosen import SUPPORT
from autopar.solve.program.problem import Problem
from autopar.solve.program.solution import Solution, check_cutoff
from autopar.solve.tables.capped_elimination import eliminated_under
from autopar.solve.tables.choice_tables import WideError
from autopar.solve.tables.elimination import eliminated
from autopar.solve.tables.priced_elimination import eliminated_at

WHOLE_PROGRAM_GAP = 0.01  # a gap for which the whole program is tried after all
NAMED_WORK = 30 * SECOND  # and with how much work
FEW_STRATEGIES = 16  # strategies of an operator, of which most have a name of their own
LEAST_ELIMINATED_OPERATORS = 100  # from which on choices are eliminated if they can be and none are equal
MANY_OPERATOR_CLASSES = 300  # from which on they are eliminated also if some operators are equal
MANY_AXES = 3  # on fewer, the program with names is small enough


def axes_alike(prices: Prices) -> Alike:
    """Groups of at least two interchangeable axes; none on meshes that are small anyway."""
    mesh = prices.dims.mesh
    if len(mesh.shape) < MANY_AXES:
        return ()
    groups: dict[object, list[int]] = {}
    for axis in mesh.axes:
        groups.setdefault((mesh.shares_of(axis), prices.cluster.link(mesh, axis)), []).append(axis)
    return tuple(tuple(axes) for axes in groups.values() if len(axes) > 1)


def choose_named(
    graph: Graph,
    prices: Prices,
    space: Space,
    folding: Folding,
    goal: Goal,
    effort: Effort = ANY_EFFORT,
    programs: WrittenPrograms | None = None,
) -> Solution:
    """`choose`, by way of the relaxation where axes are alike; the same plans, the same errors.

    Should no naming of what was chosen meet the cap, or all be far from the bound, the whole program is
    solved after all.
    """
    alike, programs = axes_alike(prices), programs or WrittenPrograms()
    if goal.cap is None and (apart := unlike(graph, space, folding)):
        with contextlib.suppress(WideError):
            if goal.memory_price == FREE and prices.step_weight == 1.0:
                tables = programs.tables(graph, prices, *apart)
                return eliminated(tables, recompute=goal.recompute, offload=goal.offload, cutoff=goal.cutoff)
            memory_tables = programs.memory_tables(graph, prices, *apart, offloads=False)
            return eliminated_at(
                memory_tables,
                goal.memory_price,
                recompute=goal.recompute,
                offload=goal.offload,
                cutoff=goal.cutoff,
            )
    simple = goal.recompute is not Recompute.ALL and goal.offload is not Offload.ALL
    if goal.cap is not None and simple and (apart := unlike(graph, space, folding)):
        with contextlib.suppress(WideError):
            memory_tables = programs.memory_tables(
                graph, prices, *apart, offloads=goal.offload is not Offload.NONE
            )
            found, programs.row_prices = eliminated_under(
                memory_tables,
                goal.cap,
                recompute=goal.recompute,
                offload=goal.offload,
                start=programs.row_prices,
                bounded=goal.bounded,
                cutoff=goal.cutoff,
            )
            return found
    ask = partial(choose, graph, prices, folding=folding, effort=effort, programs=programs)
    unbounded = replace(goal, bounded=False, cutoff=math.inf)
    few = sum(map(len, space.strategies.values())) <= FEW_STRATEGIES * len(space.strategies)
    if not alike or (few and not goal.bounded):  # without names it would hardly be solved sooner
        return ask(space=space, goal=goal)
    nameless = partial(
        programs.problem,
        graph,
        prices,
        forget(space, alike),
        folding,
        cap=goal.cap,
        alike=alike,
        recomputes=goal.recompute is not Recompute.NONE,
        offloads=goal.offload is not Offload.NONE,
    )
    problem = nameless(memory_price=goal.memory_price)
    try:
        answer = solve(problem.lp, relaxed=True, time_limit=effort.time_limit)
        bound = answer.bound
        if goal.memory_price != FREE or not goal.bounded:
            bound = -math.inf
        elif folding.count > 1:
            free = nameless(relaxed=True)
            bound = min(bound, solve(free.lp, relaxed=True, time_limit=effort.time_limit).bound)
    except SolverError:
        return ask(space=space, goal=replace(goal, cutoff=math.inf))
    check_cutoff(bound, goal.cutoff)
    if answer.values is None:
        return ask(space=space, goal=replace(goal, cutoff=math.inf))
    try:
        found = ask(space=named(space, problem, answer, alike), goal=unbounded)
    except (InfeasibleError, SolverError):
        return ask(space=space, goal=replace(goal, cutoff=math.inf))
    if bound > -math.inf and found.seconds - bound > WHOLE_PROGRAM_GAP * found.seconds:
        with contextlib.suppress(InfeasibleError, SolverError):  # there is a plan already
            work = min(effort.work, NAMED_WORK)
            named_all = ask(space=space, goal=unbounded, effort=replace(effort, work=work))
            found = min(found, named_all, key=lambda each: each.seconds)
    bound = min(bound, found.seconds)
    proven = found.seconds - bound <= max(goal.gap, SUPPORT) * found.seconds
    status = "gap_limit" if found.status == "optimal" and not proven else found.status
    return replace(found, bound=bound, status=status)


def unlike(graph: Graph, space: Space, folding: Folding) -> tuple[Space, Folding] | None:
    """The unfolded space of a graph of many operators of which few are equal; None for other graphs."""
    classes, count = len(space.strategies), len(graph.operators)
    if folding.count == 1:
        return (space, folding) if count >= LEAST_ELIMINATED_OPERATORS else None
    if classes < MANY_OPERATOR_CLASSES or 2 * classes < count:
        return None
    strategies = {item.name: space.strategies[folding.class_of[item.name]] for item in graph.operators}
    return replace(space, strategies=strategies), Folding({name: name for name in strategies}, {}, 1)


def forget(space: Space, alike: Alike) -> Space:
    """One strategy, and one layout of an input or output, of all that differ by names alone."""
    strategies = {
        name: list({_strategy_key(strategy, alike): strategy for strategy in offered}.values())
        for name, offered in space.strategies.items()
    }

    def nameless(ends: Mapping[str, Sequence[Layout]]) -> dict[str, Sequence[Layout]]:
        return {
            name: list(dict.fromkeys(unnamed(layout, alike) for layout in layouts))
            for name, layouts in ends.items()
        }

    inputs, outputs = nameless(space.inputs), nameless(space.outputs)
    return replace(space, strategies=strategies, inputs=inputs, outputs=outputs)


def named(space: Space, problem: Problem, answer: SolverAnswer, alike: Alike) -> Space:
    """Collect all namings, within `space`, of what the relaxed `answer` chose."""
    assert answer.values is not None
    values = answer.values
    strategies = {}
    for name, offered in space.strategies.items():
        pairs = zip(problem.space.strategies[name], problem.operators.x[name], strict=True)
        chosen = {
            _strategy_key(strategy, alike) for strategy, variable in pairs if values[variable] > SUPPORT
        }
        strategies[name] = [item for item in offered if _strategy_key(item, alike) in chosen]

    def chosen_ends(
        ends: Mapping[str, Sequence[Layout]], variables: Mapping[str, Sequence[tuple[Layout, int]]]
    ) -> dict[str, Sequence[Layout]]:
        found = dict(ends)
        for name, layouts in variables.items():
            kept = {layout for layout, variable in layouts if values[variable] > SUPPORT}
            found[name] = [layout for layout in ends[name] if unnamed(layout, alike) in kept]
        return found

    stored = {
        name: [(layout, variable) for (layout, _), variable in choices.items()]
        for name, choices in problem.inputs.items()
    }
    leaving = {name: list(choices.items()) for name, choices in problem.output_layouts.items()}
    inputs, outputs = chosen_ends(space.inputs, stored), chosen_ends(space.outputs, leaving)
    return replace(space, strategies=strategies, inputs=inputs, outputs=outputs)


def _strategy_key(strategy: Strategy, alike: Alike) -> tuple[str, ...]:
    placed = [option.factor for option in strategy]
    for axes in alike:
        for axis, factor in zip(axes, sorted(placed[axis] for axis in axes), strict=True):
            placed[axis] = factor
    return tuple(placed)
