"""Unlike devices, on real processes: rows by speed train as the serial model does, and save what it saves."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.core.device_groups import DeviceGroup, GroupLink
from autopar.runtime.launch.launch import run_function
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.whole_tensors import full_of

Pools = Callable[[int], Pool]
LOSS = 1e-9  # sums in another order, float64
SPEEDS = {2: (1.0, 2.0), 3: (1.0, 3.0, 5.0)}
SIZE = 18  # samples of a batch


class Net(nn.Module):
    """Convolutions with strides, batch norm, a tied matrix, a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Tanh())
        self.down = nn.Conv2d(6, 12, 3, stride=2, padding=1)
        self.middle = nn.Linear(12, 12, bias=False)
        self.last = nn.Linear(12, 12)
        self.last.weight = self.middle.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.down(self.first(x))).flatten(2).transpose(1, 2)
        return self.last(torch.tanh(self.middle(h))).mean(1)


def cluster_of(size: int) -> ClusterSpec:
    groups = [DeviceGroup(f"g{rank}", "cpu", speed=speed) for rank, speed in enumerate(SPEEDS[size])]
    ties = [GroupLink((a.name, b.name), Link(1e-6, 1e12), same_node=True) for a, b in pairwise(groups)]
    return ClusterSpec.of_groups(groups, ties)


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(seed: int, size: int = SIZE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2, 18, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(12, (size,), generator=generator)


def parallel(
    force: Any, costs: str, cluster: ClusterSpec | None = None, *, size: int = SIZE, **options: Any
) -> ParallelModule:
    return autopar.parallelize(
        make(),
        cluster or cluster_of(dist.get_world_size()),
        batch(0, size),
        loss_fn=F.cross_entropy,
        force=force,
        **options,
        measure=False,
        costdb=costs,
        quiet=True,
    )


def train(model: nn.Module, steps: range, *, serial: bool) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
    for step in steps:
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y) if serial else model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def gap(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference between two models' states."""
    mine, wanted = (full_of(model.state_dict()) for model in (ours, theirs))
    assert mine.keys() == wanted.keys()
    return max(float((mine[name] - wanted[name]).abs().max()) for name in wanted)


def _trains(force: str, costs: str) -> tuple[str, range]:
    ours, theirs = parallel(force, costs), make()
    losses = [train(model, range(4), serial=serial) for model, serial in ((ours, False), (theirs, True))]
    assert losses[0] == pytest.approx(losses[1], rel=LOSS)
    assert gap(ours, theirs) < LOSS
    return str(ours.plan.mesh), ours.samples


@pytest.mark.parametrize(
    ("size", "force"), [(2, "batch"), (3, "batch"), (2, "domain"), (3, "domain"), (2, "filter")]
)
def test_rows_by_speed_train_as_the_serial_model_does(
    pools: Pools, tmp_path: Path, size: int, force: str
) -> None:
    found = pools(size).run(_trains, force, str(tmp_path / "costs.db"))
    mesh = {mesh for mesh, _ in found}
    assert mesh == {":".join(f"{speed:g}" for speed in SPEEDS[size])} or force == "filter"


def _local(costs: str) -> tuple[int, list[float]]:
    """A loader of the rank's own samples, as many as its speed says."""
    ours = parallel("batch", costs, inputs="local")
    data = TensorDataset(*batch(7, 4 * SIZE))
    losses = []
    for x, y in DataLoader(data, batch_sampler=ours.sampler(data)):
        loss = ours(x, y)
        loss.backward()
        losses.append(loss.item())
    return len(x), losses


def test_samplers_give_each_rank_the_samples_that_its_speed_says(pools: Pools, tmp_path: Path) -> None:
    found = pools(3).run(_local, str(tmp_path / "costs.db"))
    assert [rows for rows, _ in found] == [2, 6, 10]
    assert all(losses == found[0][1] for _, losses in found)


def _save(folder: Path) -> None:
    ours = parallel("batch", str(folder / "costs.db"), shard_state="weights")
    train(ours, range(2), serial=False)
    autopar.save(folder / "run", ours)


def _goes_on(folder: Path) -> None:
    even = ClusterSpec.local(dist.get_world_size())
    ours, theirs = parallel("filter", str(folder / "even.db"), even), make()
    assert not ours.plan.mesh.shares
    autopar.load(folder / "run", ours)
    train(theirs, range(2), serial=True)
    assert gap(ours, theirs) < LOSS


def test_what_unlike_devices_save_even_plans_load(pools: Pools, tmp_path: Path) -> None:
    pools(3).run(_save, tmp_path)
    pools(2).run(_goes_on, tmp_path)


def _steps(ours: ParallelModule, count: int, seeds: range) -> None:
    """Steps in micro-batches, held against the serial model's; then an evaluation and a call."""
    theirs = make()
    mine, other = (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (ours, theirs))
    for seed in seeds:
        x, y = batch(seed, 6 * count)
        parts = zip(x.chunk(count), y.chunk(count), strict=True)
        whole = torch.stack([F.cross_entropy(theirs(a), b) / count for a, b in parts]).sum()
        other.zero_grad()
        whole.backward()
        mine.zero_grad()
        assert ours.train_step(x, y).item() == pytest.approx(whole.item(), rel=LOSS)
        norms = ours.clip_grad_norm_(0.05), nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        assert norms[0].item() == pytest.approx(norms[1].item(), rel=LOSS)
        other.step()
        mine.step()
    assert gap(ours, theirs) < LOSS
    x, y = batch(9, 6 * count)
    ours.eval(), theirs.eval()
    with torch.no_grad():
        wanted = F.cross_entropy(theirs(x), y).item()
        assert ours.eval_step(x, y).item() == pytest.approx(wanted, rel=LOSS)
        assert ours(x, y).item() == pytest.approx(wanted, rel=LOSS)


def _stages(costs: str) -> tuple[int, ...]:
    groups = [DeviceGroup("small", "cpu", memory=60_000), DeviceGroup("large", "cpu", memory=10**9)]
    cluster = ClusterSpec.of_groups(groups, [GroupLink(("small", "large"), Link(1e-6, 1e12), same_node=True)])
    ours = parallel(None, costs, cluster, stages=2, micro_batches=3)
    _steps(ours, 3, range(2))
    return ours.plan.pipeline.hosts


@pytest.mark.slow
def test_stages_lie_on_the_groups_that_the_plan_chose(pools: Pools, tmp_path: Path) -> None:
    assert {*pools(2).run(_stages, str(tmp_path / "costs.db"))} == {(1, 0)}


def _meshes(mesh: str, folder: Path, start: int | None, options: dict[str, Any]) -> None:
    """Stages on meshes of their own; `start` is where the second one begins, if not where the plan says."""
    cluster, count = ClusterSpec.local(int(os.environ["WORLD_SIZE"])), mesh.count("+") + 1
    asked = {"mesh": mesh, "stages": count, "micro_batches": 4, **options}
    costs, force = str(folder / "costs.db"), asked.pop("force", None)
    if start is None:
        _steps(parallel(force, costs, cluster, **asked), 4, range(2))
        return
    plan = parallel(force, costs, cluster, size=24, **asked).plan
    plan = replace(plan, pipeline=replace(plan.pipeline, starts=(0, start)))
    made = autopar.parallelize(make(), cluster, batch(0, 24), loss_fn=F.cross_entropy, plan=plan, quiet=True)
    _steps(made, 4, range(2))
    autopar.save(folder / "run", made)


def _loads(folder: Path) -> None:
    ours, model = parallel("filter", str(folder / "even.db"), ClusterSpec.local(2)), make()
    autopar.load(folder / "run", ours)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for seed in range(2):
        x, y = batch(seed, 24)
        parts = zip(x.chunk(4), y.chunk(4), strict=True)
        optimizer.zero_grad()
        torch.stack([F.cross_entropy(model(a), b) / 4 for a, b in parts]).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    assert gap(ours, model) < LOSS


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1+2", "2+1"])
def test_a_tied_weight_on_unlike_meshes_is_one_and_even_plans_load_what_is_saved(
    pools: Pools, tmp_path: Path, mesh: str
) -> None:
    """The second stage begins between the two layers that share a weight, which it has in other parts."""
    run_function(_meshes, 3, mesh, tmp_path, 9, {"force": "filter"})
    pools(2).run(_loads, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("1+3", {"force": "filter"}),
        ("2+1+1", {"force": "batch", "shard_state": "weights"}),
        ("3+1", {"schedule": "gpipe"}),
        ("1:2+1", {"force": "domain"}),
        ("2x1+1x2", {}),
    ],
)
def test_stages_on_meshes_of_their_own_train_as_the_serial_model_does(
    tmp_path: Path, mesh: str, options: dict[str, Any]
) -> None:
    sizes = {"1+3": 4, "2+1+1": 4, "3+1": 4, "1:2+1": 3, "2x1+1x2": 4}
    run_function(_meshes, sizes[mesh], mesh, tmp_path, None, options)


def _two_layouts(folder: Path) -> None:
    _meshes("2+1", folder, None, {})
    with pytest.raises(autopar.AutoparError, match="in one group, by another plan in the same processes"):
        _meshes("1+2", folder, None, {})
    _steps(parallel("batch", str(folder / "even.db"), ClusterSpec.local(3)), 1, range(2))


@pytest.mark.slow
def test_meshes_that_lie_across_those_of_another_plan_are_refused_and_even_ones_go_on(tmp_path: Path) -> None:
    run_function(_two_layouts, 3, tmp_path)
