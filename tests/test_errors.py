"""Errors travel between processes whole: what rank 0 finds, every rank raises."""

from __future__ import annotations

import pickle

import pytest

from autopar.errors import INTERRUPTED, AutoparError, InfeasibleError, InputError, WorkerError

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


def test_an_interrupted_command_ends_as_shells_count() -> None:
    assert INTERRUPTED == 130
