"""Losses of a language model whose sequence is split, or its vocabulary, or both, are the serial ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism, Pins
from autopar.core.mesh import Mesh
from autopar.planning.asked.request import Request
from autopar.proof.check import Report, check
from autopar.sharding.strategies import dims_of, strategies_of
from autopar.solve.choices.kinds import Kinds
from autopar.trace.target import Target
from costdb.database import Database
from tests.forced_programs import traced

WORDS = 17
IGNORED = -100
BATCH, DOMAIN, MODEL = Parallelism.BATCH, Parallelism.DOMAIN, Parallelism.MODEL


def following(labels: Tensor) -> Tensor:
    """The label of the next token, as transformers shifts them."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])


def flat(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), following(labels).view(-1))


def by_count(logits: Tensor, labels: Tensor) -> Tensor:
    wanted = following(labels)
    total = F.cross_entropy(logits.view(-1, WORDS), wanted.view(-1), reduction="sum")
    return total / (wanted != IGNORED).sum()


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, WORDS, dtype=logits.dtype)
    wanted = following(labels).view(-1)
    return F.cross_entropy(logits.view(-1, WORDS), wanted, weight, label_smoothing=0.1)


def taught(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), logits.detach().roll(1, 0).softmax(-1).transpose(1, 2))


def with_z(logits: Tensor, labels: Tensor) -> Tensor:
    kept = following(labels) != IGNORED
    z = (logits.logsumexp(-1).square() * kept).sum() / kept.sum()
    return flat(logits, labels) + 0.01 * z


def of_picked_words(logits: Tensor, labels: Tensor) -> Tensor:
    wanted = following(labels)
    kept = wanted != IGNORED
    words = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(words * kept).sum() / kept.sum()


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1), reduction="none")
    weights = torch.linspace(0.5, 1, losses.numel(), dtype=losses.dtype)
    return (losses * weights).sum() / weights.sum()


LOSSES = [shifted, flat, by_count, smoothed, taught, with_z, of_picked_words, weighted]
Loss = Callable[[Tensor, Tensor], Tensor]


class Words(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=False)
        self.loss = loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.embedding(tokens).tanh()), labels)


def tokens_and_labels() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, WORDS, (2, 13))
    labels[0, 3:6] = labels[1, -5:] = IGNORED  # more on one rank than on others
    return torch.randint(0, WORDS, (2, 13)), labels


def split(model: nn.Module, inputs: tuple[Tensor, ...], mesh: Mesh, wanted: tuple[Parallelism, ...]) -> Pins:
    """Every operator split as is wanted on each axis, or whole where it can't be."""
    graph, _ = traced(model, *inputs)
    dims = dims_of(graph, mesh)
    kinds, pins = Kinds(graph, dims), {}
    for item in graph.operators:
        ways = [list(zip(wanted, way, strict=True)) for way in strategies_of(item, dims)]
        fit = [
            [option.factor if kind.has(kinds.of(item, option)) else None for kind, option in way]
            for way in ways
            if all(not option.shards or kind.has(kinds.of(item, option)) for kind, option in way)
        ]
        pins[item.name] = max(fit, key=lambda way: sum(factor is not None for factor in way))
    return pins


def proved(loss: Loss, mesh: Mesh, wanted: tuple[Parallelism, ...]) -> tuple[Pins, Report]:
    model = Words(loss)
    pins = split(model, tokens_and_labels(), mesh, wanted)
    target = Target(model, tokens_and_labels(), {}, lambda y: y, "")
    asked = Request(measure=False, alternatives=False, pins=pins, mesh=mesh)
    with Database.in_memory(autopar.__file__) as database:
        cluster = ClusterSpec.local(mesh.num_devices)
        return pins, check(target, cluster, asked, steps=2, processes=False, database=database)


def splitting(pins: Pins, name: str) -> list[int]:
    """The axes on which operators of that name are split."""
    return sorted({axis for key, way in pins.items() if name in key for axis, each in enumerate(way) if each})


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_over_a_split_sequence_is_serial(loss: Loss, ranks: int) -> None:
    pins, report = proved(loss, Mesh((ranks,)), (DOMAIN,))
    assert report.passed and splitting(pins, "softmax" if loss is of_picked_words else "entropy"), report


@pytest.mark.parametrize(
    "kinds",
    [
        (DOMAIN, MODEL),
        pytest.param((BATCH, DOMAIN), marks=pytest.mark.slow),
        pytest.param((DOMAIN, DOMAIN), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("loss", LOSSES)
def test_sequence_and_vocabulary_are_split_at_once(loss: Loss, kinds: tuple[Parallelism, ...]) -> None:
    pins, report = proved(loss, Mesh((2, 2)), kinds)
    for name in ("gather",) if loss is of_picked_words else ("entropy",):
        assert splitting(pins, name) == [0, 1], pins
    assert report.passed, report
