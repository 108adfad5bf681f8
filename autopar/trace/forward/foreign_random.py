"""Random numbers that a program can't draw: Python's, NumPy's, and torch's from a state that forward sets.

    keep = random.random() > 0.1        traced once, and the same ever after: refused
    torch.manual_seed(0)                not in the program, which goes on drawing: refused

That something drew is told by states: those of all generators that live are compared before and after a
trace. Only where one has moved the trace runs again, watched, to name the line.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import compress
from types import FrameType
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch

from autopar.errors import TraceError
from autopar.trace.call.user_source import is_tool, shown_line

Result = TypeVar("Result")
State = Any  # of a generator

# Nobody seeds with it: a forward that sets a seed is seen, also where it sets the one that is there already.
_UNUSUAL_SEED = 0x7A5E_51DE_0DD5_EED5
_NUMPY = (np.random.RandomState, np.random.BitGenerator)


@dataclass(frozen=True, slots=True)
class _Generator:
    """A live random generator of Python or NumPy; whoever holds its `lock`, if any, draws alone."""

    read: Callable[[], State]
    write: Callable[[State], None]
    lock: Any = None


def without_draws(run: Callable[[], Result]) -> Result:
    """Result of `run`, a trace. Raises TraceError with the line that draws or seeds in a way that no program
    can repeat."""
    generators = _living()
    states = [generator.read() for generator in generators]
    with _entropy() as asked, _unusual_torch_seed():
        result = run()
        if not asked and not _torch_is_seeded() and not _moved(generators, states):
            return result
    moved = [generator.read() for generator in generators]
    _restore(generators, states)
    line, culprit = _find_line(run, generators)
    if line:
        _restore(generators, states)
        raise _refusal(line, culprit)
    _restore(generators, moved)  # another thread drew
    return result


def _restore(generators: Sequence[_Generator], states: Sequence[State]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.write(state)


def _refusal(line: str, name: str) -> TraceError:
    if name == "torch":
        return TraceError(
            where=line,
            found="a forward that sets torch's seed or random state, which a program doesn't",
            wanted="draws that go on from the state that training has",
            remedy="seed outside of forward, or draw outside and pass the tensor",
        )
    return TraceError(
        where=line,
        found=f"a random number of {name}, drawn once, when the model is traced",
        wanted="draws by torch, which every call makes anew",
        remedy="write keep = torch.rand(()) > p; x = x + keep * layer(x), or draw outside and pass a tensor",
    )


# -- the generators -------------------------------------------------------------------------------------


def _living() -> list[_Generator]:
    """Find the generators of Python and NumPy among live objects, but for those of the system, which have no
    state."""
    kinds = {kind for base in (random.Random, *_NUMPY) for kind in _subclasses(base)}
    kinds -= _subclasses(random.SystemRandom)
    found = {id(each): each for each in _of_kinds(gc.get_objects(), kinds)}
    if id(random.getstate.__self__) not in found:  # type: ignore[attr-defined]  # Python's own, which is there
        found |= {id(each): each for each in _of_modules(kinds)}
    tools = _of_tools()
    generators = [_described(each) for place, each in found.items() if place not in tools]
    return [generator for generator in generators if generator is not None]


def _of_modules(kinds: set[type]) -> Iterator[Any]:
    """Generators that modules hold: the collector doesn't list what was there before `gc.freeze`."""
    spaces = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    held = [each for space in spaces for each in list(space.values())]
    for each in _of_kinds(held, kinds | {np.random.Generator}):
        yield each.bit_generator if isinstance(each, np.random.Generator) else each


def _of_kinds(objects: Sequence[Any], kinds: set[type]) -> Iterator[Any]:
    """Objects whose type is one of `kinds`: of a million, so no line of Python runs for each."""
    return compress(objects, map(kinds.__contains__, map(type, objects)))


def _of_tools() -> set[int]:
    """Generators that are nobody's but a tool's own: sympy, which counts torch's symbols, draws from those of
    a module, and `tempfile` names files by another."""
    symbols, files = sys.modules.get("sympy.core.random"), sys.modules.get("tempfile")
    owned = [] if symbols is None else list(vars(symbols).values())
    owned.append(getattr(getattr(files, "_name_sequence", None), "_rng", None))
    return set(map(id, owned))


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _described(each: Any) -> _Generator | None:
    if isinstance(each, random.Random):
        try:
            each.getstate()
        except NotImplementedError:  # a subclass that has none
            return None
        return _Generator(each.getstate, each.setstate)
    if isinstance(each, np.random.RandomState):
        return _Generator(each.get_state, each.set_state, each._bit_generator.lock)  # noqa: SLF001  (NumPy's)
    return _Generator(lambda: each.state, lambda state: setattr(each, "state", state), each.lock)


def _moved(generators: Sequence[_Generator], states: Sequence[State]) -> bool:
    pairs = zip(generators, states, strict=True)
    return any(_plain(generator.read()) != _plain(state) for generator, state in pairs)


def _plain(state: State) -> State:
    """The state with bytes in the place of arrays, which `==` doesn't compare."""
    match state:
        case np.ndarray():
            return state.tobytes()
        case dict():
            return {name: _plain(value) for name, value in state.items()}
        case tuple() if len(state) < 16:  # Python's own is one of 625 numbers
            return tuple(map(_plain, state))
        case _:
            return state


@contextmanager
def _entropy() -> Iterator[list[str]]:
    """Who asked the system for random bits meanwhile, as what makes a generator without a seed does."""
    asked: list[str] = []
    bits, seed = random._urandom, random.Random.seed  # type: ignore[attr-defined]  # noqa: SLF001

    def urandom(count: int) -> bytes:
        asked.append("bits")
        return bits(count)  # type: ignore[no-any-return]

    def seeded(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            asked.append("seed")
        seed(self, a, version)

    with patch.object(random, "_urandom", urandom), patch.object(random.Random, "seed", seeded):
        yield asked


@contextmanager
def _unusual_torch_seed() -> Iterator[None]:
    """Context in which torch's own generator has a seed that no one sets."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(_UNUSUAL_SEED)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _torch_is_seeded() -> bool:
    return torch.default_generator.initial_seed() != _UNUSUAL_SEED


# -- the line -------------------------------------------------------------------------------------------


def _find_line(run: Callable[[], object], generators: Sequence[_Generator]) -> tuple[str, str]:
    """The first line of the model that draws or seeds, and by what; ("", "") if none does.

    Calls of Python's generators are seen themselves. Those of NumPy's are not: it is seen after a line that
    they have moved, and other threads must wait meanwhile.
    """
    search = _DrawSearch([generator for generator in generators if generator.lock])
    before = sys.gettrace(), sys.getprofile()
    with _unusual_torch_seed(), ExitStack() as locks:
        for generator in search.generators:
            locks.enter_context(generator.lock)
        sys.settrace(search.follow)
        sys.setprofile(search.profile)
        try:
            run()
        except Exception:
            if not search.line:
                raise
        finally:
            sys.settrace(before[0])
            sys.setprofile(before[1])
    return search.line, search.culprit


class _DrawSearch:
    """Python's calls at each line of a model, and those of foreign functions, to find a draw."""

    def __init__(self, generators: Sequence[_Generator]) -> None:
        self.generators = generators
        self.states = [generator.read() for generator in generators]
        self.line = self.culprit = ""

    def profile(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or self.line:
            return
        owner = getattr(function, "__self__", None)
        if isinstance(owner, random.Random) and function.__name__ != "getstate":
            self.blame(frame, "Python's random")
        elif function is os.urandom:
            self.blame(frame, "a generator without a seed")

    def follow(self, frame: FrameType, _event: str, _: Any) -> Any:
        if self.line or is_tool(frame.f_code.co_filename):
            return None
        number = frame.f_lineno

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal number
            if not self.line and event in ("line", "return"):
                if _torch_is_seeded():
                    self.blame(frame, "torch", number)
                elif _moved(self.generators, self.states):
                    self.blame(frame, "NumPy", number)
            number = frame.f_lineno
            return None if self.line else step

        return step

    def blame(self, frame: FrameType, culprit: str, number: int | None = None) -> None:
        """The innermost frame that is the model's, if it is under the trace's forward."""
        stack = [each for each, _ in traceback.walk_stack(frame)]
        forward = next((place for place, each in enumerate(stack) if _is_forward(each)), 0)
        models = [each for each in stack[:forward] if not is_tool(each.f_code.co_filename)]
        if models:
            self.culprit = culprit
            self.line = shown_line(models[0].f_code.co_filename, number or models[0].f_lineno)


def _is_forward(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "autopar.trace.flat_model" and frame.f_code.co_name == "forward"
