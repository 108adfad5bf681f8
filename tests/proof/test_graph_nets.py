"""Nets on graphs train as the serial model does, however their vertices, edges and features are split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from autopar.api import verify
from autopar.cluster import ClusterSpec
from tests.trace.graph_nets import HIDDEN, SumOfNeighbours, target

Layer = Callable[[int, int], nn.Module]


def layers() -> dict[str, Layer]:
    """Unedited layers of PyTorch Geometric."""
    nets = pytest.importorskip("torch_geometric.nn")

    def gin(features: int, out: int) -> nn.Module:
        inner = nn.Sequential(nn.Linear(features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, out))
        made: nn.Module = nets.GINConv(inner, train_eps=True)
        return made

    return {
        "gcn": nets.GCNConv,
        "sage": nets.SAGEConv,
        "sage_max": lambda features, out: nets.SAGEConv(features, out, aggr="max"),
        "gat": lambda features, out: nets.GATConv(features, out, heads=2, concat=False, dropout=0.2),
        "gin": gin,
        "gatv2": lambda features, out: nets.GATv2Conv(features, out, heads=2, concat=False),
        "transformer": lambda features, out: nets.TransformerConv(features, out, heads=2, concat=False),
    }


def prove(layer: Layer, devices: int, force: str | None) -> None:
    report = verify(
        target(layer),
        ClusterSpec.local(devices),
        steps=2,
        changes=0,
        stages=1,
        micro_batches=1,
        force=force,
    )
    assert report.verdict.passed, report.verdict


@pytest.mark.parametrize("force", ["batch", "filter"])
def test_sums_over_edges_are_those_of_the_serial_model(force: str) -> None:
    prove(SumOfNeighbours, 2, force)


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_unedited_layers_train_as_alone(name: str) -> None:
    prove(layers()[name], 2, "batch")


@pytest.mark.long
@pytest.mark.parametrize("devices", [2, 3, 4, 6])
@pytest.mark.parametrize("force", [None, "batch", "filter", "channel"])
@pytest.mark.parametrize("name", ["gcn", "sage", "sage_max", "gat", "gin", "gatv2", "transformer"])
def test_every_layer_trains_as_alone_however_it_is_split(name: str, force: str | None, devices: int) -> None:
    prove(layers()[name], devices, force)
