"""What can't be traced is refused in few words: the user's line, what it asks for, and a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError, InputError, TraceError
from autopar.trace.export import trace

X = torch.randn(8, 6)


class Net(nn.Module):
    def __init__(self, then: Callable[[Tensor], Any] = lambda h: h) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(6, 6), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.linear(x))


BY_VALUES: dict[str, Callable[[Tensor], Any]] = {
    "a branch": lambda h: h if h.sum() > 0 else -h,
    "a number": lambda h: h * int(h.abs().max()),
    "a loop": lambda h: sum(h.sum() for _ in range(int(h.max().item()))),
    "equal": lambda h: h if torch.equal(h, h + 1) else -h,
}


@pytest.mark.parametrize("name", BY_VALUES)
@pytest.mark.parametrize("part", ["forward", "loss"])
def test_what_depends_on_values_is_said_so_with_the_line_and_by_what_part(
    name: str, part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    function = BY_VALUES[name]
    model = Net(function) if part == "forward" else Net()
    loss = None if part == "forward" else lambda output, y: function(output - y)
    with pytest.raises(TraceError) as refusal:
        trace(model, (X,) if loss is None else (X, X), loss_fn=loss)
    error = refusal.value
    assert f"test_refusals.py:{function.__code__.co_firstlineno}: " in error.where
    assert error.where.startswith("the loss <lambda>") == (part == "loss")
    assert "depends on a tensor's values" in error.found
    assert ("return the tensor" if name == "a number" else "torch.where") in error.remedy
    assert len(str(error)) <= 400
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("model", "args", "loss", "words"),
    [
        (Net(lambda h: h.detach().numpy()), (X,), None, "numpy.*out of the program"),
        (Net(lambda h: h @ torch.ones(5, 2)), (X,), None, "call the model eagerly"),
        (Net(), (X, torch.zeros(7, dtype=torch.int64)), F.cross_entropy, "the loss cross_entropy.*8.*7"),
        (Net(), (X, X), lambda output, y: F.mse_loss(output, y[:, :5]), "the loss <lambda>, .*broadcast"),
        (Net(), (X, X), lambda output, y: None, "loss_fn <lambda>: found None"),
        (Net(), (X, X), lambda output, y: 3.0, "loss_fn <lambda>: found a number"),
        (Net(), (X, X), lambda output, y: F.mse_loss(output, y).item(), "found a number.*item"),
    ],
)
def test_what_the_code_itself_raises_or_gives_is_named_as_its_own(
    model: nn.Module, args: tuple[Tensor, ...], loss: Any, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=words) as refusal:
        trace(model, args, loss_fn=loss)
    assert len(str(refusal.value)) <= 400
    assert capfd.readouterr().err == ""


DERIVED: dict[str, Callable[[Tensor], Any]] = {
    "func.grad": lambda h: torch.func.grad(lambda z: z.tanh().sum())(h),
    "jvp": lambda h: torch.func.jvp(torch.tanh, (h,), (h,))[1],
    "vmap": lambda h: torch.vmap(lambda row: row.sum())(h),
    "hessian": lambda h: torch.func.hessian(lambda z: z.sin().sum())(h),
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
def test_derivatives_that_a_trace_cannot_follow_are_taken_around_the_call(
    derive: Callable[[Tensor], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TraceError, match="around the call") as refusal:
        trace(Net(derive), (X,))
    assert f"test_refusals.py:{derive.__code__.co_firstlineno}: " in refusal.value.where
    assert "torch.autograd.grad(y.sum(), x, create_graph=True)" in refusal.value.remedy
    assert ("torch.einsum" in refusal.value.remedy) == (derive in (DERIVED["vmap"], DERIVED["hessian"]))
    assert len(str(refusal.value)) <= 400


def test_words_and_lines_of_any_length_are_cut() -> None:
    def long(h: Tensor) -> Tensor:
        raise ValueError("x" * 10_000)

    with pytest.raises(AutoparError) as refusal:
        trace(Net(long), (X,))
    assert len(str(refusal.value)) <= 400


def test_sparse_gradients_are_refused_before_anything_is_planned() -> None:
    with pytest.raises(TraceError, match="embedding with sparse gradients.*sparse=False"):
        trace(nn.Embedding(5, 4, sparse=True), (torch.arange(3),))
    frozen = nn.Embedding(5, 4, sparse=True).requires_grad_(False)
    assert trace(frozen, (torch.arange(3),)).graph.operators
