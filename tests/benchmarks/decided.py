"""One rank of the benchmark of deciding together: the plans of all ways, and their steps in turn."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.cluster import ClusterSpec
from autopar.comparing.measured import TIMEOUT, Contest, ContestJob
from autopar.core.costs import OptimizerState
from autopar.cost.machine.measuring import CoRunners
from autopar.errors import InfeasibleError
from autopar.planning.agree import agree, measure_links
from autopar.planning.asked.request import Request
from autopar.planning.planner import Planner
from autopar.results.plan.plan import Plan
from autopar.runtime.launch import worker
from autopar.trace.target import Target, load_target
from costdb.database import Database
from tests.benchmarks.contest import Contestant, Timed, compete
from tests.benchmarks.hierarchical import Way, decide_all
from tests.benchmarks.host_contest import STEPS, check_losses, trained

RATE = 0.02  # losses fall by more than they may differ
OPTIMIZER = "sgd-momentum"
STATE = OptimizerState(1.0)

Plans = dict[Way, Plan | InfeasibleError]


@dataclass(frozen=True, slots=True)
class Trial:
    """A target with what is asked of its plans; `rounds` of steps are timed, none if it is 0."""

    source: str
    cluster: ClusterSpec
    request: Request
    rounds: int


@dataclass(frozen=True, slots=True)
class DecidedSteps:
    """The plans, the times of their steps by the ways' names, and the largest relative error of losses
    against the serial ones."""

    plans: Plans
    timed: Timed | None
    errors: dict[str, float]


def run_rank(trial: Trial, costdb: str) -> DecidedSteps:
    """One rank's part: plan each way, check the losses of its first steps, then time more of them."""
    share_cores(int(os.environ["RANK"]), trial.cluster.num_devices)
    worker.init("cpu", TIMEOUT.total_seconds())
    measure_links(trial.cluster, costdb, TIMEOUT)
    target = load_target(trial.source)
    plans = agree(partial(find_plans, target, trial, costdb), trial.cluster)
    if not trial.rounds:
        return DecidedSteps(plans, None, {})
    contest = Contest(ContestJob(trial.source, trial.cluster, trial.request, OPTIMIZER, costdb, None), target)
    serial = _serial_losses(target)
    contestants, errors = {}, {}
    for way, plan in plans.items():
        if isinstance(plan, InfeasibleError):
            continue
        step = _step(contest, plan)
        errors[way.value] = check_losses(way.value, [float(step()) for _ in range(STEPS)], serial)
        contestants[way.value] = Contestant(step, predicted=plan.step_seconds)
    return DecidedSteps(plans, compete(contestants, rounds=trial.rounds, keep=tuple(contestants)), errors)


def find_plans(
    target: Target, trial: Trial, costdb: str | None, co_runners: CoRunners | None = None
) -> Plans:
    """What each way decides for the target's first micro-batch."""
    planner = Planner(trial.cluster, trial.request, target.loss_fn)
    graph = planner.trace_step(target.model, target.args, target.kwargs).graph
    with Database.open(costdb) as database:
        found = decide_all(graph, trial.cluster, trial.request, database=database, co_runners=co_runners)
    return {way: each if isinstance(each, InfeasibleError) else each.plan for way, each in found.items()}


def share_cores(rank: int, ranks: int) -> None:
    """Keep this process, and the threads that it starts, to the rank's share of the cores, for which it
    competes with its neighbours at most:

        4 ranks on 2 cores     core 0: ranks 0, 1     core 1: ranks 2, 3

    So ranks of different stages are as fast as they are, however long the others wait. Else a stage that
    waits would lend its cores to the others, and no cut would be better than another.
    """
    cores = sorted(os.sched_getaffinity(0))
    first, stop = (place * len(cores) // ranks for place in (rank, rank + 1))
    os.sched_setaffinity(0, cores[first : max(stop, first + 1)])


def _step(contest: Contest, plan: Plan) -> Callable[[], Tensor]:
    """A training step of a fresh module; it returns the loss."""
    parallel = contest.parallel(copy.deepcopy(contest.target.model), plan)
    args, kwargs = contest.inputs()
    parallel.prepare(*args, **kwargs)
    return trained(parallel, partial(parallel.train_step, *args, **kwargs), rate=RATE)


def _serial_losses(target: Target) -> list[float]:
    """Those of the model in one process: rank 0 trains it, all know them."""
    losses = torch.zeros(STEPS, dtype=torch.float64)
    if dist.get_rank() == 0:
        model, loss_fn = copy.deepcopy(target.model), target.loss_fn
        assert loss_fn is not None and not target.kwargs
        images, labels = target.args

        def learn() -> Tensor:
            loss: Tensor = loss_fn(model(images), labels)
            loss.backward()
            return loss.detach()

        step = trained(model, learn, rate=RATE)
        losses = torch.tensor([float(step()) for _ in range(STEPS)], dtype=torch.float64)
    dist.broadcast(losses, src=0)
    return list(losses.tolist())
