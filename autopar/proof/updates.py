"""A rule of updates, run on processes, against its reference in one: parameters and buffers at the end.

    island i, step t     the target's example, its numbers scaled by 1 + (i + t) / 10, rows of ids turned by i
    a server             what it logged is replayed in its order

Both sides are in float64. Each island's losses are of batches of its own, so that islands part.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.proof.precision import copy_model, float64_by_default, raise_model, raised_eager
from autopar.proof.processes import TrainingJob, parallel_of
from autopar.proof.verdict import TOLERANCE, Record, Verdict, compare
from autopar.proof.verify import MOMENTUM, RATE, eager_call, run_eagerly, seed
from autopar.results.files.text import html_of
from autopar.results.plan.plan import Plan
from autopar.runtime.islands.joining import join_islands
from autopar.runtime.launch.launch import run_function
from autopar.runtime.module.parallel_module import runner_of
from autopar.runtime.module.steps import steps as steps_of
from autopar.trace.call.call_signature import Arguments, find_loss
from autopar.trace.target import Target, load_target
from autopar.updates.event_log import EventLog
from autopar.updates.reference import train_by
from autopar.updates.rules import IslandRule, Server, check_islands

TIMEOUT_SECONDS = 600.0
COMPARED = ("parameters", "buffers")


@dataclass(frozen=True, slots=True)
class IslandsJob:
    """Job that every rank of such a proof receives."""

    training: TrainingJob  # of one island
    rule: IslandRule
    whole: ClusterSpec
    islands: int
    folder: str

    @property
    def learners(self) -> int:
        """The number of islands that take batches."""
        return self.islands - isinstance(self.rule, Server)


@dataclass(frozen=True, slots=True)
class UpdatesReport:
    """The verdict on a rule, the plan of an island, and what a server did."""

    rule: IslandRule
    islands: int
    plan: Plan
    verdict: Verdict
    log: EventLog | None
    sent: int  # bytes of one rank of island 0

    @property
    def passed(self) -> bool:
        return self.verdict.passed

    def as_dict(self) -> dict[str, Any]:
        """The report as the command line's JSON shows it."""
        return {
            "passed": self.passed,
            "updates": str(self.rule),
            "islands": self.islands,
            "mesh": str(self.plan.mesh),
            "max_error": {name: self.verdict.max_error[name] for name in COMPARED},
            "worst": self.verdict.worst,
            "sent_bytes": self.sent,
            "events": self.log.as_dict() if self.log else None,
        }

    def __str__(self) -> str:
        lines = [f"{name:<11} {self.verdict.max_error[name]:.1e}" for name in COMPARED]
        lines.append(f"worst       {self.verdict.worst}")
        if self.log:
            lines.append(f"events      {self.log}")
        verdict = "equals" if self.passed else "DIFFERS from"
        lines.append(
            f"{self.islands} islands of mesh {self.plan.mesh}: {self.rule} {verdict} its reference in one "
            f"process ({TOLERANCE:.0e} allowed)"
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_of(self)


def prove_updates(
    target: Target, job: TrainingJob, rule: IslandRule, whole: ClusterSpec, islands: int, arguments: Arguments
) -> UpdatesReport:
    """Train `target` by the rule on processes of this machine, and by its reference; `job` is an island's.

    Raises InputError for plans with stages or micro-batches, and what ranks raise.
    """
    check_islands(rule, islands)
    whole.check_local()
    if job.by_steps:
        raise InputError(
            where=f"verify with updates={rule}",
            found="a plan with stages or micro-batches",
            wanted="one of calls and backward, which this proof trains by",
            remedy="leave out --stages and --micro-batches",
        )
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        told = run_function(
            train_island,
            whole.num_devices,
            IslandsJob(job, rule, whole, islands, folder),
            timeout=TIMEOUT_SECONDS,
        )
    firsts = [item for item in told if item]
    log = next((item.log for item in firsts if item.log), None)
    model = raise_model(copy_model(target.model))
    casts: dict[str, None] = {}

    def loss_of(copied: nn.Module, learner: int, step: int) -> Tensor:
        torch.manual_seed(seed(step))
        tensors = varied(job.tensors, learner, step)
        with raised_eager(casts):
            loss = run_eagerly(
                copied, eager_call(copied, arguments, tensors, target.loss_fn), target.loss_fn
            )[1]
        return _required(loss)

    learners = islands - isinstance(rule, Server)
    models = train_by(rule, model, learners, job.steps, loss_of, optimizer_of, log)
    verdicts = [
        compare(item.record, _record(models[0 if log else item.island]), tuple(casts))
        for item in firsts
        if not isinstance(rule, Server) or item.island == 0
    ]
    worst = max(verdicts, key=lambda verdict: max(verdict.max_error.values()))
    return UpdatesReport(rule, islands, job.plan, worst, log, firsts[0].sent)


@dataclass(frozen=True, slots=True)
class IslandResult:
    """What the first rank of an island tells."""

    island: int
    record: Record
    log: EventLog | None
    sent: int


def train_island(job: IslandsJob) -> IslandResult | None:
    """One rank's part: of an island's steps by the rule."""
    islands = join_islands(job.rule, job.whole, job.islands, timedelta(seconds=TIMEOUT_SECONDS))
    target = load_target(job.training.source)
    with float64_by_default():
        parallel, traced = parallel_of(target, job.training)
        args, kwargs = traced.arguments.rebuild(varied(job.training.tensors, 0, 0))
        parallel.prepare(*args, **kwargs)
        islands.begin(parallel, parallel.plan)
        runner_of(parallel).islands = islands
        optimizer = optimizer_of([item for item in parallel.parameters() if item.requires_grad])
        samples = range(job.learners * job.training.steps)
        sampler = parallel.sampler(samples, batch_size=1, shuffle=False)
        loader: Any = DataLoader(samples, batch_sampler=sampler)  # type: ignore[arg-type]
        folder = Path(job.folder) / "run"
        for step, _ in enumerate(steps_of(parallel, loader, folder=folder, optimizer=optimizer)):
            torch.manual_seed(seed(step))
            optimizer.zero_grad()
            args, kwargs = traced.arguments.rebuild(varied(job.training.tensors, islands.share, step))
            _required(find_loss(parallel(*args, **kwargs))).backward()
            optimizer.step()
        held = {**dict(parallel.named_parameters()), **dict(parallel.named_buffers())}
        full = {name: parallel.gather(name, item.detach()).clone() for name, item in held.items()}
    if dist.get_rank():
        return None
    names = dict(parallel.named_parameters()).keys()
    record = Record(
        parameters={name: item for name, item in full.items() if name in names},
        buffers={name: item for name, item in full.items() if name not in names},
    )
    return IslandResult(islands.mine, record, islands.log, islands.across.sent)


def varied(tensors: Sequence[Tensor], learner: int, step: int) -> tuple[Tensor, ...]:
    """The example as a learner's batch of a step: other numbers, other ids beside the same labels."""
    first = next((place for place, item in enumerate(tensors) if _are_ids(item)), None)
    return tuple(_varied(item, learner, step, turn=place == first) for place, item in enumerate(tensors))


def _varied(tensor: Tensor, learner: int, step: int, *, turn: bool) -> Tensor:
    if tensor.is_floating_point():
        return (tensor.detach().double() * (1 + (learner + step) / 10)).requires_grad_(tensor.requires_grad)
    return tensor.roll(learner, 0) if turn else tensor


def _are_ids(tensor: Tensor) -> bool:
    return tensor.dim() > 0 and not tensor.is_floating_point() and not tensor.is_complex()


def optimizer_of(tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of proofs."""
    return torch.optim.SGD(list(tensors), lr=RATE, momentum=MOMENTUM)


def _record(model: nn.Module) -> Record:
    return Record(
        parameters={name: item.detach() for name, item in model.named_parameters()},
        buffers=dict(model.named_buffers()),
    )


def _required(loss: Tensor | None) -> Tensor:
    assert loss is not None
    return loss
