"""A loss that ranks compute of their own parts of the output trains as the serial one does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.core.mesh import Mesh
from autopar.core.placement import R, Shard
from autopar.errors import InputError
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.sampler import BatchSampler
from tests.runtime.programs.test_local_inputs import EXACT, Pools, costs, data, gap, local, make, on_ranks

assert costs  # a fixture


def parallel(size: int, mesh: str, force: Any, costs: str, **options: Any) -> ParallelModule:
    return autopar.parallelize(
        make(),
        autopar.ClusterSpec.local(Mesh.parse(mesh).num_devices),
        data(size)[:2],
        mesh=mesh,
        force=force,
        measure=False,
        costdb=costs,
        outputs="local",
        **options,
    )


def replicas(ours: ParallelModule) -> int:
    """How many ranks hold one and the same part of the output."""
    (layout,) = ours.plan.program.outputs.values()
    return math.prod(n for n, place in zip(ours.plan.mesh.shape, layout, strict=True) if place == R)


def _train(mesh: str, force: Any, size: int, inputs: str, costs: str) -> str:
    serial, ours = make(), parallel(size, mesh, force, costs, inputs=inputs)
    pair = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (serial, ours)]
    for step in range(3):
        x, bias, classes = data(size, seed=step)
        wanted = F.one_hot(classes, 6).double()
        output = ours(*(local(ours, x, bias) if inputs == "local" else (x, bias)))
        (part,) = ours.output_parts
        assert tuple(output.shape) == part.shape
        mine = (output - part.take(wanted)).square().sum() / wanted.numel()
        theirs = F.mse_loss(serial(x, bias), wanted)
        for loss, optimizer in zip((theirs, mine), pair, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total = mine.detach() / replicas(ours)
        dist.all_reduce(total)
        assert gap(total, theirs) < EXACT
        for a, b in zip(ours.parameters(), serial.parameters(), strict=True):
            assert gap(a.grad, b.grad) < EXACT
    assert gap(ours.state_dict(), serial.state_dict()) < EXACT
    (layout,) = ours.plan.as_dict()["outputs"].values()
    return str(layout)


BY_CLASS = {"last": ["o"], "add": ["d1"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "force", "layout"),
    [
        ("2", "batch", "S(0)"),
        ("2", BY_CLASS, "S(1)"),
        ("2", "domain", "R"),
        ("4", "batch", "S(0)"),
        ("2x2", "batch", "S(0)·S(0)"),
        ("2x2", {"last": ["n0", "o"], "add": ["d0", "d1"]}, "S(0)·S(1)"),
        ("2x2", None, None),
    ],
)
@pytest.mark.parametrize("inputs", ["global", "local"])
def test_a_loss_of_parts_equals_the_serial_loss(
    mesh: str, force: Any, layout: str | None, inputs: str, pools: Pools, costs: str
) -> None:
    found = on_ranks(pools, _train, mesh, force, 7, inputs, costs)
    assert len(set(found)) == 1
    if layout is not None:
        assert found[0] == layout


def _loader(mesh: str, costs: str) -> None:
    """Targets from the same loader as the inputs, a mean over the global batch."""
    x, bias, classes = data(20)
    serial, ours = make(), parallel(6, mesh, "batch", costs, inputs="local")
    assert ours.output_parts[0].span(0) == ours.samples
    dataset = TensorDataset(x, classes)
    loader = DataLoader(dataset, batch_sampler=ours.sampler(dataset))
    pair = [torch.optim.SGD(model.parameters(), 0.1) for model in (serial, ours)]
    for (part, labels), rows in zip(loader, BatchSampler(dataset, batch_size=6, rows=range(6)), strict=True):
        losses = (
            F.cross_entropy(serial(x[rows], bias), classes[rows]),
            F.cross_entropy(ours(part, bias), labels, reduction="sum") / 6,
        )
        for loss, optimizer in zip(losses, pair, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert gap(ours.state_dict(), serial.state_dict()) < EXACT


@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_targets_of_this_ranks_samples_do_for_its_part(mesh: str, pools: Pools, costs: str) -> None:
    on_ranks(pools, _loader, mesh, costs)


class Named(nn.Module):
    """A loss, an output that could be split, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.linear(x)
        return {"loss": h.square().mean(), "h": h, "largest": h.max()}


def _named(mesh: str, costs: str) -> str:
    torch.manual_seed(0)
    model, x = Named().double(), torch.randn(6, 4, dtype=torch.float64)
    wanted = model(x)
    ours = autopar.parallelize(
        model,
        autopar.ClusterSpec.local(2),
        (x,),
        force={"linear": ["n0"]},
        measure=False,
        costdb=costs,
        outputs="local",
    )
    found = ours(x)
    assert gap(found["loss"], wanted["loss"]) < EXACT and gap(found["largest"], wanted["largest"]) < EXACT
    assert gap(found["h"], ours.output_parts[1].take(wanted["h"])) < EXACT
    assert [part.is_whole for part in ours.output_parts] == [True, False, True]
    assert list(ours.plan.program.outputs.values()) == [(R,), (Shard(0),), (R,)]
    return str(ours.plan)


def test_the_loss_and_numbers_stay_global_and_the_plan_says_how_outputs_lie(pools: Pools, costs: str) -> None:
    text = on_ranks(pools, _named, "2", costs)[0]
    assert "outputs   mean R, linear S(0), max_1 R" in text, text


def test_the_option_has_three_words() -> None:
    with pytest.raises(InputError, match="outputs: found 'mine', wanted auto, global, local"):
        autopar.parallelize(make(), autopar.ClusterSpec.local(2), data(4), outputs="mine")  # type: ignore[arg-type]
