"""Any graph, any layer on it, any strategies: the parallel program computes what the serial graph does."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from autopar.core.mesh import Mesh
from autopar.sharding.needed_rows import NEEDED
from tests.proof.graph_programs import MESHES, MIXES, Mix, draw_model
from tests.proof.plans import TOLERANCE, dims_of, draw_offloaded, draw_program, limit_of, magnified, prove

UNLIKE = [*map(Mesh.parse, ("1:2", "1:3:5", "3:1x2"))]  # shares of rows


def prove_random_graph_programs(count: int, *, repeat: bool) -> int:
    """How many operators exchanged rows that they needed, of `count` programs that are drawn and proved."""
    met: list[str] = []

    @settings(
        max_examples=count,
        derandomize=repeat,
        database=None,
        suppress_health_check=list(HealthCheck),
        deadline=None,
        phases=[Phase.generate],  # to make an example smaller takes minutes
    )
    @given(
        st.randoms(use_true_random=False, note_method_calls=False),
        st.sampled_from([*MESHES, *UNLIKE]),
        st.sampled_from(MIXES),
    )
    def check(random: Random, mesh: Mesh, mix: Mix) -> None:
        model = draw_model(random, mix)
        dims = dims_of(model, mesh)
        program = draw_program(random, model.graph, dims)
        program = replace(program, offload=draw_offloaded(random, model.graph, program))
        error, where = prove(model, program, dims)
        limit = limit_of(error, lambda: magnified(model, dims))
        chosen = {name: [str(each) for each in item] for name, item in program.strategies.items()}
        assert error < limit, f"{where}: {error:.3g} on {mesh}, above {limit:.3g}\n{model}\n{chosen}"
        met.extend(factor for factors in chosen.values() for factor in factors if factor == NEEDED)

    check()
    return len(met)


def test_what_one_index_picks_and_places_is_exchanged_apart() -> None:
    """As many edges as vertices, cut alike, but what is sent of edges isn't what is sent of vertices."""
    random = Random(435)
    mesh, model = random.choice(MESHES), draw_model(random, random.choice(MIXES))
    dims = dims_of(model, mesh)
    program = draw_program(random, model.graph, dims)
    assert prove(model, program, dims)[0] < TOLERANCE


@pytest.mark.slow
def test_random_programs_on_random_graphs_equal_serial() -> None:
    assert prove_random_graph_programs(5, repeat=True) > 0


@pytest.mark.long
def test_many_random_programs_on_random_graphs_equal_serial() -> None:
    assert prove_random_graph_programs(300, repeat=False) > 300
