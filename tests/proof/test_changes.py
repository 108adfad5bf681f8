"""`verify` changes what forward reads, and tells a change that a program wouldn't follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism
from autopar.planning.asked.request import Request
from autopar.proof.check import Report, check
from autopar.proof.verdict import Record
from autopar.proof.verify import train_eagerly
from autopar.trace.target import Target


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)
        self.tau, self.use, self.epoch, self.scales = 0.7, False, 3, [1.0, 2.0]

    def read_tau(self) -> Any:
        return self.tau

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.fc(x)) * self.read_tau() * self.scales[1]
        return h.relu() if self.use else h


class Hiding(Block):
    def read_tau(self) -> Any:
        return object.__getattribute__(self, "tau")  # where nobody watches


def report_of(model: nn.Module) -> Report:
    target = Target(model, (torch.linspace(-1, 1, 48).reshape(8, 6),), {}, lambda y: y.square().mean(), "")
    request = Request(force=Parallelism.BATCH, measure=False)
    return check(target, ClusterSpec.local(2), request, steps=1, changes=9)


def test_every_change_of_what_forward_reads_is_followed_and_taken_back() -> None:
    torch.manual_seed(0)
    model = Block()
    before = [{**vars(module)} for module in model.modules()]
    report = report_of(model)
    tried = report.changes_tried
    assert tried is not None and report.passed and tried.passed
    # tau, use, p, inplace, scales' two; epoch and others that nobody reads; three of modes and hooks
    assert tried.tried >= 10 and tried.refused == ("a hook on fc",)
    assert f"changed     {tried.tried} of {tried.there}" in str(report)
    assert report.as_dict()["state_changes"]["wrong"] == []
    assert [{**vars(module)} for module in model.modules()] == before


@pytest.mark.slow
def test_a_change_that_no_guard_notices_is_told() -> None:
    torch.manual_seed(0)
    report = report_of(Hiding())
    assert report.verdict.passed and not report.passed
    assert report.changes_tried is not None
    (wrong,) = report.changes_tried.wrong
    assert wrong == "tau 0.7 -> 0.44999999999999996, which no guard notices"
    assert "DIFFERS from eager training for tau" in str(report)


def test_eager_training_with_a_change_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[int]()

    def train(*args: Any, **kwargs: Any) -> Record:
        taken.append(kwargs["steps"])
        return train_eagerly(*args, **kwargs)

    monkeypatch.setattr("autopar.proof.verify.train_eagerly", train)
    torch.manual_seed(0)
    changes = report_of(Block()).changes_tried
    assert changes is not None and changes.tried > 1
    assert len(taken) == 1  # of the proof; each change trains by itself, once, and hands that on
