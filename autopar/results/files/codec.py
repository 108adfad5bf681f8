"""Results as files of versioned JSON that people can read: frozen dataclasses to objects, and back.

    {"kind": "Plan", "format": 2, "autopar": "0.1.0", "result": {"program": {"mesh": "2x2", ...}, ...}}

Meshes and placements are written as they are printed (`2x2`, `S(0)`), enums by their values; all else is
what its fields are. A file is written whole or not at all. Files of the format before this one are read: what
has come since has a default.

    format 2   parts of the step, one device by itself, reasons of alternatives, moments, the frontier
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import cattrs
from cattrs.v import format_exception

from autopar.core.mesh import Mesh
from autopar.core.placement import Broadcast, Partial, Placement, Replicate, Shard
from autopar.core.user_text import parse_json, read_text
from autopar.core.version import VERSION
from autopar.errors import SHOWN_CHARACTERS, AutoparError, InputError, cut_text, show_value
from autopar.results.files.whole_file import write_whole

FORMAT = 2  # of a file: another number gives its fields another meaning
READ = (FORMAT - 1, FORMAT)  # formats that are read
HEAD = ("kind", "format", "autopar")
EXACTLY: Mapping[type, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}
FAULTS = 3  # of a file, that an error names

Result = TypeVar("Result")


def save(result: object, path: str | Path) -> None:
    """Write a result; raises InputError where the file can't be written."""
    document = {
        "kind": type(result).__name__,
        "format": FORMAT,
        "autopar": VERSION,
        "result": _CONVERTER.unstructure(result),
    }
    write_whole(Path(path), _text(document), where=f"{type(result).__name__.lower()} file {path}")


def load(
    kind: type[Result], path: str | Path, broken_laws: Callable[[Result], Iterable[str]] = lambda _: ()
) -> Result:
    """The result of that kind that `save` wrote; raises InputError for any other file."""
    document = _read(path, kind.__name__)
    try:
        result = _CONVERTER.structure(document["result"], kind)
    except cattrs.BaseValidationError as cause:
        faults = cattrs.transform_error(cause, path="result", format_exception=_fault)
        raise _faulty(path, kind, faults) from cause
    if faults := list(broken_laws(result)):
        raise _faulty(path, kind, faults)
    return result


def _faulty(path: str | Path, kind: type, faults: list[str]) -> InputError:
    more = f" and {len(faults) - FAULTS} more" if len(faults) > FAULTS else ""
    parts = [fault.rpartition(" @ ") for fault in faults[:FAULTS]]
    found = (
        "; ".join(
            f"{cut_text(what, SHOWN_CHARACTERS)}{at}{cut_text(path, SHOWN_CHARACTERS)}"
            for what, at, path in parts
        )
        + more
    )
    return _wrong(path, found, f"the fields of a {kind.__name__}")


def _fault(cause: BaseException, kind: type | None) -> str:
    """Fault of one field, in words."""
    match cause:
        case AutoparError():
            return f"{cause.found}, where {cause.wanted} is wanted"
        case ValueError():
            return str(cause)
        case _:
            return format_exception(cause, kind)


def _read(path: str | Path, kind: str) -> dict[str, Any]:
    """The document in a file, whose kind and versions are those wanted."""
    if not os.path.exists(path):  # nor can be
        raise InputError(
            where=str(path),
            found="no such file",
            wanted=f"the JSON file of a {kind}",
            remedy="check the path, or save one by autopar plan TARGET --cluster local:2 --output FILE",
        )
    try:
        document = parse_json(read_text(path))
    except ValueError as cause:
        raise _wrong(path, str(cause), f"a readable JSON file of a {kind}") from cause
    if not isinstance(document, dict) or document.keys() != {*HEAD, "result"}:
        raise _wrong(path, "other JSON", f"an object of {', '.join(HEAD)} and result")
    if document["kind"] != kind:
        raise _wrong(path, f"kind {show_value(document['kind'])}", f"kind {kind!r}")
    if document["format"] not in READ or isinstance(document["format"], bool):
        version = cut_text(str(document["autopar"]), SHOWN_CHARACTERS)
        found = f"format {show_value(document['format'])} of autopar {version}"
        raise _wrong(path, found, f"format {' or '.join(map(str, READ))}")
    if not isinstance(document["result"], dict):
        raise _wrong(path, f"result {show_value(document['result'])}", f"the fields of a {kind}")
    return document


def _text(document: dict[str, Any]) -> str:
    """Indented JSON whose innermost lists stand on one line each."""
    text = json.dumps(document, indent=1, ensure_ascii=False)
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", _on_one_line, text) + "\n"


def _on_one_line(innermost: re.Match[str]) -> str:
    return "[" + re.sub(r"\n\s+", " ", innermost[1]) + "]"


def _placement(text: Any, _: object) -> Placement:
    """Reads a placement as it is printed."""
    plain = {str(each): each for each in (Replicate(), Partial(), Broadcast())}
    if text in plain:
        return plain[text]
    shard = re.fullmatch(r"S\((\d+)(?:\.(\d+))?\)", str(text))
    if shard is None:
        raise ValueError(f"{show_value(text)} is no placement: S(0), S(0.1), R, P or B")
    return Shard(int(shard[1]), int(shard[2] or 0))


def _exactly(types: tuple[type, ...], value: Any, kind: type) -> Any:
    """The value, which has one of the types: what could be made of another is not what was saved."""
    if type(value) not in types:
        raise ValueError(f"{show_value(value)} is no {kind.__name__}")
    return kind(value)


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for printed in (Mesh, Shard, Replicate, Partial, Broadcast):
        converter.register_unstructure_hook(printed, str)
    converter.register_structure_hook(Mesh, lambda text, _: Mesh.parse(str(text)))
    converter.register_structure_hook(Placement, _placement)
    for kind, types in EXACTLY.items():
        converter.register_structure_hook(kind, partial(_exactly, types))
    return converter


def _wrong(path: str | Path, found: str, wanted: str) -> InputError:
    return InputError(
        where=str(path),
        found=found,
        wanted=wanted,
        remedy="plan again with this version, and save the plan",
    )


_CONVERTER = _converter()
