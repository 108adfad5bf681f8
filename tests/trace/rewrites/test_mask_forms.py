"""A mask's closed form says what the mask holds, at each place, and says it at any length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar.ops  # noqa: F401  (declares what is known of operators)
from autopar.core.graph import Graph
from autopar.core.score_blocks import CAUSAL as CAUSAL_BAND
from autopar.core.score_blocks import Band
from autopar.trace.export import trace
from autopar.trace.rewrites.closed_forms import AnyForm, Line, TwoNumbers
from autopar.trace.rewrites.mask_forms import MaskForms

SMALLEST = torch.finfo(torch.float32).min


class Made(nn.Module):
    """Adds what is made of sizes alone to its input."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        made = self.make(x.shape[-1])
        return torch.where(made, x, 0.0) if made.dtype is torch.bool else x + made


def made_by(make: Callable[[int], Tensor], length: int) -> tuple[Graph, str]:
    graph = trace(Made(make), (torch.empty(length, length, device="meta" if length > 99 else None),)).graph
    made = [name for name in graph.operators[-1].operands if name != graph.inputs[0].name]
    return graph, made[0]


def holds(form: AnyForm, shape: tuple[int, ...]) -> Tensor:
    """A form written out."""
    places = torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij")

    def line(each: Line) -> Tensor:
        slopes = (0,) * (len(shape) - len(each.slopes)) + each.slopes
        value = torch.full(shape, float(each.offset), dtype=torch.float64)
        for slope, place in zip(slopes, places, strict=True):
            value = value + slope * place
        return value

    if isinstance(form, Line):
        return line(form)
    assert isinstance(form, TwoNumbers)
    inside = torch.stack([line(each) >= 0 for each in form.lines]).all(0)
    return torch.where(inside, float(form.inside), float(form.outside)).to(torch.float64)


def rows(length: int) -> Tensor:
    return torch.arange(length)[:, None]


def keys(length: int) -> Tensor:
    return torch.arange(length)[None]


def added(length: int) -> Tensor:
    return torch.full((length, length), SMALLEST).triu(1)


def turned(length: int) -> Tensor:
    return (1.0 - torch.ones(length, length).tril()) * SMALLEST


def filled(length: int) -> Tensor:
    return torch.zeros(length, length).masked_fill(keys(length) > rows(length), -torch.inf)


def chosen(length: int) -> Tensor:
    return torch.where((keys(length) <= rows(length)).logical_not(), SMALLEST, 0.0)


def of_both(length: int) -> Tensor:
    near = torch.ones(length, length, dtype=torch.bool).triu(-2)
    return torch.ones(length, length, dtype=torch.bool).tril() & near


def banded(length: int) -> Tensor:
    shown = (keys(length) > rows(length) - 3).expand(length, length)
    return torch.where(shown, added(length), SMALLEST)


def near(length: int) -> Tensor:
    return (rows(length) - keys(length)).abs() <= 2


def not_far(length: int) -> Tensor:
    return ~((rows(length) - keys(length)).abs() >= 4) & ~((keys(length) - rows(length)).abs() > 3)


def nearer(length: int) -> Tensor:
    return (keys(length) - rows(length)).abs() < 3


def stepped(length: int) -> Tensor:
    positions = torch.arange(2, 2 + 2 * length, 2)[1:]
    positions = torch.cat([positions[:1] - 2, positions])
    return positions[None] <= positions[:, None]


def in_one_piece(length: int) -> Tensor:
    """As transformers writes it: documents begin where positions don't go up by one, and none does."""
    positions = torch.arange(length)[None].expand(2, -1)
    of = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    sample = torch.arange(2)[:, None, None]
    query, key = positions[sample, rows(length)[None]], positions[sample, keys(length)[None]]
    alike = of[sample, rows(length)[None]] == of[sample, keys(length)[None]]
    return ((key <= query) & alike)[1]


def picked(length: int) -> Tensor:
    later = (keys(length) <= rows(length)).expand(length, length)
    return later[torch.arange(length), :][:, torch.arange(length)]


CAUSAL = (added, turned, filled, chosen, stepped, in_one_piece, picked)


@pytest.mark.parametrize("make", [*CAUSAL, of_both, banded, near, nearer, not_far])
def test_a_form_is_what_is_made(make: Callable[[int], Tensor]) -> None:
    graph, name = made_by(make, 7)
    form = MaskForms(graph).form(name)
    assert form is not None
    torch.testing.assert_close(holds(form, (7, 7)), make(7).to(torch.float64))


def shifted_pick(length: int) -> Tensor:
    """Rows by places counted from the end, which no rule knows."""
    return (keys(length) <= rows(length)).expand(length, length)[torch.arange(length) - 1]


def uneven(length: int) -> Tensor:
    """Differences of what isn't one line."""
    steps = torch.cat([torch.arange(3), torch.arange(length - 3)]).diff(prepend=torch.tensor([-1]))
    return (steps != 1).cumsum(0)[None] == (steps != 1).cumsum(0)[:, None]


@pytest.mark.parametrize("make", [shifted_pick, uneven])
def test_places_from_the_end_and_broken_lines_have_no_form(make: Callable[[int], Tensor]) -> None:
    graph, name = made_by(make, 7)
    assert MaskForms(graph).form(name) is None


@pytest.mark.parametrize("make", [*CAUSAL, of_both, banded])
def test_masks_are_read_at_any_length(make: Callable[[int], Tensor]) -> None:
    for length in (7, 1 << 17):
        graph, name = made_by(make, length)
        wanted = Band(before=None if make in CAUSAL else 2, after=0)
        assert MaskForms(graph).mask(name) == wanted, length


@pytest.mark.parametrize(("make", "reach"), [(near, 2), (nearer, 2), (not_far, 3)])
def test_windows_of_both_sides_are_read(make: Callable[[int], Tensor], reach: int) -> None:
    for length in (7, 1 << 17):
        graph, name = made_by(make, length)
        assert MaskForms(graph).mask(name) == Band(before=reach, after=reach), length


@given(
    slope=st.integers(-2, 2),
    other=st.integers(-2, 2),
    offset=st.integers(-6, 6),
    word=st.sampled_from(["ge", "gt", "le", "lt", "eq", "ne"]),
    diagonal=st.integers(-4, 4),
    negated=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_forms_that_are_given_are_true(
    slope: int, other: int, offset: int, word: str, diagonal: int, negated: bool
) -> None:
    def make(length: int) -> Tensor:
        shown: Tensor = getattr(torch, word)(rows(length) * slope + offset, keys(length) * other)
        shown = shown.logical_not() if negated else shown
        return shown & torch.ones(length, length, dtype=torch.bool).tril(diagonal)

    graph, name = made_by(make, 5)
    form = MaskForms(graph).form(name)
    if form is not None:
        torch.testing.assert_close(holds(form, (5, 5)), make(5).to(torch.float64))


def test_what_rounds_has_no_form() -> None:
    def halves(length: int) -> Tensor:
        return keys(length).to(torch.bfloat16) <= rows(length).to(torch.bfloat16)

    graph, name = made_by(halves, 7)
    assert MaskForms(graph).mask(name) is not None
    graph, name = made_by(halves, 600)
    assert MaskForms(graph).mask(name) is None


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@given(
    dtype=st.sampled_from(INTEGERS),
    offset=st.integers(-3, 3),
    word=st.sampled_from(["logical_not", "logical_and", "logical_or", "ge", "lt", "ne"]),
    reach=st.integers(0, 3),
)
@settings(max_examples=25, deadline=None)
def test_forms_of_integers_as_truth_and_of_those_that_wrap_are_true(
    dtype: torch.dtype, offset: int, word: str, reach: int
) -> None:
    """Zero is False, whatever a line holds elsewhere; what is below zero wraps where it is unsigned."""

    def make(length: int) -> Tensor:
        one, two = rows(length).to(dtype) + offset, keys(length).to(dtype)
        first = one if dtype is torch.bool else one - two
        made: Tensor = first.logical_not() if word == "logical_not" else getattr(torch, word)(first, two)
        return made.expand(length, length) & torch.ones(length, length, dtype=torch.bool).tril(reach)

    graph, name = made_by(make, 5)
    form = MaskForms(graph).form(name)
    if form is not None:
        torch.testing.assert_close(holds(form, (5, 5)), make(5).to(torch.float64))


def test_a_line_that_stands_for_truth_has_no_form() -> None:
    for make in (
        lambda length: (rows(length) - keys(length)).logical_not(),
        lambda length: torch.logical_and(keys(length) - 1, keys(length) <= rows(length)),
        lambda length: torch.logical_or(keys(length), keys(length) <= rows(length)),
        lambda length: rows(length).to(torch.uint8) - keys(length).to(torch.uint8) >= 0,
    ):
        graph, name = made_by(make, 7)
        assert MaskForms(graph).mask(name) is None


def test_infinity_times_zero_has_no_form() -> None:
    def undefined(length: int) -> Tensor:
        hidden = torch.full((length, length), -torch.inf)[None] * torch.zeros(length, length)[None]
        return hidden[0].triu(1)

    def hidden(length: int) -> Tensor:
        return (torch.full((length, length), -torch.inf)[None] * torch.ones(length, length)[None])[0].triu(1)

    graph, name = made_by(undefined, 7)
    assert MaskForms(graph).mask(name) is None
    graph, name = made_by(hidden, 7)
    assert MaskForms(graph).mask(name) == CAUSAL_BAND
