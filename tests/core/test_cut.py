"""Cuts: every row has one owner, axes nest, and aligned boundaries are multiples of the unit."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.core.cut import (
    aligned,
    balanced,
    by_shares,
    chunked,
    has_empty,
    longest,
    longest_place,
    most_for_a_share,
    nested,
    part,
)

LENGTHS = st.integers(0, 60)
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
RULES = st.sampled_from([balanced, chunked])


def test_the_drawing_in_the_docstring() -> None:
    assert balanced(10, 4) == (0, 3, 6, 8, 10)
    assert chunked(10, 4) == (0, 3, 6, 9, 10)
    assert aligned(10, (2,), 4) == (0, 4, 10)
    assert by_shares(10, [(1, 1, 2, 4)]) == (0, 1, 2, 5, 10)


def test_of_the_longest_parts_an_inner_one_stands_for_all() -> None:
    assert longest_place(balanced(10, 4)) == 1
    assert longest_place(balanced(9, 4)) == 0
    assert longest_place(balanced(8, 2)) == 0
    assert longest_place(aligned(107, (4,), 4)) == 1  # 24, 28, 28 and 27 rows


@given(LENGTHS, st.integers(1, 8))
def test_chunked_is_what_torch_chunk_does(length: int, parts: int) -> None:
    sizes = [len(chunk) for chunk in torch.arange(length).chunk(parts)] if length else []
    sizes += [0] * (parts - len(sizes))
    assert chunked(length, parts) == (0, *itertools.accumulate(sizes))


@given(LENGTHS, st.integers(1, 8))
def test_balanced_parts_differ_by_at_most_one_row(length: int, parts: int) -> None:
    sizes = [high - low for low, high in itertools.pairwise(balanced(length, parts))]
    assert max(sizes) - min(sizes) <= 1 and sorted(sizes, reverse=True) == sizes


@given(LENGTHS, SIZES, RULES)
def test_a_minor_axis_never_moves_a_major_boundary(length: int, sizes: tuple[int, ...], rule: object) -> None:
    cut = nested(length, sizes, rule)  # type: ignore[arg-type]
    inner = len(cut[:-1]) // sizes[0]
    assert cut[::inner] == rule(length, sizes[0])  # type: ignore[operator]


@given(LENGTHS, SIZES, st.integers(1, 9))
def test_aligned_cuts_nest_in_multiples_of_the_unit(length: int, sizes: tuple[int, ...], unit: int) -> None:
    cut = aligned(length, sizes, unit)
    assert cut[0] == 0 and cut[-1] == length and list(cut) == sorted(cut)
    assert all(bound % unit == 0 or bound == length for bound in cut)
    assert cut[:: len(cut[:-1]) // sizes[0]] == aligned(length, sizes[:1], unit)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(2, 9))
def test_no_cut_in_whole_units_waits_less_for_its_longest_part(length: int, parts: int, unit: int) -> None:
    bounds = [*range(0, length, unit), length]
    others = itertools.combinations_with_replacement(bounds, parts - 1)
    assert longest(aligned(length, (parts,), unit)) == min(longest((0, *inner, length)) for inner in others)


@given(LENGTHS, SIZES, RULES, st.data())
def test_every_row_has_one_owner(
    length: int, sizes: tuple[int, ...], rule: object, data: st.DataObject
) -> None:
    cut = nested(length, sizes, rule)  # type: ignore[arg-type]
    depth = data.draw(st.integers(0, len(sizes)))
    places = itertools.product(*(range(size) for size in sizes[:depth]))
    rows = [row for place in places for row in range(*part(cut, sizes, place))]
    assert rows == list(range(length))


SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(st.integers(1, 14), SHARES)
def test_no_cut_without_empty_parts_has_fewer_rows_for_a_share(length: int, shares: list[int]) -> None:
    cut = by_shares(length, [shares])
    others = itertools.combinations_with_replacement(range(length + 1), len(shares) - 1)
    cuts = [(0, *inner, length) for inner in others]
    full = [each for each in cuts if not has_empty(each)] or cuts
    assert cut in full
    assert most_for_a_share(cut, shares) == min(most_for_a_share(each, shares) for each in full)


@given(LENGTHS, SIZES)
def test_equal_shares_cut_evenly(length: int, sizes: tuple[int, ...]) -> None:
    shares = [(3,) * size for size in sizes]
    assert by_shares(length, shares) == nested(length, sizes, balanced)
    cut = balanced(length, sizes[0])
    assert most_for_a_share(cut, shares[0]) == longest(cut)


@given(LENGTHS, st.lists(SHARES, min_size=1, max_size=3), st.integers(1, 9))
def test_cuts_by_shares_nest_in_multiples_of_the_unit(
    length: int, shares: list[list[int]], unit: int
) -> None:
    cut = by_shares(length, shares, unit)
    assert cut[0] == 0 and cut[-1] == length and list(cut) == sorted(cut)
    assert all(bound % unit == 0 or bound == length for bound in cut)
    assert cut[:: len(cut[:-1]) // len(shares[0])] == by_shares(length, shares[:1], unit)


def test_empty_parts_are_seen() -> None:
    assert has_empty(chunked(9, 4)) and not has_empty(balanced(9, 4))
