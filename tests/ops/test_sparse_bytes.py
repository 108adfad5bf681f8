"""What ranks send for a layer of a graph net is what docs/theory/graphs.md says, forward and backward."""

from __future__ import annotations

import pytest
import torch

from autopar.core.mesh import Mesh
from autopar.core.placement import B, Placement, Shard
from tests.benchmarks.graphs import rows_of
from tests.ops.layer_bytes import F, N, layer, messages, random_edges

S0, S1 = Shard(0), Shard(1)


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("factor", "before", "after"),
    [("i", S0, S0), ("j", S0, S0), ("f", S1, S1)],
    ids=["rows", "columns", "features"],
)
def test_one_axis(factor: str, before: Placement, after: Placement, ranks: int) -> None:
    wanted = 0.0 if factor == "f" else 2 * (ranks - 1) / ranks * N * F
    assert layer(Mesh((ranks,)), [factor], (before,), (after,)) == pytest.approx(wanted)


@pytest.mark.parametrize("side", [2, pytest.param(3, marks=pytest.mark.long)])
def test_blocks_whose_roles_rotate_from_layer_to_layer(side: int) -> None:
    """x split over b, whole over a; then sums over b, for x split over a."""
    wanted = 4 * (side - 1) / side * N * F / side
    assert layer(Mesh((side, side)), ["i", "j"], (B, S0), (S0, B)) == pytest.approx(wanted)


@pytest.mark.parametrize("side", [2, pytest.param(3, marks=pytest.mark.long)])
def test_rows_by_features(side: int) -> None:
    wanted = 2 * (side - 1) / side * N * F / side
    assert layer(Mesh((side, side)), ["i", "f"], (S0, S1), (S0, S1)) == pytest.approx(wanted)


@pytest.mark.parametrize("side", [2, *(pytest.param(side, marks=pytest.mark.long) for side in (3, 4))])
def test_blocks_of_some_features_in_three_dims(side: int) -> None:
    wanted = 4 * (side - 1) / side * N * F / side**2
    assert layer(Mesh((side,) * 3), ["i", "j", "f"], (B, S0, S1), (S0, B, S1)) == pytest.approx(wanted)


def test_a_block_with_its_sums_scattered() -> None:
    """Of a mesh of 2 x 3: rows over two, columns over three, both ends whole over the other axis."""
    wanted = 2 * (2 / 3) * N * F / 2  # sums scattered over b, their gradient gathered
    assert layer(Mesh((2, 3)), ["i", "j"], (B, S0), (S0, S0)) == pytest.approx(wanted)


def test_only_rows_that_are_read_are_sent() -> None:
    """Each vertex reads the three on either side: three rows over each boundary, each way."""
    reach, ranks = 3, 4
    offsets = torch.arange(-reach, reach + 1)
    rows = torch.arange(N).repeat_interleave(len(offsets))
    columns = (rows + offsets.repeat(N)).clamp(0, N - 1)
    found = layer(Mesh((ranks,)), ["r"], (S0,), (S0,), edges=torch.stack((rows, columns)))
    assert found == pytest.approx(2 * F * 2 * reach * (ranks - 1) / ranks)


def test_rows_that_are_read_along_one_axis_with_features_along_the_other() -> None:
    edges = torch.stack((torch.arange(N), torch.arange(N).roll(1)))
    found = layer(Mesh((2, 2)), ["r", "f"], (S0, S1), (S0, S1), edges=edges)
    assert found == pytest.approx(2 * F / 2)  # one row of half the features to each other rank


@pytest.mark.parametrize(("source", "target", "times"), [("e", "e", 4), ("e", "r", 2)])
def test_messages_to_vertices_that_are_split_send_half_of_what_edges_do(
    source: str, target: str, times: int
) -> None:
    """Edges in the order of where they lead are cut with these vertices, and their sums stay."""
    ranks, width = 2, 8
    found = messages(Mesh((ranks,)), source, target, edges=random_edges(), width=width)
    assert found == pytest.approx(times * N * width * (ranks - 1) / ranks)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_every_row_of_the_table_is_as_counted(ranks: int) -> None:
    for row in rows_of(ranks):
        assert row.counted == pytest.approx(row.formula), row
