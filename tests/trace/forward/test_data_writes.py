"""Writes by `.data`, and to frozen parameters: split exactly, or refused where backward or another name sees
them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism
from autopar.core.graph import InputKind
from autopar.core.mesh import Mesh
from autopar.errors import TraceError
from autopar.planning.asked.request import Request
from autopar.proof.check import check
from autopar.trace.export import trace
from autopar.trace.target import Target
from costdb.database import Database

Update = Callable[["Twins"], None]
TWO = ClusterSpec.local(2)


class Twins(nn.Module):
    """A layer that learns, a frozen one that follows it, and a buffer."""

    mean: Tensor
    kept: Tensor

    def __init__(self, update: Update, after: Update = lambda _: None) -> None:
        super().__init__()
        self.learner, self.update, self.after = nn.Linear(6, 6), update, after
        self.teacher = copy.deepcopy(self.learner).requires_grad_(False)
        self.register_buffer("mean", torch.ones(6))

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.learner.parameters(), self.teacher.parameters(), strict=True))

    def forward(self, x: Tensor) -> Tensor:
        self.update(self)
        with torch.no_grad():
            target = self.teacher(x)
        y = self.learner(x) * self.mean
        self.after(self)
        return F.mse_loss(y, target + 1)


def in_place(twins: Twins) -> None:
    with torch.no_grad():
        for new, old in twins.pairs():
            old.mul_(0.9).add_(new, alpha=0.1)


def by_rows(twins: Twins) -> None:
    with torch.no_grad():
        twins.teacher.weight[1:3] = twins.learner.weight[1:3]


def by_assignment(twins: Twins) -> None:
    for new, old in twins.pairs():
        old.data = old.data * 0.9 + new.data * 0.1


def by_copies(twins: Twins) -> None:
    for new, old in twins.pairs():
        old.data = new.data.clone()


def by_adding(twins: Twins) -> None:
    twins.teacher.bias.data += twins.learner.bias.data
    twins.teacher.weight.data.mul_(0.9)


def in_turns(twins: Twins) -> None:
    with torch.no_grad():
        twins.teacher.bias.lerp_(twins.learner.bias, 0.1)
    twins.teacher.bias.data = twins.teacher.bias.data * 0.9
    twins.teacher.bias.data += 1


def of_a_buffer(twins: Twins) -> None:
    twins.mean.data = twins.mean.data * 0.9 + twins.learner.bias.data * 0.1


def by_initialising(twins: Twins) -> None:
    nn.init.constant_(twins.teacher.bias.data, 0.5)
    nn.init.ones_(twins.teacher.weight)


def by_state_dict(twins: Twins) -> None:
    new = twins.learner.state_dict()
    twins.teacher.load_state_dict(
        {name: 0.9 * old + 0.1 * new[name] for name, old in twins.teacher.state_dict().items()}
    )


BATCH, FILTER = Parallelism.BATCH, Parallelism.FILTER


@pytest.mark.parametrize(
    ("update", "force"),
    [
        (in_place, FILTER),
        (by_rows, FILTER),
        (by_assignment, BATCH),
        (by_copies, FILTER),
        (by_adding, BATCH),
        (in_turns, FILTER),
        (of_a_buffer, FILTER),
        (by_initialising, BATCH),
        (by_state_dict, BATCH),
    ],
)
def test_writes_to_what_does_not_learn_are_the_serial_ones(update: Update, force: Parallelism) -> None:
    torch.manual_seed(0)
    target = Target(Twins(update), (torch.randn(8, 6),), {}, None, "")
    request = Request(measure=False, alternatives=False, force=force, mesh=Mesh((2,)))
    with Database.in_memory(autopar.__file__) as database:
        report = check(target, TWO, request, steps=3, processes=False, database=database)
    assert report.passed, str(report)


def test_a_parameter_that_forward_writes_is_state_of_the_program() -> None:
    graph = trace(Twins(in_place), (torch.randn(8, 6),)).graph
    kinds = {item.target: item.kind for item in graph.inputs}
    assert kinds["teacher.weight"] is kinds["teacher.bias"] is InputKind.BUFFER
    assert kinds["learner.weight"] is InputKind.PARAMETER
    assert {name for name, _ in graph.writes} >= {
        item.name for item in graph.inputs if item.target.startswith("teacher.")
    }


def of_what_learns(twins: Twins) -> None:
    twins.learner.bias.data = twins.learner.bias.data * 0.9


def of_one_memory(twins: Twins) -> None:
    twins.teacher.bias.data = twins.learner.bias.data


def of_a_name(twins: Twins) -> None:
    values = twins.teacher.bias.data * 0.9
    twins.teacher.bias.data = values
    values.add_(1)


def of_an_attribute(twins: Twins) -> None:
    twins.kept = twins.teacher.bias.data * 0.9
    twins.teacher.bias.data = twins.kept


def of_what_it_was(twins: Twins) -> None:
    before = twins.teacher.bias.data
    twins.teacher.bias.data = before * 2
    twins.teacher.bias.data = before


def of_a_view(twins: Twins) -> None:
    twins.teacher.weight[0].data = twins.teacher.weight[1] * 2


def of_another_dtype(twins: Twins) -> None:
    twins.teacher.bias.data = twins.teacher.bias.data.double() * 2


@pytest.mark.parametrize(
    "update",
    [of_what_learns, of_one_memory, of_a_name, of_an_attribute, of_what_it_was, of_a_view, of_another_dtype],
)
def test_an_assignment_to_data_that_is_no_write_is_refused_at_its_line(update: Update) -> None:
    with pytest.raises(TraceError, match=r"tensor\.data = .*copy_") as refusal:
        trace(Twins(update), (torch.randn(8, 6),))
    first = update.__code__.co_firstlineno
    assert int(refusal.value.where.split(":")[1]) in range(first, first + 4)


def scaled(twins: Twins) -> None:
    twins.mean.data.mul_(0.9)


def initialised(twins: Twins) -> None:
    nn.init.constant_(twins.mean.data, 0.5)


def written_out(twins: Twins) -> None:
    torch.mul(twins.mean.data, 0.9, out=twins.mean.data)


def rectified(twins: Twins) -> None:
    F.relu(twins.mean.data, inplace=True)


def assigned(twins: Twins) -> None:
    twins.mean.data = twins.mean * 0.9


@pytest.mark.parametrize("after", [scaled, assigned, initialised, written_out, rectified])
def test_a_write_by_data_to_what_backward_reads_is_refused(after: Update) -> None:
    with pytest.raises(TraceError, match=r"test_data_writes\.py:\d+: .*what backward reads"):
        trace(Twins(lambda _: None, after), (torch.randn(8, 6),))


class Given(Twins):
    """Gives what it computes, without a loss."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.learner(x) * self.mean
        self.after(self)
        return y


def test_so_it_is_where_the_loss_comes_later() -> None:
    with pytest.raises(TraceError, match=r"test_data_writes\.py:\d+: .*what backward reads"):
        trace(Given(lambda _: None, scaled), (torch.randn(8, 6),))


def test_a_write_with_gradients_to_a_frozen_parameter_is_refused() -> None:
    def learning(twins: Twins) -> None:
        for new, old in twins.pairs():
            old.mul_(0.9).add_(new, alpha=0.1)

    with pytest.raises(TraceError, match=r"in-place write to parameter teacher\.weight"):
        trace(Twins(learning), (torch.randn(8, 6),))


class Codes(nn.Module):
    """Nearest codes, which are averages; the distances, whose backward would read them, lead to no loss."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(4, 6)
        self.register_buffer("codes", torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        nearest = torch.cdist(z, self.codes).argmin(-1)
        chosen = self.codes[nearest]
        kept = F.one_hot(nearest, 5).to(z.dtype)
        self.codes.data.copy_(0.9 * self.codes + 0.1 * (kept.T @ z.detach()))
        y: Tensor = self.decode(z + (chosen - z).detach())
        return F.mse_loss(y, x)


def test_a_write_by_data_to_what_only_lost_gradients_read_is_traced() -> None:
    graph = trace(Codes(), (torch.randn(8, 6),)).graph
    assert [name for name, _ in graph.writes] == ["codes"]
