"""What runs on each host, with exchanges that start early and without: losses beside the serial model's,
peaks, then times.

weights   a cap that FSDP2 keeps and DistributedDataParallel does not: autopar's choice, and weights in shards
sums      whole weights: sums of gradients in buckets, behind backward or after it
tensor    two blocks whose weights are split over the hosts, as `force="model"` does
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.cluster import Link
from autopar.comparing.measured_peak import peak_bytes
from autopar.errors import CheckError
from autopar.results.plan.plan import Plan
from autopar.runtime.launch import worker
from autopar.runtime.parameters.gradient_buckets import Sums
from examples import characters
from tests.benchmarks import host_contest
from tests.benchmarks.contest import Contestant, Timed, compete

LINK = Link(latency=200e-6, bandwidth=125e6)  # 1 Gbit/s
FSDP, DDP = "FSDP2", "DistributedDataParallel"
OWN = "autopar's own plan"
SHARDS = {"force": "batch", "shard_state": "weights"}
# Of each part our contenders: whether exchanges start early, and what is asked of the plan.
OURS: dict[str, dict[str, tuple[bool, dict[str, Any]]]] = {
    "weights": {OWN: (True, {}), "shards, early": (True, SHARDS), "shards": (False, SHARDS)},
    "sums": {"sums, early": (False, {"force": "batch"}), "sums": (False, {"force": "batch"})},
    "tensor": {"split, early": (True, {"force": "model"}), "split": (False, {"force": "model"})},
}
# Whose steps are divided by whose.
RATIOS = {
    "weights": ((OWN, FSDP), ("shards, early", FSDP), ("shards", FSDP), ("shards, early", "shards")),
    "sums": (("sums, early", DDP), ("sums, early", "sums")),
    "tensor": (("split, early", "split"),),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A character GPT, and how many texts of what length it learns from at once."""

    blocks: int
    hidden: int
    count: int
    sequence: int

    def model(self) -> characters.GPT:
        torch.manual_seed(host_contest.SEED)
        vocabulary = len(set(characters.text()))
        return characters.gpt(self.blocks, self.hidden, 4, vocabulary, self.sequence, dropout=0.0)

    def batch(self) -> tuple[Tensor, Tensor]:
        return next(characters.batches(self.count, self.sequence))

    def share(self) -> list[Tensor]:
        """This rank's samples; equal shares, so the loss is the mean of all."""
        rank, size = dist.get_rank(), dist.get_world_size()
        return [item.chunk(size)[rank].contiguous() for item in self.batch()]


# Few tokens beside 13 MB of weights, or activations beside few weights: most of a step is communication.
PARTS = {"weights": Shape(4, 256, 4, 32), "sums": Shape(4, 256, 4, 32), "tensor": Shape(2, 128, 16, 128)}


@dataclass(frozen=True, slots=True)
class Entrant:
    """Who takes a step, of what, by which plan if there is one."""

    step: Callable[[], Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class PartFigures:
    """One part's figures; peaks are the fullest rank's bytes, `exchanged` predicted parts of a step."""

    timed: Timed
    peaks: dict[str, int]
    cap: int | None
    exchanged: dict[str, float]


def contest(part: str, rounds: int, costdb: str) -> PartFigures:
    """The contenders of a part on this rank; the same on every rank."""
    torch.set_num_threads(1)
    worker.init()
    shape = PARTS[part]
    serial, cap = _serial_losses(shape), None
    entrants: dict[str, Entrant] = {}
    peaks: dict[str, int] = {}

    def enter(name: str, entrant: Entrant) -> None:
        host_contest.say(f"{part}: {name}")
        losses = [float(entrant.step()) for _ in range(host_contest.STEPS)]
        host_contest.check_losses(name, losses, serial)
        peaks[name], entrants[name] = _peak(entrant), entrant

    if part != "tensor":
        enter(DDP, _theirs(shape, DistributedDataParallel(shape.model())))
    if part == "weights":
        enter(FSDP, _theirs(shape, _sharded(shape)))
        cap = (peaks[DDP] + peaks[FSDP]) // 2
        if not peaks[FSDP] < cap < peaks[DDP]:
            raise CheckError(
                where="cap", found=str(peaks), wanted="FSDP2 below DistributedDataParallel", remedy="see both"
            )
        del entrants[DDP]  # it doesn't fit
    for name, (overlap, asked) in OURS[part].items():
        entrant = _ours(shape, costdb, overlap=overlap, memory=cap, **asked)
        if name == "sums":
            entrant = replace(entrant, step=_after_backward(entrant.step))
        enter(name, entrant)
    plans = {name: each.plan for name, each in entrants.items() if each.plan is not None}
    contestants = {
        name: Contestant(each.step, predicted=each.plan.step_seconds if each.plan else None)
        for name, each in entrants.items()
    }
    host_contest.say(f"{part}: {rounds} rounds")
    return PartFigures(
        timed=compete(contestants, rounds=rounds, keep=tuple(contestants)),
        peaks=peaks,
        cap=cap,
        exchanged={name: 1.0 - plan.compute_seconds / plan.step_seconds for name, plan in plans.items()},
    )


def _ours(shape: Shape, costdb: str, *, overlap: bool, **asked: Any) -> Entrant:
    batch = shape.batch()
    parallel = autopar.parallelize(
        shape.model(),
        host_contest.cluster_of(LINK),
        batch,
        stages=1,
        micro_batches=1,
        optimizer="sgd-momentum",
        costdb=costdb,
        overlap=overlap,
        **asked,
    )

    def learn() -> Tensor:
        loss: Tensor = parallel(*batch)
        loss.backward()
        return loss.detach()

    return _trained(parallel, learn, parallel.plan)


def _theirs(shape: Shape, model: nn.Module) -> Entrant:
    """One of torch's own, on this rank's samples."""
    share = shape.share()

    def learn() -> Tensor:
        loss: Tensor = model(*share)
        loss.backward()
        total = loss.detach()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    return _trained(model, learn)


def _sharded(shape: Shape) -> nn.Module:
    """FSDP2, block by block."""
    model = shape.model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def _trained(model: nn.Module, learn: Callable[[], Tensor], plan: Plan | None = None) -> Entrant:
    optimizer = torch.optim.SGD(model.parameters(), lr=host_contest.RATE, momentum=host_contest.MOMENTUM)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = learn()
        optimizer.step()
        return loss

    return Entrant(step, model, optimizer, plan)


def _peak(entrant: Entrant) -> int:
    """Bytes of all tensors of a step on the rank that takes most; they are there from the steps before."""
    alive = [*entrant.model.parameters(), *entrant.model.buffers()]
    states = entrant.optimizer.state.values()
    alive += [each for state in states for each in state.values() if isinstance(each, Tensor)]
    entrant.optimizer.zero_grad()
    most = torch.tensor(peak_bytes(entrant.step, alive, torch.device("cpu")))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _serial_losses(shape: Shape) -> list[float]:
    """Those of the model in one process: rank 0 trains it, all know them."""
    losses = torch.zeros(host_contest.STEPS, dtype=torch.float64)
    if dist.get_rank() == 0:
        model, batch = shape.model(), shape.batch()

        def learn() -> Tensor:
            loss: Tensor = model(*batch)
            loss.backward()
            return loss.detach()

        step = _trained(model, learn).step
        losses = torch.tensor([float(step()) for _ in range(host_contest.STEPS)], dtype=torch.float64)
    dist.broadcast(losses, src=0)
    return list(losses.tolist())


# -- sums that don't overlap ------------------------------------------------------------------------------


def _after_backward(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step with its buckets of gradients summed when backward has ended, none of them before."""

    def late() -> Tensor:
        with _held():
            return step()

    return late


@contextmanager
def _held() -> Iterator[None]:
    is_full = Sums._is_full
    Sums._is_full = lambda self, number: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sums._is_full = is_full  # type: ignore[method-assign]
