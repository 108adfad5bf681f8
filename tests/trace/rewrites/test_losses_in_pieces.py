"""Last products and their losses become one operator where that changes nothing that anyone sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.loss_pieces import LossPieces
from autopar.core.mesh import Mesh
from autopar.planning.asked.request import Request
from autopar.proof.check import check
from autopar.trace.export import trace
from autopar.trace.forms.linear_loss import LINEAR_LOSS
from autopar.trace.target import Target
from costdb.database import Database
from tests.ops.test_split_losses import WORDS, following, tokens_and_labels

IGNORED = -100
Loss = Callable[[Tensor, Tensor], Tensor]


def padded_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers has it: logits in 32 bits, labels that are shifted."""
    return F.cross_entropy(logits.float().view(-1, WORDS), following(labels).view(-1), ignore_index=IGNORED)


def shifted_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers had it, and smoothed."""
    rows = logits.float()[..., :-1, :].contiguous().view(-1, WORDS)
    return F.cross_entropy(rows, labels[..., 1:].contiguous().view(-1), label_smoothing=0.1)


def by_count(logits: Tensor, labels: Tensor) -> Tensor:
    wanted = following(labels)
    total = F.cross_entropy(logits.view(-1, WORDS), wanted.view(-1), reduction="sum")
    return total / (wanted != IGNORED).sum()


def scaled(logits: Tensor, labels: Tensor) -> Tensor:
    return padded_labels(logits * 0.5, labels)


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return padded_labels(logits.tanh(), labels)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), following(labels).view(-1), torch.ones(WORDS))


def each(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.view(-1, WORDS), following(labels).view(-1), reduction="none")
    return losses.mean()


def with_z(logits: Tensor, labels: Tensor) -> Tensor:
    return padded_labels(logits, labels) + logits.logsumexp(-1).square().mean()


def rounded(logits: Tensor, labels: Tensor) -> Tensor:
    return padded_labels(logits.bfloat16(), labels)


def of_other_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """Classes are not the product's columns."""
    return F.cross_entropy(logits.view(WORDS, -1).mT, following(labels).view(-1))


class Model(nn.Module):
    """A language model; with `returns` its logits leave beside the loss."""

    def __init__(
        self, loss: Loss, *, returns: bool = False, tied: bool = False, biased: bool = False
    ) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=biased)
        self.loss, self.returns = loss, returns
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor | dict[str, Tensor]:
        logits = self.head(self.embedding(tokens).tanh())
        loss = self.loss(logits, labels)
        return {"loss": loss, "logits": logits} if self.returns else loss


def count(model: nn.Module, *, alone: bool = False) -> int:
    """Losses in pieces in the graph of a model; `alone`, without outputs beside the loss."""
    traced = trace(model, tokens_and_labels(), in_pieces=True)
    graph = (traced.loss_alone() if alone else traced).graph
    return sum(item.target is LINEAR_LOSS for item in graph.operators)


@pytest.mark.parametrize("loss", [padded_labels, shifted_logits, by_count])
def test_a_loss_of_rows_that_nobody_else_reads_is_in_pieces(loss: Loss) -> None:
    assert count(Model(loss)) == 1


@pytest.mark.parametrize("loss", [scaled, capped, weighted, each, with_z, rounded, of_other_rows])
def test_what_else_happens_to_logits_keeps_them_whole(loss: Loss) -> None:
    assert count(Model(loss)) == 0


def test_logits_that_leave_are_whole_unless_the_loss_is_wanted_alone() -> None:
    model = Model(padded_labels, returns=True)
    assert (count(model), count(model, alone=True)) == (0, 1)


@pytest.mark.parametrize(
    ("mesh", "stages", "micro_batches"), [(Mesh((2,)), 1, 1), (Mesh((1,)), 2, 2), (Mesh((1,)), 1, 2)]
)
@pytest.mark.parametrize(
    "model",
    [
        Model(padded_labels, biased=True),
        Model(shifted_logits, tied=True),
        Model(by_count),
        Model(padded_labels, returns=True),
    ],
    ids=["padded", "shifted", "by count", "returned"],
)
def test_losses_in_pieces_are_the_serial_ones(
    model: nn.Module, mesh: Mesh, stages: int, micro_batches: int
) -> None:
    asked = Request(
        mesh=mesh,
        measure=False,
        alternatives=False,
        pipeline_ranks=stages,
        micro_batches=micro_batches,
        loss_pieces=LossPieces.ALL,
    )
    target = Target(model, tokens_and_labels(), {}, None, "")
    with Database.in_memory(autopar.__file__) as database:
        cluster = ClusterSpec.local(mesh.num_devices * stages)
        report = check(target, cluster, asked, steps=2, processes=False, database=database)
    assert report.passed, report


def test_a_plan_says_where_no_loss_can_be_in_pieces() -> None:
    said = []
    for loss in (padded_labels, capped):
        model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))
        tokens, labels = tokens_and_labels()
        made = autopar.plan(
            model, ClusterSpec.local(2), (tokens, labels), loss_fn=loss, loss_pieces="all", measure=False
        )
        said.append(any("no loss is in pieces" in note for note in made.notes))
    assert said == [False, True]
