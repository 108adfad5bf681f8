"""Writes by `.data`, of which autograd doesn't know: `p.data = values`, which torch.export leaves out, is
told as a write where it can't be told from one.

    p.data = p.data * 0.9 + q.data * 0.1      p.copy_(...): nobody else has the memory that p gets
    p.data += q                               p.data.add_(q), and p keeps its memory
    p.data = q.data                           refused: from here on p and q would be one memory
    p.data = y                                refused: what is written to y, or p, would show in both
    y = p.data; p.data = ...; p.data = y      refused: y would still be what p was before
    p[0].data = p[1] * 2                      refused: p keeps its own memory
    y = x * p; p.data.mul_(2)                 refused: backward reads the new p for the gradient of x
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.torch_seams.modes import without_functions
from autopar.torch_seams.pytree import tree_leaves
from autopar.torch_seams.tensors import storage_key
from autopar.trace.call.user_source import calling_line
from autopar.trace.forward.forward_error import ForwardError

DATA: Any = Tensor.data  # the attribute of every tensor
_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__")


class DataWrites:
    """Writes by `.data` in one trace."""

    def __init__(self) -> None:
        self._made = WeakTensorKeyDictionary()  # tensors that calls gave, after how many assignments
        self._assigned: list[int] = []  # memory of what was assigned to, in turn
        self._apart = WeakTensorKeyDictionary()  # of these, by `.data` and views of that
        self._nodes: list[Node] = []  # of autograd, of what calls gave
        self._last: tuple[weakref.ref[Tensor] | None, tuple[Any, ...]] = None, ()  # a result, its arguments
        self._given: tuple[weakref.ref[Tensor], str] | None = None  # values of the last assignment; its line
        self._read: dict[Node, str] = {}  # nodes that have kept what was written since, and where

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note a write by `.data`; raise ForwardError where the values of the assignment before are held."""
        self._require_let_go()
        written = _written(function, args, kwargs) if self._apart else None
        if written is not None and written in self._apart:
            self._note_write(written)

    def end(self, results: Iterable[Tensor]) -> None:
        """Raise ForwardError for values of the last assignment that are held still.

        And where the backward of what forward gives reads what was written since its use.
        """
        self._require_let_go()
        with without_functions():
            given = [item.grad_fn for item in results if item.grad_fn is not None] if self._read else []
        for node in _nodes_behind(given):
            if (line := self._read.get(node)) is not None:
                raise ForwardError(
                    "a write by .data to what backward reads: it would have the new values",
                    "values that stay as they were used",
                    "write it before its use, or use a .clone() of it",
                    line=line,
                )

    def _require_let_go(self) -> None:
        given, self._given = self._given, None
        if given is not None and given[0]() is not None:
            raise _refused("tensor.data = y, where y is kept", given[1])

    def after(self, function: Any, args: Any, result: Any) -> None:
        """Note the tensors that a call takes and gives."""
        made = [item for item in tree_leaves(result) if isinstance(item, Tensor)]
        if not made:
            return
        taken = [item for item in tree_leaves(args) if isinstance(item, Tensor)]
        before = set(map(id, taken))
        for item in made:
            if id(item) not in before:  # as in-place operators give what they take
                self._made[item] = len(self._assigned)
        with without_functions():  # which would give a stand-in for the node
            self._nodes += [item.grad_fn for item in made if item.grad_fn is not None]
        if function == DATA.__get__:
            self._apart[made[0]] = None
        elif self._apart and (apart := {_memory(item) for item in taken if item in self._apart}):
            self._apart.update(dict.fromkeys(item for item in made if _memory(item) in apart))
        self._last = weakref.ref(made[-1]), tuple(map(weakref.ref, taken))

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Write `values`, which the call before has made, as assigning them does."""
        memory = _memory(tensor)
        if _memory(values) == memory and _lies(values) == _lies(tensor):
            if memory in self._assigned[self._made.get(values, 0) :]:
                raise _refused("tensor.data = y, where y is what the tensor was before another assignment")
            return
        if tensor.requires_grad or tensor in self._made or not self._is_new(values):
            raise _refused("tensor.data = ...")
        if (values.shape, values.dtype, values.device) != (tensor.shape, tensor.dtype, tensor.device):
            raise _refused(f"tensor.data = ... of {values.dtype}{list(values.shape)}")
        self._note_write(tensor)
        self._given = weakref.ref(values), calling_line()
        self._assigned.append(memory)
        with torch.no_grad():
            tensor.copy_(values.detach())

    def _is_new(self, values: Tensor) -> bool:
        """Whether the call before has made `values`, in memory of their own."""
        result, taken = self._last
        if result is None or result() is not values:
            return False
        return _memory(values) not in {_memory(item) for ref in taken if (item := ref()) is not None}

    def _note_write(self, tensor: Tensor) -> None:
        """Note which nodes have kept the memory of `tensor` for backward."""
        memory, line = _memory(tensor), calling_line()
        for node in _nodes_behind(self._nodes):
            if any(_memory(item) == memory for item in _saved(node)):
                self._read[node] = line


_current: ContextVar[DataWrites | None] = ContextVar("the writes by .data of this trace", default=None)


@contextmanager
def noted(writes: DataWrites) -> Iterator[None]:
    """Context in which `end_forward` is of these writes."""
    token = _current.set(writes)
    try:
        yield
    finally:
        _current.reset(token)


def end_forward(results: Iterable[Tensor]) -> None:
    """Raise ForwardError for writes by `.data` that a program of these results can't repeat."""
    if (writes := _current.get()) is not None:
        writes.end(results)


def _written(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor that a call writes: its first, or `out`."""
    name = getattr(function, "__name__", "")
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    given = (*args, *kwargs.values()) if in_place or kwargs.get("inplace") else (kwargs.get("out"),)
    return next((item for item in given if isinstance(item, Tensor)), None)


def _nodes_behind(nodes: Iterable[Node]) -> Iterator[Node]:
    """Nodes of autograd, and all that their backward leads to, each once."""
    todo, seen = list(nodes), set[Node]()
    while todo:
        if (node := todo.pop()) in seen:
            continue
        seen.add(node)
        yield node
        todo += [before for before, _ in node.next_functions if before is not None]


def _saved(node: Node) -> Iterator[Tensor]:
    """The tensors that a node keeps for backward, but for those that were written since."""
    for name in [name for name in dir(node) if name.startswith("_saved_")]:
        with suppress(RuntimeError):  # if they were
            yield from (item for item in tree_leaves(getattr(node, name)) if isinstance(item, Tensor))


def _memory(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage()) if tensor.layout is torch.strided else id(tensor)


def _lies(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _refused(found: str, line: str | None = None) -> ForwardError:
    return ForwardError(
        found,
        "the result of an expression, of the same shape and dtype, to a frozen parameter or a buffer",
        "write buffer.copy_(...) under torch.no_grad(), to parameters that learn outside of forward, or "
        "compute with the new values, as by F.linear(x, weight * mask)",
        line=line,
    )
