"""Programs are found by their call and by what their traces read; those that ran longest ago are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import pytest
from torch import Tensor

from autopar.runtime.module import program_cache
from autopar.runtime.module.guards import Guard
from autopar.runtime.module.program_cache import Entry, ProgramCache
from autopar.trace.call_signature import flatten_arguments

NO_ARGUMENTS = flatten_arguments((), {})


@dataclass
class Flag:
    """A guard that holds while nobody has lowered it."""

    up: bool = True

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        return self.up


def entry(program: str, flag: Flag | None = None) -> Entry[str]:
    return Entry(program, cast(Guard, flag or Flag()), {})


def test_as_many_kinds_and_states_are_kept_as_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "KINDS", 3)
    monkeypatch.setattr(program_cache, "STATES", 2)
    cache = ProgramCache[str]()
    for number in range(5):
        cache.add((number,), entry(f"{number}"))
    assert list(cache.programs()) == ["2", "3", "4"]
    cache.add((2,), entry("2 again"))  # it ran last now
    cache.add((2,), entry("2 at last"))
    cache.add((5,), entry("5"))
    assert list(cache.programs()) == ["4", "2 at last", "2 again", "5"]
    assert len(cache) == 4 and cache.of((3,)) == []


def test_the_program_whose_guard_holds_is_found_and_comes_to_the_front() -> None:
    cache, flags = ProgramCache[str](), [Flag() for _ in range(3)]
    for number, flag in enumerate(flags):
        cache.add(("x",), entry(f"{number}", flag))
    for up, wanted in (((1, 1, 1), "2"), ((1, 1, 0), "1"), ((1, 1, 1), "1"), ((1, 0, 0), "0")):
        for flag, now in zip(flags, up, strict=True):
            flag.up = bool(now)
        found = cache.find(("x",), NO_ARGUMENTS)
        assert found is not None and found.program == wanted
        assert cache.of(("x",))[0] is found
    for flag in flags:
        flag.up = False
    assert cache.find(("x",), NO_ARGUMENTS) is None and cache.find(("y",), NO_ARGUMENTS) is None


def test_kinds_of_call_that_differ_in_the_first_part_of_their_key_are_alike() -> None:
    cache = ProgramCache[str]()
    for key in (("a", 1), ("b", 1), ("a", 2)):
        cache.add(key, entry(str(key)))
    assert [each.program for each in cache.like(("c", 1))] == ["('a', 1)", "('b', 1)"]
