"""Every message in the source says where, found, wanted and remedy, shortly, and names what there is.

Read from the syntax trees: calls with a `remedy`, by keyword or by a helper of the same file that takes one.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

import autopar
from autopar.cli.commands import app
from autopar.cluster import ClusterSpec
from autopar.errors import LONGEST_MESSAGE
from autopar.explaining.what_if import WORDS
from autopar.planning.asked.options import OPTIONS
from autopar.runtime.module.parallel_module import ParallelModule

ROOT = Path(autopar.__file__).parents[1]
FIELDS = ("where", "found", "wanted", "remedy")
HOLE = "\0"  # where an f-string puts a value
MOST = 300  # constant characters of a message: the rest is for what it says of the case
OUTSIDE = {"--ntasks-per-node", "--force-reinstall"}  # flags of srun and pip
# Keywords of torch and others.
KEYWORDS = {
    *("requires_grad", "sparse", "strict", "fused", "create_graph", "use_cache", "batch_first", "timeout"),
    *(
        "dynamo_backend",
        "error_if_nonfinite",
        "nproc_per_node",
        "drop_last",
        "batch_sampler",
        "minutes",
        "inputs",
        "outputs",
    ),
}
VERBS = """
add ask build call change check choose compute convert correct cut draw drop end export free freeze give
hook initialise install keep leave let load lower make measure mend move multiply name number parallelize
pass pin plan prepare profile put raise read register remove rename repair replace report return rewrite run
save say see seed set sort start step take turn use verify wait watch wrap write
"""


@dataclass(frozen=True)
class Message:
    """The constant parts of one message; None for a part that a variable says."""

    place: str
    parts: dict[str, str | None]

    def __str__(self) -> str:
        return f"{self.place}: " + "; ".join(f"{name} {text!r}" for name, text in self.parts.items())


def constant(node: ast.expr) -> str | None:
    """The text that an expression is known to give, with holes; None where that is nothing."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in values)
        case ast.BinOp(left=left, right=right, op=ast.Add()):
            known = [constant(left), constant(right)]
            return None if known == [None, None] else "".join(part or HOLE for part in known)
    return None


def _helpers(tree: ast.Module) -> dict[str, list[str]]:
    """The parameters of the file's own functions that take a remedy."""
    defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    named = {node.name: [item.arg for item in (*node.args.posonlyargs, *node.args.args)] for node in defined}
    return {name: arguments for name, arguments in named.items() if "remedy" in arguments}


@cache
def messages() -> tuple[Message, ...]:
    """All messages of the source."""
    files = [*sorted((ROOT / "autopar").rglob("*.py")), *sorted((ROOT / "costdb").glob("*.py"))]
    return tuple(message for file in files for message in _of_file(file))


def _of_file(file: Path) -> Iterator[Message]:
    tree = ast.parse(file.read_text())
    helpers = _helpers(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {item.arg: item.value for item in node.keywords if item.arg}
        given |= dict(zip(helpers.get(name, ()), node.args, strict=False))
        if "remedy" in given and (name in helpers or name.endswith("Error") or name == "__init__"):
            place = f"{file.relative_to(ROOT)}:{node.lineno}"
            yield Message(place, {field: constant(given[field]) for field in FIELDS if field in given})


def texts(*fields: str) -> Iterator[tuple[str, str]]:
    """Where each text of these parts stands, and the text."""
    for message in messages():
        for field in fields:
            if text := message.parts.get(field):
                yield f"{message.place} {field}", text


def found(pattern: str, *fields: str) -> list[tuple[str, Any]]:
    """Where these parts match a pattern, and what does."""
    return [(place, match) for place, text in texts(*fields) for match in re.findall(pattern, text)]


def errors() -> list[Message]:
    """Messages that are made at once, not by a helper that knows the other parts."""
    return [message for message in messages() if "where" in message.parts]


def test_there_are_messages() -> None:
    assert len(messages()) > 250


def test_every_error_has_all_four_parts() -> None:
    whole = set(FIELDS)
    bad = [message for message in errors() if message.parts.keys() != whole or "" in message.parts.values()]
    assert not bad, "\n".join(map(str, bad))


def test_what_is_constant_of_a_message_leaves_room_for_the_rest() -> None:
    for message in messages():
        assert sum(len(text or "") for text in message.parts.values()) <= MOST < LONGEST_MESSAGE, message


def test_parts_begin_and_end_without_punctuation() -> None:
    """The message joins them by `:`, `,` and `;`."""
    bad = [f"{place}: {text!r}" for place, text in texts(*FIELDS) if text != text.strip(" .,;:\n")]
    assert not bad, "\n".join(bad)


def test_a_remedy_begins_with_a_verb() -> None:
    bad = [(place, text) for place, text in texts("remedy") if not _begins_with_verb(text)]
    assert not bad, "\n".join(map(str, bad))


def _begins_with_verb(text: str) -> bool:
    word = re.match(r"\w+|\0", text)
    return word is not None and word[0] in (HOLE, *VERBS.split())


def test_messages_name_no_internals() -> None:
    """No class of a private name, no repr of functions."""
    bad = [
        f"{place}: {text!r}" for place, text in texts(*FIELDS) if re.search(r"\b_[A-Z]\w+|0x[0-9a-f]", text)
    ]
    assert not bad, "\n".join(bad)


@cache
def flags() -> set[str]:
    command: Any = typer.main.get_command(app)
    found = {word for item in command.params for word in (*item.opts, *item.secondary_opts)}
    for each in command.commands.values():
        found |= {word for item in each.params for word in (*item.opts, *item.secondary_opts)}
    return found | {"--help"}


def test_flags_that_messages_name_exist() -> None:
    named = found(r"(?<!\S)--[a-z][a-z-]*", *FIELDS)
    assert len(named) > 60
    assert [each for each in named if each[1] not in flags() | OUTSIDE] == []


def test_commands_that_messages_name_exist() -> None:
    command: Any = typer.main.get_command(app)
    pattern = r"(?:`|\b(?:run|write|from|by) )autopar ([a-z]+)"
    named = found(pattern, *FIELDS)
    assert len(named) >= 5
    assert [each for each in named if each[1] not in command.commands] == []


def _exists(path: str) -> bool:
    """Whether a dotted name leads from the package to something."""
    head, *rest = path.split(".")
    value: Any = import_module("autopar") if head == "autopar" else None
    for name in rest:
        if not hasattr(value, name):
            return find_spec(path) is not None  # an integration, whose framework may be missing
        value = getattr(value, name)
    return True


def test_functions_that_messages_name_exist() -> None:
    pattern = r"\bautopar\.[A-Za-z_]+(?:\.[A-Za-z_]+)*"
    named = found(pattern, *FIELDS)
    assert len(named) >= 8
    assert [each for each in named if not _exists(each[1])] == []


def test_methods_that_messages_name_exist() -> None:
    owners = {"parallel": ParallelModule, "ClusterSpec": ClusterSpec}
    pattern = r"(?<![\w.])(parallel|ClusterSpec)\.(\w+)"
    named = found(pattern, *FIELDS)
    assert len(named) >= 8
    assert [each for each in named if not hasattr(owners[each[1][0]], each[1][1])] == []


def test_keywords_that_remedies_name_exist() -> None:
    api = [getattr(autopar, name) for name in autopar.__all__ if inspect.isfunction(getattr(autopar, name))]
    known = {name for each in (*api, ClusterSpec) for name in inspect.signature(each).parameters}
    named = found(r"\b([a-z_]+)=(?=\S)", "remedy")
    assert len(named) >= 15
    assert [each for each in named if each[1] not in known | OPTIONS.keys() | KEYWORDS | set(WORDS)] == []


@pytest.mark.parametrize(
    ("text", "told"),
    [("f'a {b}'", "a \0"), ("'a' + b", "a\0"), ("b", None), ("'a' 'b'", "ab")],
)
def test_the_constant_part_of_an_expression_is_read(text: str, told: str | None) -> None:
    assert constant(ast.parse(text, mode="eval").body) == told
