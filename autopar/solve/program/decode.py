"""From choices to a program: what the solver's answer spells, or any other choices among the same.

Operators and inputs are chosen, conversions follow: the cheaper of those that the solver's flows make and of
paths that are found anew between the layouts in which a tensor is made and used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.convert.moves import canonical, gathers
from autopar.convert.path import tree_within
from autopar.core.gathering import Gathering
from autopar.core.move import Move
from autopar.core.placement import Layout
from autopar.core.program import Program
from autopar.core.strategy import Strategy
from autopar.cost.program.values import leading
from autopar.errors import RuleError
from autopar.solve.choices.conversion_trees import cheapest_tree
from autopar.solve.choices.direct_ways import distances
from autopar.solve.choices.gather_phases import completing
from autopar.solve.choices.tensor_classes import TensorClass
from autopar.solve.linear_program import SolverAnswer
from autopar.solve.program.problem import Problem
from autopar.solve.program.tensor_starts import Stored

INTEGRAL = 1e-6  # how far from 0 and 1 a relaxed choice may be to count as made


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices that make a program: the strategy of each operator class; how each class of inputs that has a
    choice is stored, and gathered; the layouts of outputs; how cast weights are gathered. Conversions follow
    from these."""

    strategies: Mapping[str, Strategy]
    stored: Mapping[str, Stored]
    outputs: Mapping[str, Layout]
    casts: Mapping[str, Gathering]


def is_whole(problem: Problem, answer: SolverAnswer) -> bool:
    """Whether all integer variables of the solver's answer are 0 or 1."""
    if answer.values is None:
        return False
    whole = (value for value, flag in zip(answer.values, problem.lp.integer, strict=True) if flag)
    return all(min(value, abs(1 - value)) < INTEGRAL for value in whole)


def read(problem: Problem, answer: SolverAnswer) -> Program:
    """Read the program from the solver's values."""
    assert answer.values is not None
    values = answer.values
    strategies = {
        name: problem.space.strategies[name][max(range(len(x)), key=lambda index: values[x[index]])]
        for name, x in problem.operators.x.items()
    }
    stored = {
        name: max(choices, key=lambda item: values[choices[item]]) for name, choices in problem.inputs.items()
    }
    outputs = {
        name: max(choices, key=lambda item: values[choices[item]])
        for name, choices in problem.output_layouts.items()
    }
    casts = {
        name: Gathering.REGATHER if choice is None or values[choice] > 0.5 else Gathering.KEEP
        for name, choice in problem.regathered.items()
    }
    return decoded(problem, Choices(strategies, stored, outputs, casts), values)


def choices_of(problem: Problem, program: Program) -> Choices:
    """The choices of `program`, a plan of this problem."""
    stored = {}
    for name, choices in problem.inputs.items():
        layout = program.inputs[name]
        exact = layout, program.gatherings.get(name, Gathering.KEEP)
        stored[name] = exact if exact in choices else next(each for each in choices if each[0] == layout)
    return Choices(
        {name: program.strategies[members[0]] for name, members in problem.operators.members.items()},
        stored,
        {name: program.outputs[name] for name in problem.output_layouts},
        {
            name: Gathering.REGATHER if choice is None else program.gathering(name)
            for name, choice in problem.regathered.items()
        },
    )


def decoded(
    problem: Problem,
    choices: Choices,
    values: tuple[float, ...] | None = None,
    *,
    around: bool = False,
    cheapest: bool = False,
) -> Program:
    """The program of these choices; conversions are those of the solver's `values` or cheaper ones, which
    with `around` may lead through layouts that nobody asks for; the `cheapest` of all, if these are wanted.

    Raises RuleError if without `values` there is no way from one layout to another.
    """
    graph, folding = problem.graph, problem.folding
    strategies = {item.name: choices.strategies[folding.class_of[item.name]] for item in graph.operators}
    inputs: dict[str, Layout] = {item.name: problem.space.inputs[item.name][0] for item in graph.inputs}
    gatherings: dict[str, Gathering] = {}
    for tensor in problem.tensors:
        if tensor.name in choices.stored:
            layout, gathering = choices.stored[tensor.name]
            inputs |= dict.fromkeys(tensor.members, layout)
            gatherings |= dict.fromkeys(tensor.members, gathering)
        elif tensor.name in choices.casts:
            gatherings |= dict.fromkeys(tensor.members, choices.casts[tensor.name])
    outputs = {name: layouts[0] for name, layouts in problem.space.outputs.items()} | dict(choices.outputs)
    for name, open_to in problem.output_layouts.items():  # as it lies is as good as any other way
        made, _ = ends(problem, name, strategies, inputs, outputs)
        outputs[name] = made if made in open_to else outputs[name]
    moves: dict[str, tuple[Move, ...]] = {}
    for tensor in problem.tensors:
        gathering = gatherings.get(tensor.name, Gathering.KEEP)
        chosen = _moves_of(
            problem, tensor, strategies, inputs, outputs, values, gathering, around=around, cheapest=cheapest
        )
        moves |= dict.fromkeys(tensor.members, chosen)
    special = {
        name: gathering
        for name, gathering in gatherings.items()
        if gathering is not Gathering.KEEP and any(map(gathers, moves[name]))
    }
    mesh = problem.prices.dims.mesh
    reduce = problem.prices.reduce
    on_host = tuple(item.name for item in graph.inputs if item.name in problem.prices.on_host)
    return Program(
        mesh, inputs, strategies, moves, outputs, gatherings=special, reduce=reduce, on_host=on_host
    )


def _moves_of(
    problem: Problem,
    tensor: TensorClass,
    strategies: Mapping[str, Strategy],
    inputs: Mapping[str, Layout],
    outputs: Mapping[str, Layout],
    values: tuple[float, ...] | None,
    gathering: Gathering,
    *,
    around: bool = False,
    cheapest: bool = False,
) -> tuple[Move, ...]:
    """Choose the cheaper of what the flows use, and paths found anew between the chosen layouts."""
    prices = problem.prices
    source, needs = ends(problem, tensor.name, strategies, inputs, outputs)
    if all(need == source for need in needs):
        return ()
    parameter = problem.wiring.is_parameter(tensor.name)

    def path(*, leads: bool, around: bool = around) -> tuple[Move, ...]:
        key = tensor.name, source, tuple(needs), gathering, leads, around
        if key not in problem.paths:
            problem.paths[key] = tree_within(
                tensor.network,
                source,
                needs,
                _seconds_of_moves(problem, tensor, gathering, leads=leads),
                differentiable=prices.training and problem.graph.specs[tensor.name].requires_grad,
                anywhere=around,
            )
        return problem.paths[key]

    if cheapest and (tree := _cheapest(problem, tensor, source, needs, gathering)) is not None:
        return tree
    candidates = list(_flowing(tensor, source, needs, values))
    if tensor.ways is not None and values is not None:
        candidates.append(path(leads=False, around=True))
    if problem.wiring.is_fixed(tensor.name) and values is None:
        raise RuleError(
            where=f"buffer {tensor.name}",
            found="a conversion",
            wanted="none: it is written where it lies",
            remedy="choose operators that take it as it lies",
        )
    if problem.may_gather(tensor.name) or not candidates:
        candidates.append(path(leads=False))
    if problem.may_lead(tensor.name):
        candidates.append(path(leads=True))

    def seconds(moves: tuple[Move, ...]) -> float:
        first = leading(source, needs, moves, gathering) if parameter else ()
        repeated = sum(problem.move_seconds(tensor.name, move, leads=move in first) for move in moves)
        return repeated + _regather_seconds(problem, tensor.name, moves, strategies, gathering)

    return min(candidates, key=seconds)


def _cheapest(
    problem: Problem, tensor: TensorClass, source: Layout, needs: list[Layout], gathering: Gathering
) -> tuple[Move, ...] | None:
    """The cheapest conversions of all; for several needs of a weight only if each costs the same anywhere."""
    place = tensor.network.place
    seconds = _seconds_of_moves(problem, tensor, gathering, leads=False)
    if gathering is Gathering.REGATHER:
        seconds = seconds + np.where(tensor.network.gathers, tensor.network.forward, 0.0)
    if problem.may_lead(tensor.name):
        if len(set(needs)) > 1:
            return None
        return _led(problem, tensor, place[source], place[needs[0]], gathering, seconds)
    return cheapest_tree(tensor.network, seconds, place[source], [place[need] for need in needs])


def _led(
    problem: Problem,
    tensor: TensorClass,
    source: int,
    need: int,
    gathering: Gathering,
    seconds: NDArray[np.float64],
) -> tuple[Move, ...] | None:
    """The cheapest way, of which the first moves are made once a step, and others take so many seconds."""
    network = tensor.network
    if gathering is Gathering.ONCE:
        seconds = np.where(completing(network), np.inf, seconds)
    able = network.sums | (network.gathers if gathering is Gathering.ONCE else False)
    able &= problem.may_gather(tensor.name) | ~completing(network)
    first = np.where(able, problem.prices.step_weight * network.seconds, np.inf)
    ahead = distances(replace(network, seconds=first), np.array([source]), able)[:, 0]
    rest = replace(network, seconds=seconds)
    behind = distances(rest, np.array([need]), np.isfinite(seconds), backward=True)[:, 0]
    middle = int(np.argmin(ahead + behind))
    parts = cheapest_tree(network, first, source, [middle]), cheapest_tree(network, seconds, middle, [need])
    return None if parts[0] is None or parts[1] is None else (*parts[0], *parts[1])


def _flowing(
    tensor: TensorClass, source: Layout, needs: list[Layout], values: tuple[float, ...] | None
) -> Iterator[tuple[Move, ...]]:
    """Moves that the flows of the solver's `values` use, if they reach all needs."""
    if values is not None and tensor.ways is None:
        found = _reach(source, needs, tensor.used(values, INTEGRAL))
        if found is not None:
            yield found


def _seconds_of_moves(
    problem: Problem, tensor: TensorClass, gathering: Gathering, *, leads: bool
) -> NDArray[np.float64]:
    """Seconds of the moves of a tensor's network, inf where one can't be made; with `leads` those that can
    lead count as made once a step."""
    network = tensor.network
    seconds = network.seconds
    if leads and problem.wiring.is_parameter(tensor.name):
        able = network.sums | network.gathers if gathering is Gathering.ONCE else network.sums
        seconds = np.where(able, problem.prices.step_weight * seconds, seconds)
    if not problem.may_gather(tensor.name):
        seconds = np.where(completing(network), np.inf, seconds)
    if gathering is not Gathering.KEEP:
        seconds = np.where(network.from_partial, np.inf, seconds)
    return seconds


def _regather_seconds(
    problem: Problem,
    name: str,
    moves: Sequence[Move],
    strategies: Mapping[str, Strategy],
    gathering: Gathering,
) -> float:
    """Seconds for which backward gathers a weight again, were it converted by `moves`."""
    if gathering is not Gathering.REGATHER:
        return 0.0
    before = {move.target: move for move in moves}
    total = 0.0
    for item, index in problem.wiring.uses[name]:
        strategy = strategies[item.name]
        if index in problem.prices.operator(item, strategy).saved.operands:
            layout = problem.canonical(name, tuple(option.operands[index] for option in strategy))
            while layout in before:
                if gathers(before[layout]):
                    total += problem.prices.move_parts(name, before[layout])[0]
                layout = before[layout].source
    return total


def ends(
    problem: Problem,
    name: str,
    strategies: Mapping[str, Strategy],
    inputs: Mapping[str, Layout],
    outputs: Mapping[str, Layout],
) -> tuple[Layout, list[Layout]]:
    """The layout in which a tensor is made, and those in which it is used."""
    graph = problem.graph
    differentiable = problem.prices.training and graph.specs[name].requires_grad

    def tidy(layout: Layout) -> Layout:
        return canonical(layout, differentiable=differentiable)

    if name in problem.wiring.makers:
        maker, result = problem.wiring.makers[name]
        source = tuple(option.results[result] for option in strategies[maker.name])
    else:
        source = inputs[name]
    needs = [
        tidy(tuple(option.operands[index] for option in strategies[item.name]))
        for item, index in problem.wiring.uses[name]
    ]
    if name in outputs and name in graph.outputs:
        needs.append(tidy(outputs[name]))
    needs += [tidy(inputs[buffer]) for buffer, value in graph.writes if value == name]
    return tidy(source), needs


def _reach(source: Layout, needs: list[Layout], used: set[Move]) -> tuple[Move, ...] | None:
    """The moves with flow that lie on paths from `source` to the needs; None if some need is cut off."""
    via: dict[Layout, Move] = {}
    waiting, seen = [source], {source}
    while waiting:
        layout = waiting.pop(0)
        for move in used:
            if move.source == layout and move.target not in seen:
                seen.add(move.target)
                via[move.target] = move
                waiting.append(move.target)
    taken: dict[Layout, Move] = {}
    for need in needs:
        while need != source:
            if need not in via:
                return None
            taken[need] = via[need]
            need = via[need].source
    return tuple(move for move in via.values() if move in taken.values())
