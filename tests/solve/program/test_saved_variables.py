"""No memory row asks for more than a plan holds: what it counts the replayed peak has."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import pytest
import torch

from autopar.core.gathering import Gathering
from autopar.core.graph import Graph, Ref
from autopar.core.mesh import Mesh
from autopar.core.program import Program
from autopar.core.recompute import Segment
from autopar.cost.program.peak_memory import Replay
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import RuleError
from autopar.solve.choices.fold import fold
from autopar.solve.choices.space import Space, build_space
from autopar.solve.choices.tensor_classes import Use
from autopar.solve.highs import solve
from autopar.solve.linear_program import LinearProgram, Terms
from autopar.solve.program.decode import Choices, decoded, read
from autopar.solve.program.problem import Problem
from tests.proof.models import Script, draw_trained
from tests.solve.brute_force import GRAPHS, random_prices, unfolded

aten = torch.ops.aten
CLOSE = 1e-6
AMPLE = 10**12  # bytes
DEEP = 5  # blocks, so that what is kept for backward is most of the peak
TRIED = 2  # choices, of which some have no conversions that lead from one to the other


def turned() -> Graph:
    """Products with views of weights, which are most of what there is."""
    s = Script()
    x = s.user(2, 12)
    for _ in range(DEEP):
        weight = s.call(aten.t.default, Ref(s.weight(12, 12)))
        x = s.call(aten.gelu.default, Ref(s.call(aten.matmul.default, Ref(x), Ref(weight))))
    return s.graph(s.call(aten.sum.default, Ref(x)))


def gated() -> Graph:
    """Storages of which backward reads the whole, two halves, and a view."""
    s = Script()
    x = s.user(32, 4)
    for _ in range(DEEP):
        h = s.linear(x, 8)
        squares = s.call(aten.mul.Tensor, Ref(h), Ref(h))
        other = s.call(aten.t.default, Ref(h))
        cubes = s.call(aten.t.default, Ref(s.call(aten.mul.Tensor, Ref(other), Ref(other))))
        first, second = s.calls(
            aten.chunk.default, Ref(s.call(aten.add.Tensor, Ref(squares), Ref(cubes))), 2, 1
        )
        x = s.call(aten.add.Tensor, Ref(first), Ref(second))
    return s.graph(s.call(aten.sum.default, Ref(x)))


def spread() -> Graph:
    """Few elements that a view makes many, and products that keep them."""
    s = Script()
    h = s.linear(s.user(8, 6), 8)
    for _ in range(DEEP):
        h = s.linear(h, 8)
        wide = s.call(aten.expand.default, Ref(s.call(aten.unsqueeze.default, Ref(h), 0)), [4, 8, 8])
        product = s.call(aten.mul.Tensor, Ref(wide), Ref(s.user(4, 8, 8)))
        h = s.call(aten.sum.dim_IntList, Ref(product), [0])
    return s.graph(s.call(aten.sum.default, Ref(h)))


def heavy() -> Graph:
    """Weights that are most of what there is."""
    s = Script()
    x = s.user(2, 12)
    for _ in range(DEEP):
        x = s.linear(x, 12)
    return s.graph(s.call(aten.sum.default, Ref(x)))


def layers() -> Graph:
    """Equal blocks whose activations backward reads twice, once as a view."""
    s = Script()
    x = s.linear(s.user(4, 6), 8)
    for _ in range(4):
        turned = s.call(aten.t.default, Ref(s.call(aten.gelu.default, Ref(s.linear(x, 8)))))
        x = s.linear(s.call(aten.t.default, Ref(s.call(aten.mul.Tensor, Ref(turned), Ref(turned)))), 8)
    return s.graph(s.call(aten.sum.default, Ref(x)))


def drawn(seed: int = 0) -> Graph:
    return draw_trained(Random(seed)).graph


MADE = (*GRAPHS, turned, gated, spread, layers, heavy, pytest.param(drawn, marks=pytest.mark.long))


class Open(Problem):
    """The program with all its conversions, those that are as cheap elsewhere among them."""

    def passes(self, name: str, use: Use) -> tuple[bool, bool]:
        return False, False


class Watched(Replay):
    """A replay that notes what is `held` when backward begins."""

    held = 0

    def backward(self) -> None:
        self.held = self.heap.now
        super().backward()


def least(problem: Problem, program: Program) -> Iterator[float]:
    """For each memory row the least that it counts for a program, however tensors are converted."""
    pinned = apart(problem)
    for variable, value in values_of(problem, program):
        pinned.equal([(1.0, variable)], value)
    memory = problem.memory
    later = [(-nbytes, variable) for nbytes, variable in memory.gradients]
    for row in ([*memory.held, *later], memory.resting):
        yield minimum(pinned, row)


def minimum(lp: LinearProgram, row: Terms) -> float:
    lp.costs = [0.0] * len(lp.costs)
    for amount, variable in row:
        lp.costs[variable] += amount / 1000
    return 1000 * solve(lp, relaxed=True).cost


def values_of(problem: Problem, program: Program) -> Iterator[tuple[int, float]]:
    """What the variables of choices, and of what is recomputed, are in a program."""
    operators = problem.operators
    runs_again = {
        problem.graph.operators[place].name
        for first, stop in program.recompute
        for place in range(first, stop)
    }
    for name, x in operators.x.items():
        members = operators.members[name]
        share = sum(member in runs_again for member in members) / len(members)
        for strategy, whole, again in zip(problem.space.strategies[name], x, operators.r[name], strict=True):
            taken = program.strategies[members[0]] == strategy
            yield whole, float(taken)
            yield again, share * taken
    for name, choices in problem.inputs.items():
        stored = program.inputs[name], program.gathering(name)
        if stored not in choices:  # it isn't gathered, so it might be in any way
            stored = next(each for each in choices if each[0] == program.inputs[name])
        yield choices[stored], 1.0


def some_programs(problem: Problem, random: Random) -> Iterator[Program]:
    """The fastest program, one for each way of gathering weights in shards, and programs at random."""
    yield read(problem, solve(problem.lp, relaxed=True))
    for gathering in Gathering:
        pinned = apart(problem)
        for choices in problem.inputs.values():
            ways = {way: variable for (_, way), variable in choices.items()}
            for (_, way), variable in choices.items():
                if gathering in ways and way is not gathering:
                    pinned.equal([(1.0, variable)], 0.0)
        answer = solve(pinned, relaxed=True)
        if answer.values is not None:
            yield read(problem, answer)
    for _ in range(TRIED):
        with contextlib.suppress(RuleError):
            yield decoded(problem, some_choices(problem, random))


def some_choices(problem: Problem, random: Random) -> Choices:
    return Choices(
        {name: random.choice(problem.space.strategies[name]) for name in problem.operators.x},
        {name: random.choice(list(offered)) for name, offered in problem.inputs.items()},
        {name: random.choice(list(offered)) for name, offered in problem.output_layouts.items()},
        {name: random.choice((Gathering.KEEP, Gathering.REGATHER)) for name in problem.regathered},
    )


def apart(problem: Problem) -> LinearProgram:
    """The rows and costs of a problem, for others to be added."""
    shared = ("lows", "highs", "rows", "columns", "coefficients")
    return replace(problem.lp, solved=[], **{name: list(getattr(problem.lp, name)) for name in shared})


def some_parts(count: int, random: Random) -> tuple[Segment, ...]:
    """Up to two disjoint runs of operators."""
    ends = sorted(random.sample(range(count + 1), min(4, count + 1)))
    pairs = list(zip(ends[::2], ends[1::2], strict=False))
    return tuple(pairs[: random.randint(0, 2)])


def described(graph: Graph, mesh: Mesh, random: Random, *, repeated: bool, folded: bool) -> Problem:
    prices = random_prices(graph, mesh, random)
    if repeated:
        prices.step_weight, prices.micro_batches, prices.accumulates = 0.25, 4, True
    folding = fold(graph, prices.dims) if folded else unfolded(graph)
    space = build_space(graph, prices, folding)
    space = Space(space.strategies, space.inputs, space.outputs, tuple(Gathering))
    return Open(graph, prices, space, folding, cap=AMPLE, recomputes=True)


@pytest.mark.slow
@pytest.mark.parametrize("repeated", [False, True], ids=["once", "micro-batches"])
@pytest.mark.parametrize("made", MADE, ids=lambda made: getattr(made, "__name__", ""))
def test_no_row_counts_more_than_the_replayed_peak(made: Callable[[], Graph], repeated: bool) -> None:
    graph, random = made(), Random(7)
    seen = 0
    for shape, folded in (((2,), False), ((2, 2), True)):
        problem = described(graph, Mesh(shape), random, repeated=repeated, folded=folded)
        for program in some_programs(problem, random):
            parts = some_parts(len(graph.operators), random) if seen % 2 else ()
            priced = PricedProgram(problem.prices, program).remedied(recompute=parts)
            held, resting = least(problem, priced.program)
            if held < math.inf:  # else the placement program's conversions can't make it
                seen += 1
                replay = Watched(priced)
                assert resting <= replay.run().nbytes * (1 + CLOSE), str(priced.program)
                assert held <= replay.held * (1 + CLOSE), str(priced.program)
    assert seen
