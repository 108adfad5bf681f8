"""Checks of values that raise are passed: a program goes on where eager code goes on.

    assert torch.isfinite(h).all()              the branch that raises is the one that isn't taken
    if (h < 0).any(): raise ValueError(h)

Which one raises the code of the caller tells. One that may be caught decides more than whether forward ends,
and isn't passed: by a `try`, by a `with` whose manager isn't known, and what Python itself catches.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cache
from types import CodeType, FrameType

from autopar.trace.call.user_source import is_tool

_CAUGHT_BY_PYTHON = {"AttributeError", "StopIteration", "StopAsyncIteration"}  # by hasattr, by loops
_MANAGERS = {  # that let exceptions through; all of torch's do
    "autocast",
    "enable_grad",
    "inference_mode",
    "no_grad",
    "nullcontext",
    "record_function",
    "set_grad_enabled",
    "torch",
}
_RETURNS = ("RETURN_VALUE", "RETURN_CONST", "RETURN_GENERATOR", "YIELD_VALUE", "RERAISE")


def passing_answer(frame: FrameType | None) -> bool | None:
    """The truth value of a tensor with which the asking code goes on; None if no answer makes it raise."""
    frames = list(_users(frame))
    if not frames:
        return None
    asking = _Code.of(frames[0].f_code)
    found = asking.passing(frames[0].f_lasti)
    if found is None:
        return None
    answer, raised = found
    offsets = (raised, *(outer.f_lasti for outer in frames[1:]))
    caught = any(_Code.of(each.f_code).catches(at) for each, at in zip(frames, offsets, strict=True))
    return None if caught else answer


def _users(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of forward that are a user's or a library's of models, the innermost first."""
    while frame is not None and frame.f_globals.get("__name__") != "autopar.trace.flat_model":
        if not is_tool(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


class _Code:
    """The steps of a function's code, by their offsets."""

    def __init__(self, code: CodeType) -> None:
        self.steps = list(dis.get_instructions(code))
        self.places = {step.offset: place for place, step in enumerate(self.steps)}
        self.handlers = dis._parse_exception_table(code)  # type: ignore[attr-defined]  # noqa: SLF001  (Python's)

    @staticmethod
    @cache
    def of(code: CodeType) -> _Code:
        """The code, read once."""
        return _Code(code)

    def passing(self, offset: int) -> tuple[bool, int] | None:
        """The answer that a branch goes on with, and the offset where the other one raises."""
        place = self.places[offset]
        while self.steps[place].opname in ("TO_BOOL", "EXTENDED_ARG"):
            place += 1
        branch = self.steps[place]
        if not branch.opname.startswith("POP_JUMP") or not branch.opname.endswith(("_TRUE", "_FALSE")):
            return None
        jumps, falls = self.raises(self.places[branch.argval]), self.raises(place + 1)
        jumps_if = branch.opname.endswith("_TRUE")
        if jumps is None:
            return None if falls is None else (jumps_if, falls)
        return (not jumps_if, jumps) if falls is None else None

    def raises(self, place: int) -> int | None:
        """The offset where the code from a place on raises, on all its ways; None if it doesn't."""
        seen, places, found = set[int](), [place], None
        while places:
            place = places.pop()
            if place in seen:
                continue
            seen.add(place)
            step = self.steps[place]
            if step.opname == "RAISE_VARARGS":
                if self.globals(place) & _CAUGHT_BY_PYTHON:
                    return None
                found = step.offset
                continue
            if step.opname in _RETURNS or place + 1 == len(self.steps):
                return None
            if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
                places.append(self.places[step.argval])
            if not step.opname.startswith("JUMP_") or "_OR_POP" in step.opname:
                places.append(place + 1)
        return found

    def catches(self, offset: int) -> bool:
        """Whether an `except`, a `finally` or a `with` may catch an exception that is raised at `offset`."""
        for entry in self.handlers:
            if entry.start <= offset < entry.end:
                first, second = self.steps[self.places[entry.target] :][:2]
                passes = second.opname == "WITH_EXCEPT_START" and self.lets_through(entry.target)
                if first.opname == "PUSH_EXC_INFO" and not passes:
                    return True
        return False

    def lets_through(self, target: int) -> bool:
        """Whether the `with` of the handler at `target` has only managers that are known to catch nothing."""
        start = min(entry.start for entry in self.handlers if entry.target == target)
        entered = [place for place in range(self.places[start]) if "WITH" in self.steps[place].opname]
        names = self.globals(entered[-1]) if entered else set()
        return bool(names) and names <= _MANAGERS

    def globals(self, place: int) -> set[str]:
        """The global names that a step's line loads up to it."""
        line = self.line(place)
        steps = (self.steps[each] for each in range(place) if self.line(each) == line)
        return {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")}

    def line(self, place: int) -> int | None:
        """Line of a step in its file."""
        positions = self.steps[place].positions
        return positions.lineno if positions else None
