"""A command: its flags, made from the table of options, and what it prints."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import RenderableType

from autopar.planning.asked.options import OPTIONS, Door, Options
from autopar.torch_seams.torch_version import check_torch


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """A command's output: an object for JSON, a text for a person, and the exit code."""

    document: dict[str, Any]
    text: RenderableType
    exit_code: int = 0


def taking(
    door: Door, *, without: str | None = None, shown: bool = True
) -> Callable[[Callable[..., CommandOutput]], Callable[..., CommandOutput]]:
    """A command with a flag for each option of `door` but one in the place of its `**options`.

    Values are checked before it runs. Unless defaults are `shown`, what isn't said is None.
    """
    names = [name for name in door.options if name != without]
    flags = [_flag(name, door.default(name) if shown else None) for name in names]

    def add(command: Callable[..., CommandOutput]) -> Callable[..., CommandOutput]:
        @functools.wraps(command)
        def checked(**words: Any) -> CommandOutput:
            if words.pop("no_measure", False):
                words["measure"] = False
            Options(door, **{name: words[name] for name in names if name in words}).read()
            check_torch()
            return command(**words)

        signature = inspect.signature(command, eval_str=True)
        own = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
        needed = [item for item in own if item.default is item.empty]
        rest = [item for item in own if item.default is not item.empty]
        parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in (*needed, *flags, *rest)]
        checked.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        checked.__annotations__ = {item.name: item.annotation for item in parameters}
        return checked

    return add


def _flag(name: str, default: Any) -> inspect.Parameter:
    """The parameter from which typer makes the flag of an option."""
    option, text = OPTIONS[name], name.replace("_", "-")
    kind: Any
    if option.words == (bool,) and not option.without:
        kind = bool
        told = typer.Option(
            default, f"--{text}", metavar=option.metavar, help=option.help, show_default=False
        )
    elif option.words == (bool,):  # is true unless the flag says that it isn't
        name, kind = f"no_{name}", bool
        told = typer.Option(False, f"--no-{text}", help=option.without)
    else:
        kind = str if str in option.words else option.words[-1]
        told = typer.Option(default, f"--{text}", metavar=option.metavar, help=option.help)
    annotation = kind | None if told.default is None else kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=told, annotation=annotation)
