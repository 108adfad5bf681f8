"""Rows that the example's routers send to each expert are counted, and price plans where nobody says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.cluster import ClusterSpec
from autopar.core.costs import IMBALANCE
from autopar.core.mesh import Mesh
from autopar.planning import router_loads
from autopar.planning.asked.request import Request
from autopar.planning.planner import Planner
from autopar.planning.router_loads import with_router_loads
from autopar.sharding.atoms import fullest_share
from autopar.sharding.strategies import dims_of
from autopar.trace.experts.routed_experts import ROUTED_EXPERTS
from autopar.trace.export import Traced, trace
from tests.ops.test_expert_forms import CHOSEN, EXPERTS, WIDTH, Loop

X = torch.randn(5, 3, WIDTH, generator=torch.Generator().manual_seed(3))


def net(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), Loop(), Loop())


def traced(model: nn.Module) -> Traced:
    return trace(model, (X,))


def chosen(loop: Loop, x: Tensor) -> tuple[int, ...]:
    keys = loop.gate(x).softmax(-1).topk(CHOSEN, -1)[1]
    return tuple(torch.bincount(keys.flatten(), minlength=EXPERTS).tolist())


def test_rows_are_counted_as_eager_routers_choose() -> None:
    model = net()
    first, _, one, other = model
    assert isinstance(one, Loop) and isinstance(other, Loop)
    hidden = first(X)
    wanted = (chosen(one, hidden), chosen(other, one(hidden)))
    assert with_router_loads(traced(model), model).graph.loads == wanted
    assert all(sum(rows) == CHOSEN * 15 for rows in wanted) and len(set(wanted)) == 2


def test_the_fullest_rank_is_that_of_the_fullest_router() -> None:
    assert fullest_share([(9, 4, 1, 2, 7, 1)], 3) == 13 * 3 / 24
    assert fullest_share([(9, 4, 1, 2, 7, 1)], 4) == 13 * 4 / 24  # 2, 2, 1 and 1 experts
    assert fullest_share([(9, 4, 1, 2, 7, 1), (0, 0, 0, 0, 0, 5)], 3) == 3
    assert fullest_share([(9, 4), (0, 0, 0)], 3) is None


def test_counting_draws_none_of_the_users_numbers() -> None:
    model = net(dropout=0.5)
    call, state = traced(model), torch.get_rng_state()
    assert with_router_loads(call, model).graph.loads
    assert torch.equal(torch.get_rng_state(), state)


def test_counting_leaves_running_statistics_as_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), *net())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert with_router_loads(traced(model), model).graph.loads
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_nothing_is_counted_of_what_is_large_or_has_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    call = traced(model)
    assert not with_router_loads(call, net().to("meta")).graph.loads
    monkeypatch.setattr(router_loads, "MOST_OPERATIONS", 100)
    assert not with_router_loads(call, model).graph.loads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_", "source"),
    [
        (Request(mesh=Mesh((3,))), "as measured on the example"),
        (Request(mesh=Mesh((3,)), measure=False), "--imbalance"),
        (Request(mesh=Mesh((3,)), imbalance=1.7), "--imbalance"),
    ],
)
def test_a_plan_says_what_it_takes_the_fullest_rank_to_run_and_whence(request_: Request, source: str) -> None:
    model = net()
    names = [item.name for item in traced(model).graph.operators if item.target is ROUTED_EXPERTS]
    request_ = replace(request_, pins=dict.fromkeys(names, ("own",)), measure_seconds=1.0)
    plan = Planner(ClusterSpec.local(3), request_, nn.MSELoss()).find_plan(model, (X, X), {}, None)
    counted = fullest_share(with_router_loads(traced(model), model).graph.loads, 3)
    share = request_.imbalance or (counted if request_.measure else IMBALANCE)
    assert (
        f"the fullest rank of experts is expected to run {share:.3g} of an even share ({source})"
        in plan.notes
    )


def test_prices_follow_what_was_counted() -> None:
    model = net()
    graph = with_router_loads(traced(model), model).graph
    assert dims_of(graph, Mesh((2,))).fullest(2) == fullest_share(graph.loads, 2)
    assert dims_of(graph, Mesh((2,)), 1.5).fullest(2) == 1.5
    assert dims_of(traced(model).graph, Mesh((2,))).fullest(2) == IMBALANCE
