"""Parts of a batch whose losses and gradients add up to the batch's, whatever the loss is a mean of."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
import autopar.ops
from autopar.cluster import ClusterSpec
from autopar.core.cutting import Rows
from autopar.core.graph import Operator, Ref
from autopar.errors import AutoparError, InputError
from autopar.planning.graphs.micro_batch_graphs import (
    CallTraces,
    Parts,
    _is_part,
    _size,
    _with_numbers,
    guesses,
    parts_of,
)
from autopar.trace.call.call_signature import flatten_arguments
from autopar.trace.export import Traced, trace
from autopar.trace.micro_batches import split_batch
from tests.proof.models import evaluate

Loss = Callable[[Tensor, Tensor], Tensor]
SAMPLES, CLASSES, COUNT = 10, 4, 4


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
    """Ten samples; the labels of the first part of four (3, 3, 2, 2) are all 2."""
    torch.manual_seed(1)
    labels = torch.tensor([2, 2, 2, 0, 1, 3, 2, 0, 1, 1])
    return torch.randn(SAMPLES, 3).double(), labels


def parts(model: nn.Module, *tensors: Tensor, said: Any = None) -> Parts:
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        return trace(model, args, kwargs)

    return parts_of(CallTraces(of), tensors, {}, said)


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def in_parts(model: nn.Module, found: Parts, count: int) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients that the graphs of `count` parts add up to."""
    batch = split_batch(found.cutting(), found.call.tensors, count, find=model.get_buffer)
    total, sums = torch.zeros(()), [torch.zeros_like(item) for item in model.parameters()]
    graphs = {micro.share: place for place, micro in reversed(list(enumerate(batch)))}
    traced = {share: found.traced(count, place).graph for share, place in graphs.items()}
    for micro in batch:
        graph = traced[micro.share]
        given = dict(zip(found.call.paths, micro.tensors, strict=True))
        given |= dict(model.named_parameters()) | dict(model.named_buffers())
        inputs = {
            item.name: given[item.target] if item.value is None else item.value for item in graph.inputs
        }
        loss = evaluate(graph.operators, inputs)[graph.outputs[0]]
        for mine, more in zip(sums, gradients(loss * micro.weight, model), strict=True):
            mine += more
        total = total + micro.weight * loss.detach()
    return total, sums


def assert_alike(model: nn.Module, *tensors: Tensor, count: int = COUNT, said: Any = None) -> Parts:
    found = parts(model, *tensors, said=said)
    whole = model(*tensors)
    total, sums = in_parts(model, found, count)
    assert torch.allclose(total, whole, rtol=1e-12)
    for mine, theirs in zip(sums, gradients(whole, model), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-14)
    return found


# -- losses ---------------------------------------------------------------------------------------------


def one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, CLASSES).double()


def errors(z: Tensor, y: Tensor) -> Tensor:
    return (z - one_hot(y)).square()


def weights() -> Tensor:
    return torch.arange(1.0, 5.0).double()


def masked(z: Tensor, y: Tensor) -> Tensor:
    mask = (y != 2).double()
    return (errors(z, y).sum(1) * mask).sum() / mask.sum()


def clamped(z: Tensor, y: Tensor) -> Tensor:
    return (errors(z, y).sum(1) * (y != 2)).sum() / (y != 2).sum().clamp(min=1)


def normalised(z: Tensor, y: Tensor) -> Tensor:
    weight = weights()[y]
    return (errors(z, y).sum(1) * (weight / weight.sum())).sum()


def reciprocal(z: Tensor, y: Tensor) -> Tensor:
    return errors(z, y)[:, 1].dot(y.double()) * (1 / (y.sum() + 1e-3))


MEANS: dict[str, Loss] = {
    "mse": lambda z, y: F.mse_loss(z, one_hot(y)),
    "mean": lambda z, y: (z - one_hot(y)).abs().mean(),
    "mean of sums": lambda z, y: errors(z, y).sum(1).mean(),
    "sum of means over samples": lambda z, y: errors(z, y).mean(0).sum(),
    "samples last": lambda z, y: errors(z, y).transpose(0, 1).mean(1).sum(),
    "negated mean": lambda z, y: -z.gather(1, y[:, None]).mean(),
    "scaled": lambda z, y: 0.5 * F.mse_loss(z, one_hot(y)) + 3.0,
    "two means": lambda z, y: F.l1_loss(z, one_hot(y)) + 0.1 * z.square().mean(),
    "binary": lambda z, y: F.binary_cross_entropy_with_logits(z, one_hot(y)),
    "weighted binary": lambda z, y: F.binary_cross_entropy_with_logits(z, one_hot(y), pos_weight=weights()),
    "probabilities": lambda z, y: F.cross_entropy(z, (one_hot(y) + 1) / 8),
}
SUMS: dict[str, Loss] = {
    "cross entropy": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "nll": lambda z, y: F.nll_loss(z.log_softmax(1), y, reduction="sum"),
    "mse": lambda z, y: F.mse_loss(z, one_hot(y), reduction="sum"),
    "sum": lambda z, y: errors(z, y).sum(),
    "sum of means of features": lambda z, y: errors(z, y).mean(1).sum(),
    "mean of sums over samples": lambda z, y: errors(z, y).sum(0).mean(0).sum(),
    "negated": lambda z, y: -z.gather(1, y[:, None]).sum(),
    "labels left out": lambda z, y: F.cross_entropy(z, y, reduction="sum", ignore_index=2),
    "class weights": lambda z, y: F.cross_entropy(z, y, weights(), reduction="sum"),
    "product": lambda z, y: z[:, 0].dot(z[:, 1]),
    "divided by the number of samples": lambda z, y: z.square().sum() / len(z),
    "times its reciprocal": lambda z, y: z.square().sum() * (1 / z.numel()),
    "divided by a tensor of it": lambda z, y: z.square().sum() / torch.tensor(float(len(z))).double(),
    "batchmean": lambda z, y: F.kl_div(z.log_softmax(1), one_hot(y), reduction="batchmean"),
}
COUNTS: dict[str, Loss] = {
    "cross entropy": F.cross_entropy,
    "labels left out": lambda z, y: F.cross_entropy(z, y, ignore_index=2),
    "class weights": lambda z, y: F.cross_entropy(z, y, weights()),
    "both": lambda z, y: F.cross_entropy(z, y, weights(), ignore_index=2),
    "smoothed": lambda z, y: F.cross_entropy(z, y, ignore_index=2, label_smoothing=0.1),
    "nll": lambda z, y: F.nll_loss(z.log_softmax(1), y, weights(), ignore_index=2),
    "scaled": lambda z, y: -0.5 * F.cross_entropy(z, y, ignore_index=2),
    "mask": masked,
    "clamped mask": clamped,
    "weights that add up to 1": normalised,
    "reciprocal of a count": reciprocal,
}
LOSSES = {
    **{f"mean: {name}": loss for name, loss in MEANS.items()},
    **{f"sum: {name}": loss for name, loss in SUMS.items()},
    **{f"count: {name}": loss for name, loss in COUNTS.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_parts_add_up_to_the_batch(loss: Loss) -> None:
    found = assert_alike(net(loss), *data())
    assert found.is_exact and found.traced(COUNT).cutting.change is None  # type: ignore[union-attr]


@pytest.mark.parametrize("loss", COUNTS.values(), ids=COUNTS)
def test_parts_that_count_by_their_inputs_are_noted(loss: Loss) -> None:
    assert "by its share of what the whole batch" in str(parts(net(loss), *data()).traced(2).graph.notes)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [*MEANS.values(), *SUMS.values()], ids=[*MEANS, *SUMS])
def test_parts_that_count_by_samples_need_no_note(loss: Loss) -> None:
    assert not parts(net(loss), *data()).traced(2).graph.notes


def of_pairs(z: Tensor, y: Tensor) -> Tensor:
    pairs = z.unflatten(1, (2, 2))
    return torch.linalg.inv(pairs.mT @ pairs + torch.eye(2)).square().mean()


def of_patches(z: Tensor, y: Tensor) -> Tensor:
    image = z.unflatten(1, (1, 2, 2))
    read = F.grid_sample(image, F.affine_grid(z[:, None, :3].expand(-1, 2, -1), [len(z), 1, 2, 2], False))
    return (F.unfold(read, 2) * F.cosine_similarity(z, one_hot(y))[:, None, None]).mean()


APART: dict[str, Loss] = {
    "matrices": of_pairs,
    "patches": of_patches,
    "lesser": lambda z, y: torch.min(z, one_hot(y)).square().mean(),
    "windows": lambda z, y: (
        z.unfold(1, 2, 1).sum(-1) * torch.cdist(z[:, None], one_hot(y)[:, None])[:, 0]
    ).mean(),
    "triples": lambda z, y: F.triplet_margin_loss(z, one_hot(y), z.flip(1)),
}


@pytest.mark.parametrize("loss", APART.values(), ids=APART)
def test_samples_go_apart_through_operators_that_take_each_for_itself(loss: Loss) -> None:
    assert assert_alike(net(loss), *data()).is_exact


BENT: dict[str, Loss] = {
    "root": lambda z, y: F.mse_loss(z, one_hot(y)).sqrt(),
    "square of a mean": lambda z, y: z.mean(0).square().sum(),
    "square of a sum": lambda z, y: z.sum(0).square().mean(),
    "largest": lambda z, y: z.square().sum(1).max(),
    "a sum and a number": lambda z, y: z.square().sum() + 3.0,
    "a sum and a mean": lambda z, y: z.square().sum() + z.mean(),
    "two counts": lambda z, y: F.cross_entropy(z, y) + F.cross_entropy(z, y, ignore_index=2),
    "a count that learns": lambda z, y: (errors(z, y) * z.exp()).sum() / z.exp().sum(),
    "half precision": lambda z, y: F.cross_entropy(z.half(), y),
}


@pytest.mark.parametrize("loss", BENT.values(), ids=BENT)
def test_losses_that_parts_do_not_add_up_to_are_told(loss: Loss) -> None:
    found = parts(net(loss), *data())
    assert found.obstacle == "the loss is no plain mean or sum of samples" and not found.is_exact
    (note,) = found.traced(2).graph.notes
    assert "no plain mean or sum of samples: micro-batches, which count in the loss by their samples" in note


@pytest.mark.parametrize("count", [2, 4])
def test_a_part_of_a_bent_loss_divides_by_its_own_length(count: int) -> None:
    """So a sum over samples that Python divides, and a mean, add up by shares whatever else is no sum."""
    found = assert_alike(net(lambda z, y: errors(z, y).sum() / len(z) + z.mean()), *data(), count=count)
    assert not found.is_exact and found.cutting().by_share


# Of a sample's four numbers as two by two, some dims first and then the rest.
TWICE: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "sum of means": lambda z, dims: z.mean(dims).sum(),
    "mean of sums": lambda z, dims: z.sum(dims).mean(),
    "negated sum of means": lambda z, dims: -z.mean(dims).sum(),
    "mean of halved sums": lambda z, dims: (z.sum(dims) / 2).mean(),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "samples"),
    [(dims, place) for n in (1, 2) for dims in combinations(range(3), n) for place in range(0, 3, n)],
)
@pytest.mark.parametrize("reduce", TWICE.values(), ids=TWICE)
def test_what_takes_the_samples_weighs_them_in_whatever_dim_they_are(
    reduce: Callable[[Tensor, tuple[int, ...]], Tensor], dims: tuple[int, ...], samples: int
) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return reduce(z.square().view(-1, 2, 2).movedim(0, samples), tuple(dim - 3 for dim in dims))

    assert_alike(net(loss), *data(), count=2)


# -- where samples are ------------------------------------------------------------------------------------


class Of(nn.Module):
    """A function of some layers and the inputs."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*self.layers, *inputs)


def model(function: Callable[..., Tensor], *layers: nn.Module) -> nn.Module:
    return Of(function, *layers).double()


def by_words(encoder: Any, head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    encoded = encoder(x)
    states = encoded if isinstance(encoded, Tensor) else encoded[0]
    return F.cross_entropy(head(states).flatten(0, 1), y.flatten())


@pytest.mark.slow
def test_sequences_with_time_first_are_cut_by_samples() -> None:
    """[time, samples, features], as nn.LSTM and nn.TransformerEncoder take them by default."""
    for encoder in (nn.LSTM(6, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0)):
        width = 6 if isinstance(encoder, nn.LSTM) else 8
        x, y = torch.randn(6, 4, width).double(), torch.randint(3, (6, 4))
        y[:, :2] = -100
        y[0, 0] = 1
        for labels in (y, y.flatten()):
            found = assert_alike(model(by_words, encoder, nn.Linear(8, 3)), x, labels, count=3)
            assert found.size == 4


def test_inputs_as_long_as_the_batch_are_whole_where_they_hold_no_samples() -> None:
    def with_prior(layer: nn.Module, x: Tensor, prior: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(layer(x) + prior.log().sum(), y)

    found = assert_alike(
        model(with_prior, nn.Linear(6, 8)),
        torch.randn(8, 6).double(),
        torch.rand(8).double(),
        torch.randint(8, (8,)),
    )
    assert found.rows[1] is None and found.rows[0] == found.rows[2] is not None


def test_samples_may_be_told_by_the_second_input() -> None:
    """A table of keys comes first, whose rows all samples read."""

    def scores(layer: nn.Module, keys: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x @ layer(keys).t(), y)

    found = assert_alike(
        model(scores, nn.Linear(3, 5)),
        torch.randn(6, 3).double(),
        torch.randn(4, 5).double(),
        torch.arange(4),
    )
    assert found.rows[0] is None and found.size == 4


def far_anchors(layer: nn.Module, x: Tensor, anchors: Tensor) -> Tensor:
    return torch.inner(layer(x), anchors).square().amin(1).mean()


def neighbours(layer: nn.Module, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
    around = torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])
    return F.cross_entropy(layer(x + around), y)


def of_neighbours(layer: nn.Module, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(layer(torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])), y)


EDGES = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])


def test_where_the_graph_does_not_tell_the_user_is_asked() -> None:
    x = torch.randn(4, 6).double()
    asked = [
        (model(far_anchors, nn.Linear(6, 2)), (x, torch.randn(4, 2).double()), "inner"),
        (model(lambda layer, x: (layer(x) @ layer(x).t()).exp().mean(), nn.Linear(6, 3)), (x,), "matmul"),
    ]
    for asking, call, culprit in asked:
        with pytest.raises(InputError, match=rf"{culprit}.*batch_dims=") as error:
            parts(asking, *call).traced(2)
        assert len(str(error.value)) <= 400


@pytest.mark.slow
def test_of_one_graph_no_dims_are_asked_for_that_are_refused_next() -> None:
    x, y = torch.randn(4, 6).double(), torch.arange(4) % 3
    for forward in (neighbours, of_neighbours):
        asking = model(forward, nn.Linear(6, 3))
        with pytest.raises(InputError, match=r"index.*; leave out --micro-batches"):
            parts(asking, x, EDGES, y).traced(2)
        for said in guesses(parts(asking, x, EDGES, y).call):
            with pytest.raises(AutoparError):
                parts(asking, x, EDGES, y, said=said).traced(2)


def test_what_the_user_says_is_taken_and_noted() -> None:
    x, anchors = torch.randn(4, 6).double(), torch.randn(4, 2).double()
    asking = model(far_anchors, nn.Linear(6, 2))
    for said in ({"input_0": 0, "input_1": None}, {0: -2}):
        found = assert_alike(asking, x, anchors, count=2, said=said)
        assert found.rows[1] is None
        (note,) = found.traced(2).graph.notes
        assert "inner.default) takes samples together, as far as is known" in note


@pytest.mark.parametrize("said", [{"y": 0}, {0: 2}, {7: 0}, {0: 0, 1: 1}, {0: None}], ids=str)
def test_dims_that_the_call_does_not_have_are_refused(said: Any) -> None:
    x, anchors = torch.randn(4, 6), torch.randn(4, 2)
    with pytest.raises(InputError, match="batch_dims: found"):
        parts(Of(far_anchors, nn.Linear(6, 2)), x, anchors, said=said)


def test_a_batch_norm_tells_samples_though_it_takes_them_together() -> None:
    """A convolution of single pixels leaves height and width apart too."""

    def classes(conv: nn.Module, norm: nn.Module, head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(norm(conv(x)).relu().mean((2, 3))), y)

    layers = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Linear(8, 4)
    found = parts(model(classes, *layers), torch.randn(4, 3, 4, 4).double(), torch.arange(4))
    assert found.size == 4 and found.rows[0] is not None and found.rows[0].dim == 0
    assert found.cutting().by_statistics and "batch_norm" in (found.obstacle or "")


def test_a_part_of_another_shape_than_the_batch_says_is_told() -> None:
    """The branch is one for the whole batch and another for parts."""

    def branching(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = layer(x)
        return F.mse_loss(z if len(x) > 5 else z.tanh(), y)

    x, y = torch.randn(10, 6).double(), torch.randn(10, 3).double()
    traced = parts(model(branching, nn.Linear(6, 3)), x, y).traced(2)
    assert "tanh" in str(traced.cutting.change)  # type: ignore[union-attr]


def picked(layer: nn.Module, x: Tensor, ends: Tensor, y: Tensor) -> Tensor:
    """Of each sequence the row that `ends` says."""
    return F.cross_entropy(layer(x)[torch.arange(len(x)), ends], y)


def test_a_sample_may_pick_of_its_own_row_by_its_number() -> None:
    ends = torch.tensor([0, 3, 2, 1, 2, 0])
    labels = torch.tensor([0, -100, 1, 2, 1, 0])
    found = assert_alike(model(picked, nn.Linear(5, 3)), torch.randn(6, 4, 5).double(), ends, labels, count=2)
    assert found.size == 6 and found.rows[1] is not None


@pytest.mark.parametrize(
    "number",
    [
        lambda x: torch.arange(len(x)).double().mean(),
        lambda x: torch.full((), len(x)).double(),
        lambda x: torch.ones(len(x)).double().sum(),
    ],
)
def test_numbers_made_of_the_batchs_length_are_told(number: Callable[[Tensor], Tensor]) -> None:
    def loss(layer: nn.Module, x: Tensor) -> Tensor:
        return (layer(x) * number(x)).square().mean()

    traced = parts(model(loss, nn.Linear(3, 2)), torch.randn(6, 3).double()).traced(2)
    change = traced.cutting.change if traced.cutting else None
    assert change is not None and "another number for fewer samples" in change


def test_a_sum_of_parts_that_are_computed_otherwise_is_refused() -> None:
    def branching(layer: nn.Module, x: Tensor) -> Tensor:
        z = layer(x)
        return (z if len(x) > 5 else z.tanh()).sum()

    with pytest.raises(InputError, match="2, of which one is computed otherwise than the batch: tanh"):
        parts(model(branching, nn.Linear(6, 3)), torch.randn(6, 6).double()).traced(2)


class Bags(nn.Module):
    """Bags of indices that lie in one tensor, one after the other, so that none of its rows is a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(30, 8, mode="sum"), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.table(x, offsets))  # type: ignore[no-any-return]


def test_a_model_without_rows_of_samples_is_not_cut() -> None:
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

    with pytest.raises(InputError, match=r"embedding_bag.*takes samples together.*batch_dims="):
        planned(2)
    for choice in (None, "auto"):
        plan = planned(choice)
        assert plan.pipeline.micro_batches == 1 and any(
            "unless batch_dims says" in note for note in plan.notes
        )


# by hand


def test_the_first_tensor_with_samples_says_how_many_there_are() -> None:
    call = flatten_arguments((torch.zeros(3), torch.zeros(2, 12), torch.zeros(5, 7)), {})
    assert _size(call, (None, Rows(1, outer=2, inner=3), Rows(0))) == 2
    assert _size(call, (None, None, Rows(0))) == 5
    assert _size(call, (None, None, None)) == 1  # a batch that is whole is one sample


def test_the_first_rows_of_a_constant_are_a_part_of_it() -> None:
    whole = torch.arange(12).reshape(4, 3)
    for part in (whole, whole[:2], whole[:, :2], whole[:3, :1]):
        assert _is_part(part, whole)
    for other in (whole[1:], whole[:, 1:], whole[:2] + 1, whole[0], torch.arange(15).reshape(5, 3)):
        assert not _is_part(other, whole)


def test_numbers_are_those_of_the_whole_batch_and_shapes_those_of_the_part() -> None:
    aten = torch.ops.aten

    def add(factor: float) -> Operator:
        return Operator("sum", aten.add.Tensor, (Ref("x"), Ref("y")), {"alpha": factor}, ("z",))

    assert _with_numbers(add(2), add(5)) == add(5)
    plain = Operator("sum", aten.add.Tensor, (Ref("x"), Ref("y")), {}, ("z",))
    assert _with_numbers(add(1), plain) == add(1)  # the whole batch's has the default

    def power(exponent: float) -> Operator:
        return Operator("power", aten.pow.Tensor_Scalar, (Ref("x"), exponent), {}, ("z",))

    assert _with_numbers(power(3), power(9)) == power(9)

    def view(rows: int) -> Operator:
        return Operator("view", aten.view.default, (Ref("x"), [rows, 4]), {}, ("z",))

    assert _with_numbers(view(3), view(12)) == view(3)


def test_a_part_is_traced_once_for_both_forms_of_its_loss() -> None:
    model, tensors, made = net(F.cross_entropy), data(), list[int]()

    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        made.append(len(args[0]))
        return trace(model, args, kwargs)

    whole = CallTraces(of)
    forms = [parts_of(each, tensors, {}) for each in (whole, whole.form(in_pieces=True))]
    graphs = [each.traced(count).graph for each in forms for count in (2, 5)]
    assert made == [SAMPLES, SAMPLES, SAMPLES // 2, SAMPLES // 5]
    direct = CallTraces(lambda args, kwargs: trace(model, args, kwargs, in_pieces=True))
    alone = parts_of(direct, tensors, {})
    assert graphs[2:] == [alone.traced(count).graph for count in (2, 5)]
    assert graphs[:2] != graphs[2:]
