"""Loops over experts are one chain of products where they are alike; else they are equal all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.core.force import Parallelism
from autopar.errors import ValuesAskedError
from autopar.trace.experts.looped_experts import NOTE
from autopar.trace.experts.routed_experts import ROUTED_EXPERTS
from autopar.trace.export import trace
from autopar.trace.rewrites.routed_products import ROUTED_MM
from tests.ops.test_expert_forms import EXPERTS, HIDDEN, WIDTH, Gated, Loop, Net, proved


class Wider(Loop):
    """One expert has more channels."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[1] = Gated(HIDDEN + 1)


class Frozen(Loop):
    """One expert doesn't learn."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[2].requires_grad_(False)


class Otherwise(Loop):
    """One expert computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[2].down = nn.Sequential(self.experts[2].down, nn.Tanh())  # type: ignore[assignment]


class Scaled(Loop):
    """What a turn has added is scaled before the next."""

    def looped(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            places, turns = torch.where(chosen == number)
            made = made.index_add(0, places, expert(rows[places]) * shares[places, turns, None]) * 1.5
        return made


class Fewer(Loop):
    """Rows may choose one more expert than the loop has, and get nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts[EXPERTS - 1]


class Twice(Loop):
    """One expert has two turns, another none."""

    def looped(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        return super().looped(rows, shares, chosen.clamp(min=1)) + super().looped(rows, shares, chosen % 3)


class AnyTurn(Loop):
    """Masks that say whether any of a row's choices is an expert, which several experts share."""

    def looped(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(-1)
            share = (shares * (chosen == number)).sum(-1)
            made[mask] += expert(rows[mask]) * share[mask, None]
        return made


class WrittenBetween(Loop):
    """`made[i] += rows`, in three steps, with a write in between."""

    def looped(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            places, turns = torch.where(chosen == number)
            own = made[places] + expert(rows[places]) * shares[places, turns, None]
            made.mul_(2)
            made[places] = own
        return made


class Put(Loop):
    """Each row has one expert, and what this makes of it is put in its place."""

    def looped(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mask = chosen[:, 0] == number
            made[mask] = expert(rows[mask]) * shares[mask, :1]
        return made


class PutOverRows(Loop):
    """Where no expert of the loop is chosen first, a row stays as it is."""

    def looped(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        made = rows.clone()
        for number, expert in enumerate(self.experts[:2]):
            mask = chosen[:, 0] == number
            made[mask] = expert(rows[mask]) * shares[mask, :1]
        return made


class Residual(nn.Module):
    """Each layer's value is used twice, so paths double with every layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


class Deep(Loop):
    def __init__(self, layers: int = 40) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Residual(layers) for _ in range(EXPERTS))


class PartlyTied(Loop):
    """One expert has the weights of its first layer in its second as well."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Residual(2) for _ in range(EXPERTS))
        self.experts[1].layers[1] = self.experts[1].layers[0]


def routed(model: nn.Module) -> int:
    graph = trace(model, (torch.randn(4, 3, WIDTH),)).graph
    return sum(item.target is ROUTED_EXPERTS for item in graph.operators)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Wider, Frozen, Otherwise, Scaled, Fewer, AnyTurn, Twice, PartlyTied])
def test_what_is_no_loop_over_equal_experts_is_equal_and_noted(kind: type[Loop]) -> None:
    report = proved(kind, 2, Parallelism.BATCH)
    assert report.passed and routed(Net(kind())) == 0, report
    assert any(NOTE in note for note in report.plan.notes)


def test_two_mixtures_are_two_chains() -> None:
    assert routed(nn.Sequential(Loop(), Loop())) == 2


class Asked(Loop):
    """Turns without rows are left out."""

    def looped(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            places, turns = torch.where(chosen == number)
            if places.numel() == 0:
                continue
            made.index_add_(0, places, expert(rows[places]) * shares[places, turns, None])
        return made


@pytest.mark.parametrize("split", [Parallelism.BATCH, Parallelism.EXPERTS])
def test_rows_that_are_put_in_their_places_are_one_chain(split: Parallelism) -> None:
    report = proved(Put, 2, split)
    assert report.passed and routed(Net(Put())) == 1, report


def test_a_branch_on_numbers_of_rows_is_refused_with_what_does_without() -> None:
    with pytest.raises(ValuesAskedError, match="leave the branch out where no rows change nothing"):
        trace(Asked(), (torch.randn(4, 3, WIDTH),))


@pytest.mark.slow
def test_values_that_are_used_twice_are_looked_at_once() -> None:
    graph = trace(Net(Deep()), (torch.randn(4, 3, WIDTH),)).graph
    assert any(item.target in (ROUTED_MM, ROUTED_EXPERTS) for item in graph.operators)
    assert not any(NOTE in note for note in graph.notes)
