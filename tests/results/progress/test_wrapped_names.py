"""Names of layers break behind dots and low lines; in a word only where no column could hold it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from autopar.results.files.text import as_text
from autopar.results.progress.wrapped_names import WrappedName, wrap_name

NAME = "encoder.layers_of_the_left_tower.0.query"


def test_a_name_breaks_behind_dots_then_behind_low_lines_then_anywhere() -> None:
    assert wrap_name(NAME, 60) == [NAME]
    assert wrap_name(NAME, 32) == ["encoder.", "layers_of_the_left_tower.0.query"]
    assert wrap_name(NAME, 17) == ["encoder.", "layers_of_the_", "left_tower.0.", "query"]
    assert wrap_name("attention", 4) == ["atte", "ntio", "n"]
    assert wrap_name("h.0 … h.11, each:", 9) == ["h.0 …", "h.11,", "each:"]
    assert wrap_name("", 5) == [""] and wrap_name("  query", 9) == ["  query"]


@given(st.text("ab._ ", max_size=40), st.integers(1, 12))
def test_no_line_is_too_long_and_nothing_is_lost(name: str, width: int) -> None:
    lines = wrap_name(name, width)
    assert max(map(len, lines)) <= width
    assert "".join(lines).replace(" ", "") == name.replace(" ", "")


def test_a_table_gives_a_name_the_room_of_its_longest_word() -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("layer")
    table.add_column("seconds", no_wrap=True)
    table.add_row(WrappedName(NAME), "x" * 20)
    lines = as_text(table, width=40).splitlines()
    assert [line.split("  ")[0].strip() for line in lines[1:]] == [
        "encoder.",
        "layers_of_the_",
        "left_tower.0.query",
    ]
