"""A batch in parts, and losses of parts that add up to the loss of the batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.graph import Graph
from autopar.errors import InputError
from autopar.trace.export import trace
from autopar.trace.micro_batches import is_sum, loss_notes, loss_weight, mask_seed, reducer_of, split_batch

Loss = Callable[[Tensor, Tensor], Tensor]
SAMPLES, CLASSES = 10, 4


class Net(nn.Module):
    """Every sample on its own, so that a loss of samples is all that joins them."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(3, CLASSES), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y)


def net(loss: Loss) -> Net:
    torch.manual_seed(0)
    return Net(loss).double()


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(SAMPLES, 3).double(), torch.arange(SAMPLES) % CLASSES


def graph_of(loss: Loss) -> Graph:
    return trace(net(loss), tuple(item[:3] for item in data())).graph


def one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, CLASSES).double()


MEANS: dict[str, Loss] = {
    "cross entropy": F.cross_entropy,
    "nll": lambda z, y: F.nll_loss(z.log_softmax(1), y),
    "mse": lambda z, y: F.mse_loss(z, one_hot(y)),
    "mean": lambda z, y: (z - one_hot(y)).abs().mean(),
    "mean of sums": lambda z, y: (z - one_hot(y)).square().sum(1).mean(),
    "sum of means over samples": lambda z, y: (z - one_hot(y)).square().mean(0).sum(),
    "negated mean": lambda z, y: -z.gather(1, y[:, None]).mean(),
    "sum divided by the number of samples": lambda z, y: z.square().sum() / len(z),
    "scaled mean": lambda z, y: 0.5 * F.cross_entropy(z, y),
    "two means": lambda z, y: F.cross_entropy(z, y) + 0.1 * z.square().mean(),
    "binary": lambda z, y: F.binary_cross_entropy_with_logits(z, one_hot(y)),
}
SUMS: dict[str, Loss] = {
    "cross entropy": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "nll": lambda z, y: F.nll_loss(z.log_softmax(1), y, reduction="sum"),
    "mse": lambda z, y: F.mse_loss(z, one_hot(y), reduction="sum"),
    "sum": lambda z, y: (z - one_hot(y)).square().sum(),
    "sum of means of features": lambda z, y: (z - one_hot(y)).square().mean(1).sum(),
    "negated sum": lambda z, y: -z.gather(1, y[:, None]).sum(),
    "labels left out": lambda z, y: F.cross_entropy(z, y, reduction="sum", ignore_index=2),
    "class weights": lambda z, y: F.cross_entropy(z, y, torch.arange(1.0, 5.0).double(), reduction="sum"),
}
RELATIVE: dict[str, Loss] = {
    "labels left out": lambda z, y: F.cross_entropy(z, y, ignore_index=2),
    "class weights": lambda z, y: F.cross_entropy(z, y, torch.arange(1.0, 5.0).double()),
}


# -- parts ----------------------------------------------------------------------------------------


def test_longer_parts_come_first_and_what_is_no_batch_is_passed_whole() -> None:
    x, mask, scale = torch.arange(10.0).view(10, 1), torch.ones(10, 3), torch.tensor(2.0)
    table = torch.ones(7, 2)
    parts = split_batch([x, mask, scale, table], 4)
    assert (
        [len(part.tensors[0]) for part in parts] == [len(part.tensors[1]) for part in parts] == [3, 3, 2, 2]
    )
    assert [part.share for part in parts] == [0.3, 0.3, 0.2, 0.2]
    assert torch.equal(torch.cat([part.tensors[0] for part in parts]), x)
    assert all(part.tensors[2] is scale and part.tensors[3] is table for part in parts)


def test_one_part_is_the_batch() -> None:
    (part,) = split_batch([torch.ones(3)], 1)
    assert part.share == 1.0 and len(part.tensors[0]) == 3


def test_batches_that_are_too_short_are_refused() -> None:
    with pytest.raises(InputError, match="4 for a batch of 3, wanted at most 3"):
        split_batch([torch.ones(3)], 4)
    with pytest.raises(InputError, match="found 0, wanted at least 1"):
        split_batch([torch.ones(10)], 0)
    with pytest.raises(InputError, match="no samples"):
        split_batch([torch.ones(0, 3)], 1)


class Bags(nn.Module):
    """Bags of indices that lie in one tensor, one after the other, so that none of its rows is a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(30, 8, mode="sum"), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.table(x, offsets))


def test_a_first_input_without_samples_in_its_rows_is_not_cut() -> None:
    call = (torch.arange(10), torch.tensor([0, 2, 5, 7]), torch.arange(4))

    def planned(micro_batches: int | str | None) -> autopar.Plan:
        return autopar.plan(
            Bags(),
            ClusterSpec.local(2),
            call,
            loss_fn=nn.CrossEntropyLoss(),
            micro_batches=micro_batches,
            measure=False,
        )

    with pytest.raises(
        InputError, match=r"the rows of input_2 \(4\), not of the first input, input_0 \(10\)"
    ):
        planned(2)
    for choice in (None, "auto"):
        plan = planned(choice)
        assert plan.pipeline.micro_batches == 1 and any("input_2 (4)" in note for note in plan.notes)


def test_every_micro_batch_of_every_step_has_masks_of_its_own() -> None:
    assert len({mask_seed(step, number) for step in range(100) for number in range(64)}) == 6400


# -- losses ---------------------------------------------------------------------------------------


def accumulated(loss: Loss) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss and gradient of the whole batch, and those of its weighted parts."""
    whole, parts, graph = net(loss), net(loss), graph_of(loss)
    value = whole(*data())
    value.backward()
    total = torch.zeros(())
    for part in split_batch(data(), 4):
        term = parts(*part.tensors) * loss_weight(graph, part.share)
        term.backward()
        total = total + term.detach()
    assert whole.layer.weight.grad is not None and parts.layer.weight.grad is not None
    return value.detach(), whole.layer.weight.grad, total, parts.layer.weight.grad


@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
def test_parts_of_a_mean_count_by_their_shares(loss: Loss) -> None:
    assert not is_sum(graph_of(loss))
    value, gradient, total, summed = accumulated(loss)
    assert torch.allclose(total, value, rtol=1e-12) and torch.allclose(summed, gradient, rtol=1e-12)


@pytest.mark.parametrize("loss", SUMS.values(), ids=SUMS)
def test_parts_of_a_sum_count_whole(loss: Loss) -> None:
    assert is_sum(graph_of(loss)) and not loss_notes(graph_of(loss))
    value, gradient, total, summed = accumulated(loss)
    assert torch.allclose(total, value, rtol=1e-12) and torch.allclose(summed, gradient, rtol=1e-12)


# Of a sample's four numbers as two by two, some dims first and then the rest.
TWICE: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "sum of means": lambda z, dims: z.mean(dims).sum(),
    "mean of sums": lambda z, dims: z.sum(dims).mean(),
    "negated sum of means": lambda z, dims: -z.mean(dims).sum(),
    "mean of halved sums": lambda z, dims: (z.sum(dims) / 2).mean(),
}


@pytest.mark.parametrize(
    "dims", [dims for count in (1, 2) for dims in combinations(range(3), count)], ids=str
)
@pytest.mark.parametrize("reduce", TWICE.values(), ids=TWICE)
def test_a_dim_counts_alike_from_either_end(
    reduce: Callable[[Tensor, tuple[int, ...]], Tensor], dims: tuple[int, ...]
) -> None:
    """Parts are weighed by what takes the samples together, which is dim 0 and dim -3."""
    kinds = set()
    for chosen in (dims, tuple(dim - 3 for dim in dims), (dims[0] - 3, *dims[1:])):

        def loss(z: Tensor, y: Tensor, chosen: tuple[int, ...] = chosen) -> Tensor:
            return reduce(z.square().view(-1, 2, 2), chosen)

        kinds.add((is_sum(graph_of(loss)), loss_notes(graph_of(loss))))
        value, gradient, total, summed = accumulated(loss)
        assert torch.allclose(total, value, rtol=1e-12) and torch.allclose(summed, gradient, rtol=1e-12)
    assert len(kinds) == 1


@pytest.mark.parametrize("loss", RELATIVE.values(), ids=RELATIVE)
def test_a_mean_over_labels_counts_by_samples_and_says_so(loss: Loss) -> None:
    """The whole batch's loss divides by what is kept in it, a part's by what is kept in the part."""
    assert not is_sum(graph_of(loss))
    value, _, total, _ = accumulated(loss)
    assert not torch.allclose(total, value, rtol=1e-3)
    (note,) = loss_notes(graph_of(loss))
    assert "unlike numbers of ignored labels" in note


def test_losses_that_are_neither_are_noted_and_plain_ones_are_not() -> None:
    for name in ("sum divided by the number of samples", "scaled mean", "two means"):
        (note,) = loss_notes(graph_of(MEANS[name]))
        assert "no plain mean or sum" in note, name
    for bent in (lambda z, y: z.mean(0).square().sum(), lambda z, y: z.sum(0).square().mean()):
        (note,) = loss_notes(graph_of(bent))
        assert "no plain mean or sum" in note and reducer_of(graph_of(bent)) is None
    for name in ("mse", "mean", "mean of sums", "sum of means over samples", "binary"):
        assert not loss_notes(graph_of(MEANS[name])), name
