"""Serial reruns with another order of sums: the same numbers in float64, other roundings in less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.proof import sum_order
from autopar.proof.sum_order import OtherOrder, SumKernel


class Attention(nn.Module):
    """Attention by torch's own kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        return F.scaled_dot_product_attention(*heads, is_causal=True)


class Matrices(nn.Module):
    """Products that no layer makes."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.unflatten(0, (2, -1)), x.T.unflatten(1, (2, -1)).movedim(1, 0)
        return torch.baddbmm(a @ b, a, b, beta=2.0, alpha=0.5) + x[0].dot(x[1]) + (x @ x[0]).sum()


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5)), (6, 7)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, bias=False)),
        (4, 3, 9, 9),
    ),
    "transposed": (lambda: nn.ConvTranspose2d(3, 5, 3, stride=2), (4, 3, 6, 6)),
    "in groups": (lambda: nn.Conv1d(4, 8, 3, groups=2), (5, 4, 9)),
    "attention": (Attention, (3, 6, 16)),
    "matrices": (Matrices, (8, 6)),
}


def results(net: str, dtype: torch.dtype, mode: OtherOrder | None = None) -> list[Tensor]:
    """What it gives, and all gradients."""
    torch.manual_seed(0)
    make, shape = NETS[net]
    model, x = make().to(dtype), torch.randn(shape).to(dtype).requires_grad_()
    if mode is None:
        y = model(x)
        y.square().sum().backward()
    else:
        with mode:
            y = model(x)
            y.square().sum().backward()
    return [y.detach(), *(item.grad for item in (x, *model.parameters()) if item.grad is not None)]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("net", NETS)
def test_in_float64_another_order_changes_nothing_but_roundings(net: str, parts: int) -> None:
    mode = OtherOrder(7, parts=parts)
    for ours, theirs in zip(results(net, torch.float64, mode), results(net, torch.float64), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert mode.changed and not mode.unchanged


@pytest.mark.parametrize("net", ["linear", "convolutions", "attention"])
def test_in_bfloat16_parts_of_sums_are_rounded(net: str) -> None:
    ours, theirs = (results(net, torch.bfloat16, mode) for mode in (OtherOrder(7, parts=2), None))
    assert any(not torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_in_float32_the_order_alone_tells() -> None:
    ours, theirs = (results("linear", torch.float32, mode) for mode in (OtherOrder(7), None))
    assert any(not torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_equal_seeds_are_equal_orders() -> None:
    ours, theirs = (results("linear", torch.float32, OtherOrder(7)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_wrong_equation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {**sum_order.SUMS, torch.ops.aten.addmm.default: SumKernel("+ km kn -> mn", "k", "k")}
    monkeypatch.setattr(sum_order, "SUMS", wrong)
    torch.manual_seed(0)
    x, layer = torch.randn(6, 6), nn.Linear(6, 6)
    with OtherOrder(7):
        found = layer(x)
    assert not torch.allclose(found, layer(x))


def _has_lstm() -> bool:
    """Whether torch has a recurrent kernel in bfloat16 for this CPU, which wants AVX-512."""
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(4, 4)(torch.randn(3, 2, 4))
    except RuntimeError:
        return False
    return True


needs_lstm = pytest.mark.skipif(not _has_lstm(), reason="this CPU has no LSTM in bfloat16")


@needs_lstm
def test_a_recurrent_kernel_keeps_its_order() -> None:
    with torch.no_grad(), OtherOrder(7) as mode, torch.autocast("cpu", torch.bfloat16):
        nn.LSTM(4, 4)(torch.randn(3, 2, 4))
    assert mode.unchanged and not mode.changed
