"""Texts that users wrote, or broke, as data: parsers fail, or take minutes, on what is too deep or too long.

    file ─ read_text ─ text ─ parse_json, parse_toml ─ data, whose values are still to be checked

Whatever is wrong raises ValueError, with a few plain words that say what was found.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from autopar.errors import show_value

DEEPEST = 64  # brackets within brackets; plans have 9
MOST_NUMBER_DIGITS = 30  # of a whole number; the largest count, of flops, has 20
LARGEST_FILE_BYTES = 64 << 20  # bytes of a file; the plan of a thousand operators has one MiB
LONGEST_TOML = 256 << 10  # bytes of a file
LONGEST_LINE = 4_000  # characters of a line of TOML: tomllib's time is quadratic in the dots of a key

Tree = TypeVar("Tree")


def is_file(path: str | Path) -> bool:
    """Whether the file exists; a path that is too long or has a null byte names none."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def read_text(path: str | Path, *, longest: int = LARGEST_FILE_BYTES) -> str:
    """The text of a file; raises ValueError for one that can't be read, is too long, or isn't UTF-8."""
    try:
        with Path(path).open("rb") as file:
            read = file.read(longest + 1)
    except OSError as cause:
        raise ValueError(cause.strerror or str(cause)) from cause
    if len(read) > longest:
        raise ValueError(f"more than {longest:,} bytes")
    try:
        return read.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise ValueError(f"bytes that are no UTF-8 text, at byte {cause.start:,}") from cause


def parse_json(text: str) -> Any:  # noqa: ANN401  JSON may hold anything
    """The value that a text of JSON says; raises ValueError for any other, and for a key that comes twice."""
    return _parsed(partial(json.loads, text, parse_int=_whole, object_pairs_hook=_object))


def parse_toml(text: str) -> dict[str, Any]:
    """The tables that a text of TOML says; raises ValueError for any other."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LONGEST_LINE:
            raise ValueError(f"more than {LONGEST_LINE:,} characters in line {number}")
    return _parsed(partial(tomllib.loads, text))


def _parsed(parse: Callable[[], Tree]) -> Tree:
    """Result of `parse`; raises ValueError if the text is nested too deeply or has a number that is too
    long."""
    try:
        tree = parse()
    except RecursionError as cause:
        raise _too_deep() from cause
    except MemoryError as cause:
        raise ValueError("more than memory holds") from cause
    except ValueError as cause:  # the parsers' own say what was found, with line and column
        raise ValueError(re.sub(r"Exceeds the limit .*", "a number that is too long", str(cause))) from cause
    _check(tree)
    return tree


def _check(tree: object) -> None:
    level = [tree]
    for _ in range(DEEPEST + 1):
        for value in level:
            if isinstance(value, int):
                _check_whole(value)
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise _too_deep()


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _whole(text: str) -> int:
    if len(text) > MOST_NUMBER_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)


def _check_whole(number: int) -> None:
    """Refuse a whole number of TOML that is too large; it may be written in hexadecimal."""
    if abs(number) >= 10**MOST_NUMBER_DIGITS:
        raise ValueError(show_value(number))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {show_value(twice)} twice")
    return found


def _too_deep() -> ValueError:
    return ValueError(f"brackets nested more than {DEEPEST} deep")
