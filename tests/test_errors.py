"""Errors travel between processes whole: what rank 0 finds, every rank raises."""

from __future__ import annotations

import math
import pickle

import pytest

from autopar.errors import INTERRUPTED, AutoparError, InfeasibleError, InputError, OverCapError, WorkerError

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
