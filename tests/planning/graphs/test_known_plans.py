"""A plan is kept for a graph that differs from its own in sizes, if it can be run there and fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from autopar.cluster import ClusterSpec
from autopar.core.fingerprint import fingerprint_of
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.core.placement import Replicate
from autopar.planning.asked.request import Request
from autopar.planning.graphs.known_plans import RESIZED, kept, resized
from autopar.results.plan.plan import Plan
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.trace.export import trace
from tests.forced_programs import force_kinds
from tests.runtime.forced_compiler import plan_of

CLUSTER = ClusterSpec.local(2)
Along = Callable[[Tensor, int], Tensor]


class Net(nn.Module):
    def __init__(self, dim: int = -1, along: Along = torch.cumsum) -> None:
        super().__init__()
        self.fc, self.out, self.dim, self.along = nn.Linear(6, 8), nn.Linear(8, 4), dim, along

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.along(self.fc(x), self.dim)).square().sum()  # type: ignore[no-any-return]


def graph(*shape: int, dim: int = -1, along: Along = torch.cumsum) -> Graph:
    return trace(Net(dim, along), (torch.zeros(shape),)).graph


def plan(*shape: int, kind: str = "batch", along: Along = torch.cumsum) -> Plan:
    """A plan for an input of that shape, that takes 1000 bytes, 100 of them all step long."""
    own = graph(*shape, along=along)
    program = force_kinds(own, Dims(own, find_atoms(own), Mesh((2,))), [kind])
    known = plan_of(program, Pipeline())
    return replace(known, graph=fingerprint_of(own), peak_bytes=1000, state_bytes=100)


def test_a_plan_is_kept_for_other_sizes_and_says_so() -> None:
    known = plan(4, 5, 6)
    for shape in ((4, 7, 6), (7, 5, 6), (2, 1, 6)):
        other = graph(*shape)
        found = resized(other, [known], CLUSTER, Request())
        assert found is not None and found.program is known.program
        assert found.graph == fingerprint_of(other) and found.notes == (RESIZED,)
        again = resized(graph(6, 5, 6), [found], CLUSTER, Request())
        assert again is not None and again.notes == (RESIZED,)
        assert kept(other, [known]) is None


def test_a_plan_is_not_kept_where_a_rank_would_have_no_rows() -> None:
    assert resized(graph(1, 5, 6), [plan(4, 5, 6)], CLUSTER, Request()) is None


def test_a_plan_is_not_kept_for_another_model() -> None:
    other = trace(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), (torch.zeros(4, 5, 6),)).graph
    assert resized(other, [plan(4, 5, 6)], CLUSTER, Request()) is None


def test_a_plan_is_not_kept_where_an_operator_no_longer_offers_what_it_does() -> None:
    known = [plan(4, 5, 6, along=torch.cumprod)]
    assert resized(graph(4, 5, 6, dim=1, along=torch.cumprod), known, CLUSTER, Request()) is not None
    assert resized(graph(4, 5, 6, dim=0, along=torch.cumprod), known, CLUSTER, Request()) is None


def test_what_is_longer_must_fit_into_memory() -> None:
    def found(cap: int, length: int) -> Plan | None:
        known = replace(plan(4, 5, 6), memory_cap=cap)
        return resized(graph(4, length, 6), [known], CLUSTER, Request())

    assert found(1000, 4) is not None, "what is shorter fits"
    exact = found(1 << 30, 500)
    assert exact is not None and exact.peak_bytes == 1000, "far from the cap nothing is replayed"
    # 2 x 500 rows of 6 + 8 + 8 + 4 floats are kept, at least: more than 50 kB.
    assert found(50_000, 500) is None
    near = found(200_000, 500)
    assert near is not None and 50_000 < near.peak_bytes < 200_000


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        out: Tensor = self.heads[which](x)
        return out


def test_a_plan_is_not_kept_where_another_weight_is_used_that_lies_otherwise() -> None:
    first, second = (trace(Heads(), (torch.zeros(4, 6), which)).graph for which in range(2))
    program = force_kinds(first, Dims(first, find_atoms(first), Mesh((2,))), ["filter"])
    whole = tuple(Replicate() for _ in program.mesh.shape)
    unused = {item.name: whole for item in first.inputs if "heads_1" in item.name}
    program = replace(program, inputs={**program.inputs, **unused})
    known = replace(plan_of(program, Pipeline()), graph=fingerprint_of(first))
    assert unused and resized(first, [known], CLUSTER, Request()) is not None
    assert resized(second, [known], CLUSTER, Request()) is None
