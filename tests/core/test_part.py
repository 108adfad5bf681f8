"""Parts: what is taken, put and added is the same box of the full tensor."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.core.part import Part


def test_heads_of_a_fused_projection() -> None:
    part = Part(((3, 4, 8),), (((0, 3), (2, 4), (0, 8)),))
    full = torch.arange(96)
    wanted = torch.cat([full[32 * third + 16 : 32 * third + 32] for third in range(3)])
    assert part.shape == (48,) and not part.is_whole and torch.equal(part.take(full), wanted)


@st.composite
def parts(draw: st.DrawFn) -> Part:
    atoms = draw(
        st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)
    )

    def rows(size: int) -> tuple[int, int]:
        start = draw(st.integers(0, size))
        return start, draw(st.integers(start, size))

    return Part(atoms, tuple(tuple(rows(size) for size in dim) for dim in atoms))


@given(parts())
def test_take_put_and_add_agree(part: Part) -> None:
    shape = [torch.Size(dim).numel() for dim in part.atoms]
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    mine = part.take(full)
    assert tuple(mine.shape) == part.shape
    again = torch.zeros_like(full)
    part.put(mine, again)
    assert torch.equal(part.take(again), mine) and again.count_nonzero() == mine.count_nonzero()
    part.add(mine, again)
    assert torch.equal(part.take(again), 2 * mine) and torch.equal(again.sum(), 2 * mine.sum())


@given(parts().filter(lambda part: len(part.atoms) > 0), st.integers(0, 2), st.integers(0, 2))
def test_a_part_is_cut_as_well_from_the_rows_that_cover_it(part: Part, before: int, after: int) -> None:
    shape = [torch.Size(dim).numel() for dim in part.atoms]
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    span = part.span(0)
    taken = {int(row) for row in part.take(full).reshape(-1) // max(1, torch.Size(shape[1:]).numel())}
    if taken:
        assert (span.start, span.stop) == (min(taken), max(taken) + 1)
    rows = range(max(0, span.start - before), min(shape[0], span.stop + after))
    within = part.within(rows)
    if within is not None:
        assert torch.equal(within.take(full[rows.start : rows.stop]), part.take(full))
    elif taken:
        assert taken != set(range(min(taken), max(taken) + 1))
