"""Any strategies, any layouts, any paths: the parallel program computes what the serial graph does."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.core.mesh import Mesh
from tests.proof.models import draw_model
from tests.proof.plans import (
    MESHES,
    ROWS,
    TOLERANCE,
    Histogram,
    dims_of,
    draw_offloaded,
    draw_program,
    limit_of,
    magnified,
    prove,
)

EXCUSED = 0.01  # of all examples, at most
WEIGHTS = (4, 3, 3, 5, 3, 2, 1, 1, 1, 2, 2, 2, 2)
WEIGHTED = [mesh for mesh, weight in zip(MESHES, WEIGHTS, strict=True) for _ in range(weight)]


def prove_random_programs(count: int, *, repeat: bool) -> Histogram:
    """Draw and prove `count` programs; the same ones each time with `repeat`."""
    met, excused = Histogram(), []

    @settings(
        max_examples=count,
        derandomize=repeat,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False, note_method_calls=False), st.sampled_from(WEIGHTED))
    def check(random: Random, mesh: Mesh) -> None:
        model = draw_model(random)
        dims = dims_of(model, mesh)
        program = draw_program(random, model.graph, dims)
        program = replace(program, offload=draw_offloaded(random, model.graph, program))
        error, where = prove(model, program, dims)
        limit = limit_of(error, lambda: magnified(model, dims))
        text = f"{where}: {error:.3g} on {mesh}, above {limit:.3g}\n{model}\n"
        assert error < limit, text + "\n".join(
            f"{name}: {[str(option) for option in strategy]}" for name, strategy in program.strategies.items()
        )
        met.add(model, program, dims)
        excused.append(limit > TOLERANCE)

    check()
    assert sum(excused) <= EXCUSED * len(excused), "rounding is said to explain too much"
    return met


@settings(max_examples=30, derandomize=True, database=None, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 20), min_size=2, max_size=4))
def test_rows_by_any_shares_equal_serial(number: int, shares: list[int]) -> None:
    random = Random(number)
    model, mesh = draw_model(random), Mesh((len(shares),), (tuple(shares),))
    dims = dims_of(model, mesh)
    error, where = prove(model, draw_program(random, model.graph, dims), dims)
    assert error < limit_of(error, lambda: magnified(model, dims)), f"{where}: {error:.3g} on {mesh}\n{model}"


@pytest.mark.slow
def test_random_programs_equal_serial(capsys: pytest.CaptureFixture[str]) -> None:
    met = prove_random_programs(150, repeat=True)
    with capsys.disabled():
        print(f"\n{met}")
    assert met.examples >= 150


@pytest.mark.long
def test_many_random_programs_equal_serial(capsys: pytest.CaptureFixture[str]) -> None:
    met = prove_random_programs(2500, repeat=False)
    with capsys.disabled():
        print(f"\n{met}")
    assert met.examples >= 2000
    rare = {row: met.rows[row] for row in ROWS if met.rows[row] < 50}
    assert not rare, f"rows of the move table that were hardly met: {rare}"
