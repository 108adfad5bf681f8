"""What ranks send for a layer of a graph net is what docs/theory/graphs.md says, forward and backward."""

from __future__ import annotations

import pytest
import torch

from autopar.core.mesh import Mesh
from autopar.core.placement import B, Placement, Shard
from tests.benchmarks.graphs import nets_of, rows_of, variants
from tests.ops.layer_bytes import F, N, layer, messages, random_edges, sent
from tests.ops.net_bytes import net, net_programs, one_axis, weights

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


@pytest.mark.parametrize("name", ["1D needed rows, r", "2D, i f", "2D, i j"])
def test_a_net_sends_what_its_products_and_its_weights_do(name: str) -> None:
    edges, width = random_edges(), 8
    found = next(each for each in variants(4, edges, width) if each.name == name)
    wanted = sum(found.elements) + weights(found.mesh, found.ways, width)
    assert net(found.mesh, found.ways, edges, width) == pytest.approx(wanted)


def test_blocks_on_unequal_axes_send_what_is_published_of_copies() -> None:
    """1.5D with c copies: 2 n f / c and 2 n f c / P, each less what a rank keeps."""
    ranks, copies, width = 8, 2, 8
    found = next(each for each in variants(ranks, random_edges(), width) if each.name.startswith("1.5D"))
    whole = 2 * N * width
    wanted = whole / copies * (1 - copies / ranks) + whole * copies / ranks * (1 - 1 / copies)
    assert sum(found.elements) / 2 == pytest.approx(wanted)


def test_a_block_takes_sixteen_bytes_an_entry_on_its_rank() -> None:
    """Its column, its row, and its value in both orders; and where rows and columns start; for all layers."""
    ranks, edges = 4, random_edges()
    programs, _ = net_programs(Mesh((ranks,)), [one_axis("i")] * 2, edges, width=8)
    held = {each.data_ptr(): each for program in programs for each in program.constants.values()}
    entries, starts = len((edges[0] * N + edges[1]).unique()), N + ranks + ranks * (N + 1)
    assert sum(tensor.nbytes for tensor in held.values()) == 16 * entries + 4 * starts


def test_an_all_to_all_sends_each_rank_its_part_of_a_part() -> None:
    assert sent("s_to_s", 4, 160) == 30


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 4, 8, 9, 16])
def test_every_row_of_the_tables_is_as_counted(ranks: int) -> None:
    for row in (*rows_of(ranks), *nets_of(ranks)):
        assert row.counted == pytest.approx(row.formula), row
