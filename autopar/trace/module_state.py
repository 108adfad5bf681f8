"""What a forward puts in the place of what its modules hold, which a traced program would lose.

    self.mean = 0.9 * self.mean + 0.1 * x.mean(0)      a buffer     copied into it, as mean.copy_(...) would
                                                       a tensor     refused if it is read, too
    self.calls += 1                                    a number     noted: nothing tells whether it is read

torch.export undoes such changes, and copies the buffers of the outermost module alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.core.graph import Graph, TensorSpec
from autopar.errors import TraceError


@dataclass(frozen=True, slots=True)
class Held:
    """The `value` that a module holds as forward begins, under a `name` in one of its dictionaries."""

    place: dict[str, Any]
    name: str
    value: Any

    @property
    def is_replaced(self) -> bool:
        return self.place.get(self.name) is not self.value


State = Mapping[str, Held]  # by path


def buffers_of(model: nn.Module) -> State:
    """All buffers, also those that are None."""
    return {
        _path(path, name): Held(module._buffers, name, value)
        for path, module in model.named_modules()
        for name, value in module._buffers.items()
    }


def attributes_of(model: nn.Module) -> State:
    """The tensors and numbers that are plain attributes."""
    return {
        _path(path, name): Held(vars(module), name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (torch.Tensor, int, float))
    }


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


def replaced_in(attributes: State) -> Mapping[str, Any]:
    """By path what has been replaced."""
    return {path: held.value for path, held in attributes.items() if held.is_replaced}


def noted(graph: Graph, replaced: Mapping[str, Any]) -> Graph:
    """The graph with a note of numbers that its forward has `replaced`; raises TraceError for tensors that it
    reads, too: it would always read the first ones."""
    constants = {item.target.removeprefix("model.") for item in graph.inputs if item.value is not None}
    for path, value in replaced.items():
        if path in constants and isinstance(value, torch.Tensor):
            raise TraceError(
                where=f"attribute {path}",
                found="a tensor that forward reads and replaces",
                wanted="a buffer, whose values are kept from call to call",
                remedy=f"register_buffer({path.rpartition('.')[2]!r}, ...) it",
            )
    return replace(graph, notes=(*graph.notes, *_notes(replaced)))


def _notes(replaced: Mapping[str, Any]) -> Sequence[str]:
    numbers = {path: value for path, value in replaced.items() if not isinstance(value, torch.Tensor)}
    return [f"forward changes {path}, which stays {value} in the program" for path, value in numbers.items()]
