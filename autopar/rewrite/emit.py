"""Writes the program of one rank, call by call, and knows every local shape as it goes.

Each call is evaluated on meta tensors while it is written, so a wrong shape is found here, in the
operator that caused it, and no process group is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.core.graph import Call, TensorSpec
from autopar.core.size_patterns import ResultShapes, SizePattern, pattern_of, result_shapes
from autopar.ops.recurrent import steps_dim, steps_of
from autopar.torch_seams import pytree

_META = torch.device("meta")
_GIVEN: dict[Any, Any] = {}  # on meta tensors by calls, by all that it depends on
_PATTERNS: dict[
    Any, tuple[Any, ResultShapes] | None
] = {}  # of calls that differ by sizes; None: those matter


@dataclass(frozen=True, slots=True)
class LocalCall:
    """One local call as it was written: its tensors in argument order, and what it gave."""

    call: Call
    operands: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]

    @property
    def is_local(self) -> bool:
        """Whether the call is torch's own, not one that autopar registered."""
        return bool(self.call.target.namespace != "autopar")


class GraphEmitter:
    """An `Emitter` that appends to an fx.Graph; `written` and `collectives` are for pricing, one that
    never `runs`."""

    def __init__(self, *, device: torch.device | None = None, runs: bool = True) -> None:
        self.graph, self.runs = fx.Graph(), runs
        self.device = device
        self.meta: dict[fx.Node, torch.Tensor] = {}
        self.constants: dict[str, torch.Tensor] = {}  # of this rank, by placeholder
        self.known: dict[object, fx.Node] = {}  # their nodes, by key
        self.memory: dict[fx.Node, object] = {}  # of constants: equal for those that are one tensor
        self.written: list[LocalCall] = []
        self.collectives: list[tuple[str, tuple[Any, ...], TensorSpec]] = []

    def placeholder(self, name: str, spec: TensorSpec) -> fx.Node:
        node = self.graph.placeholder(name)
        self.meta[node] = torch.empty(
            spec.shape, dtype=spec.dtype, device=_META, requires_grad=spec.requires_grad
        )
        return node

    def constant(
        self, key: object, spec: TensorSpec, make: Callable[[], torch.Tensor], memory: object = None
    ) -> fx.Node:
        """A placeholder for what the rank's program holds from the start; one for each key. It is made only
        where the program is to run. Those of equal `memory` share it."""
        if key not in self.known:
            places = [node for node in self.graph.nodes if node.op == "placeholder"]
            name = f"part_{len(self.constants)}"
            before = self.graph.inserting_after(places[-1]) if places else nullcontext()
            with before:
                node = self.graph.placeholder(name)
            self.meta[node] = torch.empty(spec.shape, dtype=spec.dtype, device=_META)
            self.known[key], self.constants[name] = node, make() if self.runs else self.meta[node]
            self.memory[node] = key if memory is None else memory
        return self.known[key]

    def call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and self.device is not None:
            kwargs["device"] = self.device
        call = Call(target, self.described(tuple(args)), self.described(kwargs))
        operands = tuple(item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, fx.Node))
        strides = tuple(self.meta[item].stride() for item in operands)
        key = target, call.key(), strides, *_ambient()
        if key not in _GIVEN:
            given = None if steps_of(call) else _by_pattern(call, strides)
            if given is None:
                given = pytree.tree_map(_bare, self._evaluated(call, args, kwargs))
            _GIVEN[key] = given
        values = _GIVEN[key]
        node = self.graph.call_function(target, tuple(args), kwargs)
        if isinstance(values, torch.Tensor):
            self.meta[node] = values
            self.written.append(LocalCall(call, operands, (node,)))
            return node
        parts: list[fx.Node] = []
        for index, value in enumerate(values):
            part = self.graph.call_function(operator.getitem, (node, index))
            self.meta[part] = value
            parts.append(part)
        self.written.append(LocalCall(call, operands, tuple(parts)))
        return tuple(parts)

    def _evaluated(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        on_meta = {**self._lookup(kwargs), **({"device": _META} if "device" in kwargs else {})}
        values = self._lookup(tuple(args))
        if not (steps := steps_of(call)):
            return call.target(*values, **on_meta)
        x, *others = values
        first, *states = call.target(x.narrow(steps_dim(call), 0, 2), *others, **on_meta)
        return _longer(first, steps_dim(call), steps), *states

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(item.call for item in self.written)

    def collective(self, target: Any, args: Sequence[Any], shape: Sequence[int]) -> fx.Node:
        node = self.graph.call_function(target, tuple(args))
        operand = self.meta[args[0]]
        requires_grad = any(self.meta[item].requires_grad for item in node.all_input_nodes)
        spec = TensorSpec(tuple(operand.shape), operand.dtype, requires_grad)
        self.collectives.append((str(target), tuple(args[1:]), spec))
        self.meta[node] = torch.empty(
            tuple(shape), dtype=operand.dtype, device=_META, requires_grad=requires_grad
        )
        return node

    def collective_of_list(
        self, target: Any, args: Sequence[Any], shapes: Sequence[Sequence[int]]
    ) -> tuple[fx.Node, ...]:
        """A collective that takes a list of tensors first, and gives one of these shapes for each."""
        node = self.graph.call_function(target, tuple(args))
        parts = []
        for index, (operand, shape) in enumerate(zip(args[0], shapes, strict=True)):
            part = self.graph.call_function(operator.getitem, (node, index))
            like = self.meta[operand]
            self.meta[part] = torch.empty(
                tuple(shape), dtype=like.dtype, device=_META, requires_grad=like.requires_grad
            )
            parts.append(part)
        return tuple(parts)

    def shape(self, value: fx.Node) -> tuple[int, ...]:
        return tuple(self.meta[value].shape)

    def _lookup(self, tree: Any) -> Any:
        return fx.node.map_arg(tree, lambda node: self.meta[node])

    def described(self, tree: Any) -> Any:
        """`tree` with a `TensorSpec` for every value."""

        def describe(node: fx.Node) -> Any:
            value = self.meta[node]
            return TensorSpec(tuple(value.shape), value.dtype, value.requires_grad)

        return fx.node.map_arg(tree, describe)


def _by_pattern(call: Call, strides: Sequence[tuple[int, ...]]) -> Any:
    """Result of a call of contiguous operands, if it follows from calls of other sizes; else None."""
    pattern = pattern_of(call)
    if pattern is None or not all(map(_contiguous, _operands(call), strides)):
        return None
    key = pattern.key, *_ambient()
    if key not in _PATTERNS:
        _PATTERNS[key] = _learned(pattern)
    learned = _PATTERNS[key]
    if learned is None:
        return None
    specs, shapes = learned
    leaves = [
        torch.empty(shape, dtype=spec.dtype, device=_META, requires_grad=spec.requires_grad)
        for spec, shape in zip(
            pytree.tree_leaves(specs, is_leaf=_is_spec), shapes.at(pattern.sizes), strict=True
        )
    ]
    return leaves[0] if isinstance(specs, TensorSpec) else tuple(leaves)


def _learned(pattern: SizePattern) -> tuple[Any, ResultShapes] | None:
    """Result of a pattern's calls at all sizes, contiguous tensors; None if sizes matter."""
    found = []
    for call in pattern.probes():
        try:
            args, kwargs = (_on_meta(each) for each in (call.args, call.kwargs))
            given = call.target(*args, **kwargs)
        except Exception:  # noqa: BLE001  (an operator may refuse sizes by any error)
            return None
        results = [given] if isinstance(given, torch.Tensor) else given
        if not all(isinstance(each, torch.Tensor) and each.is_contiguous() for each in results):
            return None
        specs = [TensorSpec(tuple(each.shape), each.dtype, each.requires_grad) for each in results]
        found.append((isinstance(given, torch.Tensor), specs))
    (single, small), (_, large) = found
    shapes = result_shapes([spec.shape for spec in small], [spec.shape for spec in large])
    same = [replace(spec, shape=()) for spec in small] == [replace(spec, shape=()) for spec in large]
    if shapes is None or not same:
        return None
    return small[0] if single else tuple(small), shapes


def _operands(call: Call) -> list[TensorSpec]:
    leaves = pytree.tree_leaves((call.args, call.kwargs), is_leaf=_is_spec)
    return [each for each in leaves if _is_spec(each)]


def _on_meta(tree: Any) -> Any:
    """`tree` with a tensor on the meta device for every spec, and that device for every other."""

    def fill(leaf: Any) -> Any:
        match leaf:
            case TensorSpec():
                shape, dtype, grad = leaf.shape, leaf.dtype, leaf.requires_grad
                return torch.empty(shape, dtype=dtype, device=_META, requires_grad=grad)
            case torch.device():
                return _META
            case _:
                return leaf

    return pytree.tree_map(fill, tree, is_leaf=_is_spec)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, TensorSpec)


def _contiguous(spec: TensorSpec, stride: tuple[int, ...]) -> bool:
    return torch.empty(spec.shape, device=_META).stride() == stride


def _longer(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A tensor without values that lies in memory as this one does, with a dim of another size."""
    shape = [*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]]
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    longer = torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)
    return longer.requires_grad_(tensor.requires_grad)


def _ambient() -> tuple[Any, ...]:
    """Torch's state on which results depend beside the call."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()


def _bare(value: Any) -> Any:
    """A tensor on the meta device that remembers nothing of how it was made."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(_META).requires_grad_(value.requires_grad)
