"""What cutting a batch into micro-batches changes is told apart from what parallel training does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.proof.check import Report
from autopar.proof.cutting import _Average
from autopar.trace import micro_batches
from autopar.trace.target import Target

Loss = Callable[[Tensor, Tensor], Tensor]
TWO = ClusterSpec.local(2)


def verified(model: nn.Module, call: tuple[Tensor, ...], loss: Loss | None, **options: Any) -> Report:
    options = {"micro_batches": 3, "stages": 1} | options
    return api.verify(Target(model, call, {}, loss, ""), TWO, steps=2, changes=0, **options)


def layers(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 4))


def batch() -> tuple[Tensor, Tensor]:
    """Eight samples, parts of 3, 3 and 2; all labels of the first part are ignored."""
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.tensor([-100, -100, -100, 1, 2, -100, 3, 0])


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_with_ignored_labels_the_program_equals_the_uncut_serial_model(stages: int) -> None:
    report = verified(layers(), batch(), nn.CrossEntropyLoss(), stages=stages)
    assert report.passed and report.cutting is None, report
    assert report.plan.pipeline.micro_batches == 3
    assert any("count" in note for note in report.plan.notes)


def test_class_weights_may_be_a_buffer_of_the_model() -> None:
    class Weighing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()
            self.loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0, 0.5]))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.loss(self.layers(x), y)  # type: ignore[no-any-return]

    report = verified(Weighing(), batch(), None)
    assert report.passed and report.cutting is None, report


@pytest.mark.slow
def test_statistics_of_parts_that_are_asked_for_pass_with_a_statement() -> None:
    report = verified(layers(nn.BatchNorm1d(8)), batch(), nn.CrossEntropyLoss())
    assert report.passed and report.changes
    assert "parallel training equals serial training that is cut alike" in str(report)
    assert "cutting     into 3 micro-batches alone changes loss by" in str(report)
    assert "1 (aten.batch_norm.default) takes samples together" in str(report)
    assert report.as_dict()["cutting"]["allowed"]


def root(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, F.one_hot(y.clamp(min=0), 4).to(z.dtype)).sqrt()


def test_a_loss_that_cutting_changes_fails() -> None:
    report = verified(layers(), batch(), root)
    assert report.verdict.passed and report.changes and not report.passed
    assert "the loss is no plain mean or sum of samples" in str(report)


def per_sample(z: Tensor, y: Tensor) -> Tensor:
    return z.square().sum() / len(z) + z.sigmoid().mean()


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_a_sum_that_python_divides_beside_a_mean_is_computed_as_in_serial_parts(stages: int) -> None:
    report = verified(layers(), batch(), per_sample, stages=stages)
    assert report.verdict.passed, report


def test_micro_batches_that_nobody_asked_for_leave_statistics_alone() -> None:
    report = verified(layers(nn.BatchNorm1d(8)), batch(), nn.CrossEntropyLoss(), micro_batches=None)
    assert report.passed and report.cutting is None and report.plan.pipeline.micro_batches == 1


def test_random_masks_are_no_change() -> None:
    """They are drawn anew for each part, as two batches have two masks."""
    report = verified(layers(nn.Dropout(0.5)), batch(), nn.CrossEntropyLoss())
    assert report.passed and not report.changes, report


class StochasticDepth(nn.Module):
    """A layer that is left out at random, sample by sample, drawn as libraries of vision models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty((len(x), 1)).bernoulli_(0.5)
        return x + self.layer(x) * kept.div_(0.5)


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_left_out_at_random_are_no_change(stages: int) -> None:
    report = verified(layers(StochasticDepth()), batch(), nn.CrossEntropyLoss(), stages=stages)
    assert report.passed and not report.changes, report


def test_random_masks_hide_no_change() -> None:
    """The effect of cutting is that on the model without them: on average a dropout keeps all."""
    drops, plain = (
        verified(layers(nn.BatchNorm1d(8), drop), batch(), nn.CrossEntropyLoss())
        for drop in (nn.Dropout(0.5), nn.Identity())
    )
    assert drops.passed and drops.cutting is not None and plain.cutting is not None
    assert drops.cutting.verdict.max_error == plain.cutting.verdict.max_error


def test_the_uncut_model_is_what_parts_are_held_against(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that count by their samples equal serial parts that do; not the batch."""
    x, y = batch()
    call, loss = (x, y.clamp(min=1)), nn.CrossEntropyLoss(ignore_index=1)
    assert verified(layers(), call, loss).passed
    monkeypatch.setattr(micro_batches, "factor_of", lambda *_: 1 / 8)
    assert not verified(layers(), call, loss).passed


@pytest.mark.long
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_llama_with_ignored_labels_equals_the_uncut_model(count: int, masked: bool) -> None:
    """One sample at a time its attention mask is made otherwise, which is noted."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    tokens = torch.randint(64, (4, 8))
    labels = tokens.clone()
    labels[0], labels[1, :6] = -100, -100
    call = {"input_ids": tokens, "labels": labels}
    if masked:
        call["attention_mask"] = torch.ones_like(tokens)
    target = Target(model, (), call, None, "")
    report = api.verify(target, TWO, steps=2, micro_batches=count, stages=1)
    assert report.passed and report.cutting is None, report


def test_random_numbers_are_as_they_are_on_average() -> None:
    x, half = torch.full((2, 3), 0.25), torch.full((2, 3), 0.5)
    draws: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "uniform": (lambda: torch.empty(2, 3).uniform_(), half),
        "from": (lambda: torch.empty(2, 3).uniform_(-1.0), half * 0),
        "from to": (lambda: torch.empty(2, 3).uniform_(2.0, 5.0), half * 7),
        "normal": (lambda: torch.empty(2, 3).normal_(), half * 0),
        "of a mean": (lambda: torch.empty(2, 3).normal_(3.0, 9.0), half * 6),
        "exponential": (lambda: torch.empty(2, 3).exponential_(2.0), half),
        "geometric": (lambda: torch.empty(2, 3).geometric_(0.5), half * 4),
        "log-normal": (lambda: torch.empty(2, 3).log_normal_(0.0, 2**0.5), half * 2 * math.e),
        "Cauchy": (lambda: torch.empty(2, 3).cauchy_(2.0), half * 4),
        "integers": (lambda: torch.randint(5, (2, 3)).double(), half * 4),
        "integers from": (lambda: torch.randint(2, 7, (2, 3)).double(), half * 8),
        "integers like": (lambda: torch.randint_like(x, 2, 7), half * 8),
        "Poisson": (lambda: torch.poisson(half), half),
        "bernoulli": (lambda: torch.empty(2, 3).bernoulli_(), half),
        "of a chance": (lambda: torch.empty(2, 3).bernoulli_(0.75), half * 1.5),
        "of chances": (lambda: torch.bernoulli(x), x),
        "rand": (lambda: torch.rand(2, 3), half),
        "rand like": (lambda: torch.rand_like(x), half),
        "randn": (lambda: torch.randn(2, 3), half * 0),
        "dropout": (lambda: torch.native_dropout(x, 0.5, True)[0], x),
        "none": (lambda: x + 1, x + 1),
    }
    with _Average():
        drawn = {name: draw() for name, (draw, _) in draws.items()}
    for name, (_, wanted) in draws.items():
        assert torch.equal(drawn[name], wanted), name
