"""Checks of values that raise are passed and noted; what they may decide beside that is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace.export import trace

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(6, 4), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x)).square().sum()


def finite(h: Tensor) -> Tensor:
    assert torch.isfinite(h).all(), f"not finite: {h}"
    return h * 2


def none_negative(h: Tensor) -> Tensor:
    if (h < -1e9).any():
        raise ValueError(f"negative: {h}")
    return h * 2


def small(h: Tensor) -> Tensor:
    if (h.abs() < 1e9).all():
        return h * 2
    else:
        raise ValueError


def neither(h: Tensor) -> Tensor:
    if torch.isnan(h).any() or torch.isinf(h).any():
        raise ValueError
    return h * 2


def without_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        if not torch.isfinite(h).all():
            kind = "training"
            raise RuntimeError(kind)
    return h * 2


@pytest.mark.parametrize("then", [finite, none_negative, small, neither, without_gradient])
def test_a_check_that_raises_is_passed_and_noted(then: Callable[[Tensor], Tensor]) -> None:
    graph = trace(Net(then), (X,)).graph
    assert torch.ops.aten.mul.Tensor in {item.target for item in graph.operators}
    assert graph.notes and all("this check of values is not in the program" in note for note in graph.notes)
    first = then.__code__.co_firstlineno + (2 if then is without_gradient else 1)
    assert f"test_value_checks.py:{first}: " in graph.notes[0]


def caught(h: Tensor) -> Tensor:
    try:
        none_negative(h)
        if not torch.isfinite(h).all():
            raise AssertionError
    except (AssertionError, ValueError):
        return h.nan_to_num()
    return h


def caught_outside(h: Tensor) -> Tensor:
    try:
        return finite(h)
    except AssertionError:
        return h.nan_to_num()


def suppressed(h: Tensor) -> Tensor:
    with contextlib.suppress(AssertionError):
        return finite(h)
    return h


@contextlib.contextmanager
def swallowing() -> Iterator[None]:
    with contextlib.suppress(AssertionError):
        yield


def swallowed(h: Tensor) -> Tensor:
    with torch.no_grad(), swallowing():
        assert (h > 0).all()
        h = h * 5
    return h


class Asked:
    """Has an attribute for some values."""

    def __init__(self, h: Tensor) -> None:
        self.h = h

    @property
    def large(self) -> float:
        if (self.h < 0).any():
            raise AttributeError
        return 2.0


def asked_for(h: Tensor) -> Tensor:
    return h * getattr(Asked(h), "large", 5.0)


def until(h: Tensor) -> Tensor:
    class Doubled:
        def __init__(self) -> None:
            self.n = 0

        def __iter__(self) -> Doubled:
            return self

        def __next__(self) -> Tensor:
            self.n += 1
            if (h * self.n > 2).any():
                raise StopIteration
            return h * self.n

    return sum(Doubled(), h)


def chosen(h: Tensor) -> Tensor:
    if (h < 0).any():
        h = -h
    return h


def first_one(h: Tensor) -> Tensor:
    if (h > 0).any():
        if h.shape[0] == 3:
            return h
        raise ValueError
    return -h


def kept(h: Tensor) -> Tensor:
    is_fine = bool(torch.isfinite(h).all())
    assert is_fine
    return h if is_fine else -h


@pytest.mark.parametrize(
    "then", [caught, caught_outside, suppressed, swallowed, asked_for, until, chosen, first_one, kept]
)
def test_what_decides_more_than_whether_forward_ends_is_refused(then: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match="branch"):
        trace(Net(then), (X,))


def test_a_check_of_inputs_is_answered_by_their_values() -> None:
    class Checked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert (x < 9).all(), "large"
            return x * 2

    assert not trace(Checked(), (X,)).graph.notes
    with pytest.raises(TraceError, match="large"):
        trace(Checked(), (X + 9,))
