"""Equal blocks stand once, whatever their names; what differs is printed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.results.plan.fold_blocks import RepeatedRows, TableRow, fold_rows


def rows(*named: str) -> list[TableRow]:
    """`h.0.fc=4` is a row of that name, whose cell is 4."""
    return [TableRow(name, (cell,)) for name, _, cell in (each.partition("=") for each in named)]


def unfolded(found: list[TableRow | RepeatedRows]) -> list[TableRow]:
    """All rows again."""
    every: list[TableRow] = []
    for each in found:
        if isinstance(each, TableRow):
            every.append(each)
            continue
        stem = each.first.rstrip("0123456789")
        start = int(each.first.removeprefix(stem))
        every += [
            TableRow(f"{stem}{start + number}{row.name}", row.cells)
            for number in range(each.count)
            for row in each.rows
        ]
    return every


def test_equal_neighbours_are_one_block() -> None:
    found = fold_rows(rows("in=1", "h.0.fc=4", "h.0=2", "h.1.fc=4", "h.1=2", "h.2.fc=4", "h.2=2", "out=1"))
    assert found == [
        *rows("in=1"),
        RepeatedRows("h.0", "h.2", 3, tuple(rows(".fc=4", "=2"))),
        *rows("out=1"),
    ]


def test_a_block_that_differs_stands_by_itself() -> None:
    found = fold_rows(rows("h.0.a=1", "h.1.a=2", "h.2.a=2", "h.4.a=2"))
    assert found == [*rows("h.0.a=1"), RepeatedRows("h.1", "h.2", 2, tuple(rows(".a=2"))), *rows("h.4.a=2")]


def test_blocks_inside_blocks_that_differ_are_folded() -> None:
    found = fold_rows(rows("l.0.b.0=1", "l.0.b.1=1", "l.1.b.0=2", "l.1.b.1=2", "l.1.c=3"))
    assert found == [
        RepeatedRows("l.0.b.0", "l.0.b.1", 2, (TableRow("", ("1",)),)),
        RepeatedRows("l.1.b.0", "l.1.b.1", 2, (TableRow("", ("2",)),)),
        *rows("l.1.c=3"),
    ]


def test_numbers_inside_words_name_no_blocks() -> None:
    plain = rows("conv1=1", "conv2=1", "add_1=2", "add_2=2")
    assert fold_rows(plain) == plain


NAMES = st.lists(
    st.tuples(
        st.sampled_from(["h.{}.fc", "h.{}", "x.{}.y.0", "add", "{}"]), st.integers(0, 4), st.integers(0, 1)
    ),
    max_size=12,
)


@given(NAMES)
def test_nothing_is_lost_or_moved(named: list[tuple[str, int, int]]) -> None:
    plain = [TableRow(name.format(number), (str(cell),)) for name, number, cell in named]
    assert unfolded(fold_rows(plain)) == plain
