"""The user's own words for a traced operator: its module in the model and its line of source."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterator

from torch import fx

LINE_LENGTH = 80  # characters of a line of source that an error shows


def module_of(node: fx.Node) -> str:
    """The qualified name of the innermost module that calls the operator; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed([path for path, _ in stack.values()]), "") if stack else ""
    return re.sub(r"^model(\.|$)", "", re.sub(r"@\d+$", "", str(path)))


_OURS = (__file__.rsplit("/", 2)[0] + "/", sysconfig.get_path("stdlib") + "/")


def is_library(file: str) -> bool:
    """Whether a source file is autopar's, torch's or Python's own: not the user's."""
    return file.startswith(_OURS) or "site-packages" in file or "/torch/" in file or file.startswith("<")


def _frames(text: str) -> Iterator[str]:
    for file, line, code in re.findall(r'File "([^"]+)", line (\d+), in \S+\s*\n\s*([^\n]*)', text):
        if not is_library(file):
            yield f"{file}:{line}: {code.strip()}"


def source_of(node: fx.Node) -> str:
    """The innermost line of the user's own code that calls the operator; empty where none is known."""
    return next(reversed(list(_frames(node.meta.get("stack_trace") or ""))), "")


def user_line(error: BaseException) -> str:
    """The innermost line of the user's own code in the traceback of `error`."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not is_library(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return next(reversed(list(_frames(str(error)))), "the model's forward")


def calling_line() -> str:
    """The innermost line of the user's own code that is being run."""
    for frame, number in traceback.walk_stack(None):
        if not is_library(frame.f_code.co_filename):
            file = frame.f_code.co_filename
            return f"{file}:{number}: {linecache.getline(file, number).strip()[:LINE_LENGTH]}"
    return "a call outside a file"


def first_line(error: BaseException) -> str:
    """What an error says first, or its type where it says nothing."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
