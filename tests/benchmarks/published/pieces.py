"""The pieces of a Llama, as autopar prices and places them: its embedding, a block, its head, and the loss.

    places    0        1             n        m        end
              | embed  |   a block   |  head  |  loss  |

A stage of k blocks takes k times what one takes. A piece depends on the shape, the samples of a micro-batch
on one device and the group that shares its layers, not on the other degrees: it is priced once for all runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

from autopar.cluster import ClusterSpec, Link
from autopar.compiler import Compiler
from autopar.convert.moves import gathers
from autopar.core.costs import OptimizerState
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.cost.machine.model import CostModel
from autopar.cost.stages.intervals import Intervals, intervals
from autopar.errors import InputError
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.request import Request
from autopar.sharding.strategies import find_atoms
from tests.benchmarks.published.llama import BLOCK, HEAD, llama, pins
from tests.benchmarks.published.runs import Shape

ONCE = OptimizerState(0.0)  # so that state is a weight and a gradient


@dataclass(frozen=True, slots=True)
class Piece:
    """Seconds of one micro-batch, those of its exchanges apart, and bytes on one device; `weights` counts
    those on one device, `leaving` bytes go on to the next piece. Of what is kept for backward `gathered`
    bytes are other devices' parts, which could be gathered again."""

    forward: float
    backward: float
    exchanging: float
    exchanges: int
    exchanging_back: float
    exchanges_back: int
    kept: float
    gathered: float
    working: float
    weights: float
    leaving: float


Pieces: TypeAlias = tuple[Piece, Piece, Piece, Piece]  # embedding, block, head, loss


@cache
def traced(shape: Shape, samples: int) -> Graph:
    """The graph of one micro-batch of a model with one block."""
    model, inputs = llama(shape, samples)
    request = Request(measure=False, alternatives=False)
    return (
        Compiler(ClusterSpec(devices_per_node=1, device="h100"), request, None)
        .trace_step(model, inputs, {})
        .graph
    )


def price(shape: Shape, samples: int, cluster: ClusterSpec) -> Pieces:
    """The pieces where all devices of `cluster` share every layer, placed as Megatron does; where its pins
    don't fit the shape, as the solver finds best."""
    graph = traced(shape, samples)
    try:
        table, exchanges = _table(graph, cluster, pins(cluster.num_devices))
    except InputError:
        table, exchanges = _table(graph, cluster, {})
    embed, block, head, loss = (_piece(table, place, *exchanges[place]) for place in range(4))
    return replace(embed, leaving=block.leaving), block, head, loss  # summed before it is sent


def _table(
    graph: Graph, cluster: ClusterSpec, pinned: dict[str, tuple[str]]
) -> tuple[Intervals, list[tuple[list[tuple[float, float]], float]]]:
    """The stages that pieces make, and of each piece what its exchanges take, forward and backward, and the
    bytes that they bring from other devices to be kept."""
    mesh, model = Mesh((cluster.num_devices,)), CostModel.of(cluster, None)
    request = Request(mesh=mesh, pins=pinned or None, measure=False, alternatives=False, optimizer=ONCE)
    problem = MeshProblem(graph, find_atoms(graph), mesh, cluster, model, request, None, cluster.intra)
    priced = problem.solve(problem.ask()).priced
    places = _places(graph)
    exchanges: list[list[tuple[float, float]]] = [[] for _ in places[1:]]
    gathered, prices = [0.0 for _ in places[1:]], problem.prices
    for value in priced.values.of.values():
        if value.move is not None and not value.leads:
            piece = bisect_right(places, max(0, value.home)) - 1
            exchanges[piece].append(prices.move_parts(value.name, value.move))
            whole, part = (prices.local_bytes(value.name, at) for at in (value.layout, value.move.source))
            gathered[piece] += max(0, whole - part) if gathers(value.move) else 0.0
    table = intervals(priced, Link(0.0, 1.0), places=places)
    return table, list(zip(exchanges, gathered, strict=True))


def _places(graph: Graph) -> Sequence[int]:
    """Where the pieces begin, and the end."""
    modules = [item.module for item in graph.operators]
    block = next(place for place, name in enumerate(modules) if name.startswith(BLOCK))
    head = next(place for place, name in enumerate(modules) if name in HEAD)
    loss = max(place for place, name in enumerate(modules) if name in HEAD) + 1
    return 0, block, head, loss, len(modules)


def _piece(table: Intervals, place: int, exchanges: Sequence[tuple[float, float]], gathered: float) -> Piece:
    at = place, place + 1
    forward, backward = (sum(each) for each in zip((0.0, 0.0), *exchanges, strict=True))
    return Piece(
        forward=max(0.0, float(table.forward[at]) - forward),
        backward=max(0.0, float(table.input_gradient[at] + table.weight_gradient[at]) - backward),
        exchanging=forward,
        exchanges=sum(before > 0 for before, _ in exchanges),
        exchanging_back=backward,
        exchanges_back=sum(after > 0 for _, after in exchanges),
        kept=float(table.kept[at]),
        gathered=gathered,
        working=float(table.working[at]),
        weights=float(table.gradients[at]) / 2,  # in bfloat16
        leaving=float(table.received[place + 1]),
    )
