"""Losses run in pieces where a memory cap asks for it, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.api import compare, verify
from autopar.errors import InfeasibleError
from autopar.explaining.asked import AskedPlan
from autopar.explaining.explain import problem_of
from autopar.results.plan.plan import Plan
from autopar.trace.target import Target
from tests.pool import Pool

WORDS, WIDTH = 512, 32
ROOMY, TIGHT = 20_000_000, 4_000_000  # bytes: logits, and what a loss makes of them, are 12 MB on each of two
ONE_STEP = {"stages": 1, "micro_batches": 1}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.inner(self.embedding(tokens)).tanh())
        return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


def case() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    labels = torch.randint(0, WORDS, (16, 256))
    labels[:5, 30:] = -100  # more on one rank than on the other
    return Model(), (torch.randint(0, WORDS, (16, 256)), labels)


def planned(**options: Any) -> Plan:
    model, batch = case()
    cluster, asked = autopar.ClusterSpec.local(2), {"measure": False, "optimizer": "sgd", **options}
    return autopar.plan(model, cluster, batch, **asked)


def is_in_pieces(plan: Plan) -> bool:
    return any("linear_cross_entropy" in layer.op for layer in plan.layers)


@pytest.mark.slow
@pytest.mark.parametrize("options", [ONE_STEP, {}], ids=["one step", "any"])
def test_pieces_are_chosen_where_whole_logits_are_slower_under_a_cap(options: dict[str, Any]) -> None:
    free, tight = planned(memory=ROOMY, **options), planned(memory=TIGHT, **options)
    assert not is_in_pieces(free) and is_in_pieces(tight)
    assert tight.peak_bytes <= TIGHT < free.peak_bytes
    if options:
        with pytest.raises(InfeasibleError, match="memory cap"):
            planned(memory=TIGHT, loss_pieces="none", **options)
    else:
        other = planned(memory=TIGHT, loss_pieces="none")
        assert other.pipeline.micro_batches > 1 and tight.step_seconds < other.step_seconds


def test_pieces_are_taken_by_the_users_word() -> None:
    assert is_in_pieces(planned(loss_pieces="all"))
    assert not is_in_pieces(planned(loss_pieces="none"))


def test_what_explains_a_plan_in_pieces_solves_its_own_graph() -> None:
    options = {"measure": False, "optimizer": "sgd", "memory": TIGHT, **ONE_STEP}
    target = Target(*case(), {}, None, "")
    asked = AskedPlan(target, autopar.ClusterSpec.local(2), options)
    plan = asked.plan()
    problem = problem_of(asked, plan)
    assert {item.name for item in problem.graph.operators} == plan.program.strategies.keys()
    assert is_in_pieces(plan)


def _trained(path: str | None) -> tuple[bool, list[Tensor], list[Tensor]]:
    """Whether the plan has pieces; losses and parameters of two steps, the serial model's and ours."""
    model, batch = case()
    serial = case()[0].double()
    model = model.double()
    plan = {"plan": path} if path else {"measure": False, "quiet": True, "memory": 2 * TIGHT}
    ours = autopar.parallelize(model, autopar.ClusterSpec.local(2), batch, **plan)  # type: ignore[arg-type]
    results = []
    for net in (serial, ours):
        optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
        for _ in range(2):
            optimizer.zero_grad()
            loss = net(*batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        pieces = net is ours and is_in_pieces(ours.plan)  # of training
        with torch.no_grad():
            losses.append(net.eval()(*batch))
        net.train()
        results.append([*losses, *net.state_dict().values()])
    return pieces, results[0], results[1]


@pytest.mark.slow
@pytest.mark.parametrize("saved", [False, True], ids=["searched", "from a file"])
def test_what_runs_in_pieces_is_the_serial_model(
    saved: bool, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    path = None
    if saved:
        model, batch = case()
        cluster, path = autopar.ClusterSpec.local(2), str(tmp_path / "plan.json")
        asked: dict[str, Any] = {"measure": False, "memory": 2 * TIGHT, **ONE_STEP}
        autopar.plan(model.double(), cluster, batch, **asked).save(path)
    for pieces, serial, ours in pools(2).run(_trained, path):
        assert pieces
        for one, other in zip(serial, ours, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=["a batch", "2 micro-batches"])
def test_a_plan_that_is_in_pieces_by_choice_is_verified_as_such(options: dict[str, Any]) -> None:
    report = verify(
        Target(*case(), {}, None, ""),
        autopar.ClusterSpec.local(2),
        steps=2,
        memory=TIGHT // options.get("micro_batches", 1),
        **{**ONE_STEP, **options},
    )
    assert report.passed and is_in_pieces(report.plan)


def test_rows_of_a_comparison_are_in_pieces_where_plans_are() -> None:
    asked = {"measure": False, "optimizer": "sgd", "memory": TIGHT}
    rows = compare(Target(*case(), {}, None, ""), autopar.ClusterSpec.local(2), **asked).rows
    plans = {row.name: row.plan for row in rows if row.plan is not None and row.reason is None}
    assert is_in_pieces(plans["hybrid"]) and is_in_pieces(plans["batch"])


class Logits(nn.Module):
    """Logits that leave, by a matrix that is also the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(60, 8), nn.Linear(8, 60, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


def of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, 60), labels.view(-1))


def test_a_loss_beside_logits_that_leave_is_verified_in_pieces() -> None:
    tokens, labels = (torch.randint(0, 60, (4, 7)) for _ in range(2))
    target = Target(Logits(), (tokens, labels), {}, of_rows, "")
    report = verify(target, autopar.ClusterSpec.local(2), steps=2, loss_pieces="all")
    assert report.passed and is_in_pieces(report.plan)
