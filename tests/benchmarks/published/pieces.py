"""The pieces of a Llama, as autopar prices and places them: its embedding, a block, its head, and the loss.

    places    0        1             n        m        end
              | embed  |   a block   |  head  |  loss  |

A stage of k blocks takes k times what one takes. A piece depends on the shape, the samples of a micro-batch
on one device and the group that shares its layers, not on the other degrees: it is priced once for all runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeAlias

from torch import Tensor, nn

from autopar.cluster import ClusterSpec, Link
from autopar.convert.moves import MoveAction, effect, gathers
from autopar.core.costs import Collective, OptimizerState
from autopar.core.force import Pins
from autopar.core.graph import Graph, InputKind
from autopar.core.mesh import Mesh
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.prices import Prices
from autopar.cost.program.values import Value
from autopar.cost.stages.intervals import Intervals, intervals
from autopar.errors import InputError
from autopar.planning.asked.request import Request
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.planner import Planner
from tests.benchmarks.published.llama import BLOCK, HEAD, llama, pins
from tests.benchmarks.published.runs import Shape

INSTANT = 1e3  # times a device's bandwidth, so that products alone take time
ONCE = OptimizerState(0.0)  # so that state is a weight and a gradient
COLLECTIVES = {
    MoveAction.ALL_REDUCE: Collective.ALL_REDUCE,
    MoveAction.ALL_GATHER: Collective.ALL_GATHER,
    MoveAction.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
}
Exchanges: TypeAlias = tuple[tuple[Collective, int], ...]  # with bytes of the full tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """Seconds of one micro-batch, without those of what it exchanges, and bytes on one device: `products` and
    attention, and the rest, which `moves` memory; `weights` counts those on one device, `leaving` bytes go on
    to the next piece. Of what is kept for backward `gathered` bytes are other devices' parts, which could be
    regathered."""

    products: float
    products_back: float
    moves: float
    moves_back: float
    exchanges: Exchanges
    exchanges_back: Exchanges
    kept: float
    gathered: float
    working: float
    weights: float
    leaving: float


Pieces: TypeAlias = tuple[Piece, Piece, Piece, Piece]  # embedding, block, head, loss


@cache
def traced(shape: Shape, samples: int) -> Graph:
    """The graph of one micro-batch of a model with one block."""
    return traced_model(*llama(shape, samples))


def traced_model(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Graph:
    """The graph of one micro-batch; its layers are called as those of `llama`."""
    request = Request(measure=False, alternatives=False)
    planner = Planner(ClusterSpec(devices_per_node=1, device="h100"), request, None)
    return planner.trace_step(model, inputs, {}).graph


def price(shape: Shape, samples: int, cluster: ClusterSpec) -> Pieces:
    """The pieces where all devices of `cluster` share every layer, placed as Megatron does; where its pins
    don't fit the shape, as the solver finds best."""
    graph = traced(shape, samples)
    try:
        return priced_pieces(graph, cluster, pins(cluster.num_devices))
    except InputError:
        return priced_pieces(graph, cluster, {})


def priced_pieces(graph: Graph, cluster: ClusterSpec, pinned: Pins, weight_bytes: int = 2) -> Pieces:
    """The pieces of a graph whose weights take so many bytes each, placed as `pinned` says."""
    table, shared = _table(graph, cluster, pinned)
    products, instant = _table(graph, cluster, pinned, bandwidth=INSTANT)
    embed, block, head, loss = (
        _piece(table, place, shared[place], _passes(products, place, instant[place]), weight_bytes)
        for place in range(4)
    )
    return replace(embed, leaving=block.leaving), block, head, loss  # summed before it is sent


@dataclass(slots=True)
class Shared:
    """What the devices of a piece exchange: collectives and autopar's seconds for them, forward and backward,
    and the bytes that they bring from other devices to be kept."""

    exchanges: list[tuple[Collective, int]] = field(default_factory=list)
    exchanges_back: list[tuple[Collective, int]] = field(default_factory=list)
    seconds: float = 0.0
    seconds_back: float = 0.0
    gathered: float = 0.0


def _table(
    graph: Graph, cluster: ClusterSpec, pinned: Pins, *, bandwidth: float = 1.0
) -> tuple[Intervals, list[Shared]]:
    """The stages that pieces make, where memory has so many times its `bandwidth`, and what each exchanges;
    gradients of its norms, which a stack sums once a step, are too small to count."""
    mesh, model = Mesh((cluster.num_devices,)), CostModel.of(cluster, None, device_files=False)
    device = replace(model.device, bandwidth=bandwidth * model.device.bandwidth)
    model = replace(model, device=device)
    request = Request(mesh=mesh, pins=pinned or None, measure=False, alternatives=False, optimizer=ONCE)
    problem = MeshProblem(graph, mesh, cluster, model, request, None, cluster.intra)
    priced = problem.solve(problem.ask()).priced
    places = _places(graph)
    weights = {item.name for item in graph.inputs if item.kind is InputKind.PARAMETER}
    found = [Shared() for _ in places[1:]]
    for value in priced.values.of.values():
        if value.move is not None and not value.leads:
            made = found[bisect_right(places, max(0, priced.values.source(value.name).maker)) - 1]
            _share(made, problem.prices, value, is_weight=value.name in weights)
    return intervals(priced, Link(0.0, 1.0), places=places), found


def _share(shared: Shared, prices: Prices, value: Value, *, is_weight: bool) -> None:
    """Add the conversion that makes a value."""
    assert value.move is not None
    forward, backward = prices.move_parts(value.name, value.move)
    shared.seconds += forward
    shared.seconds_back += backward
    if is_weight:
        return
    whole, part = (prices.local_bytes(value.name, at) for at in (value.layout, value.move.source))
    shared.gathered += max(0, whole - part) if gathers(value.move) else 0.0
    change, nbytes = effect(value.move), max(whole, part)
    if change.forward in COLLECTIVES:
        shared.exchanges.append((COLLECTIVES[change.forward], nbytes))
    if change.backward in COLLECTIVES:
        shared.exchanges_back.append((COLLECTIVES[change.backward], nbytes))


def _places(graph: Graph) -> Sequence[int]:
    """Where the pieces begin, and the end."""
    modules = [item.module for item in graph.operators]
    block = next(place for place, name in enumerate(modules) if name.startswith(BLOCK))
    head = next(place for place, name in enumerate(modules) if name in HEAD)
    loss = max(place for place, name in enumerate(modules) if name in HEAD) + 1
    return 0, block, head, loss, len(modules)


def _passes(table: Intervals, place: int, shared: Shared) -> tuple[float, float]:
    """Seconds of a piece forward and backward, without its exchanges."""
    at = place, place + 1
    backward = float(table.input_gradient[at] + table.weight_gradient[at])
    return max(0.0, float(table.forward[at]) - shared.seconds), max(0.0, backward - shared.seconds_back)


def _piece(
    table: Intervals, place: int, shared: Shared, products: tuple[float, float], weight_bytes: int
) -> Piece:
    at = place, place + 1
    forward, backward = _passes(table, place, shared)
    again = [each for each in shared.exchanges if each[0] is Collective.ALL_GATHER]
    return Piece(
        products=products[0],
        products_back=products[1],
        moves=max(0.0, forward - products[0]),
        moves_back=max(0.0, backward - products[1]),
        exchanges=tuple(shared.exchanges),
        exchanges_back=(*again, *shared.exchanges_back),
        kept=float(table.saved[at]),
        gathered=shared.gathered,
        working=float(table.working[at]),
        weights=float(table.gradients[at]) / weight_bytes,
        leaving=float(table.received[place + 1]),
    )
