"""What was cut into stages isn't cut again, and comes to the same step or error."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autopar.core.mesh import Mesh
from autopar.core.program import Program
from autopar.errors import InfeasibleError
from autopar.planning import staged_step
from autopar.planning.asked.request import Request
from autopar.planning.known_cuts import KnownCuts
from autopar.planning.search import decide
from autopar.solve.program.solution import CutoffError, Solution
from autopar.solve.stages.step import Step
from tests.planning.test_pipeline_search import CLUSTER, graph_of


@pytest.mark.parametrize(("memory", "feasible"), [(335_000_000, True), (60_000_000, False)])
def test_a_placement_is_cut_once_whatever_prices_of_memory_lead_to_it(
    monkeypatch: pytest.MonkeyPatch, memory: int, feasible: bool
) -> None:
    staged, cut = staged_step.staged, list[Program]()

    def counted(solution: Solution, **options: Any) -> Step:
        cut.append(solution.program)
        return staged(solution, **options)

    monkeypatch.setattr(staged_step, "staged", counted)
    asked = Request(
        measure=False, alternatives=False, mesh=Mesh((1,)), pipeline_ranks=4, micro_batches=8, memory=memory
    )
    found: Any = None
    try:
        found = decide(graph_of(8), CLUSTER, asked).step
    except InfeasibleError as error:
        assert "memory cap" in str(error)
    assert (found is not None) == feasible
    assert len(cut) == 1
    if found is not None:
        assert found.peak_bytes <= memory


def test_what_is_known_is_not_asked_for_again_but_what_was_too_slow_is() -> None:
    known, step, asked = KnownCuts(), Step.__new__(Step), list[str]()
    for name, value in (("bound", 1.0), ("free", 2.0)):
        object.__setattr__(step, name, value)
    program: Any = "a placement"

    def slow() -> Step:
        asked.append("slow")
        raise CutoffError(where="plans", found="2 s", wanted="less", remedy="take the other")

    def cut() -> Step:
        asked.append("cut")
        return step

    for way, limit in ((slow, 1.0), (cut, math.inf), (cut, math.inf), (cut, 1.5)):
        try:
            assert known.step(program, (1,), way, cutoff=math.inf, limit=limit) is step
        except CutoffError:
            assert limit < 2.0
    assert asked == ["slow", "cut"]
    assert known.step(program, (2,), cut, cutoff=math.inf, limit=math.inf) is step and len(asked) == 3
