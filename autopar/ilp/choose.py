"""Solve the placement program, read the answer truthfully, and check it outside the solver."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.convert.path import tree
from autopar.convert.table import canonical
from autopar.core.graph import Graph
from autopar.core.move import Move
from autopar.core.placement import Layout, replicated
from autopar.core.plan import Program
from autopar.cost.memory import Peak, peak_memory
from autopar.cost.prices import Prices
from autopar.cost.step import step_cost
from autopar.cost.values import find_values, leading
from autopar.errors import CheckError, InfeasibleError, SolverError
from autopar.ilp.fold import Folding
from autopar.ilp.linear_program import Answer
from autopar.ilp.placement import FREE, Dear, Problem, Space, TensorClass
from autopar.ilp.solver import solve
from autopar.units import show_bytes

INTEGRAL = 1e-6  # how far from 0 and 1 a relaxed choice may be to count as made
MEMORY_ROUNDS = 8
TIE = 1e-6  # GiB that a second is worth where only memory counts


@dataclass(frozen=True, slots=True)
class Solution:
    """A checked plan of one mesh: predicted seconds, a proven lower bound, and the solver's status."""

    program: Program
    seconds: float
    bound: float
    status: str
    peak: Peak

    @property
    def gap(self) -> float:
        """How much slower than the best possible plan this one may be, relatively."""
        return max(0.0, (self.seconds - self.bound) / self.seconds) if self.seconds > 0 else 0.0


def choose(
    graph: Graph,
    prices: Prices,
    space: Space,
    folding: Folding,
    *,
    cap: int | None = None,
    gap: float = 1e-4,
    time_limit: float | None = None,
    dear: Dear = FREE,
    bounded: bool = True,
) -> Solution:
    """The cheapest plan whose predicted peak is at most `cap` bytes per device.

    With `dear` memory, which excludes a cap, the cheapest by seconds and memory together; its bound is
    then none on seconds, -inf. So it is if it need not be `bounded`, which saves time.

    Raises InfeasibleError if no plan that meets the cap is found, SolverError if the time limit passed
    without an incumbent. The linear memory rows leave out short-lived tensors, so the exact replay of
    an answer tightens them until it fits; failing that, the plan that needs least memory is taken. Only
    the first bound, under the cap itself, holds for all plans.
    """
    deadline = None if time_limit is None else time.monotonic() + time_limit
    first = _solve_once(
        graph, prices, space, folding, cap=cap, gap=gap, deadline=deadline, dear=dear, bounded=bounded
    )
    if cap is None or first.peak.nbytes <= cap:
        return first
    solution, rows_cap = first, cap
    for _ in range(MEMORY_ROUNDS):
        rows_cap -= max(solution.peak.nbytes - cap, cap // 200)
        try:
            solution = _solve_once(
                graph, prices, space, folding, cap=rows_cap, gap=gap, deadline=deadline, bounded=False
            )
        except InfeasibleError:
            break
        if solution.peak.nbytes <= cap:
            return _judged(solution, first.bound, gap)
    found = least(graph, prices, space, folding)
    if found is None or found.peak.nbytes > cap:
        raise infeasible(graph, prices, cap, found)
    return _judged(found, first.bound, gap)


def _judged(solution: Solution, bound: float, gap: float) -> Solution:
    """With a bound on all plans; "optimal" only if that proves it."""
    far = solution.seconds - bound > max(gap, 1e-6) * solution.seconds
    status = "gap_limit" if solution.status == "optimal" and far else solution.status
    return replace(solution, bound=min(bound, solution.seconds), status=status)


def _solve_once(
    graph: Graph,
    prices: Prices,
    space: Space,
    folding: Folding,
    *,
    cap: int | None,
    gap: float,
    deadline: float | None,
    dear: Dear = FREE,
    bounded: bool = True,
) -> Solution:
    """The best plan by the linear rows."""

    def left() -> float | None:
        return None if deadline is None else max(0.1, deadline - time.monotonic())

    problem = Problem(graph, prices, space, folding, cap=cap, dear=dear)
    answer = solve(problem.lp, relaxed=True, time_limit=left())
    if answer.status == "infeasible":
        raise infeasible(graph, prices, cap or 0, least(graph, prices, space, folding))
    bound = answer.bound
    if not _is_integral(problem, answer):
        answer = solve(problem.lp, gap=gap, time_limit=left())
        bound = max(bound, answer.bound)
    if answer.status == "infeasible":
        raise infeasible(graph, prices, cap or 0, least(graph, prices, space, folding))
    if answer.values is None:
        raise SolverError(
            where="solver",
            found="no plan in time",
            wanted="an incumbent",
            remedy="give more with --time-limit",
        )
    if dear != FREE or not bounded:
        bound = -math.inf
    elif folding.count > 1:
        free = Problem(graph, prices, space, folding, cap=cap, relaxed=True)
        bound = min(bound, solve(free.lp, relaxed=True, time_limit=left()).bound)
    program = read(problem, answer)
    seconds = total_seconds(graph, prices, program)
    promised = answer.cost - problem.memory_cost(answer.values)
    if seconds > promised * (1 + 1e-6):
        promised += _optimism(problem, program)
    if seconds > promised * (1 + 1e-6) + 1e-12:
        raise CheckError(
            where="plan",
            found=f"{seconds:.6g} s when priced again",
            wanted=f"at most the solver's {promised:.6g} s",
            remedy="report this model",
        )
    peak = peak_memory(graph, prices, program)
    found = Solution(program, seconds, bound, answer.status, peak)
    return _judged(found, bound, gap) if bounded else found


def _optimism(problem: Problem, program: Program) -> float:
    """Seconds by which the program is dearer than the solver knew: where several uses of a weight part
    before its gradient is summed, it is summed for every micro-batch."""
    prices = problem.prices
    if prices.once == 1.0:
        return 0.0
    uses = problem.graph.consumers()
    values = find_values(problem.graph, program, training=prices.training)
    return sum(
        (1.0 - prices.once) * prices.gradient_sync(value.name, value.move)
        for value in values.of.values()
        if value.move is not None
        and not value.leads
        and problem.is_parameter(value.name)
        and len(uses[value.name]) > 1
    )


def _is_integral(problem: Problem, answer: Answer) -> bool:
    if answer.values is None:
        return False
    whole = (value for value, flag in zip(answer.values, problem.lp.integer, strict=True) if flag)
    return all(min(value, abs(1 - value)) < INTEGRAL for value in whole)


def least(graph: Graph, prices: Prices, space: Space, folding: Folding) -> Solution | None:
    """The plan in `space` that needs least memory by its linear rows, of several a fast one; None if
    it is not found in time."""
    problem = Problem(graph, prices, space, folding, cap=math.inf)
    problem.lp.costs = [TIE * cost for cost in problem.lp.costs]
    for nbytes, variable in problem.memory:
        problem.lp.costs[variable] += nbytes / 2**30
    answer = solve(problem.lp, gap=1e-3, time_limit=30.0)
    if answer.values is None:
        return None
    program = read(problem, answer)
    seconds = total_seconds(graph, prices, program)
    return Solution(program, seconds, -math.inf, answer.status, peak_memory(graph, prices, program))


def infeasible(graph: Graph, prices: Prices, cap: int, found: Solution | None) -> InfeasibleError:
    """Says the least that would do and which inputs and layers hold it."""
    minimum = found.peak.nbytes if found else -1
    sizes = {
        item.target: prices.state_bytes(item.name, replicated(len(prices.dims.mesh.shape)))
        for item in graph.inputs
    }
    largest = sorted(sizes.items(), key=lambda pair: -pair[1])[:3]
    return InfeasibleError(
        where="memory cap",
        found=f"{show_bytes(cap)} per device",
        wanted=f"at least {show_bytes(minimum)} ({minimum} bytes)" if minimum >= 0 else "more",
        remedy="raise --memory or use more devices; the largest are "
        + ", ".join(f"{name} ({show_bytes(nbytes)} unsharded)" for name, nbytes in largest),
        least=minimum if minimum >= 0 else None,
    )


# -- reading the answer -------------------------------------------------------------------------------------


def read(problem: Problem, answer: Answer) -> Program:
    """The plan that the solver's values spell."""
    assert answer.values is not None
    values = answer.values
    graph, folding = problem.graph, problem.folding
    picked = {
        name: problem.space.strategies[name][max(range(len(x)), key=lambda index: values[x[index]])]
        for name, x in problem.x.items()
    }
    strategies = {item.name: picked[folding.class_of[item.name]] for item in graph.operators}
    inputs: dict[str, Layout] = {item.name: problem.space.inputs[item.name][0] for item in graph.inputs}
    for tensor in problem.tensors:
        choices = problem.input_layouts.get(tensor.name)
        if choices:
            layout = max(choices, key=lambda item: values[choices[item]])
            inputs |= dict.fromkeys(tensor.members, layout)
    outputs = {name: layouts[0] for name, layouts in problem.space.outputs.items()}
    outputs |= {
        name: max(choices, key=lambda item: values[choices[item]])
        for name, choices in problem.output_layouts.items()
    }
    moves: dict[str, tuple[Move, ...]] = {}
    for tensor in problem.tensors:
        chosen = _moves_of(problem, tensor, strategies, inputs, outputs, values)
        moves |= dict.fromkeys(tensor.members, chosen)
    return Program(problem.prices.dims.mesh, inputs, strategies, moves, outputs)


def _moves_of(
    problem: Problem,
    tensor: TensorClass,
    strategies: Mapping[str, object],
    inputs: Mapping[str, Layout],
    outputs: Mapping[str, Layout],
    values: tuple[float, ...],
) -> tuple[Move, ...]:
    """The cheaper of: what the flows use, and paths found anew between the chosen layouts."""
    prices = problem.prices
    source, needs = ends(problem.graph, prices, tensor.name, strategies, inputs, outputs)
    if all(need == source for need in needs):
        return ()
    used = tensor.used(values, INTEGRAL)
    flowing = _reach(source, needs, used)

    parameter = problem.is_parameter(tensor.name)

    def path(*, leads: bool) -> tuple[Move, ...]:
        return tree(
            source,
            needs,
            lambda move: problem.move_seconds(tensor.name, move, leads=leads),
            legal=lambda layout: prices.dims.legal(tensor.name, layout),
            differentiable=prices.training and problem.graph.specs[tensor.name].requires_grad,
        )

    candidates = [item for item in (flowing, path(leads=False)) if item is not None]
    if parameter and prices.once < 1.0:
        candidates.append(path(leads=True))

    def seconds(moves: tuple[Move, ...]) -> float:
        first = leading(source, needs, moves) if parameter else ()
        return sum(problem.move_seconds(tensor.name, move, leads=move in first) for move in moves)

    return min(candidates, key=seconds)


def ends(
    graph: Graph,
    prices: Prices,
    name: str,
    strategies: Mapping[str, object],
    inputs: Mapping[str, Layout],
    outputs: Mapping[str, Layout],
) -> tuple[Layout, list[Layout]]:
    """The layout in which a tensor is made, and those in which it is used."""
    differentiable = prices.training and graph.specs[name].requires_grad

    def tidy(layout: Layout) -> Layout:
        return canonical(layout, differentiable=differentiable)

    source = inputs.get(name)
    needs: list[Layout] = []
    for item in graph.operators:
        strategy: tuple[object, ...] = strategies[item.name]  # type: ignore[assignment]
        for index, result in enumerate(item.results):
            if result == name:
                source = tuple(option.results[index] for option in strategy)  # type: ignore[attr-defined]
        for index, operand in enumerate(item.operands):
            if operand == name:
                needs.append(tidy(tuple(option.operands[index] for option in strategy)))  # type: ignore[attr-defined]
    if name in outputs and name in graph.outputs:
        needs.append(tidy(outputs[name]))
    needs += [tidy(inputs[buffer]) for buffer, value in graph.writes if value == name]
    assert source is not None
    return tidy(source), needs


def _reach(source: Layout, needs: list[Layout], used: set[Move]) -> tuple[Move, ...] | None:
    """Of the moves that carry flow those on paths from `source` to the needs; None if some is cut off."""
    via: dict[Layout, Move] = {}
    waiting, seen = [source], {source}
    while waiting:
        layout = waiting.pop(0)
        for move in used:
            if move.source == layout and move.target not in seen:
                seen.add(move.target)
                via[move.target] = move
                waiting.append(move.target)
    kept: dict[Layout, Move] = {}
    for need in needs:
        while need != source:
            if need not in via:
                return None
            kept[need] = via[need]
            need = via[need].source
    return tuple(move for move in via.values() if move in kept.values())


def total_seconds(graph: Graph, prices: Prices, program: Program) -> float:
    """Predicted seconds of one micro-batch under `program` with its share of what is done once a step,
    summed anew: of one training step if there are no micro-batches."""
    return step_cost(graph, prices, program).weighted(prices.once)
