"""Every rule, on its own samples: each strategy that it offers equals the unsplit operator."""

from __future__ import annotations

import itertools

import pytest

import autopar.ops  # noqa: F401  (registers every family)
from autopar.core.mesh import Mesh
from autopar.ops.rule import RULES, Sample
from autopar.proof.operators import error, strategies

MESHES = [Mesh((2,)), Mesh((3,)), Mesh((2, 2))]
MOST = 10  # strategies of one sample on one mesh, evenly chosen: two axes repeat what one axis shows


def samples() -> list[pytest.param]:
    rules = dict.fromkeys(RULES.values())
    found = itertools.chain.from_iterable(((rule, sample) for sample in rule.samples()) for rule in rules)
    return [
        pytest.param(sample, id=f"{type(rule).__name__}-{index}")
        for index, (rule, sample) in enumerate(found)
    ]


@pytest.mark.parametrize("sample", samples())
def test_every_strategy_equals_the_unsplit_operator(sample: Sample) -> None:
    for mesh in MESHES:
        offered = list(strategies(sample, mesh))
        assert offered
        step = max(1, len(offered) // MOST)
        for one, dims, strategy in offered[::step]:
            names = [str(option) for option in strategy]
            assert error(one, dims, strategy) < 1e-9, (str(sample.target), str(mesh), names)
