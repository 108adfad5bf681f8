"""Any cut of any program into stages, any micro-batches: training equals serial accumulation."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from autopar.core.mesh import Mesh
from tests.proof.models import draw_trained
from tests.proof.pipelines import (
    MOST_MICRO_BATCHES,
    MOST_STAGES,
    TRAPS,
    Histogram,
    draw_batch,
    draw_pipeline,
    magnified,
    prove_pipeline,
)
from tests.proof.plans import TOLERANCE, dims_of, draw_offloaded, draw_program, limit_of

EXCUSED = 0.01  # of all examples, at most
MESHES = [Mesh(shape) for shape in ((1,), (2,), (2,), (3,), (2, 2), (1, 2))]
MESHES += map(Mesh.parse, ("1:2", "3:1x2"))


def prove_random_pipelines(count: int, *, repeat: bool) -> Histogram:
    """Draw and prove `count` pipelines; the same ones each time with `repeat`.

    Drawn from a seed, not from Hypothesis's own random source, which prefers models too simple to have
    a trap; so nothing is shrunk.
    """
    met, excused = Histogram(), []

    @settings(
        max_examples=count,
        derandomize=repeat,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32 - 1), st.sampled_from(MESHES))
    def check(number: int, mesh: Mesh) -> None:
        random = Random(number)
        model = draw_trained(random)
        dims = dims_of(model, mesh)
        program = draw_program(random, model.graph, dims, whole_outputs=True)
        program = replace(program, offload=draw_offloaded(random, model.graph, program))
        pipeline = draw_pipeline(random, model)
        batch = draw_batch(random, model, pipeline.micro_batches)
        error, where = prove_pipeline(model, program, dims, pipeline, batch)
        limit = limit_of(error, lambda: magnified(model, batch))
        text = f"{where}: {error:.3g} on {mesh}, stages from {pipeline.starts}, above {limit:.3g}\n{model}\n"
        assert error < limit, text + "\n".join(
            f"{name}: {[str(option) for option in strategy]}" for name, strategy in program.strategies.items()
        )
        met.add(model, program, dims, pipeline)
        excused.append(limit > TOLERANCE)

    check()
    assert sum(excused) <= EXCUSED * len(excused), "rounding is said to explain too much"
    return met


def prove_unlike_stages(seeds: range) -> int:
    """Draw and prove pipelines each of whose stages has a mesh and a program of its own; how many messages'
    layouts differed."""
    crossed = 0
    for number in seeds:
        random = Random(number)
        model = draw_trained(random)
        pipeline = draw_pipeline(random, model)
        meshes = [random.choice(MESHES) for _ in pipeline.starts]
        drawn = [dims_of(model, mesh) for mesh in meshes]
        programs = [draw_program(random, model.graph, dims, whole_outputs=True) for dims in drawn]
        batch = draw_batch(random, model, pipeline.micro_batches)
        error, where = prove_pipeline(model, programs[0], drawn[0], pipeline, batch, programs)
        limit = limit_of(error, lambda: magnified(model, batch))  # noqa: B023
        told = f"{where}: {error:.3g} of example {number} on {meshes}, {pipeline.starts}"
        assert error < limit, f"{told}\n{model}"
        crossed += len(set(meshes)) > 1
    return crossed


@pytest.mark.slow
def test_random_pipelines_equal_serial_accumulation(capsys: pytest.CaptureFixture[str]) -> None:
    met = prove_random_pipelines(60, repeat=True)
    with capsys.disabled():
        print(f"\n{met}")
    assert met.examples >= 60
    assert met.traps.keys() == set(TRAPS), "every trap is met"


def test_stages_on_unlike_meshes_equal_serial_accumulation() -> None:
    assert prove_unlike_stages(range(6)) > 1


@pytest.mark.long
def test_many_stages_on_unlike_meshes_equal_serial_accumulation() -> None:
    assert prove_unlike_stages(range(6, 1000)) > 400


@pytest.mark.long
def test_many_random_pipelines_equal_serial_accumulation(capsys: pytest.CaptureFixture[str]) -> None:
    met = prove_random_pipelines(1500, repeat=False)
    with capsys.disabled():
        print(f"\n{met}")
    assert met.examples >= 1000
    assert len(met.stages) == MOST_STAGES and len(met.micro_batches) == MOST_MICRO_BATCHES
    rare = {trap: met.traps[trap] for trap in TRAPS if met.traps[trap] < 20}
    assert not rare, f"traps that were hardly met: {rare}"
