"""`autopar compare --measure`: all strategies that fit, on real processes of this machine.

    parent   trace ── launch                                                      ── comparison
    rank 0            plan all rows ── measure ── steps of all rows in turn ── peaks ──┘
    rank 1            measure along              the same                  the same

All rows are planned, by measurements of as many processes at the same time, and run in one launch. A row
is a module of its own, made from its plan as `parallelize` makes it; rows whose plans are equal run
once. As many rows are there together as fit a device's memory. The serial row is the eager model on
rank 0 alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.cluster import ClusterSpec
from autopar.comparing.measured_peak import peak_bytes
from autopar.comparing.profile import ProgressDisplay
from autopar.comparing.strategies import SERIAL, Comparer
from autopar.comparing.time_in_turns import StepRunner, largest, time_in_turn
from autopar.compiler import Compiler
from autopar.cost.machine.measuring import CoRunners
from autopar.errors import AutoparError, InputError
from autopar.planning.agree import agree, measure_links
from autopar.planning.asked.optimizer_state import KNOWN
from autopar.planning.asked.request import Request
from autopar.results.comparison.comparison import Comparison, Measured, Row
from autopar.results.plan.plan import Plan
from autopar.rewrite.render import describe
from autopar.runtime.launch import worker
from autopar.runtime.launch.launch import run_function
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.torch_seams import pytree
from autopar.trace.call.call_signature import find_loss, flatten_results, split_for_loss
from autopar.trace.export import trace
from autopar.trace.forward.autocast import Autocast
from autopar.trace.target import Target, load_target
from costdb.database import Database

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class ContestJob:
    """The job that every rank of a contest receives."""

    source: str
    cluster: ClusterSpec
    request: Request
    optimizer: str
    costdb: str | None
    bar: ProgressDisplay | None


def run_rows(job: ContestJob, target: Target) -> Comparison:
    """Plan and run all rows; `target` is that of `job.source`.

    Raises InputError for a cluster that is not this machine, a model without values or a target without
    a file; what planning raises; WorkerError.
    """
    job.cluster.check_local()
    if any(parameter.is_meta for parameter in target.model.parameters()):
        raise InputError(
            where="model",
            found="parameters on the meta device",
            wanted="parameters with values, which steps compute with",
            remedy="build the model on the CPU, or compare without measuring steps",
        )
    if not job.source:
        raise InputError(
            where="target",
            found="a model without a file",
            wanted="file.py:function, which every process runs to build the model",
            remedy="pass that text, or compare without measuring steps",
        )
    autocast = job.request.autocast(job.cluster)
    trace(  # what can't be is bad input
        target.model, target.args, target.kwargs, loss_fn=target.loss_fn, autocast=autocast
    )
    found = run_function(run_rank, job.cluster.num_devices, job)[0]
    if isinstance(found, AutoparError):
        raise found
    return found


def run_rank(job: ContestJob) -> Comparison | AutoparError:
    """One rank's part; the same comparison, or error, on every rank."""
    worker.init(job.cluster.device_type, TIMEOUT.total_seconds())
    job.cluster.check_world(dist.get_world_size())
    target = load_target(job.source)
    try:
        if job.request.measure:
            measure_links(job.cluster, job.costdb, TIMEOUT)
        with job.bar.shown() if job.bar and dist.get_rank() == 0 else nullcontext():
            found = agree(partial(_plan, job, target), job.cluster)
    except AutoparError as error:
        return error
    contest = Contest(job, target)
    taken: dict[str, Measured] = {}
    for heat in heats(found.rows, found.memory_cap):
        taken |= contest.run(heat)
    return replace(found, rows=tuple(replace(row, measured=taken.get(row.name)) for row in found.rows))


def _plan(job: ContestJob, target: Target, co_runners: CoRunners) -> Comparison:
    """On rank 0: the rows, measured beside each other."""
    with Database.open(job.costdb) as database:
        return Comparer(target, job.cluster, job.request, database, job.bar, co_runners).compare()


def heats(rows: Sequence[Row], cap: int | None) -> Iterator[list[Row]]:
    """The rows that fit, in groups that a device can hold together: the states of all and the most that
    a step of one of them needs beside."""
    heat: list[Row] = []
    for row in (row for row in rows if row.feasible):
        if heat and cap is not None and _together([*heat, row]) > cap:
            yield heat
            heat = []
        heat.append(row)
    if heat:
        yield heat


def _together(rows: Sequence[Row]) -> int:
    plans = [row.plan for row in rows if row.plan]
    return sum(plan.state_bytes for plan in plans) + max(plan.peak_bytes - plan.state_bytes for plan in plans)


@dataclass(frozen=True, slots=True)
class Contest:
    """Rows of one target as running modules, on this rank."""

    job: ContestJob
    target: Target

    @property
    def device(self) -> torch.device:
        if self.job.cluster.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def run(self, rows: Sequence[Row]) -> dict[str, Measured]:
        """Seconds and bytes of each row, equal on all ranks; collective."""
        same = {row.name: next(each.name for each in rows if _alike(each, row)) for row in rows}
        trainers = {row.name: self.trainer(row) for row in rows if same[row.name] == row.name}
        runners = {name: StepRunner(each.step, alone=name == SERIAL) for name, each in trainers.items()}
        seconds = time_in_turn(runners, device=self.device)
        nbytes = {name: self.peak(trainer, runners[name]) for name, trainer in trainers.items()}
        return {name: Measured(seconds[first], nbytes[first]) for name, first in same.items()}

    def peak(self, trainer: TrainedModel, runner: StepRunner) -> int:
        mine = peak_bytes(runner.step, trainer.tensors(), self.device) if runner.is_mine else 0
        return int(largest(mine, self.device))

    def trainer(self, row: Row) -> TrainedModel:
        """A fresh model, serial or by the row's plan, with its optimizer."""
        assert row.plan is not None
        model = copy.deepcopy(self.target.model)
        args, kwargs = self.inputs()
        if row.name == SERIAL:
            model.to(self.device)
            step = partial(_serial_step, model, self.target, args, kwargs, autocast=self.autocast)
        else:
            model = parallel = self.parallel(model, row.plan)
            parallel.prepare(*args, **kwargs)
            step = partial(_parallel_step, parallel, args, kwargs, by_steps=_by_steps(row.plan))
        learned = [item for item in model.parameters() if item.requires_grad]
        optimizer = KNOWN[self.job.optimizer](learned) if learned else None
        return TrainedModel(model, optimizer, step, pytree.tree_leaves((args, kwargs)))

    def parallel(self, model: nn.Module, plan: Plan) -> ParallelModule:
        compiler = Compiler(
            self.job.cluster,
            self.job.request.settled(plan),
            self.target.loss_fn,
            costdb=self.job.costdb,
            plan=plan,
            timeout=TIMEOUT,
        )
        return ParallelModule(
            model,
            compiler,
            describe=describe,
            device=self.device,
            timeout=TIMEOUT,
            by_steps=_by_steps(plan),
        )

    @property
    def autocast(self) -> Autocast:
        """The autocast state of the serial step, equal to that of the others."""
        return self.job.request.autocast(self.job.cluster)

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example call, on this rank's device."""
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.to(self.device), (self.target.args, self.target.kwargs)
        )
        return args, kwargs


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model with its optimizer (None if it learns nothing) and its inputs; `learn` makes gradients."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    learn: Callable[[], None]
    inputs: Sequence[Any]

    def step(self) -> None:
        """Forward, backward, and the optimizer's step."""
        self.model.zero_grad()
        self.learn()
        if self.optimizer:
            self.optimizer.step()

    def tensors(self) -> Iterator[Tensor]:
        """All that lives between steps."""
        yield from (item for item in self.inputs if isinstance(item, Tensor))
        yield from self.model.buffers()
        for parameter in self.model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        state = self.optimizer.state if self.optimizer else {}
        yield from (item for item in pytree.tree_leaves(list(state.values())) if isinstance(item, Tensor))


def _serial_step(
    model: nn.Module,
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    autocast: Autocast,
) -> None:
    args, kwargs, loss_args, loss_kwargs = split_for_loss(model, target.loss_fn, args, kwargs)
    with torch.autocast(autocast.device, autocast.dtype, enabled=autocast.dtype is not None):
        output = model(*args, **kwargs)
        output = target.loss_fn(output, *loss_args, **loss_kwargs) if target.loss_fn else output
    _backward(output)


def _parallel_step(
    parallel: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any], *, by_steps: bool
) -> None:
    if by_steps:
        parallel.train_step(*args, **kwargs)
    else:
        _backward(parallel(*args, **kwargs))


def _backward(output: Any) -> None:
    """From the loss, or from all outputs if there is none."""
    loss = find_loss(output)
    outputs = flatten_results(output)[0] if loss is None else (loss,)
    roots = [item for item in outputs if item.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(item) for item in roots])


def _by_steps(plan: Plan) -> bool:
    """Whether the plan trains through `train_step`."""
    return plan.pipeline.is_staged or plan.pipeline.micro_batches > 1


def _alike(first: Row, second: Row) -> bool:
    """Whether both run the same program; the serial one is the eager model, and no program."""
    if SERIAL in (first.name, second.name):
        return first is second
    return bool(
        first.plan
        and second.plan
        and first.plan.program == second.plan.program
        and first.plan.pipeline == second.plan.pipeline
    )
