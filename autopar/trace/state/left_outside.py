"""What forward leaves outside of its modules: in globals, classes, lists and dicts that it reaches.

    CACHE[n] = torch.linspace(0, 1, n)    a table, the same at each call    taken out: the program makes it
    LOG.append(y.mean())                  a tensor of the call              refused
    COUNT += 1                            a number that counts calls        refused
    WARNED = True                         once                              left there, as eager training does
    settings.aux = y.mean()               a tensor of the call              refused where it is used

A trace must not change what the user's code sees, and a program changes nothing outside. After what is done
once the next trace must give the same graph: what the first call alone does isn't lost without a word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from autopar.errors import TraceError
from autopar.torch_seams import pytree
from autopar.trace.call.call_signature import holds_tensors
from autopar.trace.reads.inside import Inside, LeftInside
from autopar.trace.reads.numbers import is_number
from autopar.trace.reads.reachable_state import Reachable, filled_cells, members

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)  # numbers that are made of tensors
_ABSENT = object()
_LEAVES = "a forward that leaves"


class LeftTensor(NamedTuple):
    """A tensor that forward leaves somewhere, and the refusal if it isn't the same at every call."""

    tensor: torch.Tensor
    refusal: TraceError


class Outside:
    """Objects that code can reach beside the model's modules, as they are before forward.

    `once` are the names of what forward has changed and may change once, `inside` are attributes in which
    calls leave tensors that forward doesn't read.
    """

    def __init__(self, reachable: Reachable, own: set[int]) -> None:
        """`own` are the ids of containers that modules hold, which are looked at elsewhere."""
        self.once: list[str] = []
        self.inside: list[LeftInside] = []
        spaces = [item for item in reachable.namespaces.values() if not (item.is_modules or item.is_library)]
        spaces = [item for item in spaces if id(item.table) not in own]
        cells = (cell for function in reachable.functions.values() for cell in filled_cells(function))
        self._cells = [(cell, cell.cell_contents) for cell in cells]
        self._spaces = [(space, dict(space.table)) for space in spaces]
        self._caches = [(cache, cache.cache_info().misses) for cache in reachable.caches.values()]
        named = {
            id(space.table[name]): space.path(name) for space, _ in self._spaces for name in space.held()
        }
        self._containers = [
            (named.get(key, f"a {type(value).__name__} that forward reaches"), value, _content(value))
            for key, value in reachable.containers.items()
            if key not in own and isinstance(value, (list, dict, set, deque))
        ]

    def left(self, was_read: Callable[[Any, str], bool]) -> list[LeftTensor]:
        """The tensors that forward has left; raises TraceError for what no program leaves.

        Of attributes of objects `was_read` says whether forward reads them: others are refused where they are
        used outside.
        """
        left = []
        for where, before, after, attribute in self._changes():
            if attribute is not None and _is_made(after) and not was_read(*attribute):
                self.inside.append(LeftInside(*attribute, Inside(where)))
                continue
            tensors = list(_judged(where, before, after))
            self.once += [] if tensors else [where]
            left += tensors
        return left

    def restore(self) -> None:
        """Take out again whatever holds tensors of the trace."""
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        for _, value, before in self._containers:
            if any(_is_made(after) for _, _, after in _differences("", before, _content(value))):
                value.clear()
                value.update(before) if isinstance(value, (dict, set)) else value.extend(before.values())
        for space, before in self._spaces:
            for name in space.looked_at():
                if space.table[name] is not before.get(name, _ABSENT) and _is_made(space.table[name]):
                    space.put(name, before[name]) if name in before else space.drop(name)
        for cell, content in self._cells:
            if cell.cell_contents is not content and _is_made(cell.cell_contents):
                cell.cell_contents = content

    def _changes(self) -> Iterator[tuple[str, Any, Any, tuple[Any, str] | None]]:
        """Objects outside that forward has replaced: name, before and after; for attributes of objects also
        the dictionary and the key in it."""
        for space, before in self._spaces:
            for name in space.looked_at():
                if space.table[name] is not before.get(name, _ABSENT):
                    attribute = (space.table, name) if space.recorded else None
                    yield space.path(name), before.get(name, _ABSENT), space.table[name], attribute
        for where, value, before in self._containers:
            for place, then, now in _differences(where, before, _content(value)):
                if isinstance(value, (list, deque)):
                    raise _refusal(where, f"a forward that changes what the {type(value).__name__} holds")
                yield place, then, now, None
        for cell, content in self._cells:
            if cell.cell_contents is not content:
                yield "what forward closes over", content, cell.cell_contents, None


def _content(value: Any) -> dict[Any, Any]:
    """Elements of a container, by key or place; of a set, each of its members."""
    if isinstance(value, dict):
        return dict(dict.items(value))  # whatever a class makes of a key
    items = members(value)
    return dict(enumerate(items)) if isinstance(value, (list, deque)) else {item: item for item in items}


def _differences(where: str, before: dict[Any, Any], now: dict[Any, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key, value in now.items():
        if value is not before.get(key, _ABSENT):
            yield f"{where}[{key!r}]", before.get(key, _ABSENT), value
    for key in before.keys() - now.keys():
        yield f"{where}[{key!r}]", before[key], _ABSENT


def _judged(where: str, before: Any, after: Any) -> Iterator[LeftTensor]:
    leaves = pytree.tree_leaves(after)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    yield from (LeftTensor(tensor, _refusal(where, f"{_LEAVES} a tensor of the call")) for tensor in tensors)
    if any(isinstance(leaf, SYMBOLS) for leaf in leaves):
        raise _refusal(where, f"{_LEAVES} a number that is made of tensors")
    if is_number(after) and is_number(before):
        raise _refusal(where, f"{_LEAVES} {after!r} instead of {before!r}")
    if any(holds_tensors(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)):
        raise _refusal(where, f"{_LEAVES} an object that holds tensors, {type(after).__name__}")


def _is_made(value: Any) -> bool:
    """Whether a trace has made a value or what it holds."""
    leaves = pytree.tree_leaves(value)
    return any(isinstance(leaf, (torch.Tensor, *SYMBOLS)) or holds_tensors(leaf) for leaf in leaves)


def _refusal(where: str, found: str) -> TraceError:
    return TraceError(
        where=where,
        found=f"{found}, outside of the model",
        wanted="results that forward returns, which a program gives at each call",
        remedy="let forward return it and keep it outside, or keep it in a buffer of the model",
    )
