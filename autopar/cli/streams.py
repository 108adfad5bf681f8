"""Runs one command: its answer and its errors go to streams and exit codes."""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, TextIO

import typer
from rich.console import Console

from autopar.cli.command import CommandOutput
from autopar.cli.commands import app
from autopar.errors import (
    INTERRUPTED,
    AutoparError,
    InputError,
    WorkerError,
    cut_text,
)

if TYPE_CHECKING:
    pass

UsageError: Any = typer.BadParameter.__bases__[0]  # of the click that this typer carries or imports


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    own = words[: words.index("--")] if "--" in words else words
    if "--json" in own:
        return _print_json(words)
    try:
        answer = _answer(words)
    except AutoparError as error:
        if isinstance(error, WorkerError) and error.details:
            print(error.details, file=sys.stderr)
        print(f"autopar: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    if answer.text:
        from autopar.results.files.text import TEXT_WIDTH

        width = None if sys.stdout.isatty() else TEXT_WIDTH
        Console(width=width, highlight=False, markup=False, emoji=False).print(answer.text)
    return answer.exit_code


def _print_json(words: Sequence[str]) -> int:
    with _kept_stdout() as stdout:
        try:
            answer = _answer(words)
        except AutoparError as error:
            if isinstance(error, WorkerError) and error.details:
                print(error.details, file=sys.stderr)
            answer = CommandOutput({"error": error.as_dict()}, "", error.exit_code)
        except KeyboardInterrupt:
            stopped = AutoparError(
                where="autopar", found="an interrupt", wanted="the end of the work", remedy="start it again"
            )
            answer = CommandOutput({"error": stopped.as_dict() | {"kind": "Interrupted"}}, "", INTERRUPTED)
        except Exception as fault:  # our own: whoever reads the object must not wait for one in vain
            traceback.print_exc()
            document = AutoparError(
                where="autopar", found=repr(fault), wanted="no fault of its own", remedy="report this"
            ).as_dict()
            answer = CommandOutput({"error": document | {"kind": type(fault).__name__}}, "", 1)
        stdout.write(json.dumps(finite(answer.document), allow_nan=False) + "\n")
        stdout.flush()
    return answer.exit_code


def _answer(words: Sequence[str]) -> CommandOutput:
    """The answer of the command that `words` call; typer's own complaints become InputErrors."""
    try:
        result = app(list(words), standalone_mode=False)
    except UsageError as cause:
        context = getattr(cause, "ctx", None)
        name = context.command_path if context else "autopar"
        raise InputError(
            where=name,
            found=cut_text(cause.format_message().rstrip("."), 160) or "no command",
            wanted=context.get_usage().removeprefix("Usage: ") if context else "a command and its options",
            remedy=_remedy(cause) or f"see {name} --help",
        ) from cause
    except typer.Abort as cause:
        raise KeyboardInterrupt from cause
    if result == INTERRUPTED:
        raise KeyboardInterrupt
    return result if isinstance(result, CommandOutput) else CommandOutput({}, "")


def _remedy(cause: Any) -> str | None:
    """Remedy for a command line without an argument that every first one needs; None if none helps."""
    missing = getattr(getattr(cause, "param", None), "name", None)
    if type(cause).__name__ == "MissingParameter" and missing == "cluster":
        return "add --cluster local:2, two processes of this machine, or a file that describes devices"
    return None


def finite(tree: Any) -> Any:
    """`tree` for JSON: null where a number is NaN or infinite."""
    match tree:
        case dict():
            return {key: finite(value) for key, value in tree.items()}
        case list() | tuple():
            return [finite(item) for item in tree]
        case float() if not math.isfinite(tree):
            return None
        case _:
            return tree


@contextmanager
def _kept_stdout() -> Iterator[TextIO]:
    """The real stdout, while whatever else is written there, also by child processes, goes to stderr."""
    stdout = sys.stdout
    if not _is_descriptor(stdout, 1) or not _is_descriptor(sys.stderr, 2):
        with redirect_stdout(sys.stderr):  # streams that a caller has replaced have no processes
            yield stdout
        return
    stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as real:
            yield real
    finally:
        stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _is_descriptor(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (OSError, AttributeError):  # io.UnsupportedOperation is an OSError
        return False
