"""Starts copies of weights from the host's memory while the operator before computes.

    before    fetch w0  op 0              fetch w1  fetch b1  op 1
    after     start w0  wait w0  start w1  start b1  op 0  wait w1  wait b1  op 1

What one operator is the first to use is one group; each starts when the one before it is there, so that one
group more than what is computed with is on the device. In backward gradients travel back alike. Inside of
what is recomputed, which runs twice, nothing starts early.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.core.program import Program
from autopar.rewrite.overlap import operators_of, started_early
from autopar.runtime.collectives.started_fetches import FETCH_AHEAD
from autopar.runtime.saved.host_weights import fetch_target


def fetch_ahead(graph: fx.Graph, program: Program, steps: Mapping[str, int]) -> fx.Graph:
    """A copy of `graph` whose fetches of the weights that come `ahead` start early; `steps` says for which
    operator each node was written."""
    recomputed, groups = operators_of(program.recompute), dict[int, list[fx.Node]]()
    for node in graph.nodes:
        step = steps.get(node.name, -1)
        if node.target is fetch_target() and _weight(node) in program.ahead and step not in recomputed:
            groups.setdefault(step, []).append(node)
    return started_early(graph, list(groups.values()), {fetch_target(): FETCH_AHEAD})


def _weight(fetch: fx.Node) -> str:
    source = fetch.args[0]
    assert isinstance(source, fx.Node)
    return str(source.target)
