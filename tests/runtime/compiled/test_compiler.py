"""What compiling needs is named where it is missing, before anything runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import fx

import autopar.runtime.collectives.placement_moves  # noqa: F401  (registers the operators)
from autopar.cluster import ClusterSpec
from autopar.core.offload import Offload
from autopar.core.pipeline import Pipeline, stages_per_rank
from autopar.core.schedule import SPLIT_BACKWARD, ScheduleKind
from autopar.errors import InputError
from autopar.planning.asked.options import PARALLELIZE, Options
from autopar.planning.asked.request import request_of
from autopar.runtime.compiled.compiler import check_compiler, check_pipeline, check_program

TWO = ClusterSpec.local(2)


def test_a_missing_compiler_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_compiler("cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match=r"compile: found no C\+\+ compiler .*install g\+\+, or .* CXX"):
        check_compiler("cpu")


def test_a_compiler_that_is_named_and_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/g++")
    with pytest.raises(InputError, match=r"compile: found no C\+\+ compiler /no/such/g\+\+, wanted .* CXX"):
        check_compiler("cpu")


def test_a_missing_triton_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"compile: found no Triton, wanted it, .*install triton; or leave out"
    ):
        check_compiler("cuda")


@pytest.mark.parametrize("kind", ScheduleKind)
def test_a_plan_whose_schedule_splits_backward_is_not_compiled(kind: ScheduleKind) -> None:
    pipeline = Pipeline(2, 4, kind, tuple(range(2 * stages_per_rank(kind))))
    if kind not in SPLIT_BACKWARD:
        check_pipeline(pipeline)
        return
    said = f"compile: found the schedule {kind.value}, .*wanted one that doesn't.*plan with --schedule 1f1b"
    with pytest.raises(InputError, match=said):
        check_pipeline(pipeline)


def test_no_schedule_is_chosen_that_splits_backward_and_nothing_is_offloaded() -> None:
    request, _ = request_of(Options(PARALLELIZE, compile=True, stages=2, micro_batches=4), TWO)
    assert set(request.kinds()) == {*ScheduleKind} - {*SPLIT_BACKWARD}
    assert request.offload is Offload.NONE


@pytest.mark.parametrize("kind", SPLIT_BACKWARD)
def test_asking_for_what_cannot_be_compiled_is_refused(kind: ScheduleKind) -> None:
    options = Options(PARALLELIZE, compile=True, stages=2, micro_batches=4, schedule=kind.value)
    with pytest.raises(InputError, match=f"--compile: found --schedule {kind.value}.*leave out --schedule"):
        request_of(options, TWO)


def test_offload_all_with_compile_is_refused() -> None:
    with pytest.raises(InputError, match="--compile: found --offload all"):
        request_of(Options(PARALLELIZE, compile=True, offload="all"), TWO)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_without_dropout_draws_nothing(dropout: float) -> None:
    """Two draws beside a collective are refused; two calls that might draw are not."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(2):
        attention = torch.ops.aten.scaled_dot_product_attention.default
        x = graph.call_function(attention, (x, x, x, None, dropout))
    graph.output(graph.call_function(torch.ops.autopar.p_to_r.default, (x, "a@2")))
    program = fx.GraphModule(torch.nn.Module(), graph)
    if dropout:
        with pytest.raises(InputError, match="several draws on gathered operands"):
            check_program(program)
    else:
        check_program(program)
