"""What modules hold beside their parameters: kept over a trace, and searched for tensors."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from autopar.torch_seams.modules import own_tensors


class ModuleContents:
    """Contents of modules before a trace, to be put back."""

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self._states = [(vars(module), dict(vars(module))) for module in modules]
        self._tensors = [(held, dict(held)) for module in modules for held in own_tensors(module)]
        held = [
            value for _, state in self._states for name, value in state.items() if not name.startswith("_")
        ]
        self._lists = [(value, list(value)) for value in held if isinstance(value, list)]
        self._dicts = [(value, dict(value)) for value in held if isinstance(value, dict)]

    def restore(self) -> None:
        """Put back what was there; what is new stays unless it holds tensors, which are a trace's own."""
        for held, before in self._tensors:
            held.clear()
            held.update(before)
        for items, content in self._lists:
            items[:] = content
        for table, entries in self._dicts:
            if any(key not in entries for key in table):
                table.clear()
                table.update(entries)
        for state, before in self._states:
            for name in [name for name in state if name not in before and _holds_tensors(state[name])]:
                del state[name]
            state.update(before)


def replaced(value: Any, places: Mapping[int, Tensor | None]) -> Any:
    """`value`, or a copy of it with tensors replaced where it holds some of them."""
    if id(value) in places:
        return places[id(value)]
    if isinstance(value, dict):
        items = {key: replaced(item, places) for key, item in value.items()}
        changed = any(items[key] is not item for key, item in value.items())
        return type(value)(items) if changed and type(value) in (dict, OrderedDict) else value
    if type(value) in (list, tuple):
        parts = [replaced(item, places) for item in value]
        return type(value)(parts) if any(map(operator.is_not, parts, value)) else value
    return value


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return any(map(_holds_tensors, value))
    return any(map(_holds_tensors, value.values())) if isinstance(value, dict) else isinstance(value, Tensor)
