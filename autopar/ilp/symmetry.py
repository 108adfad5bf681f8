"""Axes of one size and one link are interchangeable: choose without naming them, then name them.

    2 x 2 x 2, a tensor as {S(0), S(1), S(1)}        216 layouts of 6 placements become 56 multisets

Forgetting the names relaxes the program: a plan with names is one without, of equal cost, but two
operands of one operator may have been given different names. So the relaxation gives a lower bound
for all plans; the plan itself is the best among all namings of what the relaxation chose.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.core.placement import Layout
from autopar.cost.prices import Prices
from autopar.ilp.linear_program import Answer
from autopar.ilp.placement import Problem, Space, unnamed
from autopar.ops.rule import Strategy

Alike = tuple[tuple[int, ...], ...]

SUPPORT = 1e-6  # the share above which the relaxation counts as having chosen something
MANY_AXES = 3  # on fewer, the program with names is small enough


def axes_alike(prices: Prices) -> Alike:
    """Groups of at least two interchangeable axes; none on meshes that are small anyway."""
    mesh = prices.dims.mesh
    if len(mesh.shape) < MANY_AXES:
        return ()
    groups: dict[object, list[int]] = {}
    for axis in mesh.axes:
        groups.setdefault((mesh.shape[axis], prices.cluster.link(mesh, axis)), []).append(axis)
    return tuple(tuple(axes) for axes in groups.values() if len(axes) > 1)


def forget(space: Space, alike: Alike) -> Space:
    """One strategy, and one stored layout, of all that differ by names alone."""
    strategies = {
        name: list({_strategy_key(strategy, alike): strategy for strategy in offered}.values())
        for name, offered in space.strategies.items()
    }
    inputs = {
        name: list(dict.fromkeys(unnamed(layout, alike) for layout in layouts))
        for name, layouts in space.inputs.items()
    }
    return Space(strategies, inputs, space.outputs)


def named(space: Space, problem: Problem, answer: Answer, alike: Alike) -> Space:
    """All namings, within `space`, of what the relaxed `answer` chose."""
    assert answer.values is not None
    values = answer.values
    strategies = {}
    for name, offered in space.strategies.items():
        pairs = zip(problem.space.strategies[name], problem.x[name], strict=True)
        chosen = {_strategy_key(strategy, alike) for strategy, variable in pairs if values[variable] > SUPPORT}
        strategies[name] = [item for item in offered if _strategy_key(item, alike) in chosen]
    inputs: dict[str, Sequence[Layout]] = dict(space.inputs)
    for name, layouts in problem.input_layouts.items():
        kept = {layout for layout, variable in layouts.items() if values[variable] > SUPPORT}
        inputs[name] = [layout for layout in space.inputs[name] if unnamed(layout, alike) in kept]
    return Space(strategies, inputs, space.outputs)


def _strategy_key(strategy: Strategy, alike: Alike) -> tuple[str, ...]:
    placed = [option.factor for option in strategy]
    for axes in alike:
        for axis, factor in zip(axes, sorted(placed[axis] for axis in axes), strict=True):
            placed[axis] = factor
    return tuple(placed)
