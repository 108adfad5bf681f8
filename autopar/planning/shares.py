"""Shares of rows for unlike devices: as many as each does in the time in which the others do theirs.

A device's speed is that of its group: 1 over the seconds that it takes for its even part of the batch, by
measured seconds where there are any. The ranks of a mesh axis are as fast as the slowest of their rows:

    speeds of 4 ranks   1 1 2 2    on mesh 4     1:1:2:2
                                   on mesh 2x2   1:2 for the rows, even within each

Shares are fixed before anything is solved. The even mesh stays a choice: where the memory of the slow
devices is as small as that of the fast ones is needed, or messages outweigh work.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism
from autopar.core.graph import Graph
from autopar.core.mesh import MOST_SHARE, Mesh
from autopar.core.strategy import Strategy
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.planning.asked.request import Request
from autopar.sharding.strategies import dims_of, strategies_of
from autopar.solve.choices.kinds import Kinds
from autopar.units import show_seconds

PACE = "sets the pace"
LEAST_SHARE = 120  # of the slowest device: rounding costs less than half a percent, and few ratios stay long


def by_speed(
    meshes: Sequence[Mesh], graph: Graph, cluster: ClusterSpec, model: CostModel, request: Request
) -> list[Mesh]:
    """Each mesh with shares of rows by speed, where these are unlike, and as it is; one that is asked for as
    it is asked for."""
    if not cluster.groups or request.mesh:
        return list(meshes)
    every = seconds_of(graph, cluster, model, training=request.training)
    if not all(every):  # of a graph that computes nothing
        return list(meshes)
    speeds = [1 / seconds for seconds in every]
    return list(dict.fromkeys(each for mesh in meshes for each in (shared(mesh, cluster, speeds), mesh)))


def shared(mesh: Mesh, cluster: ClusterSpec, speeds: Sequence[float]) -> Mesh:
    """The mesh with shares by the speeds of the cluster's groups."""
    of_rank = [min(speeds[number] for number in groups) for groups in cluster.places]
    rows = (
        [
            min(of_rank[mesh.rank(place)] for place in _places(mesh, axis, index))
            for index in range(mesh.shape[axis])
        ]
        for axis in mesh.axes
    )
    return Mesh(mesh.shape, tuple(map(_in_whole_numbers, rows)))


def seconds_of(graph: Graph, cluster: ClusterSpec, model: CostModel, *, training: bool) -> list[float]:
    """Seconds in which a device of each group computes its even part of the graph.

    Operators that can be are split by samples, or else by space."""
    dims = dims_of(graph, Mesh((cluster.num_devices,)))
    kinds, rows = Kinds(graph, dims), (Parallelism.BATCH, Parallelism.DOMAIN)
    chosen: list[Strategy] = []
    for item in graph.operators:
        offered = strategies_of(item, dims)
        order = {kind: number for number, kind in enumerate((*rows, None))}
        ranked = [(order.get(kinds.of(item, strategy[0]), len(order)), strategy) for strategy in offered]
        chosen.append(min(ranked, key=lambda pair: pair[0])[1])
    found = []
    for number in range(len(cluster.groups)):
        prices = Prices(graph, dims, cluster.of_group(number), model.of_group(number), training=training)
        pairs = zip(graph.operators, chosen, strict=True)
        found.append(sum(prices.plain(*pair).compute for pair in pairs))
    return found


def pace_notes(priced: PricedProgram) -> tuple[str, ...]:
    """Notes on what devices of each unlike group compute, which sets the pace, and what is no measurement."""
    prices = priced.prices
    if not prices.by_group:
        return ()
    groups, strategies = prices.cluster.groups, priced.program.strategies
    guessed = [
        f"{groups[number].name}: nothing of {groups[number].device} is measured, its seconds are estimates"
        for number, each in prices.by_group.items()
        if not each.model.measured and not each.model.here
    ]
    if prices.ranks:  # whose stages follow their speeds: see `rank_notes`
        return tuple(guessed)
    seconds = {
        groups[number].name: sum(
            each.plain(item, strategies[item.name]).compute for item in priced.graph.operators
        )
        for number, each in prices.by_group.items()
    }
    slowest = max(seconds, key=lambda name: seconds[name])
    told = ", ".join(f"{name} {show_seconds(each)}" for name, each in seconds.items())
    return (f"{slowest} {PACE}: of a micro-batch compute on a device {told}", *guessed)


def _places(mesh: Mesh, axis: int, index: int) -> itertools.product[tuple[int, ...]]:
    """Coordinates of the ranks at `index` of an axis."""
    return itertools.product(
        *(range(size) if other != axis else (index,) for other, size in enumerate(mesh.shape))
    )


def _in_whole_numbers(speeds: Sequence[float]) -> tuple[int, ...]:
    slowest = min(speeds)
    return tuple(min(MOST_SHARE, round(LEAST_SHARE * speed / slowest)) for speed in speeds)
