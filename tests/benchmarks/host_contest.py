"""What runs on each of the hosts: every contender's losses beside the serial model's, then its time.

Plans rest on operators and collectives that autopar measures here, among the hosts themselves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.errors import CheckError, InfeasibleError
from autopar.results.plan.plan import Plan
from autopar.runtime.launch import worker
from examples import characters
from tests.benchmarks.contest import Contestant, Timed, compete

HOSTS = 4
BLOCKS, HIDDEN, HEADS = 8, 256, 4  # 25 MB of gradients: a ring sums them in 1.5 s at 200 Mbit/s
SEQUENCE, BATCH, SEED = 128, 16, 0
RATE, MOMENTUM = 0.05, 0.9
STEPS = 4  # whose losses are compared
TOLERANCE = 1e-4  # relative, of a loss in float32
OURS = "auto"


@dataclass(frozen=True, slots=True)
class Network:
    """What links the hosts: tc's rate, None for none, and what the cluster's description says."""

    rate: str | None
    link: Link


NETWORKS = {
    "slow": Network("200mbit", Link(latency=200e-6, bandwidth=25e6)),
    "fast": Network(None, Link(latency=150e-6, bandwidth=2.5e9)),
}
DATA_PARALLEL = {"ddp": 25, "ddp, small buckets": 4}  # MB; the first is torch's default
PLANNED: dict[str, dict[str, Any]] = {
    OURS: {"stages": "auto", "micro_batches": "auto", "schedule": "auto"},
    "auto, no stages": {"stages": 1, "micro_batches": 1},
    "batch": {"force": "batch"},
    "domain": {"force": "domain"},
    "filter": {"force": "filter"},
    "channel": {"force": "channel"},
    **{
        f"{stages} stages, {count} x {schedule}": {
            "stages": stages,
            "micro_batches": count,
            "schedule": schedule,
        }
        for stages, count, schedule in (
            (4, 4, "gpipe"),
            (4, 4, "1f1b"),
            (4, 8, "1f1b"),
            (4, 16, "1f1b"),
            (4, 8, "zb1p"),
            (2, 4, "1f1b"),
            (2, 8, "1f1b"),
        )
    },
}


@dataclass(frozen=True, slots=True)
class HostFigures:
    """One network's figures; `plans` says what was planned, `errors` are relative ones of losses."""

    timed: Timed
    plans: dict[str, str]
    errors: dict[str, float]
    refused: dict[str, str]


def contest(network: str, names: tuple[str, ...], rounds: int, costdb: str) -> HostFigures:
    """The contenders called so on this rank; the same on every rank."""
    torch.set_num_threads(1)
    worker.init()
    serial = serial_losses()
    steps: dict[str, Contestant] = {}
    plans: dict[str, str] = {}
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name in names:
        say(f"{network} links: {name}")
        try:
            step, plan = _contender(name, _cluster(NETWORKS[network]), costdb)
        except InfeasibleError as error:
            refused[name] = error.found
            continue
        errors[name] = check_losses(name, [float(step()) for _ in range(STEPS)], serial)
        steps[name] = Contestant(step, predicted=plan.step_seconds if plan else None)
        plans[name] = _shape(plan) if plan else "-"
    say(f"{network} links: {rounds} rounds")
    timed = compete(steps, rounds=rounds, keep=(OURS, *DATA_PARALLEL))
    return HostFigures(timed, plans, errors, refused)


def _cluster(network: Network) -> ClusterSpec:
    """The hosts as one describes them: each has its share of this machine's cores."""
    return cluster_of(network.link)


def cluster_of(link: Link) -> ClusterSpec:
    """The hosts with such links between them."""
    share = (os.cpu_count() or 1) / HOSTS
    return ClusterSpec(nodes=HOSTS, devices_per_node=1, cores=share, inter=link)


def make_model(sequence: int = SEQUENCE) -> characters.GPT:
    torch.manual_seed(SEED)
    vocabulary = len(set(characters.text()))
    return characters.gpt(BLOCKS, HIDDEN, HEADS, vocabulary, sequence, dropout=0.0)


def make_batch(count: int = BATCH, sequence: int = SEQUENCE) -> tuple[Tensor, Tensor]:
    return next(characters.batches(count, sequence))


def _contender(name: str, cluster: ClusterSpec, costdb: str) -> tuple[Callable[[], Tensor], Plan | None]:
    """A training step on a fresh model, which returns the global loss, and autopar's plan for it."""
    if name in DATA_PARALLEL:
        return _data_parallel(DATA_PARALLEL[name]), None
    batch = make_batch()
    parallel = autopar.parallelize(
        make_model(), cluster, batch, optimizer="sgd-momentum", costdb=costdb, **PLANNED[name]
    )
    pipeline = parallel.plan.pipeline
    by_steps = pipeline.is_staged or pipeline.micro_batches > 1

    def learn() -> Tensor:
        if by_steps:
            return parallel.train_step(*batch)
        loss: Tensor = parallel(*batch)
        loss.backward()
        return loss.detach()

    return trained(parallel, learn), parallel.plan


def _data_parallel(bucket: int) -> Callable[[], Tensor]:
    """DistributedDataParallel on this rank's samples; equal shares, so the loss is the mean of all."""
    model = DistributedDataParallel(make_model(), bucket_cap_mb=bucket)
    rank, size = dist.get_rank(), dist.get_world_size()
    share = [item.chunk(size)[rank].contiguous() for item in make_batch()]

    def learn() -> Tensor:
        loss: Tensor = model(*share)
        loss.backward()
        total = loss.detach()
        dist.all_reduce(total)
        return total / size

    return trained(model, learn)


def trained(
    model: torch.nn.Module, learn: Callable[[], Tensor], *, rate: float = RATE, momentum: float = MOMENTUM
) -> Callable[[], Tensor]:
    """A step of SGD along the gradients that `learn` leaves; it returns the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = learn()
        optimizer.step()
        return loss

    return step


def serial_losses(count: int = BATCH, sequence: int = SEQUENCE) -> list[float]:
    """Those of the model in one process: rank 0 trains it, all know them."""
    losses = torch.zeros(STEPS, dtype=torch.float64)
    if dist.get_rank() == 0:
        model, batch = make_model(sequence), make_batch(count, sequence)

        def learn() -> Tensor:
            loss: Tensor = model(*batch)
            loss.backward()
            return loss.detach()

        step = trained(model, learn)
        losses = torch.tensor([float(step()) for _ in range(STEPS)], dtype=torch.float64)
    dist.broadcast(losses, src=0)
    return list(losses.tolist())


def check_losses(name: str, losses: list[float], serial: list[float]) -> float:
    """The largest relative error; raises CheckError beyond the tolerance.

    The serial losses fall by far more than it, so that a step with wrong gradients can't pass.
    """
    errors = [abs(ours - theirs) / theirs for ours, theirs in zip(losses, serial, strict=True)]
    moved = min(abs(a - b) / a for a, b in zip(serial, serial[1:], strict=False))
    if not (all(error <= TOLERANCE for error in errors) and moved > 10 * TOLERANCE):
        raise CheckError(
            where=f"losses of {name}",
            found=", ".join(f"{loss:.6f}" for loss in losses),
            wanted=", ".join(f"{loss:.6f}" for loss in serial) + f", as the serial model's to {TOLERANCE:g}",
            remedy="run `autopar verify` on this model and plan",
        )
    return max(errors)


def _shape(plan: Plan) -> str:
    pipeline = plan.pipeline
    if not pipeline.is_staged:
        return f"mesh {plan.mesh}" + (
            f", {pipeline.micro_batches} micro-batches" if pipeline.micro_batches > 1 else ""
        )
    text = f"{pipeline.num_stages} stages, {pipeline.micro_batches} x {pipeline.schedule.value}"
    return text if plan.mesh.num_devices == 1 else f"{text}, each on mesh {plan.mesh}"


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)
