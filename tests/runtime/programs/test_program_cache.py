"""Programs are found by their call and by what their traces read; those that ran longest ago are dropped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.programs import program_cache
from autopar.runtime.programs.guards import Guard
from autopar.runtime.programs.program_cache import Entry, ProgramCache
from autopar.trace.call.call_signature import flatten_arguments
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler
from tests.whole_tensors import full_of

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


def _dropped() -> tuple[int, int, bool, bool]:
    """How many of five programs live where two are kept, how many once the module is gone, whether the
    gradient of a call whose program was dropped arrived, and whether torch's cache of shapes is bounded."""
    compiler = forced_compiler(Mesh((2,)), ["batch"], pipeline=Pipeline())
    model: Any = ParallelModule(nn.Linear(3, 3), compiler, describe=describe, device=torch.device("cpu"))
    before, program_cache.KINDS = program_cache.KINDS, 2
    try:
        pending = model(torch.ones(4, 3)).sum()
        programs, shapes = [weakref.ref(model._autopar._current)], []
        for size in (6, 8, 10, 12):
            model(torch.ones(size, 3)).sum().backward()
            programs.append(weakref.ref(model._autopar._current))
            shapes.append(len(FakeTensorMode.cache))
        model.zero_grad()
        pending.backward()
        arrived = torch.equal(full_of(model.bias.grad), torch.full((3,), 4.0))
        del pending
        gc.collect()
        alive = sum(program() is not None for program in programs)
        del model
        gc.collect()
        left = sum(program() is not None for program in programs)
    finally:
        program_cache.KINDS = before
    return alive, left, arrived, shapes[-1] <= 2 * shapes[0]


def test_dropped_programs_are_freed_once_their_gradients_have_come(pools: Callable[[int], Pool]) -> None:
    assert pools(2).run(_dropped) == [(2, 0, True, True)] * 2
