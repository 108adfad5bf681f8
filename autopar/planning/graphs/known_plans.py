"""A plan that is there already, kept for a graph that differs from its own in numbers or sizes alone.

    mul(x, 0.7) -> mul(x, 0.6)                numbers decide nothing: the plan holds as it is
    x [8, 12, 64] -> x [5, 17, 64]            it holds if every placement has rows on every rank, and if
                                              what is longer still fits into memory

Nothing is solved or measured for them: the last short batch of an epoch and sequences of many lengths
cost a trace each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from autopar.cluster import ClusterSpec
from autopar.convert.moves import canonical
from autopar.core.fingerprint import Fingerprint, fingerprint_of
from autopar.core.graph import Graph
from autopar.core.placement import Layout
from autopar.core.program import Program
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.fused_groups import find_groups
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.planning.asked.request import Request
from autopar.results.plan.plan import Plan
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import dims_of, is_legal, options_of
from autopar.solve.stages.step import step_weight
from autopar.trace.reads.numbers import as_before

RESIZED = (
    "calls of other sizes keep these placements, without a search: seconds and bytes are those of the sizes "
    "that were planned first"
)
_SHAPE = re.compile(r" \w+\[([\d,]*)\]")  # of a result
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?")


def kept(graph: Graph, known: Sequence[Plan]) -> Plan | None:
    """A known plan whose graph differs from this one in numbers alone, with this graph; None without."""
    here = fingerprint_of(as_before(graph))
    return next((replace(plan, graph=here) for plan in known if plan.graph.shape == here.shape), None)


def resized(graph: Graph, known: Sequence[Plan], cluster: ClusterSpec, request: Request) -> Plan | None:
    """One of the plans whose graph differs from this one in sizes, if it can be run for this one."""
    here = fingerprint_of(graph)
    alike = (plan for plan in known if _outline(plan.graph) == _outline(here))
    for plan in alike:
        dims = dims_of(graph, plan.mesh, request.imbalance)
        if not holds(plan.program, dims):
            continue
        peak = plan.peak_bytes
        if plan.memory_cap is not None and _bound(plan, here) > plan.memory_cap:
            if plan.pipeline.is_staged:
                continue
            peak = _peak(plan, dims, cluster, request)
            if peak > plan.memory_cap:
                continue
        notes = plan.notes if RESIZED in plan.notes else (*plan.notes, RESIZED)
        return replace(plan, graph=here, notes=notes, peak_bytes=peak)
    return None


def holds(program: Program, dims: Dims) -> bool:
    """Whether a program fits the graph: it uses only strategies that the graph's operators offer, and each
    shard has rows on every rank."""
    graph = dims.graph
    if (set(program.strategies), set(program.inputs), set(program.outputs)) != (
        {item.name for item in graph.operators},
        {item.name for item in graph.inputs},
        set(graph.outputs),
    ) or not program.moves.keys() <= graph.specs.keys():
        return False
    strategies = ((item, program.strategies[item.name]) for item in graph.operators)
    offered = all(
        set(strategy) <= set(options_of(item, dims)) and is_legal(item, strategy, dims)
        for item, strategy in strategies
    )
    layouts = chain(
        program.inputs.items(),
        program.outputs.items(),
        (
            (name, end)
            for name, moves in program.moves.items()
            for move in moves
            for end in (move.source, move.target)
        ),
    )
    legal = offered and all(dims.legal(name, layout) for name, layout in layouts)
    return legal and _reaches(program, graph)


def _reaches(program: Program, graph: Graph) -> bool:
    """Whether moves lead to all that operators take: `heads[1](x)` lies otherwise than `heads[0](x)`."""

    def known(name: str, layout: Layout) -> tuple[str, Layout]:
        return name, canonical(layout, differentiable=graph.specs[name].requires_grad)

    strategies = program.strategies
    there = {known(name, layout) for name, layout in program.inputs.items()}
    there |= {
        known(name, tuple(option.results[index] for option in strategies[item.name]))
        for item in graph.operators
        for index, name in enumerate(item.results)
        if name
    }
    there |= {known(name, move.target) for name, moves in program.moves.items() for move in moves}
    sources = {known(name, move.source) for name, moves in program.moves.items() for move in moves}
    taken = {
        known(name, tuple(option.operands[index] for option in strategies[item.name]))
        for item in graph.operators
        for index, name in enumerate(item.operands)
    }
    return sources | taken | {known(*output) for output in program.outputs.items()} <= there


@lru_cache(maxsize=64)
def _outline(fingerprint: Fingerprint) -> tuple[str, ...]:
    """Leave every number out of a fingerprint."""
    lines = (*fingerprint.inputs, *fingerprint.operators, *fingerprint.outputs)
    return tuple(_NUMBER.sub("#", line) for line in lines)


def _bound(plan: Plan, here: Fingerprint) -> float:
    """Bytes that the plan takes at most for another graph of its outline: what isn't there all step grows as
    its tensors do, and twice that where parts become uneven."""
    pairs = zip(_sizes(here), _sizes(plan.graph), strict=True)
    growth = max((one / other for one, other in pairs if other), default=1.0)
    return plan.peak_bytes if growth <= 1 else plan.state_bytes + 2 * growth * plan.peak_bytes


def _sizes(fingerprint: Fingerprint) -> list[int]:
    """Elements of all tensors, in their order."""
    shapes = (match.group(1) for line in fingerprint.operators for match in _SHAPE.finditer(line))
    return [math.prod(map(int, shape.split(","))) if shape else 1 for shape in shapes]


def _peak(plan: Plan, dims: Dims, cluster: ClusterSpec, request: Request) -> int:
    """Bytes that the program takes on one device."""
    count = plan.pipeline.micro_batches
    prices = Prices(
        dims.graph,
        dims,
        cluster,
        CostModel.of(cluster, None),
        training=request.training,
        optimizer=request.optimizer,
        step_weight=step_weight(plan.pipeline.ranks, count),
        micro_batches=count,
        accumulates=request.training and count > 1,
        reduce=request.reduce_dtype,
        groups=find_groups(dims.graph) if request.compile else None,
    )
    return PricedProgram(prices, plan.program).peak.nbytes
