"""Other circumstances, by hand."""

from __future__ import annotations

import pytest
import torch

from autopar.cluster import ClusterSpec, Link
from autopar.core.cutting import Rows
from autopar.errors import InputError
from autopar.explaining.what_if import _repeated, read, resized

FAST, SLOW = Link(latency=1e-6, bandwidth=1e11), Link(latency=1e-5, bandwidth=1e9)


def test_samples_are_repeated_where_they_lie() -> None:
    """Two tokens of each of three samples: outer 2, inner 1; then inner 2."""
    assert _repeated(torch.tensor([0, 1, 2, 10, 11, 12]), Rows(0, outer=2), 3, 4).tolist() == [
        *(0, 1, 2, 0),
        *(10, 11, 12, 10),
    ]
    assert _repeated(torch.tensor([[0, 0, 1, 1, 2, 2]]), Rows(1, inner=2), 3, 2).tolist() == [[0, 0, 1, 1]]


def test_words_are_read() -> None:
    assert read("memory=40GB, devices=4") == {"memory": "40GB", "devices": "4"}


def test_a_cluster_grows_by_whole_nodes() -> None:
    nodes = ClusterSpec(nodes=2, devices_per_node=4, device="h100", intra=FAST, inter=SLOW, memory="80GB")
    larger = resized(nodes, 16)
    assert (larger.nodes, larger.devices_per_node, larger.inter, larger.memory) == (4, 4, SLOW, 80 * 10**9)
    smaller = resized(nodes, 2)
    assert (smaller.nodes, smaller.devices_per_node, smaller.inter) == (1, 2, None)
    with pytest.raises(InputError, match="multiple of 4"):
        resized(nodes, 6)


def test_processes_of_this_machine_share_its_memory() -> None:
    assert resized(ClusterSpec.local(2), 4) == ClusterSpec.local(4)
