"""What forward asks of its inputs is answered by the call, remembered, and compared at later calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace.export import Traced, trace
from autopar.trace.reads.attribute_reads import Reads, recording
from autopar.trace.values.input_values import changed

X = torch.randn(4, 6)
MASK, NONE = torch.tensor([True, False, False, True]), torch.zeros(4, dtype=torch.bool)
LENGTHS, LONGER = torch.tensor([2, 1, 3, 1]), torch.tensor([2, 1, 4, 1])


class Asks(nn.Module):
    """A linear layer, and whatever forward does with its output and another input."""

    def __init__(self, then: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(6, 6), then

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.then(self.layer(x), other)


def _masked(h: Tensor, mask: Tensor) -> Tensor:
    return h.masked_fill(mask[:, None], 0.0) if mask.any() else h


def _narrowed(h: Tensor, lengths: Tensor) -> Tensor:
    return h[:, : int((lengths + 0).max())]


def _packed(h: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat([h[i, :n] for i, n in enumerate(lengths.tolist())])


def _alike(h: Tensor, other: Tensor) -> Tensor:
    return h if torch.equal(other, other.sort().values) else h * 2


def _halves(h: Tensor, other: Tensor) -> Tensor:
    return h * 2 if other.chunk(2)[1].sum().item() > 1 else h


def _recorded(then: Callable[[Tensor, Tensor], Tensor], other: Tensor) -> tuple[Traced, Reads]:
    with recording() as reads:
        return trace(Asks(then), (X, other)), reads


@pytest.mark.parametrize(
    ("then", "one", "alike", "another"),
    [
        (_masked, MASK, ~MASK, NONE),
        (_masked, NONE, NONE.clone(), MASK),
        (_narrowed, LENGTHS, LENGTHS.flip(0), LONGER),
        (_packed, LENGTHS, LENGTHS.clone(), LONGER),
        (_alike, torch.arange(4), torch.arange(4) * 2, torch.arange(4).flip(0)),
        (_halves, torch.tensor([9, 9, 1, 1]), torch.tensor([0, 0, 2, 0]), torch.tensor([9, 9, 0, 1])),
    ],
)
def test_a_decision_holds_for_inputs_that_answer_alike(
    then: Any, one: Tensor, alike: Tensor, another: Tensor
) -> None:
    traced, reads = _recorded(then, one)
    assert changed(reads.decisions, (X, one)) is None
    assert changed(reads.decisions, (X, alike)) is None
    decision = changed(reads.decisions, (X, another))
    assert decision is not None and "test_input_values.py" in decision.line
    assert traced.graph.decided_by is not None


@pytest.mark.parametrize(("mask", "filled"), [(MASK, 1), (NONE, 0)])
def test_the_graph_is_that_of_the_answer(mask: Tensor, filled: int) -> None:
    traced, _ = _recorded(_masked, mask)
    assert sum("masked_fill" in str(item.target) for item in traced.graph.operators) == filled


def test_a_model_that_asks_nothing_decides_nothing() -> None:
    traced, reads = _recorded(lambda h, other: h + other.sum(), MASK)
    assert traced.graph.decided_by is None and not reads.decisions


def test_a_loss_may_ask_too() -> None:
    def loss(output: Tensor, mask: Tensor) -> Tensor:
        return output[:2].sum() if mask.all() else output.sum()

    with recording() as reads:
        traced = trace(nn.Linear(6, 6), (X, MASK), loss_fn=loss)
    assert traced.graph.decided_by is not None
    assert changed(reads.decisions, (X, torch.ones(4, dtype=torch.bool))) is not None


@pytest.mark.parametrize(
    "then",
    [
        lambda h, _: h * 2 if h.max() > 0 else h,  # follows from parameters
        lambda h, other: h * other.float().mean().item(),  # hardly two batches have it in common
        lambda h, other: h if F.dropout(other.float()).any() else h * 2,  # random
    ],
)
def test_what_no_other_batch_would_answer_alike_is_refused(then: Any) -> None:
    with pytest.raises(TraceError, match="depends on (a tensor's )?values"):
        trace(Asks(then), (X, MASK))


def test_what_forward_changes_is_not_answered_by_old_values() -> None:
    def then(h: Tensor, other: Tensor) -> Tensor:
        counts = other + 0
        view = counts[:2]
        counts.add_(1)
        return h if view.sum() > 0 else h * 2

    with pytest.raises(TraceError, match="depends on a tensor's values"):
        trace(Asks(then), (X, LENGTHS))


def test_what_is_written_with_other_values_is_not_answered_by_old_ones() -> None:
    def then(h: Tensor, other: Tensor) -> Tensor:
        counts = other + 0
        counts[:2].copy_(h[0, :2].detach().long())
        return h if counts.sum() > 0 else h * 2

    with pytest.raises(TraceError, match="depends on a tensor's values"):
        trace(Asks(then), (X, LENGTHS))


def _made_like(*size: int, device: torch.device) -> Tensor:
    return torch.zeros(1, device=device).new_ones(size)


def _global(mask: Tensor, far: int) -> Tensor:
    wide = 1.0 - mask[:, None].to(torch.float32)
    wide[:, :, 0] = float(far)
    return wide.flatten(1) > 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "make", [torch.ones, lambda *size, device: torch.zeros(1, device=device).new_ones(size)]
)
@pytest.mark.parametrize("far", [0, 1])
def test_what_follows_from_numbers_alone_is_answered_for_every_call(device: str, make: Any, far: int) -> None:
    """As a mask of ones that a model makes where none is passed, written in places, on any device."""

    def then(h: Tensor, other: Tensor) -> Tensor:
        return h * 2 if _global(make(4, 6, device=other.device), far).any().item() else h

    model = Asks(then).to(device)
    with recording() as reads:
        traced = trace(model, (X.to(device), LENGTHS.to(device)))
    doubled = [item for item in traced.graph.operators if "mul" in str(item.target)]
    assert len(doubled) == far and not reads.decisions and traced.graph.decided_by is None


def test_a_tensor_of_a_list_is_as_the_list_was() -> None:
    def then(h: Tensor, other: Tensor) -> Tensor:
        rows = [1, 2]
        made = torch.tensor(rows)
        rows[0] = 9
        return h * 2 if made.sum() > 3 else h

    assert not any("mul" in str(item.target) for item in _recorded(then, LENGTHS)[0].graph.operators)


@pytest.mark.slow
def test_every_question_has_its_own_answer() -> None:
    def then(h: Tensor, other: Tensor) -> Tensor:
        for count in range(1, 20):
            assert torch.arange(count).tolist() == list(range(count))
            assert torch.arange(count).sum().item() == sum(range(count))
        return h

    assert not _recorded(then, LENGTHS)[1].decisions


def test_inputs_that_forward_writes_are_answered_as_they_are_then() -> None:
    def then(h: Tensor, other: Tensor) -> Tensor:
        last = other.clone()
        last[0] = 9
        return h * 2 if last.max() > 8 and other.max() < 9 else h

    traced, reads = _recorded(then, LENGTHS)
    assert any("mul" in str(item.target) for item in traced.graph.operators)
    assert (
        changed(reads.decisions, (X, LENGTHS * 9)) is not None
        and changed(reads.decisions, (X, LONGER)) is None
    )


def test_random_numbers_are_as_before() -> None:
    model, state = Asks(_masked), torch.get_rng_state()
    trace(model, (X, MASK))
    assert torch.equal(state, torch.get_rng_state())
