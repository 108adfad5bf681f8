"""Where every tensor is made and used."""

from __future__ import annotations

import torch

from autopar.core.graph import Ref
from autopar.core.mesh import Mesh
from autopar.cost.program.values import find_values
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from tests.forced_programs import force_factors
from tests.proof.models import Script

aten = torch.ops.aten


def test_a_last_result_that_needs_no_weights_is_taken_by_who_takes_the_outputs() -> None:
    s = Script()
    bent = s.call(aten.relu.default, Ref(s.user(4, 6)))
    graph = s.graph(s.call(aten.sum.default, Ref(bent)))
    program = force_factors(graph, Dims(graph, find_atoms(graph), Mesh((2,))), {})
    values, last = find_values(graph, program, training=True), len(graph.operators) - 1
    assert values.source(graph.outputs[0]).free and values.source(graph.outputs[0]).carriers == (last,)
    assert values.source(bent).carriers == (last,)
