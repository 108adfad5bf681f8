"""What torch's modules decide by values doesn't keep a model from being traced, and changes no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn.utils.rnn import pack_padded_sequence

from autopar.api import verify
from autopar.cluster import ClusterSpec
from autopar.core.graph import InputKind
from autopar.errors import TraceError
from autopar.trace.export import trace
from autopar.trace.target import Target

TWO = ClusterSpec.local(2)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions check their arguments, as they do until torch.compile is used in the process."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


class Net(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, then: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(6, 6), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.linear(x), x)


class Encoder(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.layers, self.how = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), how
        self.register_buffer("mask", CAUSAL.clone(), persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.how == "made":
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        elif self.how == "buffer":
            mask = self.mask
        return self.layers(x, mask=mask).square().mean()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.both(x, y, tgt_mask=CAUSAL.clone()).square().mean()


def matrix(h: Tensor, x: Tensor) -> Tensor:
    near = x @ x.T
    near.fill_diagonal_(-3.0)
    return (near @ h).square().mean()


def balanced(h: Tensor, counts: Tensor) -> Tensor:
    """What mixtures of experts add to their loss."""
    return (h.softmax(-1).mean(0) * counts).sum()


def cumulative() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None))


X, SEQUENCE = torch.randn(8, 6), torch.randn(4, 5, 8)
TRACED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "a causal mask that is made": lambda: (Encoder("made"), (SEQUENCE,)),
    "a causal mask in a buffer": lambda: (Encoder("buffer"), (SEQUENCE,)),
    "a mask that is passed": lambda: (Encoder("passed"), (SEQUENCE, CAUSAL)),
    "a mask that is not causal": lambda: (Encoder("passed"), (SEQUENCE, CAUSAL.T.contiguous())),
    "a target mask": lambda: (Both(), (SEQUENCE, SEQUENCE)),
    "normal_": lambda: (Net(lambda h, x: (h + torch.empty_like(x).normal_(0.5, 2)).square().mean()), (X,)),
    "rsample": lambda: (Net(lambda h, x: Normal(h, 1 + x.abs()).rsample().square().mean()), (X,)),
    "log_prob": lambda: (Net(lambda h, x: -Independent(Normal(h, 1.0), 1).log_prob(x).mean()), (X,)),
    "fill_diagonal_": lambda: (Net(matrix), (X,)),
    "counts": lambda: (Net(lambda h, _: balanced(h, torch.bincount(h.argmax(-1), minlength=6))), (X,)),
    "weighted counts": lambda: (
        Net(lambda h, _: balanced(h, h.argmax(-1).bincount(h[:, 0].detach().square(), 9)[:6])),
        (X,),
    ),
    "bins": lambda: (Net(lambda h, _: balanced(h, torch.histc(h.detach(), 6, -1, 1))), (X,)),
    "a cumulative average": lambda: (cumulative(), (X, X), F.mse_loss),
    "Gaussian NLL": lambda: (
        Net(lambda h, _: (h, F.softplus(h))),
        (X, X),
        lambda output, y: F.gaussian_nll_loss(output[0], y, output[1]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_the_program_computes_what_the_eager_model_does(name: str) -> None:
    torch.manual_seed(0)
    model, args, *loss = TRACED[name]()
    target = Target(model, args, {}, loss[0] if loss else None, "")
    report = verify(target, TWO, steps=2, force="batch", changes=0)
    assert report.passed


def test_an_average_over_all_batches_is_written_to_its_buffers() -> None:
    graph = trace(cumulative(), (X,)).graph
    written = {buffer for buffer, _ in graph.writes}
    targets = {item.target for item in graph.inputs if item.kind is InputKind.BUFFER and item.name in written}
    assert targets == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda h, _: Categorical(logits=h).sample(), "Categorical"),
        (lambda h, x: F.gaussian_nll_loss(h, x, x.square()), "gaussian_nll_loss"),
    ],
)
def test_a_check_that_the_program_leaves_out_is_noted(draw: Callable[..., Any], name: str) -> None:
    assert any(name in note for note in trace(Net(draw), (X,)).graph.notes)
    with pytest.raises(ValueError, match="scale"):
        Normal(0.0, torch.tensor([-1.0]))  # eager calls check as before


def test_a_generator_that_a_draw_is_given_is_refused_with_the_line() -> None:
    own = torch.Generator()
    with pytest.raises(TraceError, match=r"test_torch_checks\.py:\d+: .*torch\.Generator.*generator="):
        trace(Net(lambda h, x: h + torch.randn(x.shape, generator=own)), (X,))


class WithZeros(nn.Module):
    """Attention to an added key of zeros; torch's code hides that one where it takes the mask for causal."""

    def __init__(self, is_causal: bool | None) -> None:
        super().__init__()
        self.encoder, self.is_causal = Encoder("passed").layers, is_causal
        for layer in self.encoder.layers:
            layer.self_attn.add_zero_attn = True

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(x, mask=mask, is_causal=self.is_causal).square().mean()


def test_a_key_that_torch_adds_beside_a_mask_that_may_be_causal_is_refused() -> None:
    with pytest.raises(TraceError, match="add_zero_attn beside a mask.*pass is_causal=False or True"):
        trace(WithZeros(None), (SEQUENCE, CAUSAL))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_key_that_torch_adds_is_seen_as_the_call_says(is_causal: bool) -> None:
    target = Target(WithZeros(is_causal), (SEQUENCE, CAUSAL), {}, None, "")
    assert verify(target, TWO, steps=2, force="batch", changes=0).passed


# -- what is refused by name ----------------------------------------------------------------------------


def packed(x: Tensor) -> Any:
    return pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)[0].sum()


def by_ctc(x: Tensor) -> Tensor:
    lengths = torch.tensor([5, 4]), torch.tensor([2, 1])
    return F.ctc_loss(x.transpose(0, 1).log_softmax(-1), torch.ones(2, 2, dtype=torch.int64), *lengths)


@pytest.mark.parametrize(
    ("model", "x", "words"),
    [
        (Net(lambda h, _: packed(h)), torch.randn(2, 5, 6), "packed sequences.*lengths.*padded tensor"),
        (Net(lambda h, _: by_ctc(h)), torch.randn(2, 5, 6), "CTC loss.*lengths.*log-probabilities"),
        (nn.Embedding(5, 4, max_norm=1.0), torch.arange(3), "embedding with max_norm.*without max_norm"),
        (
            Net(lambda h, _: torch.bincount(h.argmax(-1)).max()),
            X,
            "bincount without minlength.*pass minlength",
        ),
        (Net(lambda h, _: F.one_hot(h.argmax(-1)).max()), X, "one_hot without num_classes.*pass num_classes"),
        (Net(lambda h, _: h[:, :2].as_strided((3, 2), (1, 1)).sum()), X, "as_strided.*order.*unfold"),
        (Net(lambda h, _: torch.as_strided(h, (3, 2), (0, 1)).sum()), X, "as_strided.*order.*unfold"),
        (nn.EmbeddingBag(5, 4, max_norm=1.0), torch.ones(3, 2).long(), "embedding_bag with max_norm"),
    ],
)
def test_what_has_shapes_by_values_or_writes_to_weights_is_refused_by_name(
    model: nn.Module, x: Tensor, words: str
) -> None:
    with pytest.raises(TraceError, match=words) as refusal:
        trace(model, (x,))
    assert len(str(refusal.value)) <= 400


def test_a_value_beyond_the_length_of_a_count_is_an_error() -> None:
    """Eager calls give as many counts as the largest value asks for, which a program can't."""
    graph = trace(Net(lambda h, _: torch.bincount(h.argmax(-1), minlength=3)), (X,)).graph
    (add,) = [item for item in graph.operators if "index_add" in item.name]
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        add.target(torch.zeros(3, dtype=torch.int64), 0, torch.tensor([0, 3]), torch.ones(2).long())
