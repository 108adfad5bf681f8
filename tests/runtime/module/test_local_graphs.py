"""Ranks that pass their own vertices and know the graph train as the serial model, and hold none whole."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import InputError
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.parameters import local
from tests.pool import Pool

VERTICES, EDGES, CLASSES = 40, 50_000, 4
ROWS = {"first": ["n0"], "index_add": ["r"], "last": ["n0"], "index_add_1": ["r"], "loss": ["d0"]}
ROUNDING = 1e-9


class Net(nn.Module):
    """Two layers of sums over neighbours."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.first(x)
        h = self.last((torch.zeros_like(h).index_add(0, target, h[source]) / EDGES).tanh())
        return torch.zeros_like(h).index_add(0, target, h[source]) / EDGES


def data(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features, edges and classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(VERTICES, 6, generator=generator, dtype=torch.float64)
    edges = torch.randint(VERTICES, (2, EDGES), generator=generator)
    return x, edges, torch.randint(CLASSES, (VERTICES,), generator=generator)


def parallel(costs: str, inputs: str = "local") -> ParallelModule:
    pins = {name.replace("loss", "cross_entropy_loss"): factors for name, factors in ROWS.items()}
    return autopar.parallelize(
        Net(),
        autopar.ClusterSpec.local(dist.get_world_size()),
        data(),
        force=pins,
        loss_fn=F.cross_entropy,
        measure=False,
        costdb=costs,
        inputs=inputs,
        quiet=True,
    )


@pytest.fixture
def costs(tmp_path: Path) -> str:
    return str(tmp_path / "costs.db")


def mine(ours: ParallelModule, x: Tensor, edges: Tensor, classes: Tensor) -> tuple[Tensor, ...]:
    rows = slice(ours.samples.start, ours.samples.stop)
    return x[rows], edges, classes[rows]


def _train(costs: str) -> range:
    serial, ours, (x, edges, classes) = Net(), parallel(costs), data()
    theirs = F.cross_entropy(serial(x, edges), classes)
    theirs.backward()
    for given in (edges, edges.clone(), edges.to("meta")):
        ours.zero_grad()
        loss = ours(*mine(ours, x, given, classes))
        loss.backward()
        assert abs(float((loss - theirs).detach())) < ROUNDING
        for a, b in zip(ours.parameters(), serial.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.allclose(local(a.grad), b.grad, atol=ROUNDING)
    return ours.samples


def test_ranks_that_pass_their_vertices_train_as_the_serial_model(
    pools: Callable[[int], Pool], costs: str
) -> None:
    assert pools(2).run(_train, costs) == [range(VERTICES // 2), range(VERTICES // 2, VERTICES)]


def as_large_as_the_graph() -> list[Tensor]:
    gc.collect()
    tensors = (item for item in gc.get_objects() if type(item) is Tensor and item.device.type == "cpu")
    return [item for item in tensors if item.numel() >= EDGES]


def _hold(costs: str, inputs: str) -> list[tuple[int, ...]]:
    others = {id(item): item for item in as_large_as_the_graph()}  # what ran here before has left them
    ours = parallel(costs, inputs)
    x, edges, classes = mine(ours, *data()) if inputs == "local" else data()
    ours(x, edges, classes).backward()
    del edges
    return [tuple(item.shape) for item in as_large_as_the_graph() if id(item) not in others]


@pytest.mark.parametrize("inputs", ["local", "global"])
def test_no_rank_holds_the_graph_that_a_program_was_made_for(
    inputs: str, pools: Callable[[int], Pool], costs: str
) -> None:
    assert pools(2).run(_hold, costs, inputs) == [[], []]


def _refused(costs: str) -> list[str]:
    ours, (x, edges, classes) = parallel(costs), data()
    without = edges.to("meta")
    found = []

    def refuse(*args: Tensor) -> None:
        with pytest.raises(InputError) as error:
            ours(*args)
        found.append(str(error.value))

    a, _, c = mine(ours, x, edges, classes)
    refuse(a, edges.roll(dist.get_rank(), 1), c)
    refuse(a.to("meta"), edges, c)
    with torch.no_grad():
        refuse(a, without, c)
        ours.prepare(x, edges, classes)
        before = ours(a, without, c)
    ours.prepare(x, edges.flip(0), classes)
    refuse(a, without, c)
    assert float((ours(a, edges, c) - before).detach()) == 0
    assert float((ours(a, edges.flip(0), c) - before).detach()) != 0
    return found


def test_graphs_that_are_not_known_are_refused_by_name(pools: Callable[[int], Pool], costs: str) -> None:
    unlike, features, mode, several = pools(2).run(_refused, costs)[0]
    assert "input input_1 on rank 1 unlike that on rank 0" in unlike
    assert "input input_0 on the meta device" in features
    assert "a kind of call (a mode, gradients) without a program" in mode
    assert "one of 2 graphs of its shape" in several


def _refused_globally(costs: str) -> str:
    ours, (x, edges, classes) = parallel(costs, "global"), data()
    with pytest.raises(InputError) as error:
        ours(x, edges.to("meta"), classes)
    return str(error.value)


def test_calls_with_global_inputs_have_values(pools: Callable[[int], Pool], costs: str) -> None:
    assert all("input input_1 on the meta device" in each for each in pools(2).run(_refused_globally, costs))
