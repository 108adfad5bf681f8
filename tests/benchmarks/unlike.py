"""Rows by speed against even ones: two processes, of which one is held to a part of a core.

python -m tests.benchmarks.unlike               as root, where cgroups may be made; half a core
python -m tests.benchmarks.unlike --part 0.25 --rounds 30 --json

Each rank puts itself into a cgroup that goes before what else the machine runs, rank 1 into one with a quota
of a core's time. Both ranks then compute at once, which says how fast each is; the cluster has a group for
each, and a convolutional net is planned for it by samples. The same net with even rows stands beside it: laps
of both follow each other in turn, on the same batches, and the run fails unless the losses of both are the
serial model's.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import autopar
from autopar.cluster import LOOPBACK, ClusterSpec
from autopar.core.cut import by_shares
from autopar.core.device_groups import DeviceGroup, GroupLink
from autopar.doctor.meeting import products_a_second
from autopar.errors import CheckError
from autopar.runtime.launch import worker
from autopar.runtime.launch.launch import run_function
from tests.benchmarks.allocators import ALLOCATORS, environment
from tests.benchmarks.statistics import Ratio, ratio

CGROUP = Path("/sys/fs/cgroup")
PERIOD_MICROSECONDS = 10_000  # of the quota: much shorter than a lap
SAMPLES, SIDE = 48, 48
LAP_STEPS, SPEED_ROUNDS = 3, 7
CHECKED_STEPS = 3
MEASURE_SECONDS = 10.0  # of operators, for each plan
CLOSE = 1e-4  # of losses in float32, sums in another order


@dataclass(frozen=True, slots=True)
class UnlikeOutcome:
    """Seconds of a step of each way, by lap; `faster` is how many times as fast rows by speed are."""

    part: float
    speeds: tuple[float, float]
    mesh: str
    rows: tuple[int, int]
    even: tuple[float, ...]
    by_speed: tuple[float, ...]
    predicted: tuple[float, float]
    faster: Ratio


class Net(nn.Module):
    """Convolutions as in the first stages of a VGG, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
        deep = [nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
        self.body, self.head = nn.Sequential(*wide, *deep), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).mean((2, 3)))
        return logits


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 3, SIDE, SIDE, generator=generator)
    return x, torch.randint(10, (SAMPLES,), generator=generator)


@contextmanager
def held_to(part: float | None) -> Iterator[None]:
    """Hold this process to a part of a core's time, None for all of it, before what else the machine runs."""
    second = (CGROUP / "cgroup.controllers").exists()
    folder = (CGROUP if second else CGROUP / "cpu") / f"autopar-unlike-{os.getpid()}"
    home = folder.parent / "cgroup.procs"
    folder.mkdir()
    try:
        weight = folder / ("cpu.weight" if second else "cpu.shares")
        weight.write_text("10000" if second else "262144")  # the most
        if part is not None:
            quota = round(part * PERIOD_MICROSECONDS)
            _set_quota(folder, quota, second=second)
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        home.write_text(str(os.getpid()))
        folder.rmdir()


def _set_quota(folder: Path, quota: int, *, second: bool) -> None:
    if second:
        (folder / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))


def contest(part: float, rounds: int, costdb: str) -> UnlikeOutcome:
    """One rank's part of the contest."""
    torch.set_num_threads(1)
    worker.init("cpu")
    with held_to(part if dist.get_rank() == 1 else None):
        return _contest(part, rounds, costdb)


def _contest(part: float, rounds: int, costdb: str) -> UnlikeOutcome:
    speeds = _speeds()
    groups = [DeviceGroup(f"rank {rank}", "cpu", speed=speed) for rank, speed in enumerate(speeds)]
    tie = GroupLink((groups[0].name, groups[1].name), LOOPBACK, same_node=True)
    clusters = ClusterSpec.local(2), ClusterSpec.of_groups(groups, [tie])
    even, fit = (
        autopar.parallelize(
            make(),
            each,
            batch(0),
            loss_fn=F.cross_entropy,
            force="batch",
            costdb=costdb,
            measure_seconds=MEASURE_SECONDS,
            quiet=True,
        )
        for each in clusters
    )
    _check(even, fit)
    laps: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for place in (0, 1) if number % 2 else (1, 0):
            laps[place].append(_lap((even, fit)[place]))
    _, first, _ = by_shares(SAMPLES, [fit.plan.mesh.shares_of(0)])
    predicted = even.plan.step_seconds, fit.plan.step_seconds
    return UnlikeOutcome(
        part,
        speeds,
        str(fit.plan.mesh),
        (first, SAMPLES - first),
        tuple(laps[0]),
        tuple(laps[1]),
        predicted,
        ratio(*laps),
    )


def _speeds() -> tuple[float, float]:
    """How fast each rank computes while both do, the first for 1: the median of several rounds."""
    found = []
    for _ in range(SPEED_ROUNDS):
        dist.barrier()
        rates = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(rates, torch.tensor([products_a_second(torch.device("cpu"))]))
        found.append(float(rates[1] / rates[0]))
    return 1.0, round(median(found), 3)


def _check(*models: nn.Module) -> None:
    """Raise CheckError unless all train as the serial model does."""
    serial, losses = make(), []
    for model in (serial, *models):
        optimizer, found = torch.optim.SGD(model.parameters(), 0.05), []
        for step in range(CHECKED_STEPS):
            x, y = batch(step)
            loss = F.cross_entropy(model(x), y) if model is serial else model(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    wrong = [
        found
        for found in losses[1:]
        if max(abs(a - b) for a, b in zip(found, losses[0], strict=True)) > CLOSE
    ]
    if wrong:
        raise CheckError(
            where="losses", found=str(wrong[0]), wanted=f"{losses[0]}, as serial", remedy="report this"
        )


def _lap(model: nn.Module) -> float:
    """Seconds of a step on the slower rank."""
    x, y = batch(0)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(LAP_STEPS):
        model(x, y).backward()
    seconds = torch.tensor([(time.perf_counter() - start) / LAP_STEPS], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def main(
    part: Annotated[float, typer.Option(help="of a core's time for rank 1")] = 0.5,
    rounds: Annotated[int, typer.Option(min=5, help="laps of each way")] = 20,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Time rows by speed against even rows."""
    with environment(ALLOCATORS["tuned"]), tempfile.TemporaryDirectory() as folder:
        found = run_function(contest, 2, part, rounds, str(Path(folder) / "costs.db"))[0]
    if as_json:
        print(json.dumps(asdict(found)))
        return
    low, high = found.faster.low, found.faster.high
    even, fit = (_milliseconds(median(laps)) for laps in (found.even, found.by_speed))
    told = [_milliseconds(seconds) for seconds in found.predicted]
    print(f"rank 1 held to {part:g} of a core: speeds {found.speeds[0]:g} and {found.speeds[1]:g}")
    print(f"even      mesh 2, a step {even}, predicted {told[0]} by a cluster of like devices")
    print(f"by speed  mesh {found.mesh}, rows {found.rows}, a step {fit}, predicted {told[1]}")
    print(f"{found.faster.median:.2f} ({low:.2f} to {high:.2f}) x as fast, {rounds} pairs of laps")


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


if __name__ == "__main__":
    from tests.benchmarks.unlike import main as named  # what ranks call has to be importable

    typer.run(named)
