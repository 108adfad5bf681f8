"""The sources' figures: formulas beside brute-force counts on few processes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from autopar.cluster import Link
from autopar.errors import InputError
from tests.benchmarks.sources import domain, integrated, loops, peak, products, projection, server
from tests.benchmarks.sources.__main__ import TABLES, app
from tests.benchmarks.sources.nets import (
    INPUTS,
    NetLayer,
    alexnet,
    layers_of,
    resnet50,
    vgg16,
    volume_net,
)

# 8 rows of 8 with 3 channels, to 4 channels; then 256 features to 12.
CONVOLUTION = NetLayer("conv", 192, 256, 108, 3, 4, 64, 8, 24, 32, 2 * 108 * 64)
LINEAR = NetLayer("linear", 256, 12, 3072, 256, 12, 1, 1, 0, 0, 2 * 3072)


@pytest.mark.parametrize(
    ("make", "millions"), [(alexnet, 62.4), (vgg16, 138.3), (resnet50, 25.5), (volume_net, 3.28)]
)
def test_nets_have_the_weights_of_their_papers(make: type, millions: float) -> None:
    """Biases and norms aside."""
    assert sum(layer.w for layer in layers_of(make)) / 1e6 == pytest.approx(millions, abs=0.05)
    assert make in INPUTS


def test_sizes_of_layers_are_those_of_tensors() -> None:
    first = layers_of(alexnet)[0]
    assert (first.x, first.y, first.w) == (3 * 227**2, 96 * 55**2, 96 * 3 * 11**2)
    assert (first.rows, first.positions, first.halo_x, first.halo_y) == (55, 55**2, 5 * 3 * 227, 5 * 96 * 55)
    last = layers_of(alexnet)[-1]
    assert (last.x, last.y, last.rows, last.halo_x, last.is_windowed) == (4096, 1000, 1, 0, False)
    assert layers_of(vgg16)[0].flops == 2 * 64 * 27 * 224**2


# The server and the ring


@pytest.mark.parametrize("size", range(2, 10))
def test_a_server_sends_and_receives_p_times_what_a_ring_does(size: int) -> None:
    counted = server.busiest(server.server_messages(size), received=True)
    assert counted == 2 * (size - 1)
    ring = server.ring_messages(server.nested_rings((size,)))
    assert server.busiest(ring, received=False) == pytest.approx(2 * (size - 1) / size)
    assert server.busiest(ring, received=True) == pytest.approx(4 * (size - 1) / size)  # in and out


# Integrated grids


def owned(count: int, parts: int) -> list[set[int]]:
    return [set(range(part * count // parts, (part + 1) * count // parts)) for part in range(parts)]


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("columns", [1, 2, 4])
def test_a_model_layer_sends_what_is_counted(rows: int, columns: int) -> None:
    """Rank (r, c) has rows r of W and samples c: it gathers all outputs of its samples, sums the gradient of
    its inputs among Pr by a ring, and that of its rows of W among Pc."""
    batch = 8
    outputs, samples = owned(LINEAR.y, rows), owned(batch, columns)
    most = 0.0
    for mine in outputs:
        for held in samples:
            gathered = len(set(range(LINEAR.y)) - mine) * len(held)
            summed = sum(2 * len(held) * LINEAR.x / rows for _ in range(rows - 1))
            weights = sum(2 * LINEAR.w / rows / columns for _ in range(columns - 1))
            most = max(most, gathered + summed + weights)
    assert integrated.model_elements([LINEAR], batch, rows, columns) == pytest.approx(most)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("columns", [1, 2, 4])
def test_a_domain_layer_sends_what_is_counted(rows: int, columns: int) -> None:
    """3 x 3 over 8 rows: each part needs a row above and below that others own; the formula has one side's,
    as a rank sends both of its rows but to one neighbour each."""
    batch = 8
    needs = []
    for mine in owned(8, rows):
        above, below = {min(mine) - 1}, {max(mine) + 1}
        needs.append([len(side & set(range(8))) for side in (above, below)])
    one_side = max(max(sides) for sides in needs) if rows > 1 else 0
    halo = batch // columns * one_side * (8 * 3 + 8 * 4)  # of rows of x, and of the gradient of y
    size = rows * columns
    weights = sum(2 * CONVOLUTION.w / size for _ in range(size - 1))
    assert integrated.domain_elements([CONVOLUTION], batch, rows, columns) == pytest.approx(halo + weights)


def test_a_first_layer_gives_its_inputs_no_gradient() -> None:
    once = integrated.model_elements([CONVOLUTION], 8, 2, 1)
    assert once == 8 * CONVOLUTION.y / 2
    assert integrated.model_elements([CONVOLUTION, CONVOLUTION], 8, 2, 1) == 2 * once + 8 * CONVOLUTION.x


@pytest.mark.parametrize("size", [2, 8, 64, 512])
def test_the_best_grid_sends_no_more_than_batch_or_model_alone(size: int) -> None:
    layers = layers_of(alexnet)
    found = list(integrated.grids(layers, integrated.BATCH, size))
    best = min(each.elements for each in found)
    assert best <= integrated.domain_elements(layers, integrated.BATCH, 1, size)
    assert best <= integrated.model_elements(layers, integrated.BATCH, size, 1)
    assert {each.rows * each.columns for each in found} == {size}
    assert all(each.rows <= 13 for each in found if each.convolutions == "domain")


# Products


@pytest.mark.parametrize(("size", "replication"), [(4, 1), (4, 2), (16, 2), (16, 4), (64, 4)])
def test_products_are_counted_near_their_formulas(size: int, replication: int) -> None:
    """What is counted never exceeds the formula but by the ring's sums, of at most twice their numbers."""
    layer = products.GraphLayer(4096, 16, 65536)
    published, counted = (
        products.formulas(layer, size, replication),
        products.counts(layer, size, replication),
    )
    for scheme, words in counted.items():
        sums = layer.features**2 + 2 * layer.rows * replication / size
        assert published[scheme] / 3 < words < published[scheme] + sums


def test_rows_gather_every_block_but_their_own() -> None:
    layer = products.GraphLayer(8, 2, 10)
    assert products.count_rows(layer, 4, 1) == 2 * 3 * 4 + 2 * 3 / 4 * 4
    # Two copies of two parts: row 0's copy 1 lacks block 1; two copies sum 8 numbers.
    assert products.count_rows(layer, 4, 2) == 2 * (8 + 8) + 2 * 3 / 4 * 4


def test_a_square_gathers_a_row_of_one_and_a_column_of_the_other() -> None:
    layer = products.GraphLayer(6, 3, 36)
    assert products.count_grid(layer, 3, 1) == 2 * (2 * 4 + 2 * 2) + 4 * 2 * 2
    assert products.count_grid(layer, 1, 1) == 0


# Strategies


def test_the_projection_is_the_table_by_hand() -> None:
    """Latency 1 s, 4 bytes/s: a number takes a second."""
    layers = (CONVOLUTION, LINEAR)
    found = projection.project(layers, 8, 2, link=Link(1.0, 4.0), micro_batches=4)
    weights = CONVOLUTION.w + LINEAR.w
    assert found["data"].seconds == 2 * (1 + weights / 2)
    halo = CONVOLUTION.halo_x + CONVOLUTION.halo_y
    assert found["spatial"].seconds == found["data"].seconds + 2 * (2 + 8 * halo)
    assert found["filter"].seconds == found["channel"].seconds == 3 * (2 + 4 * CONVOLUTION.y + 4 * LINEAR.y)
    assert found["layer"].seconds == 2 * (2 + 4 - 2) * (1 + 2 * CONVOLUTION.y)
    kept = 8 * (CONVOLUTION.x + CONVOLUTION.y + LINEAR.x + LINEAR.y)
    assert found["data"].nbytes == found["spatial"].nbytes == 8 * (kept / 2 + weights)
    assert found["filter"].nbytes == 8 * (kept + weights / 2)
    assert found["layer"].nbytes == 8 * (8 * (LINEAR.x + LINEAR.y) + LINEAR.w)  # the fuller stage
    limits = {name: each.limit for name, each in found.items()}
    assert limits == {"data": 8, "spatial": 64, "filter": 4, "channel": 256, "layer": 2}


def test_data_parallel_seconds_are_a_rings_messages() -> None:
    """Every step of the ring sends one part of all weights."""
    for size in range(2, 10):
        layers, link = (CONVOLUTION, LINEAR), Link(1.0, 4.0)
        schedule = server.nested_rings((size,))
        numbers = (CONVOLUTION.w + LINEAR.w) / schedule.parts
        counted = sum(link.latency + 4 * numbers / link.bandwidth for _ in schedule.steps)
        assert projection.project(layers, 8, size, link=link)["data"].seconds == pytest.approx(counted)


def test_stages_are_as_even_as_any_cuts() -> None:
    layers = layers_of(alexnet)
    for count in (1, 2, 3):
        stages = projection.balanced(layers, count)
        assert [layer for stage in stages for layer in stage] == list(layers) and len(stages) <= count
        most = max(sum(layer.flops for layer in stage) for stage in stages)
        cuts = [()] if count == 1 else [(a,) for a in range(1, 8)] if count == 2 else []
        cuts = cuts or [(a, b) for a in range(1, 7) for b in range(a + 1, 8)]
        bounds = [(0, *cut, 8) for cut in cuts]
        assert most == min(
            max(sum(each.flops for each in layers[a:b]) for a, b in zip(cut, cut[1:], strict=False))
            for cut in bounds
        )


# Memory, loops, convolutions


def test_saved_numbers_are_those_that_autograd_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small net on real tensors: storages that are saved for backward, weights aside."""

    def small() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)
        )

    monkeypatch.setattr(peak, "resnet50", small)
    monkeypatch.setitem(INPUTS, small, (3, 8, 8))
    model, saved = small(), {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 4 and tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model(torch.randn(1, 3, 8, 8))
    assert y.requires_grad
    assert peak.saved_numbers() == sum(tensor.numel() for tensor in saved.values())


def test_a_loop_saves_what_a_narrow_tree_contends() -> None:
    assert loops.saved(64, 1.0) == pytest.approx(0, abs=1e-9)
    assert 0 < loops.saved(64, 3.0) < loops.saved(64, 48.0) < 1  # a ring fills a way up by a sixteenth
    seconds = loops.best(loops.loop(64))[0]
    moved = 2 * 63 / 64 * loops.SUM_BYTES / loops.FABRIC.bandwidth
    assert seconds == pytest.approx(2 * math.log2(64) * loops.FABRIC.latency + moved)


def test_the_roofline_counts_three_products() -> None:
    assert domain.roofline(128, 1) == pytest.approx(3 * 2 * 32 * 64 * 64 * 9 * 128**2 / 15.7e12)
    assert domain.roofline(128, 4) == domain.roofline(128, 1) / 4


# The command


def test_the_command_prints_the_tables_that_are_named() -> None:
    result = CliRunner().invoke(app, ["server", "products", "--markdown"])
    assert result.exit_code == 0 and "| server, P = 64 | 126 N | 126 N | 2 N (P - 1) |" in result.stdout
    assert "**One graph layer" in result.stdout
    plain = CliRunner().invoke(app, ["server"])
    assert "A parameter server against a ring" in plain.stdout
    wrong = CliRunner().invoke(app, ["fly"])
    assert isinstance(wrong.exception, InputError) and "'fly'" in str(wrong.exception)
    assert list(TABLES) == ["integrated", "server", "products", "projection", "domain", "peak", "loops"]
