"""Losses of a product that is made in pieces of rows are those of whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.comparing.measured_peak import grown_bytes
from autopar.core.force import Parallelism
from autopar.core.mesh import Mesh
from autopar.errors import InputError
from autopar.ops.linear_loss import LinearCrossEntropy
from autopar.planning.asked.request import Request
from autopar.proof.check import Report, check
from autopar.trace.forms import linear_loss
from autopar.trace.target import Target
from costdb.database import Database
from tests.ops.test_split_losses import (
    BATCH,
    DOMAIN,
    MODEL,
    WORDS,
    following,
    split,
    splitting,
    tokens_and_labels,
)
from tests.pool import Pool

IGNORED = -100
Loss = tuple[Tensor, list[Tensor]]


def of_whole_logits(given: list[Tensor], labels: Tensor, **how: Any) -> Loss:
    rows, weight, *bias = given
    loss = F.cross_entropy(F.linear(rows, weight, *bias), labels, **how)
    return loss, list(torch.autograd.grad(loss * 3, given))


def in_pieces(given: list[Tensor], labels: Tensor, **how: Any) -> Loss:
    rows, weight, *bias = given
    loss = autopar.linear_cross_entropy(rows, weight, labels, *bias, **how)
    return loss, list(torch.autograd.grad(loss * 3, given))


def operands(rows: int, inputs: int, classes: int, *, biased: bool = True) -> list[Tensor]:
    shapes = [(rows, inputs), (classes, inputs), *([(classes,)] if biased else [])]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def assert_equal(one: Loss, other: Loss) -> None:
    for mine, theirs in zip((one[0], *one[1]), (other[0], *other[1]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)


@given(
    rows=st.integers(1, 9),
    classes=st.integers(1, 6),
    inputs=st.integers(1, 4),
    piece=st.one_of(st.none(), st.integers(1, 12)),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["mean", "sum"]),
    biased=st.booleans(),
    ignored=st.sampled_from([IGNORED, 0, 2]),
    data=st.data(),
)
def test_pieces_are_the_whole(
    rows: int,
    classes: int,
    inputs: int,
    piece: int | None,
    smoothing: float,
    reduction: str,
    biased: bool,
    ignored: int,
    data: st.DataObject,
) -> None:
    torch.manual_seed(0)
    each = st.one_of(st.just(ignored), st.integers(0, classes - 1))
    labels = torch.tensor(data.draw(st.lists(each, min_size=rows, max_size=rows)))
    how = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
    given = operands(rows, inputs, classes, biased=biased)
    assert_equal(in_pieces(given, labels, piece=piece, **how), of_whole_logits(given, labels, **how))


def test_rows_may_have_any_number_of_dims() -> None:
    given, labels = operands(12, 4, 5), torch.arange(12) % 5
    rows = given[0].view(2, 3, 2, 4)
    loss = autopar.linear_cross_entropy(rows, given[1], labels.view(2, 3, 2), given[2], piece=5)
    torch.testing.assert_close(loss, of_whole_logits(given, labels)[0])


@pytest.mark.parametrize("learns", [0, 1, 2])
def test_what_is_frozen_gets_no_slope(learns: int) -> None:
    given, labels = operands(6, 3, 4), torch.arange(6) % 4
    wanted = of_whole_logits(given, labels)[1][learns]
    for place, x in enumerate(given):
        x.requires_grad_(place == learns)
    rows, weight, bias = given
    (autopar.linear_cross_entropy(rows, weight, labels, bias, piece=4) * 3).backward()
    assert [x.grad is not None for x in given] == [place == learns for place in range(3)]
    torch.testing.assert_close(given[learns].grad, wanted)


def test_backward_may_run_twice() -> None:
    given, labels = operands(6, 3, 4), torch.arange(6) % 4
    loss = autopar.linear_cross_entropy(given[0], given[1], labels, given[2], piece=2)
    first = torch.autograd.grad(loss, given, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, given), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_pieces_are_in_32_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = operands(512, 16, 24)
    labels = torch.randint(0, 24, (512,))
    narrow = [x.detach().to(dtype).requires_grad_() for x in exact]
    loss, slopes = in_pieces(narrow, labels, piece=1)
    wanted, exact_slopes = of_whole_logits([x.double().detach().requires_grad_() for x in narrow], labels)
    assert loss.dtype == torch.float32 and [x.dtype for x in slopes] == [dtype] * 3
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-2, atol=0)
    errors = [(x.double() - y).norm() / y.norm() for x, y in zip(slopes, exact_slopes, strict=True)]
    assert max(errors) < 2 * torch.finfo(dtype).eps  # 512 sums in 16 bits are off by ten times that


def test_autocast_rounds_operands_as_it_does_for_a_product() -> None:
    torch.manual_seed(0)
    given, labels = [x.detach().float().requires_grad_() for x in operands(9, 16, 8)], torch.arange(9) % 8
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = in_pieces(given, labels, piece=4), of_whole_logits(given, labels)
    assert mine[0].dtype == torch.float32
    for one, other in zip((mine[0], *mine[1]), (theirs[0], *theirs[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_a_gradient_of_its_gradient_is_refused() -> None:
    rows, weight = operands(6, 3, 4, biased=False)
    loss = autopar.linear_cross_entropy(rows, weight, torch.arange(6) % 4)
    with pytest.raises(InputError, match="create_graph=True.*first derivatives"):
        torch.autograd.grad(loss, rows, create_graph=True)


def test_a_forward_mode_derivative_is_refused() -> None:
    rows, weight = (each.detach() for each in operands(6, 3, 4, biased=False))
    with pytest.raises(InputError, match="forward-mode.*by backward"):
        torch.func.jvp(
            lambda x: autopar.linear_cross_entropy(x, weight, torch.arange(6) % 4), (rows,), (rows,)
        )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_are_whole_numbers_of_any_size(dtype: torch.dtype) -> None:
    given, labels = operands(6, 3, 4), torch.arange(6) % 4
    assert_equal(in_pieces(given, labels.to(dtype)), of_whole_logits(given, labels))


def test_without_labels_gradients_are_zero_whatever_comes_back() -> None:
    rows, weight = operands(6, 3, 4, biased=False)
    loss = autopar.linear_cross_entropy(rows, weight, torch.full((6,), -100))
    assert loss.isnan()
    for found in torch.autograd.grad(loss * torch.nan, [rows, weight]):
        assert torch.equal(found, torch.zeros_like(found))


def test_autocast_leaves_doubles_alone() -> None:
    given, labels = operands(6, 3, 4), torch.arange(6) % 4
    with torch.autocast("cpu", torch.bfloat16):
        assert in_pieces(given, labels)[0].dtype == torch.float64
        assert_equal(in_pieces(given, labels), of_whole_logits(given, labels))


def test_labels_beyond_the_classes_are_refused_as_torch_does() -> None:
    rows, weight = operands(6, 3, 4, biased=False)
    with pytest.raises(IndexError, match="Target 4 is out of bounds"):
        autopar.linear_cross_entropy(rows, weight, torch.arange(6), piece=2)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"weight": torch.ones(4, 2)}, r"rows \[6, 3\], a weight \[4, 2\]"),
        ({"labels": torch.arange(5)}, r"labels \[5\] of torch.int64 for rows \[6, 3\]"),
        ({"labels": torch.ones(6)}, r"labels \[6\] of torch.float32"),
        ({"bias": torch.ones(3)}, r"a bias \[3\].*4 classes"),
        ({"weight": torch.ones(4, 3, dtype=torch.float64)}, "torch.float32, torch.float64.*one dtype"),
        ({"reduction": "none"}, "reduction='none'"),
        ({"piece": 0}, "piece=0"),
        ({"piece": 2.0}, "piece=2.0"),
        ({"ignore_index": None}, "ignore_index=None"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5.*from 0 to 1"),
        ({"weight": torch.ones(0, 3)}, r"a weight \[0, 3\].*one class"),
        ({"labels": torch.zeros(6).bool()}, r"labels \[6\] of torch.bool"),
    ],
)
def test_bad_calls_are_told(change: dict[str, Any], found: str) -> None:
    call = {"rows": torch.ones(6, 3), "weight": torch.ones(4, 3), "labels": torch.zeros(6).long()} | change
    with pytest.raises(InputError, match=f"(?s){found}"):
        autopar.linear_cross_entropy(**call)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "inputs", "classes", "length"), [(131072, 4096, 128256, 8192), (8, 4, 2, 8)]
)
def test_logits_of_a_piece_are_no_more_than_the_slopes(
    rows: int, inputs: int, classes: int, length: int
) -> None:
    assert linear_loss.rows_of_piece(rows, inputs, classes, 0) == length
    assert length * classes <= inputs * (rows + classes)
    assert length == rows or 2 * length * classes > inputs * (rows + classes)


# -- on several ranks -----------------------------------------------------------------------------------


class Words(nn.Module):
    """A language model that returns its loss alone."""

    def __init__(self, *, tied: bool = False, smoothing: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=not tied)
        self.inner, self.smoothing = nn.Linear(8, 8), smoothing
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.inner(self.embedding(tokens).tanh())
        how = {"label_smoothing": self.smoothing, "piece": 4}
        return autopar.linear_cross_entropy(x, self.head.weight, following(labels), self.head.bias, **how)  # type: ignore[arg-type]


def loss_alone(loss: Tensor) -> Tensor:
    return loss


def words() -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[[Tensor], Tensor]]:
    """What real processes load."""
    return Words(), tokens_and_labels(), loss_alone


def proved(
    model: nn.Module, mesh: Mesh, kinds: tuple[Parallelism, ...], *, processes: bool = False, **asked: Any
) -> Report:
    if kinds:
        asked["pins"] = split(model, tokens_and_labels(), mesh, kinds)
        assert splitting(asked["pins"], "linear_cross_entropy"), asked["pins"]
    request = Request(measure=False, alternatives=False, mesh=mesh, **asked)
    target = Target(model, tokens_and_labels(), {}, loss_alone, f"{__file__}:words")
    with Database.in_memory(autopar.__file__) as database:
        cluster = ClusterSpec.local(mesh.num_devices * request.pipeline_ranks)
        return check(target, cluster, request, steps=2, processes=processes, database=database)


@pytest.mark.parametrize("kind", [BATCH, DOMAIN])
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_have_pieces_of_their_rows(kind: Parallelism, ranks: int) -> None:
    if kind is BATCH and ranks > 2:
        pytest.skip("two samples")
    report = proved(Words(tied=True, smoothing=0.1), Mesh((ranks,)), (kind,))
    assert report.passed, report


@pytest.mark.parametrize("kinds", [(BATCH, DOMAIN), (DOMAIN, MODEL), (DOMAIN, DOMAIN)])
def test_pieces_go_with_other_splits(kinds: tuple[Parallelism, ...]) -> None:
    report = proved(Words(), Mesh((2, 2)), kinds)
    assert report.passed, report


@pytest.mark.parametrize("stages", [1, 2])
def test_labels_count_over_micro_batches(stages: int) -> None:
    report = proved(Words(tied=True), Mesh((1,)), (), pipeline_ranks=stages, micro_batches=2)
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BATCH, DOMAIN])
def test_processes_have_pieces_of_their_rows(kind: Parallelism) -> None:
    report = proved(Words(), Mesh((2,)), (kind,), processes=True)
    assert report.passed, report


def test_the_proof_sees_a_count_of_own_labels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def lower(rule: LinearCrossEntropy, site: Any) -> tuple[Any]:
        return (site.local_call(),)

    monkeypatch.setattr(LinearCrossEntropy, "lower", lower)
    assert not proved(Words(), Mesh((2,)), (BATCH,)).passed


# -- what it takes --------------------------------------------------------------------------------------


class Head(nn.Module):
    """A product that is far larger than its rows and its weight."""

    def __init__(self, piece: int) -> None:
        super().__init__()
        self.inner, self.head, self.piece = nn.Linear(64, 64), nn.Linear(64, 512, bias=False), piece

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return autopar.linear_cross_entropy(self.inner(x), self.head.weight, labels, piece=self.piece)


def _peaks(piece: int, dtype: str) -> tuple[int, int]:
    torch.manual_seed(0)
    batch = torch.randn(4096, 64), torch.arange(4096) % 512
    cluster = autopar.ClusterSpec.local(1)
    options: dict[str, Any] = {"measure": False, "quiet": True, "optimizer": "sgd", "recompute": "none"}
    ours = autopar.parallelize(Head(piece), cluster, batch, loss_fn=loss_alone, dtype=dtype, **options)

    def step() -> None:
        ours(*batch).backward()
        ours.zero_grad()

    step()
    held = sum(x.nbytes for x in (*ours.parameters(), *batch))
    return ours.plan.peak_bytes, held + grown_bytes(step)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("piece", [256, 1024, 4096])
def test_the_predicted_peak_in_pieces_is_the_measured_one(
    piece: int, dtype: str, pools: Callable[[int], Pool]
) -> None:
    ((predicted, measured),) = pools(1).run(_peaks, piece, dtype)
    assert predicted == pytest.approx(measured, rel=0.001), (predicted, measured)
