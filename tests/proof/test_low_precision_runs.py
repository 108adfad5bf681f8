"""Proofs in bfloat16 of plans that recompute, offload, start gathers early, or are compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.core.outputs import Outputs
from autopar.core.precision import Precision
from autopar.cost.operators.prices import Prices
from autopar.cost.program.offload import movable
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import InputError
from autopar.planning.asked.request import Request
from autopar.planning.search import search
from autopar.proof import check as check_module
from autopar.proof import verify as verify_module
from autopar.proof.check import Report, check
from autopar.proof.processes import TrainingJob, train_on_processes, train_rank
from autopar.results.plan.plan import Plan
from autopar.rewrite import build as build_module
from autopar.rewrite.overlap import overlap
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.trace.export import trace
from autopar.trace.target import Target, load_target
from tests.pool import Pool
from tests.runtime.forced_compiler import ROUGH

TARGETS = Path(__file__).parents[1] / "targets.py"
TWO = ClusterSpec.local(2)
SHARDS = {"force": "batch", "shard_state": "weights"}


def target(name: str = "deep") -> Target:
    return load_target(f"{TARGETS}:{name}")


def proved(processes: bool, **options: Any) -> Report:
    report = api.verify(target(), TWO, steps=2, changes=0, processes=processes, dtype="bf16", **options)
    assert report.passed, report
    assert report.low is not None and report.low.loss is not None
    return report


def _started(run: Callable[[], object]) -> list[str]:
    """Operators by which gathers start in programs that are written in `run`."""
    started: list[str] = []

    def noted(*args: Any, **options: Any) -> Any:
        graph = overlap(*args, **options)
        started.extend(str(node.target) for node in graph.nodes if "start_s_to" in str(node.target))
        return graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_module, "overlap", noted)
        patch.setattr(build_module, "overlap", noted)
        run()
    return started


def test_gathers_that_start_early_on_simulated_ranks() -> None:
    assert _started(lambda: proved(False, overlap=True, **SHARDS))


def _train(job: TrainingJob) -> list[str]:
    return _started(lambda: train_rank(job))


@pytest.mark.usefixtures("warm_ranks")
def test_gathers_that_start_early_on_processes(
    pools: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[TrainingJob] = []

    def run_noted(job: TrainingJob) -> Any:
        jobs.append(job)
        return train_on_processes(job)

    monkeypatch.setattr(check_module, "train_on_processes", run_noted)
    proved(True, overlap=True, **SHARDS)
    assert all(pools(2).run(_train, *jobs))


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("processes", [False, True])
def test_what_is_computed_again(processes: bool) -> None:
    report = proved(processes, recompute="all", **SHARDS)
    assert report.plan.program.recompute


def _offloaded(request: Request) -> Plan:
    """A plan that offloads all that can be, but what backward reads first."""
    case = target()
    autocast = request.autocast(TWO)
    traced = trace(case.model, case.args, loss_fn=case.loss_fn, loss_only=False, autocast=autocast)
    plan = search(traced.graph, TWO, replace(request, outputs=Outputs.GLOBAL)).plan  # as proofs compare them
    dims = Dims(traced.graph, find_atoms(traced.graph), plan.mesh)
    rates = tuple((dtype, 1e9) for dtype in (torch.bfloat16, torch.float32))
    rough = replace(ROUGH, device=replace(ROUGH.device, flops=rates))
    priced = PricedProgram(Prices(traced.graph, dims, TWO, rough), plan.program)
    offloaded = tuple(item.tensor for item in movable(priced)[:-1])
    assert offloaded
    return replace(plan, program=replace(plan.program, offload=offloaded))


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("processes", [False, True])
def test_what_is_offloaded(processes: bool) -> None:
    request = Request(dtype=Precision.BF16, measure=False, alternatives=False, schedule=None)
    plan = _offloaded(request)
    report = check(target(), TWO, request, steps=2, processes=processes, plan=plan)
    assert report.plan.program.offload and report.passed, report


@pytest.mark.long
def test_compiled_programs() -> None:
    assert proved(True, compile=True, **SHARDS).verdict.passed


def test_simulated_ranks_compile_nothing() -> None:
    with pytest.raises(InputError, match="write --processes, or leave out --compile"):
        proved(False, compile=True)
