"""Backward of proofs: small float64 convolutions take one thread, all else the threads that there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.proof.backward import backward, is_small


class Threads(TorchDispatchMode):
    """Notes how many threads torch has at each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[function.overloadpacket.__name__] = torch.get_num_threads()
        return function(*args, **(kwargs or {}))


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("dtype", "count"), [(torch.float64, 1), (torch.float32, 2)])
def test_small_products_of_samples_take_one_thread(dtype: torch.dtype, count: int) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)).to(dtype)
    loss = model(torch.ones(5, 2, 4, 4, dtype=dtype)).sum()
    with Threads() as threads:
        backward([loss])
    assert threads.found["convolution_backward"] == count and threads.found["mm"] == 2
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_gradients_are_autograd_s() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(3, 2, 3)).double()
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    y = model(x)
    seed = torch.randn_like(y)
    wanted = torch.autograd.grad(y, list(model.parameters()), seed)
    backward([model(x)], [seed])
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
def test_small_is_counted_in_flops_of_a_sample(transposed: bool) -> None:
    def small(side: int) -> bool:
        x, weight = (
            torch.empty(shape, dtype=torch.float64) for shape in ((9, 64, side, side), (64, 64, 3, 3))
        )
        return is_small(x, x, weight, None, (1, 1), (1, 1), (1, 1), transposed)

    assert small(36) and not small(38)  # 2 x 36^2 x 64 x 64 x 9 = 9.6e7, 2 x 38^2 x 64 x 64 x 9 = 1.06e8
