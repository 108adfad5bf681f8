"""Which code runs: every function's code object once, at the least cost that this Python allows.

Python 3.12 and newer    sys.monitoring, one event for each code object
Python 3.11              the profiler written in C, some 0.6 us a call
"""

from __future__ import annotations

import cProfile
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TOOLS = (4, 3)  # of sys.monitoring, that it leaves to anybody


@contextmanager
def code_that_runs() -> Iterator[set[types.CodeType]]:
    """Gives a set that holds, in the end, the code that has run within."""
    ran: set[types.CodeType] = set()
    tool = _free_tool()
    if tool is None:
        with _profiled(ran):
            yield ran
        return
    monitoring: Any = vars(sys)["monitoring"]
    starts = monitoring.events.PY_START

    def note(code: types.CodeType, _: int) -> object:
        ran.add(code)
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "autopar")
    try:
        monitoring.register_callback(tool, starts, note)
        monitoring.set_events(tool, starts)
        monitoring.restart_events()
        yield ran
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)


def _free_tool() -> int | None:
    monitoring = getattr(sys, "monitoring", None)
    return None if monitoring is None else next((i for i in _TOOLS if monitoring.get_tool(i) is None), None)


@contextmanager
def _profiled(ran: set[types.CodeType]) -> Iterator[None]:
    """Take the code that runs from the profiler; one that is active goes on afterwards."""
    before: Any = sys.getprofile()
    if str(getattr(before, "__module__", "")).startswith("autopar."):
        yield  # who watches a second run, for the line of a refusal
        return
    profile = cProfile.Profile(subcalls=False, builtins=False)
    profile.enable()
    try:
        yield
    finally:
        profile.disable()
        ran.update(item.code for item in profile.getstats() if isinstance(item.code, types.CodeType))
        if isinstance(before, cProfile.Profile):
            before.enable()
        else:
            sys.setprofile(before)
