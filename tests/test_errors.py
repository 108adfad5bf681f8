"""Errors travel between processes whole: what rank 0 finds, every rank raises."""

from __future__ import annotations

import math
import pickle
import time

import pytest

from autopar.errors import (
    INTERRUPTED,
    LONGEST_MESSAGE,
    AutoparError,
    InfeasibleError,
    InputError,
    OverCapError,
    WorkerError,
    cut_paths,
    fit,
    show_value,
)

WORDS = {"where": "layer 3", "found": "4 rows", "wanted": "8", "remedy": "give it more"}


@pytest.mark.parametrize(
    "error",
    [InputError(**WORDS), InfeasibleError(**WORDS, least=7), WorkerError(**WORDS, traceback="line 1")],
)
def test_an_error_survives_pickling_with_all_that_it_says(error: AutoparError) -> None:
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert again.as_dict() == error.as_dict() and again.exit_code == error.exit_code
    for name in ("least", "traceback"):
        assert getattr(again, name, None) == getattr(error, name, None)


def test_the_words_of_an_error_about_memory_are_sought_once_and_only_if_they_are_read() -> None:
    sought = list[int]()

    def tell() -> InfeasibleError:
        sought.append(7)
        return InfeasibleError(**WORDS, least=7)

    error = OverCapError(tell, known=9.0)
    error.add_remedy("take less")
    assert error.would_do == 9.0 and not sought
    assert error.least == 7 and error.where == "layer 3"
    error.add_remedy("or none")
    assert str(error).endswith("give it more; or take less; or or none")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.as_dict() == error.as_dict() and sought == [7]
    assert type(again) is InfeasibleError


def test_an_interrupted_command_ends_as_shells_count() -> None:
    assert INTERRUPTED == 130


def test_the_bytes_that_are_known_to_do_are_the_least_where_there_is_one() -> None:
    assert InfeasibleError(**WORDS, least=7).would_do == 7
    assert InfeasibleError(**WORDS).would_do == math.inf


def test_a_message_has_400_characters_and_its_longest_parts_are_cut() -> None:
    error = InputError(where="file", found="x" * 10**6, wanted="y" * 500, remedy="write 2")
    assert len(str(error)) <= LONGEST_MESSAGE and error.where == "file" and error.remedy == "write 2"
    assert error.found.endswith("...") and len(error.found) - len(error.wanted) in (-1, 0, 1)
    error.add_remedy("z" * 500)
    assert len(str(error)) <= LONGEST_MESSAGE


def test_parts_that_fit_are_left_whole() -> None:
    assert fit({"a": "1234", "b": "1"}, 5) == {"a": "1234", "b": "1"}
    assert fit({"a": "1" * 20, "b": "12", "c": "3" * 20}, 18) == {
        "a": "11111...",
        "b": "12",
        "c": "33333...",
    }


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a'b", '"a\'b"'),
        ("x" * 10**6, "'" + "x" * 76 + "..."),
        (10**5_000, "a number of 5,001 digits"),
        ([10**5_000], "[a number of 5,001 digits]"),
        (object(), "a object"),
        (2.5, "2.5"),
        ({"a": [1, None]}, "{'a': [1, None]}"),
    ],
    ids=range(7),
)
def test_values_are_shown_short_and_without_addresses(value: object, shown: str) -> None:
    assert show_value(value) == shown


def test_paths_are_sought_in_time_that_grows_as_the_text() -> None:
    word = "x" * 1_000_000
    start = time.process_time()
    assert cut_paths(f"{word} a/b/c/d.py", 80) == f"{word} .../c/d.py"
    assert time.process_time() - start < 1  # by its square it would take hours
