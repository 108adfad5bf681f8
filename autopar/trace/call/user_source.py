"""The user's own words for a traced operator: its module in the model and its line of source."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from autopar.errors import cut_text
from autopar.torch_seams.tracing import noted_frames


def module_of(node: fx.Node) -> str:
    """The qualified name of the innermost module that calls the operator; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed([path for path, _ in stack.values()]), "") if stack else ""
    return re.sub(r"^model(\.|$)", "", re.sub(r"@\d+$", "", str(path)))


_LINE_LENGTH = 80  # characters of a line of source in an error, which stays below 400
_OURS = (__file__.rsplit("/", 3)[0] + "/", sysconfig.get_path("stdlib") + "/")


@functools.cache
def is_library(file: str) -> bool:
    """Whether a source file is autopar's, torch's or Python's own: not the user's."""
    return file.startswith(_OURS) or "site-packages" in file or "/torch/" in file or file.startswith("<")


_NUMPY, _TORCH = (Path(package.__path__[0]) for package in (np, torch))
_BESIDE_TORCH = (_TORCH.with_name(name) for name in ("sympy", "mpmath", "networkx", "functorch"))
_TOOLS = tuple(f"{folder}/" for folder in (_NUMPY, _TORCH, *_BESIDE_TORCH))


def is_tool(file: str) -> bool:
    """Whether a source file belongs to what all models run on: autopar, Python or torch, but no library of
    models."""
    ours, python = _OURS
    is_python = file.startswith(python) and "site-packages" not in file
    return is_python or file.startswith((ours, "<", *_TOOLS))


def shown_path(file: str) -> str:
    """A source file as errors show it: from the working directory on, where it lies below that."""
    return file.removeprefix(f"{os.getcwd()}/")


def _frames(text: str) -> Iterator[str]:
    for file, line, code in re.findall(r'File "([^"]+)", line (\d+), in \S+\s*\n\s*([^\n]*)', text):
        if not is_library(file):
            yield f"{shown_path(file)}:{line}: {cut_text(code.strip(), _LINE_LENGTH)}"


def source_of(node: fx.Node) -> str:
    """The innermost line of the user's own code that calls the operator; empty where none is known."""
    return next(reversed(list(_frames(node.meta.get("stack_trace") or ""))), "")


@contextmanager
def all_of_forward(boundary: str) -> Iterator[None]:
    """Context in which tracers note all of the user's frames below those of the file `boundary`.

    By themselves they note functions that are called forward alone.
    """

    def below(_: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        last = max((place for place, frame in enumerate(frames) if frame.filename == boundary), default=-1)
        return traceback.StackSummary.from_list(
            [frame for frame in frames[last + 1 :] if not is_library(frame.filename)]
        )

    with noted_frames.replaced(below):
        yield


def user_line(error: BaseException, unknown: str = "the model's forward") -> str:
    """The innermost line of the user's own code in the traceback of `error`, or what stands for it."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    for is_others in (is_library, is_tool):  # else that of a library of models
        for frame in frames:
            if not is_others(frame.filename):
                return shown_line(frame.filename, frame.lineno or 0)
    return next(reversed(list(_frames(str(error)))), unknown)


def shown_line(file: str, number: int) -> str:
    """A line of source as errors show it."""
    return f"{shown_path(file)}:{number}: {cut_text(linecache.getline(file, number).strip(), _LINE_LENGTH)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def calling_line() -> str:
    """The innermost line of the user's own code that is running."""
    for frame in reversed(traceback.extract_stack()):
        if not is_library(frame.filename):
            return shown_line(frame.filename, frame.lineno or 0)
    return "the model's forward"
