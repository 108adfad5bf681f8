"""The JSON Schema of a result's file, made from the types of its fields.

    Plan.gap: float                      "gap": {"type": "number"}
    Layer.kinds: tuple[str | None, ...]  "kinds": {"type": "array", "items": {"anyOf": [...]}}

Meshes and placements are texts in files, enums their values, dataclasses objects under `$defs`.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from autopar.core.mesh import MESH_PATTERN, Mesh
from autopar.core.placement import Placement
from autopar.results.files.codec import FORMAT, HEAD, READ

DIALECT = "https://json-schema.org/draft/2020-12/schema"
PLAIN: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
TEXTS: Mapping[Any, dict[str, Any]] = {
    Mesh: {
        "type": "string",
        "pattern": MESH_PATTERN,
        "description": "sizes of the axes, as in 2x2, or shares of rows, as in 1:2x2",
    },
    Placement: {
        "type": "string",
        "pattern": r"^(S\(\d+(\.\d+)?\)|R|P|B)$",
        "description": "sharded on a dim (or a part of it), replicated, partial, or broadcast",
    },
}


def schema_of(kind: type) -> dict[str, Any]:
    """The schema of files that `codec.save` writes of results of that kind, of every format that is read."""
    defined: dict[str, Any] = {}
    result = _schema(kind, defined)
    return {
        "$schema": DIALECT,
        "title": f"{kind.__name__} of autopar, format {FORMAT}",
        "type": "object",
        "properties": {
            "kind": {"const": kind.__name__},
            "format": {"enum": list(READ)},
            "autopar": {"type": "string", "description": "the version that wrote the file"},
            "result": result,
        },
        "required": [*HEAD, "result"],
        "additionalProperties": False,
        "$defs": defined,
    }


def _schema(kind: Any, defined: dict[str, Any]) -> dict[str, Any]:
    """The schema of one type; those of dataclasses are put among what is `defined`."""
    if kind in TEXTS:
        return TEXTS[kind]
    if kind in PLAIN:
        return {"type": PLAIN[kind]}
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(each, defined) for each in inner]}
    if origin is tuple:
        return _array(inner, defined)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(inner[1], defined)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [each.value for each in kind]}
    if isinstance(kind, type) and is_dataclass(kind):
        return _reference(kind, defined)
    raise NotImplementedError(f"no schema for {kind}")


def _array(inner: tuple[Any, ...], defined: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tuple: any number of one type, or one element of each type."""
    if len(inner) == 2 and inner[1] is ...:
        return {"type": "array", "items": _schema(inner[0], defined)}
    places = [_schema(each, defined) for each in inner]
    return {"type": "array", "prefixItems": places, "minItems": len(places), "maxItems": len(places)}


def _reference(kind: type, defined: dict[str, Any]) -> dict[str, Any]:
    """A reference to a dataclass's schema, which is made once."""
    name = kind.__name__
    if name not in defined:
        defined[name] = {}
        hints = get_type_hints(kind)
        defined[name] = {
            "type": "object",
            "description": " ".join((kind.__doc__ or "").split()),
            "properties": {each.name: _schema(hints[each.name], defined) for each in fields(kind)},
            "required": [each.name for each in fields(kind) if _is_needed(each)],
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}


def _is_needed(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING
