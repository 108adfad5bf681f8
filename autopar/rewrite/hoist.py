"""Starts exchanges of activations as soon as their input is there.

    before    linear 0  linear 1  gelu  linear 2          p_to_r 0  add
    after     linear 0  start 0   linear 1  gelu  linear 2  wait 0  add

A conversion is written where it is needed first. What stands between that place and the one that makes its
input doesn't depend on it, and runs beside it. Where nothing is computed between the two it stays whole.

One token goes through all exchanges of a program: none starts before the one that stood before it has, so
that ranks, whose programs may differ in what they compute, start them in one order. In backward a start is a
wait and stands where the exchange stood: there the order is that of before, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from autopar.core.recompute import Segment
from autopar.rewrite.overlap import converts_activation, operators_of
from autopar.runtime import registry
from autopar.runtime.collectives.placement_moves import SUMMED
from autopar.runtime.collectives.started_moves import START, WAIT
from autopar.torch_seams.schemas import schema_of, short_name

_MOVES = {registry.operator(name): name for name in ("p_to_r", "p_to_b", "s_to_r", "s_to_b")}
_LOCAL = {"r_to_b", "b_to_r", "r_to_p", "b_to_p", "r_to_s", "b_to_s", "s_to_p", "start_r_to_b"}
_LOCAL |= {"r_to_b" + ending for ending in SUMMED.values()}


def hoist(
    graph: fx.Graph,
    nbytes: Callable[[fx.Node], int],
    *,
    room: float,
    steps: Mapping[str, int],
    segments: Sequence[Segment],
) -> fx.Graph:
    """A copy of `graph` whose exchanges of activations start early, where one takes at most `room` bytes.

    `nbytes` are those of a node's result; `steps` says for which operator each node was written, `segments`
    which operators are recomputed.
    """
    recomputed = operators_of(segments)
    may = {
        node
        for node in graph.nodes
        if converts_activation(node, _MOVES)
        and steps.get(node.name, -1) not in recomputed
        and nbytes(node) <= room
    }
    behind = _places(list(graph.nodes), may)
    copy, made, handles = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()

    def copied(args: Any) -> Any:
        return fx.node.map_arg(args, lambda old: made[old])

    for node in graph.nodes:
        if node in handles:
            target: Any = registry.operator(WAIT + _MOVES[node.target])
            args = (handles[node], *copied(node.args))
            made[node] = copy.create_node("call_function", target, args, name=node.name)
        else:
            made[node] = copy.node_copy(node, lambda old: made[old])
        for early in behind.get(node, ()):
            target = registry.operator(START + _MOVES[early.target])
            handles[early] = copy.call_function(target, copied(early.args))
    copy.lint()
    return copy


def is_ordered(node: fx.Node) -> bool:
    """Whether ranks meet in the node's exchange. Waits begin none, and local moves need none."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") != registry.NAMESPACE:
        return False
    name: str = short_name(node.target)
    return name not in _LOCAL and not name.startswith((WAIT, "late_"))


def _places(nodes: Sequence[fx.Node], may: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Behind which nodes exchanges start that have something to run beside."""
    place = {node: number for number, node in enumerate(nodes)}
    computes = [0]
    for node in nodes:
        computes.append(computes[-1] + _computes(node))
    found: dict[fx.Node, list[fx.Node]] = {}
    token = -1  # where the exchange before has started
    for node in nodes:
        if not is_ordered(node):
            continue
        source: Any = node.args[0]
        start = place[node]
        if node in may:
            first = max(place[source], token)
            if computes[start] > computes[first + 1]:
                start = first
                found.setdefault(nodes[first], []).append(node)
        token = start
    return found


def _computes(node: fx.Node) -> bool:
    """Whether a node computes for a while: an operator that isn't autopar's, and no view."""
    target: Any = node.target
    if node.op != "call_function" or getattr(target, "namespace", registry.NAMESPACE) == registry.NAMESPACE:
        return False
    makes: bool = all(each.alias_info is None for each in schema_of(target).returns)
    return makes
