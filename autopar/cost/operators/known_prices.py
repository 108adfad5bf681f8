"""Prices that are known already: on one mesh of one cluster equal operators cost the same in whatever graph.

A search prices the graph of one micro-batch to screen choices, then that of others, and of the whole batch;
most of their operators, and all of one that is sought again, are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.convert.network import Network
from autopar.core.mesh import Mesh
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.price import KnownOperator

REMEMBERED_MESHES = 16  # meshes and clusters that are remembered


@dataclass(slots=True)
class PriceCache:
    """What is known by what it depends on beside the mesh, the cluster and whether there is a backward pass.

    Where an operator is one `local` call, it is the same on all meshes, and clusters of such devices.
    """

    local: dict[Any, KnownOperator] = field(default_factory=dict)
    operators: dict[Any, KnownOperator] = field(default_factory=dict)
    networks: dict[Any, Network] = field(default_factory=dict)


_KNOWN: dict[Any, PriceCache] = {}


def known_prices(
    cluster: ClusterSpec,
    mesh: Mesh,
    model: CostModel,
    *,
    training: bool,
    among: tuple[tuple[int, ...], ...] = (),
) -> PriceCache:
    """Remembered prices for a mesh, or for those of its ranks that are `among` coordinates. A new cache is
    made where operators are or may be measured here, since measuring changes prices."""
    measured = model.measured and not model.of_file
    if model.here or measured or model.corrections or model.collectives != CollectiveTable({}):
        return PriceCache()
    device = model.device, model.contention, model.of_file, training
    alike = next((known for (_, _, *other), known in _KNOWN.items() if tuple(other) == device), PriceCache())
    key = (mesh, among), cluster, *device
    found = _KNOWN.pop(key, None) or PriceCache(alike.local)
    while len(_KNOWN) >= REMEMBERED_MESHES:
        del _KNOWN[next(iter(_KNOWN))]
    _KNOWN[key] = found
    return found
