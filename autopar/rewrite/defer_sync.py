"""Moves what is done once a step out of a rank's program: gradient sums of weights, and gathers.

A weight that data-parallel ranks share enters the program as R and is used as B: one `r_to_b` for
each axis, whose backward is an all-reduce of that weight's gradient alone, inside backward.

    before    weight -> r_to_b "a@2x2" -> r_to_b "b@2x2" -> linear       two all-reduces of one gradient
    after     weight -> linear                                           summed over "ab@2x2" in a bucket

The sums are linear, so they may as well act on the weight's own gradient after everything else in
its backward. What is cut off is the chain at the start: each link the only use of the one before.

Of a weight that is gathered once a step the gathers at the start are cut off as well. The program then
takes the full copy; its gradient is scattered, and then summed over the axes of the `r_to_b`: sums over
different axes commute. S -> R followed by R -> B on one axis is S -> B.

    before    weight -> r_to_b "b@2x2" -> s_to_b "a@2x2" -> linear
    after     weight -> linear                                 gathered by s_to_b "a@2x2", summed over "b@2x2"
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.core.mesh import parse_key
from autopar.core.precision import Precision
from autopar.runtime.collectives.placement_moves import SUMMED
from autopar.runtime.executable import GatherCall

LOW = {SUMMED[each]: each for each in Precision if each is not Precision.FP32}


def _summing(name: str) -> dict[Any, Precision | None]:
    """The operators of a move that sums gradients, and in what: in their own dtype, or in fewer bits."""
    found: dict[Any, Precision | None] = {getattr(torch.ops.autopar, name).default: None}
    return found | {getattr(torch.ops.autopar, name + ending).default: each for ending, each in LOW.items()}


SUMS, SCATTERS = _summing("r_to_b"), _summing("s_to_b")
GATHERS = (*SCATTERS, torch.ops.autopar.s_to_r.default)


@dataclass(frozen=True, slots=True)
class DeferredSync:
    """Operations of a weight that run once a step: gathers, and the sum of its gradient over the ranks of
    `key`, in `reduce` if that isn't its own dtype."""

    key: str | None
    gathers: tuple[GatherCall, ...] = ()
    reduce: Precision | None = None


def defer(
    graph: fx.Graph, parameters: Collection[str], gathered_once: Collection[str] = ()
) -> tuple[fx.Graph, dict[str, DeferredSync]]:
    """A copy of `graph` without what leads from `parameters` once a step. `r_to_b` chains of these
    placeholders are left out, and gathers of those that are `gathered_once`.

    Also returns what is to be done for each of those parameters instead.
    """
    chains = {
        node: list(_chain(node, gathered=str(node.target) in gathered_once))
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
    return copy, {str(node.target): _deferred(chain) for node, chain in chains.items()}


def _chain(node: fx.Node, *, gathered: bool) -> Iterator[fx.Node]:
    while len(node.users) == 1:
        (node,) = node.users
        if node.target not in SUMS and not (gathered and node.target in GATHERS):
            return
        yield node


def _deferred(chain: Sequence[fx.Node]) -> DeferredSync:
    summed = [str(link.args[1]) for link in chain if link.target not in GATHERS]
    gathers = []
    for link in chain:
        if link.target in GATHERS:
            group = str(link.args[1])
            whole = link.target in SCATTERS or group in summed
            gathers.append(GatherCall("s_to_b" if whole else "s_to_r", tuple(link.args[1:])))
    done = {gather.arguments[0] for gather in gathers}
    left = [parse_key(group) for group in summed if group not in done]
    key = left[0][0].key(axis for _, axes in left for axis in axes) if left else None
    reduce = next((low for link in chain if (low := (SUMS | SCATTERS).get(link.target))), None)
    return DeferredSync(key, tuple(gathers), reduce)
