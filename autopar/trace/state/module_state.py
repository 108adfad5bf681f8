"""What a forward puts in the place of what its modules hold, which a traced program would lose.

    self.mean = 0.9 * self.mean + 0.1 * x.mean(0)      a buffer     copied into it, as mean.copy_(...) would
                                                       a tensor     refused if it is read, too
    self.scores = x.mean()                             a new tensor stays inside: its use outside is refused
    self.table = torch.arange(n)                       a cache      made anew: the same at every call
    self.calls += 1                                    a number     left behind by each call

torch.export undoes such changes, and copies the buffers of the outermost module alone.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.core.graph import Graph, InputKind, TensorSpec
from autopar.core.operator_facts import is_random
from autopar.errors import TraceError
from autopar.torch_seams import pytree
from autopar.torch_seams.modules import own_buffers, own_tensors, unsaved_buffers
from autopar.trace.reads.attribute_reads import Reads
from autopar.trace.reads.inside import Inside
from autopar.trace.reads.reachable_state import members
from autopar.trace.state.left_outside import SYMBOLS, LeftTensor

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_OWN = frozenset(vars(nn.Module()))  # attributes of every module


@dataclass(frozen=True, slots=True)
class StateEntry:
    """The `value` that a module holds as forward begins, under a `name` in one of its dictionaries."""

    place: dict[str, Any]
    name: str
    value: Any
    content: list[Any] | None = None

    @property
    def is_replaced(self) -> bool:
        return self.place.get(self.name) is not self.value

    @property
    def is_changed(self) -> bool:
        """Whether the list or dict in the entry has other contents than before."""
        now = _content(self.value)
        if now is None or self.content is None:
            return False
        return len(now) != len(self.content) or any(map(operator.is_not, now, self.content))


State = Mapping[str, StateEntry]  # by path


def buffers_of(model: nn.Module) -> State:
    """Buffers of all modules by path, None where one is declared without a tensor."""
    return {
        _path(path, name): StateEntry(own_buffers(module), name, value)
        for path, module in model.named_modules()
        for name, value in own_buffers(module).items()
    }


def attributes_of(model: nn.Module) -> State:
    """Attributes of modules that are no parameters, buffers, modules or hooks."""
    return {
        _path(path, name): StateEntry(vars(module), name, value, _content(value))
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OWN
    }


def _content(value: Any) -> list[Any] | None:
    """Elements of a list or dict; None for any other value."""
    match value:
        case list() | deque():
            return [*members(value)]
        case dict():
            return [*dict.keys(value), *dict.values(value)]
        case _:
            return None


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def write_back(buffers: State) -> None:
    """Copy what has been put in a buffer's place into the buffer; raises TraceError for another shape."""
    for path, buffer in buffers.items():
        before, after = buffer.value, buffer.place.get(buffer.name)
        if not buffer.is_replaced:
            continue
        if before is None or after is None or (before.shape, before.dtype) != (after.shape, after.dtype):
            raise TraceError(
                where=f"buffer {path}",
                found=f"a forward that puts {_shown(after)} in the place of {_shown(before)}",
                wanted="a buffer that keeps its shape and dtype",
                remedy="register it as it will be, before the model is planned",
            )
        before.copy_(after.detach())
        buffer.place[buffer.name] = before


def _shown(value: torch.Tensor | None) -> str:
    return "None" if value is None else str(TensorSpec(tuple(value.shape), value.dtype))


@dataclass(frozen=True, slots=True)
class ModuleChanges:
    """Changes that forward left in its modules: `values` by path and name.

    `cached` are tensors that it reads where they are there already: they must be the same at every call.
    `counted` are the paths of numbers that it reads and changes.
    """

    values: Mapping[tuple[str, str], Any]
    cached: tuple[LeftTensor, ...]
    counted: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of a plan on these changes."""
        return tuple(
            f"forward reads and changes {path}: a program is made for each of its values"
            for path in self.counted
        )


def left_in(model: nn.Module, before: State, reads: Reads) -> ModuleChanges:
    """Tensors that forward has left in `model`, and put nowhere else.

    Raises TraceError for lists that it changes otherwise than by tensors.
    """
    values: dict[tuple[str, str], Any] = {}
    cached: list[LeftTensor] = []
    own = set(map(id, (*model.parameters(), *model.buffers())))  # which an LSTM puts into a list of its own
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            held = before.get(_path(path, name))
            if name in _OWN or (held is not None and not held.is_replaced and not held.is_changed):
                continue
            tensors = [item for item in pytree.tree_leaves(value) if isinstance(item, torch.Tensor)]
            if any(id(item) in own for item in tensors):
                continue
            changed = held is not None and held.is_changed
            if changed and not tensors and isinstance(value, list):
                raise _changes(path, name, value)
            if changed or (tensors and reads.has(vars(module), name)):
                cached += [LeftTensor(item, _replaces(_path(path, name))) for item in tensors]
            elif tensors or any(isinstance(item, SYMBOLS) for item in pytree.tree_leaves(value)):
                values[path, name] = Inside(_path(path, name))
            elif isinstance(value, _PLAIN) or value is None:
                values[path, name] = value
    counted = [
        _path(path, name)
        for path, module in model.named_modules()
        for name in vars(module)
        if (path, name) in values and reads.has(vars(module), name)
    ]
    return ModuleChanges(values, tuple(cached), tuple(counted))


def _changes(path: str, name: str, value: Any) -> TraceError:
    return TraceError(
        where=f"attribute {_path(path, name)}",
        found=f"a forward that changes what the {type(value).__name__} holds",
        wanted="results that forward returns",
        remedy="let forward return what it adds",
    )


def _replaces(path: str, else_: str = "cache nothing") -> TraceError:
    return TraceError(
        where=f"attribute {path}",
        found="a tensor that forward reads and replaces",
        wanted="a buffer, whose values are kept from call to call",
        remedy=f"keep it by register_buffer({path.rpartition('.')[2]!r}, ...), or let forward return it, or "
        f"{else_}",
    )


class Attributes:
    """Attributes of modules, restored after a trace.

    torch.export replaces lists and dicts by copies, which takes shared ones apart, and leaves new attributes.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tables = [vars(module) for module in modules]
        self._tables = [(table, {name: table[name] for name in table.keys() - _OWN}) for table in tables]
        self._contents: dict[int, tuple[Any, list[Any]]] = {}
        todo = [value for _, before in self._tables for value in before.values()]
        while todo:
            value = todo.pop()
            content = [*members(value)] if isinstance(value, tuple) else _content(value)
            if content is not None and id(value) not in self._contents:
                self._contents[id(value)] = value, content
                todo += content

    def restore(self) -> None:
        """Put all of it back."""
        for table, before in self._tables:
            for name in table.keys() - before.keys() - _OWN:
                del table[name]
            table.update(before)
        for value, content in self._contents.values():
            now = _content(value)
            if now is None or (len(now) == len(content) and all(map(operator.is_, now, content))):
                continue
            value.clear()
            if isinstance(value, dict):
                half = len(content) // 2
                value.update(zip(content[:half], content[half:], strict=True))
            else:
                value.extend(content)


class NewState:
    """Parameters and buffers that forward makes, beside those that a model has as it begins.

    A buffer that no state dict has, and that was empty or of another shape, is made anew.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (path, held, dict(held), unsaved_buffers(module))
            for path, module in model.named_modules()
            for held in own_tensors(module)
        ]

    def check(self) -> list[LeftTensor]:
        """The buffers that forward has made and no state dict has; raises TraceError for other new ones."""
        new = [item for item in self._new() if item[1] is not None]
        kept = [path for path, _, is_saved in new if is_saved]
        if kept:
            raise TraceError(
                where=kept[0],
                found="a parameter or buffer that forward makes",
                wanted="those that a model is planned with",
                remedy="call the model once before it is planned, or make them in __init__",
            )
        return [LeftTensor(tensor, _replaces(path, "call the model once before")) for path, tensor, _ in new]

    def restore(self) -> None:
        """Take them out again."""
        for _, held, before, unsaved in self._held:
            for name in held.keys() - before.keys():
                del held[name]
            held.update({name: before[name] for name in before if _is_anew(name, held, before, unsaved)})

    def _new(self) -> Iterator[tuple[str, Any, bool]]:
        """Attributes that forward has added: path, value, and whether a state dict has it."""
        for path, held, before, unsaved in self._held:
            for name, item in held.items():
                if name not in before or _is_anew(name, held, before, unsaved):
                    yield _path(path, name), item, name not in unsaved


def _unsaved(model: nn.Module) -> set[str]:
    """The buffers that no state dict has."""
    return {_path(path, name) for path, module in model.named_modules() for name in unsaved_buffers(module)}


def _is_anew(name: str, held: dict[str, Any], before: dict[str, Any], unsaved: set[str]) -> bool:
    """Whether a buffer outside of state dicts has changed its shape or dtype."""
    old, new = before[name], held.get(name)
    fits = old is not None and new is not None and (old.shape, old.dtype) == (new.shape, new.dtype)
    return name in unsaved and new is not None and not fits


def check_cached(
    model: nn.Module, graph: Graph, names: Sequence[str], refusals: Sequence[TraceError]
) -> None:
    """Raise the refusal of one of the tensors, which forward leaves, that depends on the call.

    What is made of constants doesn't, nor what is made of buffers that no state dict has and forward keeps.
    """
    makers = graph.makers()
    unsaved, written = _unsaved(model), dict(graph.writes)
    buffers = (item for item in graph.inputs if item.kind is InputKind.BUFFER)
    kept = {item.name for item in buffers if unsaved.issuperset((item.target, *item.aliases))}
    fixed = {item.name for item in graph.inputs if item.value is not None} | (kept - written.keys())
    for name, refusal in zip(names, refusals, strict=True):
        todo, seen = [name], set[str]()
        while todo:
            value = todo.pop()
            if value in seen or value in fixed:
                continue
            seen.add(value)
            if value not in makers or is_random(makers[value].target):
                raise refusal
            todo += makers[value].operands
