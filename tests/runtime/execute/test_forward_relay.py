"""Calls of a module with stages: the serial outputs on every rank, and no backward from them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import InputError
from tests.pool import Pool
from tests.runtime.execute.test_staged_program import (
    EXACT,
    Net,
    accumulate,
    batch,
    gap,
    on_ranks,
    parallel,
    step,
)

Pools = Callable[[int], Pool]


class Both(Net):
    """With targets the loss, without them what was predicted and what the first stage found."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | dict[str, Tensor]:  # type: ignore[override]
        skip = torch.tanh(self.first(x))
        h = torch.tanh(self.middle(self.norm(skip)))
        h = torch.tanh(self.deep(self.dropout(h)))
        out = self.last(h + skip)
        return {"out": out, "sign": out > 0, "early": skip} if y is None else F.mse_loss(out, y)


def make() -> Both:
    torch.manual_seed(0)
    return Both().double()


def _called(case: str, *, training: bool) -> None:
    serial, ours = make().train(training), parallel(case, make())
    ours.prepare(*batch())
    ours.train(training)
    x, y = batch(7)  # no multiple of the micro-batches, which a call doesn't have
    for args in ((x,), (x, y)):
        with torch.no_grad():
            torch.manual_seed(3)
            wanted = serial(*args)
            torch.manual_seed(3)
            found = ours(*args)
        if isinstance(found, Tensor):
            assert gap(found, wanted) < EXACT and not found.requires_grad
            continue
        assert gap(found["out"], wanted["out"]) < EXACT and gap(found["early"], wanted["early"]) < EXACT
        assert torch.equal(found["sign"], wanted["sign"]) and found["sign"].dtype == torch.bool
    assert gap(ours.state_dict(), serial.state_dict()) < EXACT  # running statistics too
    serial.train(), ours.train()
    assert gap(step(ours, *batch(), seed=4), accumulate(serial, *batch(), seed=4)) < EXACT
    norms = [float(ours.clip_grad_norm_(1.0)), float(nn.utils.clip_grad_norm_(serial.parameters(), 1.0))]
    assert norms[0] == pytest.approx(norms[1])


def _training(case: str) -> None:
    _called(case, training=True)


def _evaluating(case: str) -> None:
    _called(case, training=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1f1b", pytest.param("zbv x filter", marks=pytest.mark.long)])
def test_a_call_gives_the_serial_outputs_of_the_whole_batch(case: str, pools: Pools) -> None:
    on_ranks(pools, case, _training)
    on_ranks(pools, case, _evaluating)


def _backward(case: str) -> None:
    ours = parallel(case, make())  # the first call places the parameters for steps
    loss = ours(*batch())
    with pytest.raises(InputError, match=r"loss = model\.train_step\(\*batch\)"):
        loss.backward()
    with pytest.raises(InputError, match="calls keep nothing for backward"):
        ours(batch()[0])["out"].sum().backward()
    x = batch()[0].requires_grad_()
    with pytest.raises(InputError, match="calls keep nothing for backward"):
        torch.autograd.grad(ours(x)["out"].sum(), x)
    assert all(item.grad is None for item in ours.parameters())
    ours.train_step(*batch())
    norm = float(ours.clip_grad_norm_(1e9))
    with torch.no_grad():
        ours(*batch())
    assert float(ours.clip_grad_norm_(1e9)) == pytest.approx(norm), "still over all stages"
    with pytest.raises(InputError, match="global on every rank"):
        _ = ours.output_parts


def test_backward_from_a_call_names_train_step(pools: Pools) -> None:
    on_ranks(pools, "1f1b", _backward)


def _solved() -> str:
    """By the solver's own plans: the schedule is chosen, and later programs keep to it."""
    serial = make().eval()
    ours = autopar.parallelize(
        make(),
        autopar.ClusterSpec.local(2),
        batch(),
        stages=2,
        micro_batches=4,
        schedule="auto",
        measure=False,
        mesh="1",
    )
    chosen = ours.plan.pipeline
    ours.eval()
    with torch.no_grad():
        assert gap(ours(batch()[0])["out"], serial(batch()[0])["out"]) < EXACT
        assert gap(ours.eval_step(*batch()), serial(*batch())) < EXACT
    assert ours.plan.pipeline.schedule is chosen.schedule
    with torch.no_grad():
        ours(*batch())
    assert ours.plan.pipeline.micro_batches == 1
    return str(ours)


def test_the_solvers_plan_of_a_call_keeps_the_stages(pools: Pools) -> None:
    for stage, text in enumerate(pools(2).run(_solved)):
        assert "the stages run one after the other" in text and f"# stage {stage}" in text
