"""Starts gathers of weights ahead of the operators that need them.

    before    s_to_b(w0)  linear 0             s_to_b(w1)  linear 1            s_to_b(w2)  linear 2
    after     start w0  wait w0  start w1  linear 0  wait w1  start w2  linear 1  wait w2  linear 2

Gathers that stand side by side (a weight, its bias) are one group, started together behind the group before,
so that one more group of full copies is in memory than is computed with. In backward the scatters of their
gradients lie alike (`autopar.runtime.collectives.started_moves`): there a group of gradients is, too.
Weights that are gathered in fewer bits are cast before their gathers start: casts of shards count as well.

A group that takes more than the memory that is left stays where it is. So do gathers inside of what is
recomputed, which runs twice.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.core.graph import TensorSpec
from autopar.core.recompute import Segment
from autopar.runtime import registry
from autopar.runtime.collectives.grouped_moves import GROUPED
from autopar.runtime.collectives.placement_moves import SUMMED
from autopar.runtime.collectives.started_moves import HALVED, START, WAIT
from autopar.torch_seams.schemas import OpOverload, short_name

# What is in memory beside a plan's peak: weights that come, gradients that go, an activation's sum, and
# what gradients of weights are made of.
AT_ONCE = 4
_HALVED = {registry.operator(name): name for name in (*HALVED, *GROUPED)}
_CAST = torch.ops.aten.to.dtype
_BESIDE = {
    _CAST,
    operator.getitem,
    *(registry.operator("r_to_b" + ending) for ending in ("", *SUMMED.values())),
}


def overlap(
    graph: fx.Graph,
    weights: Mapping[str, TensorSpec],
    *,
    room: float,
    steps: Mapping[str, int],
    segments: Sequence[Segment],
) -> fx.Graph:
    """Start gathers of placeholders and their casts early in a copy of `graph`.

    As far as they fit into `room` bytes.

    `weights` are the full tensors, by the name of their placeholder; `steps` says for which operator each
    node was written, `segments` which operators are recomputed.
    """
    recomputed = operators_of(segments)

    def stays(node: fx.Node) -> bool:
        return any(steps.get(each.name, -1) in recomputed for each in (node, *node.all_input_nodes))

    gathers = [node for node in graph.nodes if _leads(node, weights) and not stays(node)]
    groups = [group for group in _grouped(graph, gathers) if _bytes(group, weights) <= room]
    return started_early(graph, groups, _HALVED)


def started_early(
    graph: fx.Graph, groups: Sequence[Sequence[fx.Node]], halved: Mapping[Any, str]
) -> fx.Graph:
    """A copy of `graph` whose groups start when the one before has come, the first where it is.

    `halved` are the names of operators that come in halves.
    """
    place = {node: number for number, group in enumerate(groups) for node in group}
    copy, made = fx.Graph(), dict[fx.Node, fx.Node]()
    started: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node) -> fx.Node:
        if node not in made:
            made[node] = copy.node_copy(node, lambda old: made[old])
        return made[node]

    def start(number: int) -> None:
        for node in groups[number] if number < len(groups) else ():
            if node not in started:
                args = fx.node.map_arg(node.args, copied)
                begun = copy.call_function(registry.operator(START + halved[node.target]), args)
                started[node] = copy.call_function(operator.getitem, (begun, 0)) if _is_group(node) else begun

    for node in graph.nodes:
        number = place.get(node)
        if number is None:
            copied(node)
            continue
        start(number)
        args = fx.node.map_arg(node.args, lambda old: made[old])
        args = ([started[node], *args[0]], *args[1:]) if _is_group(node) else (started[node], *args)
        target: Any = registry.operator(WAIT + halved[node.target])
        made[node] = copy.create_node("call_function", target, args, name=node.name)
        if node is groups[number][-1]:
            start(number + 1)
    copy.lint()
    return copy


def starts(graph: fx.Graph) -> bool:
    """Whether anything in a program starts early."""
    calls = (node.target for node in graph.nodes if node.op == "call_function")
    return any(isinstance(target, OpOverload) and short_name(target).startswith(START) for target in calls)


def converts_activation(node: fx.Node, moves: Collection[Any]) -> bool:
    """Whether a node makes one of the `moves` of a computed value, not of an input."""
    if node.op != "call_function" or node.target not in moves:
        return False
    source: Any = node.args[0]
    is_made: bool = source.op != "placeholder"
    return is_made


def operators_of(segments: Sequence[Segment]) -> set[int]:
    """The numbers of the operators that are recomputed."""
    return {place for first, stop in segments for place in range(first, stop)}


def room_of(cap: int | None, peak_bytes: float) -> float:
    """Bytes that each kind of early or late tensors may take under a cap, beside a plan's peak."""
    return math.inf if cap is None else (cap - peak_bytes) / AT_ONCE


def _leads(node: fx.Node, names: Collection[str]) -> bool:
    """Whether a node gathers a placeholder of one of these names, or its cast."""
    if node.op != "call_function" or node.target not in _HALVED:
        return False
    weights = map(_weight, _sources(node))
    return all(weight.op == "placeholder" and str(weight.target) in names for weight in weights)


def _is_group(gather: fx.Node) -> bool:
    return isinstance(gather.args[0], Sequence)


def _sources(gather: fx.Node) -> Sequence[Any]:
    """What a node gathers: one weight, or its cast, or those of a group."""
    source: Any = gather.args[0]
    return source if _is_group(gather) else (source,)


def _weight(source: fx.Node) -> fx.Node:
    """The gathered weight, before its cast."""
    weight: Any = source.args[0] if _is_cast(source) else source
    return weight  # type: ignore[no-any-return]


def _is_cast(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is _CAST


def _grouped(graph: fx.Graph, gathers: Collection[fx.Node]) -> list[list[fx.Node]]:
    """The gathers, those together between which nothing is computed."""
    groups: list[list[fx.Node]] = []
    is_open, wanted = False, set(gathers)
    for node in graph.nodes:
        if node in wanted:
            if not is_open:
                groups.append([])
            groups[-1].append(node)
            is_open = True
        elif node.op == "call_function" and node.target not in _BESIDE:
            is_open = False
    return groups


def _bytes(group: Sequence[fx.Node], weights: Mapping[str, TensorSpec]) -> float:
    """Bytes of a group before it is needed: full tensors, and casts of shards, of the largest ones."""
    return sum(
        _bytes_of(source, weights[str(_weight(source).target)], sizes)
        for node in group
        for source, sizes in zip(_sources(node), _sizes(node), strict=True)
    )


def _sizes(gather: fx.Node) -> list[Sequence[int]]:
    """Each rank's part of each weight that a node gathers."""
    sizes: Any = gather.args[-1]
    ranks = len(sizes) // len(_sources(gather))
    return [sizes[first : first + ranks] for first in range(0, len(sizes), ranks)]


def _bytes_of(source: Any, weight: TensorSpec, sizes: Sequence[int]) -> float:
    if not _is_cast(source):
        return weight.nbytes
    full = float(weight.numel * source.args[1].itemsize)
    largest: float = max(sizes) / sum(sizes)
    return full * (1.0 + largest)
