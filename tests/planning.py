"""Plans without a solver: the first strategy that a preference allows, conversions by the path finder.

    force(graph, dims, ["d0", "n"])      shard the batch wherever an operator can, else gather

The rest of the pipeline is the real one, so what the tests run is what users run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import fx, nn

import autopar.ops
import autopar.runtime.collectives
import autopar.runtime.random  # noqa: F401  (registers the operators that programs call)
from autopar.convert.path import tree
from autopar.core.executable import Executable, InputPart, Pinned
from autopar.core.graph import Graph, InputKind, Operator
from autopar.core.mesh import Mesh
from autopar.core.placement import B, Layout, P, Partial, R, Shard
from autopar.core.plan import Program
from autopar.ops.analysis import find_atoms, strategies_of
from autopar.ops.dims import Dims
from autopar.ops.equation import GATHERED, Option
from autopar.ops.rule import Strategy
from autopar.rewrite.program import rewrite
from autopar.rewrite.samples import find_samples
from autopar.rewrite.sync import defer
from autopar.trace import trace

Prefer = Callable[[Operator, Option], float]  # the highest wins on each axis


def kinds(graph: Graph, operation: Operator, option: Option) -> str:
    """What an option is called: batch, filter, channel, domain, or the unsharded options' marks."""
    if not option.shards:
        return option.factor
    weights = {item.name for item in graph.inputs if item.kind is InputKind.PARAMETER}
    sharded = [
        placement
        for name, placement in zip(operation.operands, option.operands, strict=True)
        if name in weights and isinstance(placement, Shard)
    ]
    if sharded:
        return "channel" if P in option.results else "filter"
    first = next((item for item in option.operands if isinstance(item, Shard)), None)
    return "batch" if first == Shard(0) else "domain"


def force(
    graph: Graph,
    dims: Dims,
    wanted: Mapping[str, Sequence[str]] | Sequence[str],
    pinned: Pinned | None = None,
) -> Program:
    """For each axis a kind of parallelism (`wanted`), for single operators other ones, by module name.

    Operators that don't offer it run on gathered operands. Parameters are stored as their first
    consumer takes them, or as `pinned` says.
    """
    default = wanted if isinstance(wanted, Sequence) else wanted["*"]
    single = {} if isinstance(wanted, Sequence) else wanted
    strategies: dict[str, Strategy] = {}
    for operation in graph.operators:
        strategies[operation.name] = _choose(graph, operation, dims, single.get(operation.module, default))
    return _convert(graph, dims, strategies, pinned)


def _choose(graph: Graph, operation: Operator, dims: Dims, kinds_wanted: Sequence[str]) -> Strategy:
    def score(strategy: Strategy) -> tuple[int, int]:
        named = [kinds(graph, operation, option) for option in strategy]
        right = sum(name == want for name, want in zip(named, kinds_wanted, strict=True))
        return right, sum(option.factor == GATHERED for option in strategy)

    return max(strategies_of(operation, dims), key=score)


def _convert(graph: Graph, dims: Dims, strategies: Mapping[str, Strategy], pinned: Pinned | None) -> Program:
    whole: Layout = (R,) * len(dims.mesh.shape)
    needs: dict[str, list[Layout]] = {name: [] for name in graph.specs}
    sources: dict[str, Layout] = {}
    for operation in graph.operators:
        strategy = strategies[operation.name]
        for index, name in enumerate(operation.operands):
            needs[name].append(tuple(option.operands[index] for option in strategy))
        for index, result in enumerate(operation.results):
            if result:
                sources[result] = tuple(option.results[index] for option in strategy)
    for item in graph.inputs:
        first = needs[item.name][0] if needs[item.name] else whole
        stored = tuple(R if placement in (B, P) else placement for placement in first)
        fixed: Mapping[str, Layout] = {}
        if pinned:
            fixed = pinned.users if item.kind is InputKind.USER else pinned.stored
        sources[item.name] = fixed.get(item.target, stored)
    for name in graph.outputs:
        needs[name].append(whole)
    for buffer, value in graph.writes:
        needs[value].append(sources[buffer])
    moves = {
        name: tree(
            sources[name],
            wanted,
            lambda move: 1.0 + any(isinstance(item, Partial) for item in move.target),
            legal=lambda layout, name=name: dims.legal(name, layout),
            differentiable=graph.specs[name].requires_grad,
        )
        for name, wanted in needs.items()
    }
    inputs = {item.name: sources[item.name] for item in graph.inputs}
    return Program(dims.mesh, inputs, strategies, moves, dict.fromkeys(graph.outputs, whole))


class Compiler:
    """A `compile` for ParallelModule that forces one plan; counts what it has compiled."""

    def __init__(self, mesh: Mesh, wanted: Any, *, loss_fn: Any = None, deferred: bool = True) -> None:
        self.mesh, self.wanted, self.loss_fn, self.deferred = mesh, wanted, loss_fn, deferred
        self.count = 0

    def __call__(
        self,
        model: nn.Module,
        args: Any,
        kwargs: Any,
        *,
        training: bool,
        pinned: Pinned | None,
        step: bool = False,
    ) -> Executable:
        self.count += 1
        assert not step  # the real compiler's
        traced = trace(model, args, kwargs, loss_fn=self.loss_fn)
        graph = traced.graph
        dims = Dims(graph, find_atoms(graph), self.mesh)
        program = force(graph, dims, self.wanted, pinned)
        rank = dist.get_rank()
        mine = rewrite(graph, program, dims, rank=rank)
        parameters = [item.name for item in graph.inputs if item.kind is InputKind.PARAMETER]
        plain, keys = defer(mine.graph, parameters) if self.deferred else (mine.graph, {})
        users = list(traced.arguments.paths)
        inputs = tuple(
            InputPart(
                item.name,
                item.kind,
                item.target,
                item.spec,
                program.inputs[item.name],
                dims.part(item.name, program.inputs[item.name], self.mesh.coordinate(rank)),
                item.aliases,
                item.mutated,
                keys.get(item.name),
                users.index(item.target) if item.kind is InputKind.USER else -1,
            )
            for item in graph.inputs
        )
        return Executable(
            mesh=self.mesh,
            module=fx.GraphModule(nn.Module(), plain, class_name="ParallelProgram"),
            inputs=inputs,
            outputs=tuple(
                dims.part(name, program.outputs[name], self.mesh.coordinate(rank)) for name in graph.outputs
            ),
            writes=tuple(buffer for buffer, _ in graph.writes),
            rebuild=traced.results.rebuild,
            groups=tuple(group_keys(plain)),
            constants={},
            plan=f"forced: {self.wanted}",
            layers=mine.layers,
            samples=find_samples(graph, program.inputs, dims),
        )


def group_keys(graph: fx.Graph) -> set[str]:
    """Every group key that the program names."""
    return {
        str(argument)
        for node in graph.nodes
        for argument in node.args
        if isinstance(argument, str) and "@" in argument
    }
