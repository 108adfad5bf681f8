"""Puts parts of a rank's program into modules of their own, whose insides are recomputed in backward.

    operators   0  1 [2  3  4] 5             segments = ((2, 5),)
    x -> conv -> bn -> recompute_0 -> linear

What a segment takes and gives stays in memory between forward and backward; what lies between is
recomputed when backward comes there (`autopar.runtime.recompute`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence

from torch import fx, nn

from autopar.core.graph import Graph
from autopar.core.operator_facts import facts_of
from autopar.core.program import Program
from autopar.core.recompute import Segment
from autopar.rewrite.rank_program import RankProgram
from autopar.rewrite.torch_bindings import call_bindings
from autopar.runtime.saved.recompute import Recomputed


def recomputing(
    body: fx.Graph, whole: RankProgram, graph: Graph, program: Program, *, name: str
) -> fx.GraphModule:
    """A rank's program, or what is left of it in `body`, with the parts that `program` recomputes."""
    mutated = [item.name for item in graph.inputs if item.mutated]
    mutated += [buffer for buffer, _ in graph.writes]
    return wrap(body, whole.steps, program.recompute, mutated=mutated, name=name)


def wrap(
    graph: fx.Graph,
    steps: Mapping[str, int],
    segments: Sequence[Segment],
    *,
    mutated: Collection[str] = (),
    name: str,
) -> fx.GraphModule:
    """`graph` as a module called `name`, with the nodes of each segment in a submodule.

    `steps` says for which operator each node (by name) was written; `mutated` are placeholders whose
    tensors change in a step. Segments don't overlap; those that have no node are left out.
    """
    inside = {
        node: number
        for node in graph.nodes
        if node.op == "call_function"
        for number, (first, stop) in enumerate(segments)
        if first <= steps.get(node.name, -1) < stop
    }
    root, outer = nn.Module(), fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    written: set[int] = set()
    for node in graph.nodes:
        number = inside.get(node)
        if number is None:
            made[node] = outer.node_copy(node, lambda old: made[old])
        elif number not in written:
            written.add(number)
            nodes = [each for each, where in inside.items() if where == number]
            part = f"recompute_{len(written) - 1}"
            made.update(_write(root, outer, nodes, made, name=part, mutated=mutated))
    outer.lint()
    call_bindings(outer)
    return fx.GraphModule(root, outer, class_name=name)


def _write(
    root: nn.Module,
    outer: fx.Graph,
    nodes: Sequence[fx.Node],
    made: Mapping[fx.Node, fx.Node],
    *,
    name: str,
    mutated: Collection[str],
) -> dict[fx.Node, fx.Node]:
    """Call a submodule of `nodes`; what later nodes use of it, in the outer graph."""
    own = set(nodes)
    taken = list(dict.fromkeys(item for node in nodes for item in node.all_input_nodes if item not in own))
    given = [node for node in nodes if any(user not in own for user in node.users) and _is_tensor(node)]
    inner, copies = fx.Graph(), {}
    for item in taken:
        copies[item] = inner.placeholder(item.name)
    for node in nodes:
        copies[node] = inner.node_copy(node, lambda old: copies[old])
    inner.output(tuple(copies[node] for node in given))
    inner.lint()
    call_bindings(inner)
    body = fx.GraphModule(nn.Module(), inner, class_name=name)
    buffers = [place for place, item in enumerate(taken) if item.op == "placeholder" and item.name in mutated]
    # Where one saves a tensor before it fills it, torch would stop to recompute too early.
    to_the_end = any(facts_of(node.target).saves_unfilled for node in nodes)
    root.add_module(name, Recomputed(body, mutated=buffers, to_the_end=to_the_end))
    call = outer.call_module(name, tuple(made[item] for item in taken))
    return {node: outer.call_function(operator.getitem, (call, place)) for place, node in enumerate(given)}


def _is_tensor(node: fx.Node) -> bool:
    """True of a tensor's node, False of a call's tuple of results, which only `getitem` takes."""
    return not any(user.target is operator.getitem and user.args[0] is node for user in node.users)
