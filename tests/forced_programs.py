"""Makes programs whose strategies are forced: without a solver, conversions by the path finder.

    force_each(graph, dims, choose)                     each operator's strategy is what a function chooses
    force_factors(graph, dims, {"relu": "n o"})         a factor for each axis, by the name of a result
    force_kinds(graph, dims, ["batch", "filter"])       a kind of parallelism for each axis
    connect(graph, dims, strategies, store=...)         what all share: the moves between layouts

The rest of the pipeline is the real one, so what the tests run is what users run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

import autopar.ops
import autopar.runtime.collectives.placement_moves
import autopar.runtime.collectives.random  # noqa: F401  (registers the operators that programs call)
from autopar.convert.path import Price, tree
from autopar.core.gathering import Gathering
from autopar.core.graph import Graph, GraphInput, InputKind, Operator
from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.placement import B, Layout, P, Partial, Placement, R, Shard
from autopar.core.program import Program
from autopar.core.strategy import GATHERED, Option, Strategy
from autopar.proof.ranks import assemble, distribute, run, total_gradient
from autopar.rewrite.rank_program import rewrite
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import options_of, strategies_of
from autopar.solve.choices.space import storable
from autopar.trace.export import trace

Forced = tuple[Dims, Program]
Store = Callable[[GraphInput, Sequence[Layout]], Layout]  # of an input, given the layouts that operators take
Wanted = Mapping[str, Sequence[str]] | Sequence[str]  # kinds of parallelism: of all operators, or by module


def traced(model: nn.Module, *args: Tensor) -> tuple[Graph, dict[str, Tensor]]:
    """The graph and the full value of each of its inputs."""
    export = trace(model, args)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    users = iter(export.arguments.tensors)
    values = {
        item.name: state[item.target] if item.target in state else next(users) for item in export.graph.inputs
    }
    return export.graph, {name: value.detach().clone() for name, value in values.items()}


# -- a strategy for each operator -------------------------------------------------------------------------


def force_each(graph: Graph, dims: Dims, choose: Callable[[Operator], Strategy]) -> Program:
    """Each operator runs by the strategy that `choose` gives; inputs lie as their first use takes them."""
    strategies = {operator.name: choose(operator) for operator in graph.operators}
    return connect(graph, dims, strategies, store=lambda _, needs: as_first_taken(needs, dims))


def option(operator: Operator, dims: Dims, wanted: Placement) -> Option:
    """The option that lays the operator's result as `wanted`, or the gathered one."""
    options = options_of(operator, dims)
    gathered = next(item for item in options if item.factor == GATHERED)
    return next((item for item in options if item.results[0] == wanted), gathered)


def force_factors(
    graph: Graph, dims: Dims, factors: Mapping[str, str], stored: Mapping[str, Layout] | None = None
) -> Program:
    """Operators that make the named tensors run by a factor for each axis ("n o"), or by one for all axes.

    The others are gathered. Inputs are whole unless `stored` says how they lie.
    """
    strategies: dict[str, Strategy] = {}
    for operator in graph.operators:
        words = next((text for name, text in factors.items() if name in operator.results), GATHERED).split()
        named = {option.factor: option for option in options_of(operator, dims)}
        axes = words * len(dims.mesh.shape) if len(words) == 1 else words
        strategies[operator.name] = tuple(named[word] for word in axes)

    def store(item: GraphInput, needs: Sequence[Layout]) -> Layout:
        if item.mutated:
            return as_first_taken(needs, dims)
        return (stored or {}).get(item.name, whole(dims))

    return connect(graph, dims, strategies, store=store)


def force_kinds(
    graph: Graph,
    dims: Dims,
    wanted: Wanted,
    *,
    stored: Mapping[str, Layout] | None = None,
    users: Mapping[str, Layout] | None = None,
    gathering: Gathering | None = None,
) -> Program:
    """Operators run by the `wanted` kind of parallelism on each axis; those that don't offer it are gathered.

    Single operators may have other kinds, by their module's name; "*" are then the others'. Parameters are
    stored as their first consumer takes them, or as `stored` says; so are user inputs, by `users`. With
    `gathering` those that learn are stored in shards over every axis on which they can be.
    """
    default = wanted if isinstance(wanted, Sequence) else wanted["*"]
    single = {} if isinstance(wanted, Sequence) else wanted
    strategies = {
        operator.name: _strategy(graph, operator, dims, single.get(operator.module, default))
        for operator in graph.operators
    }

    def store(item: GraphInput, needs: Sequence[Layout]) -> Layout:
        layout = as_first_taken(needs, dims)
        if gathering is not None and item.kind is InputKind.PARAMETER and item.spec.requires_grad:
            layout = in_shards(item.name, layout, dims)
        fixed = users if item.kind is InputKind.USER else stored
        return (fixed or {}).get(item.target, layout)

    program = connect(graph, dims, strategies, store=store, price=_avoid_partial)
    if gathering is None:
        return program
    sharded = [name for name, layout in program.inputs.items() if any(isinstance(p, Shard) for p in layout)]
    return replace(program, gatherings=dict.fromkeys(sharded, gathering))


def _strategy(graph: Graph, operator: Operator, dims: Dims, wanted: Sequence[str]) -> Strategy:
    def score(strategy: Strategy) -> tuple[int, int]:
        kinds = [kind(graph, operator, option) for option in strategy]
        right = sum(name == want for name, want in zip(kinds, wanted, strict=True))
        return right, sum(option.factor == GATHERED for option in strategy)

    return max(strategies_of(operator, dims), key=score)


def kind(graph: Graph, operator: Operator, option: Option) -> str:
    """What an option is called: batch, filter, channel, domain, or the unsharded options' marks."""
    if not option.shards:
        return option.factor
    weights = {item.name for item in graph.inputs if item.kind is InputKind.PARAMETER}
    operands = zip(operator.operands, option.operands, strict=True)
    if any(name in weights and isinstance(placement, Shard) for name, placement in operands):
        return "channel" if P in option.results else "filter"
    first = next((placement for placement in option.operands if isinstance(placement, Shard)), None)
    return "batch" if first == Shard(0) else "domain"


# -- layouts and moves ------------------------------------------------------------------------------------


def connect(
    graph: Graph,
    dims: Dims,
    strategies: Mapping[str, Strategy],
    *,
    store: Store,
    leave: Callable[[str], Layout] | None = None,
    price: Price = lambda move: 1.0,
) -> Program:
    """The program of `strategies`: inputs lie as `store` says, outputs as `leave` says or whole.

    Between them are the cheapest moves by `price`.
    """
    sources, needs = _layouts(graph, strategies)
    inputs = {item.name: store(item, needs[item.name]) for item in graph.inputs}
    outputs = {name: leave(name) if leave else whole(dims) for name in graph.outputs}
    sources |= inputs
    for name, layout in outputs.items():
        needs[name].append(layout)
    for buffer, value in graph.writes:
        needs[value].append(inputs[buffer])
    moves = {
        name: tree(
            sources[name],
            needs[name],
            price,
            legal=partial(dims.legal, name),
            differentiable=spec.requires_grad,
        )
        for name, spec in graph.specs.items()
    }
    return Program(dims.mesh, inputs, strategies, moves, outputs)


def _layouts(
    graph: Graph, strategies: Mapping[str, Strategy]
) -> tuple[dict[str, Layout], dict[str, list[Layout]]]:
    """The layout in which operators make each tensor, and those in which they take it."""
    sources: dict[str, Layout] = {}
    needs: dict[str, list[Layout]] = {name: [] for name in graph.specs}
    for operator in graph.operators:
        strategy = strategies[operator.name]
        for index, name in enumerate(operator.operands):
            needs[name].append(tuple(option.operands[index] for option in strategy))
        for index, result in enumerate(operator.results):
            if result:
                sources[result] = tuple(option.results[index] for option in strategy)
    return sources, needs


def whole(dims: Dims) -> Layout:
    """The layout of a tensor of which every rank has all."""
    return (R,) * len(dims.mesh.shape)


def as_first_taken(needs: Sequence[Layout], dims: Dims) -> Layout:
    """The first of the layouts in which an input is taken, with R for what no input can be."""
    return tuple(R if placement in (B, P) else placement for placement in (needs or [whole(dims)])[0])


def in_shards(name: str, layout: Layout, dims: Dims) -> Layout:
    """`layout` with a shard of the first dim that is long enough on every axis that has none."""
    for axis, placement in enumerate(layout):
        shards = [Shard(dim) for dim in range(len(dims.atoms.of[name]))]
        choices: list[Placement] = [*shards, R] if placement == R else [placement]
        layouts = [(*layout[:axis], choice, *layout[axis + 1 :]) for choice in choices]
        layout = next(item for item in layouts if item == layout or storable(name, item, dims))
    return layout


def _avoid_partial(move: Move) -> float:
    return 1.0 + any(isinstance(placement, Partial) for placement in move.target)


# -- the proof --------------------------------------------------------------------------------------------


def check_against_serial(
    model: nn.Module, mesh: Mesh, x: Tensor, *, by: Callable[[Graph, Mesh], Forced]
) -> None:
    """Outputs, gradients and buffers of the forced program on simulated ranks equal the model's own."""
    graph, values = traced(model, x)
    dims, program = by(graph, mesh)
    for item in graph.inputs:
        values[item.name].requires_grad_(item.spec.requires_grad)
    locals_ = distribute(values, program.inputs, dims)
    ranks = range(mesh.num_devices)
    outputs = [out[0] for out in run([rewrite(graph, program, dims, rank=rank) for rank in ranks], locals_)]
    serial = model(x)
    assert all(torch.allclose(output, serial) for output in outputs)
    serial.square().mean().backward()
    torch.autograd.backward([output.square().mean() / len(outputs) for output in outputs])
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for item in graph.inputs:
        mine, layout = [local[item.name] for local in locals_], program.inputs[item.name]
        if item.target in parameters:
            gradient, wanted = total_gradient(item.name, mine, layout, dims), parameters[item.target].grad
            assert wanted is not None and torch.allclose(gradient, wanted), item.target
        elif item.mutated:
            assert torch.allclose(assemble(item.name, mine, layout, dims), buffers[item.target]), item.target
