"""Moves the gradient sums of weights out of a rank's program, so that they can be done in buckets.

A weight that data-parallel ranks share enters the program as R and is used as B: one `r_to_b` for
each axis, whose backward is an all-reduce of that weight's gradient alone, inside backward.

    before    weight -> r_to_b "a@2x2" -> r_to_b "b@2x2" -> linear       two all-reduces of one gradient
    after     weight -> linear                                           summed over "ab@2x2" in a bucket

The sums are linear, so they may as well act on the weight's own gradient after everything else in
its backward. What is cut off is the chain at the start: each link the only use of the one before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import fx

from autopar.core.mesh import parse_key


def defer(graph: fx.Graph, parameters: Collection[str]) -> tuple[fx.Graph, dict[str, str]]:
    """A copy of `graph` without the leading `r_to_b` chains of `parameters` (placeholder names).

    Also returns the group key over which each of those parameters' gradients is to be summed.
    """
    chains = {
        node: list(_chain(node))
        for node in graph.nodes
        if node.op == "placeholder" and node.target in parameters
    }
    chains = {node: chain for node, chain in chains.items() if chain}
    source = {link: node for node, chain in chains.items() for link in chain}
    copy = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        owner = source.get(node)
        made[node] = made[owner] if owner else copy.node_copy(node, lambda old: made[old])
    copy.lint()
    return copy, {str(node.target): _joint(chain) for node, chain in chains.items()}


def _chain(node: fx.Node) -> Iterator[fx.Node]:
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is not torch.ops.autopar.r_to_b.default:
            return
        yield node


def _joint(chain: list[fx.Node]) -> str:
    parsed = [parse_key(str(link.args[1])) for link in chain]
    mesh = parsed[0][0]
    return mesh.key(axis for _, axes in parsed for axis in axes)
