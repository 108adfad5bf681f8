"""Calls of attention by the names of their arguments, and written anew by place, as exporters write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.core.graph import Operator

_NEEDED = object()  # equal to nothing


def arguments_of(item: Operator) -> dict[str, Any]:
    """What an operator is called with, by name."""
    names = (argument.name for argument in item.target._schema.arguments)
    return dict(zip(names, item.args, strict=False)) | dict(item.kwargs)


def called(item: Operator, given: Mapping[str, Any]) -> Operator:
    """The operator called with these arguments: by place, up to the last one that isn't its default."""
    schema = item.target._schema.arguments
    placed = [argument for argument in schema if not argument.kwarg_only]
    args = [given.get(each.name, each.default_value) for each in placed]
    while (
        args and placed[len(args) - 1].has_default_value() and args[-1] == placed[len(args) - 1].default_value
    ):
        args.pop()
    kwargs = {each.name: given[each.name] for each in schema if each.kwarg_only and each.name in given}
    return replace(item, args=tuple(args), kwargs=kwargs)


def is_view(target: Any) -> bool:
    """Whether an operator's first result shares its operand's memory, where it can."""
    returned = target._schema.returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
