"""Spoils what users write: bytes, words, and values of JSON and TOML, each by one seed.

spoiled_json(random, document)   one to three values, keys or brackets of a document are odd
spoiled_text(random, text)       one to three words are
spoiled_bytes(random, data)      bytes are lost, doubled, or others
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

DEEP = 100_000
DIGITS = "9" * 5_000
LONG = "x" * 100_000
# Values as JSON writes them; what isn't JSON there is what a hand writes by mistake.
ODD_JSON = (
    *("null", "true", "false", '""', "[]", "{}", "0", "-1", "1", "2", "3.5", "-0.0", "1e999", "-1e999"),
    *("NaN", "Infinity", "-Infinity", DIGITS, f"-{DIGITS}", f"0.{DIGITS}", f"1e{DIGITS}", str(1 << 63)),
    *(str((1 << 63) - 1), "1e308", "1e-320", "9" * 29, "1" + "0" * 40),
    *(
        "[" * DEEP,
        "[" * DEEP + "]" * DEEP,
        '{"a":' * DEEP,
        "[" * 500 + "]" * 500,
        '{"a":' * 60 + "1" + "}" * 60,
    ),
    *(f'"{LONG}"', '"\\u0000"', '"\\ud800"', '"a\\nb"', '"inf"', '"1"', '"R"', '"S(0)"', '"2x2"', '"0x2"'),
    *('"S(99999999999999999999)"', '"3\u0660"', "[[]]", '[{"a": 1}]', '{"a": 1, "a": 2}', "[null]", "[-1]"),
    *("[1e999]", '["a"]', "'a'", "undefined", "01", "+1", ".5", "1.", "//", "{", "}", "[", "]", ",", ""),
)
ODD_TOML = (
    *(
        "0",
        "-1",
        "1",
        "true",
        "3.5",
        "nan",
        "inf",
        "-inf",
        DIGITS,
        f"0x{DIGITS}",
        f"0.{DIGITS}",
        f'"{DIGITS}GB"',
    ),
    *(
        '""',
        '"80"',
        '"80gb"',
        '"0GB"',
        '"1e9GB"',
        '"0us"',
        '"99999999999999999999TB/s"',
        '"cpu"',
        '"\\u0000"',
    ),
    *(
        "[]",
        "[[]]",
        "{}",
        "{a = 1}",
        "1979-05-27",
        "07:32:00",
        "1979-05-27T07:32:00Z",
        "[" * DEEP,
        "{a=" * DEEP,
    ),
    *("[" * 500 + "]" * 500, f'"{LONG}"', "1000000", "1000001", "9223372036854775807", "1_000", "0o7", "0b1"),
    *("'''", '"""', "=", "[", "]", ".", "a." * 2_000, "# ", "\n", "", "1e400", "-0.0", "9" * 25),
)
ODD_WORDS = (
    *(
        "",
        " ",
        "0",
        "1",
        "-1",
        "2",
        "4",
        "3.5",
        "nan",
        "inf",
        "-inf",
        "1e999",
        DIGITS,
        f"-{DIGITS}",
        "1e",
        "auto",
    ),
    *(
        "none",
        "all",
        "x",
        "2x",
        "x2",
        "2x2",
        "0x0",
        "-1x2",
        "2x2x2x2",
        f"{DIGITS}x2",
        "1000001",
        "9" * 9,
        "9" * 10,
    ),
    *(
        "\u0662",
        "\u00b2",
        "1_000",
        "+",
        "batch+",
        "batch+batch+batch+batch",
        ",",
        "=",
        "a=",
        "=1",
        "0=1",
        "a=none",
    ),
    *(f"{DIGITS}=1", f"a={DIGITS}", "0=--1", "local:", "local:0", "local:2", f"local:{DIGITS}", "local:1-8"),
    *(
        "local:8-1",
        f"local:1-{DIGITS}",
        "local:0-0",
        "none.toml",
        "none.toml:1-8",
        "\x00",
        "a\x00.toml",
        "\udcff",
    ),
    *("memory=", "memory=1GB", "memory=1GB,memory=2GB", "devices=0", f"devices={DIGITS}", "batch=-1", "80GB"),
    *(
        "0GB",
        "80gb",
        f"{DIGITS}GB",
        f"0.{DIGITS}GB",
        "1 GB ",
        "GB",
        "1e3GB",
        "a" * 300,
        LONG,
        "[" * DEEP,
        "\n",
    ),
    *(
        "--",
        "-",
        "~",
        "/",
        ".",
        "..",
        "/dev/null",
        "/proc/self/mem",
        "%s",
        "{0}",
        "$HOME",
        "\x1b[31m",
        "\ud800",
    ),
)
ODD_BYTES = (
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\x80",
    b"\xed\xa0\x80",
    b"[" * DEEP,
    b"\x00" * 4096,
    b"",
    b"\n",
)
_TOKEN = re.compile(r"[\w.+-]+|\s+|.", re.DOTALL)


def spoiled_json(random: Random, document: Any) -> bytes:
    """The text of a document in which one to three things are odd."""
    tree, odd = deepcopy(document), dict[str, str]()
    for _ in range(random.choice((1, 1, 2, 3))):
        _spoil_tree(random, tree, odd)
    text = json.dumps(tree)
    for mark, word in odd.items():
        text = text.replace(f'"{mark}"', word, 1)
    return text.encode("utf-8", "surrogatepass")


def _spoil_tree(random: Random, tree: Any, odd: dict[str, str]) -> None:
    """Change one value, key or length of a tree; what isn't JSON is a mark until it is text."""
    holder = random.choice(list(_holders(tree)))
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    key = random.choice(keys)
    mark = f"mark {len(odd)}"
    match random.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[random.choice(("", "a", LONG, "\x00", *keys))] = holder.pop(key)
        case 2 if isinstance(holder, dict):  # the same key again
            odd[mark] = f"{json.dumps(key)}: {json.dumps(holder[key])}, {json.dumps(key)}"
            holder[mark] = holder.pop(key)
        case 1 | 2:
            holder.append(holder[key])
        case 3 if isinstance(holder[key], (int, float)):
            holder[key] = random.choice((-1, 0, 0.5, 2, 1e9, -1e-9)) * holder[key] + random.choice((-1, 0, 1))
        case 4:
            holder[key] = deepcopy(random.choice(list(_values(tree))))
        case _:
            odd[mark] = random.choice(ODD_JSON)
            holder[key] = mark


def _values(tree: Any) -> list[Any]:
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [tree, *(value for child in children for value in _values(child))]


def _holders(tree: Any) -> list[Any]:
    """Objects and lists that hold something; the tree's own head as often as all else."""
    inner = [value for value in _values(tree) if isinstance(value, (dict, list)) and value]
    return inner if inner else [{"a": 1}]


def spoiled_text(random: Random, text: str, odd: tuple[str, ...]) -> bytes:
    """A text with one to three odd words among its own, or without, or with twice, one of them."""
    words = _TOKEN.findall(text) or [""]
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(words) or 1)
        words[at : at + 1] = random.choice(
            ([random.choice(odd)], [], words[at : at + 1] * 2, [*words[at : at + 1], random.choice(odd)])
        )
    return "".join(words).encode("utf-8", "surrogatepass")


def spoiled_bytes(random: Random, data: bytes) -> bytes:
    """Data of which a part is lost, doubled, overwritten, or begins and ends elsewhere."""
    found = bytearray(data)
    for _ in range(random.choice((1, 2, 8))):
        at, length = random.randrange(len(found) + 1), random.choice((1, 2, 16, 1024))
        change: Callable[[], bytes] = random.choice(
            (
                lambda length=length: random.randbytes(length),
                lambda: random.choice(ODD_BYTES),
                lambda at=at, length=length: bytes(found[at : at + length]) * 2,
                lambda: b"",
            )
        )
        found[at : at + random.choice((0, length))] = change()
    return bytes(found[: random.choice((len(found), len(found), random.randrange(len(found) + 1)))])
