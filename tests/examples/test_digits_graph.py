"""The graph of digits is what it says, and both answers on it tell most digits rightly."""

import pytest
import torch

from autopar.api import verify
from autopar.cluster import ClusterSpec
from autopar.trace.target import Target
from examples import digits_graph


def test_edges_lead_both_ways_between_vertices_that_are_there() -> None:
    edges = digits_graph.edges()
    pairs = set(map(tuple, edges.t().tolist()))
    assert len(pairs) == edges.shape[1] and all((b, a) in pairs and a != b for a, b in pairs)
    degrees = torch.bincount(edges[0])
    assert len(degrees) == 1797 and int(degrees.min()) >= digits_graph.NEIGHBOURS


def test_most_digits_are_told_by_their_neighbours() -> None:
    labelled = float((digits_graph.known_labels() != digits_graph.UNLABELLED).float().mean())
    assert 0.03 < labelled < 0.07
    assert digits_graph.accuracy(digits_graph.spread_labels()) > 0.9


@pytest.mark.parametrize("name", ["sparse", pytest.param("geometric", marks=pytest.mark.long)])
def test_the_net_trains_in_parallel_as_alone_with_its_vertices_split(name: str) -> None:
    if name == "geometric":
        pytest.importorskip("torch_geometric")
    model, inputs, loss_fn = getattr(digits_graph, name)()
    target = Target(model, inputs, {}, loss_fn, name)
    force = {"product": ["i"], "product_1": ["i"]} if name == "sparse" else "batch"
    report = verify(target, ClusterSpec.local(2), steps=2, changes=0, stages=1, micro_batches=1, force=force)
    assert report.verdict.passed, report.verdict
