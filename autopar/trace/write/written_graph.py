"""The graph as far as it is written down: inputs, operators, and which tensors share memory.

    x = relu(a)         env[node of relu] = x     root[x] = x
    y = x[0]            env[node of select] = y   root[y] = x    views[y] = the select

In-place writes (in_place.py) rename what nodes stand for, so every tensor is assigned once.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.core.graph import GraphInput, InputKind, Operator, Ref, TensorSpec
from autopar.core.operator_facts import facts_of
from autopar.errors import TraceError
from autopar.torch_seams import pytree
from autopar.torch_seams.schemas import schema_of
from autopar.torch_seams.tensors import storage_key
from autopar.trace.call.user_source import module_of, source_of
from autopar.trace.forward.checkpoint_regions import region_of


class WrittenGraph:
    """Single-assignment operators, written down in the order of the exported graph."""

    def __init__(self) -> None:
        self.inputs: dict[str, GraphInput] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.operators: list[Operator] = []
        self.titles: set[str] = set()  # names of operators
        self.env: dict[fx.Node, Any] = {}
        self.root: dict[str, str] = {}  # tensor -> the tensor whose memory it shares
        self.views: dict[str, Operator] = {}  # slice, or other shape, of a tensor -> what made it
        self.whole: dict[str, str] = {}  # another tensor of the very same elements -> the tensor they are of
        self.writes: dict[str, str] = {}  # buffer -> what it holds after the step

    def value(self, item: Any) -> Any:
        """The value in this graph of nodes of the exported graph."""
        return fx.node.map_arg(item, lambda node: self.env[node])

    def names_for(self, title: str, count: int | None) -> tuple[str, tuple[str, ...]]:
        """An operator's name and those of its results, `count` of them or itself: the exported ones, unless
        an input or another operator has them, as a parameter may be called `t` or `add`."""
        while True:
            names = (title,) if count is None else tuple(f"{title}_{index}" for index in range(count))
            if title not in self.titles and self.specs.keys().isdisjoint(names):
                self.titles.add(title)
                return title, names
            title += "_"

    def add(self, node: fx.Node, target: Any, args: tuple[Any, ...], spec: TensorSpec, **kwargs: Any) -> str:
        """Write down an operator that `node` stands for beside its own; the name of its result."""
        title, results = self.names_for(f"{node.name}_{schema_of(target).name.split('::')[1]}", None)
        self.specs[title], self.root[title] = spec, title
        self.operators.append(
            Operator(
                title,
                target,
                args,
                kwargs,
                results,
                module=module_of(node),
                source=source_of(node),
                checkpoint=region_of(node),
            )
        )
        return title

    def rename(self, old: str, new: str) -> None:
        """Nodes that stood for `old` stand for `new` from here on."""
        for key, value in self.env.items():
            if isinstance(value, Ref) and value.name == old:
                self.env[key] = Ref(new)

    def viewed(self, name: str) -> str | None:
        """Name of the tensor of which this one is a slice, or which it equals; None if there is none."""
        return self.whole.get(name) or (self.views[name].operands[0] if name in self.views else None)

    def note_aliases(self, node: fx.Node, operation: Operator, *, fresh: bool) -> None:
        """Note whose memory the results share, and which inputs the operator writes without saying so."""
        values = pytree.tree_leaves(node.meta.get("val"))
        for name, value in zip(operation.results, values, strict=False):
            if name is not None:
                self.root[name] = name
                if not fresh and not facts_of(operation.target).is_fresh:
                    self._note_sharing(node, operation, name, value)
        hidden = facts_of(operation.target).hidden_writes
        for position in hidden.arguments if hidden and operation.args[hidden.flag] else ():
            argument = operation.args[position]
            if isinstance(argument, Ref) and argument.name in self.inputs:
                item = self.inputs[argument.name]
                self.inputs[argument.name] = replace(item, mutated=True)

    def _note_sharing(self, node: fx.Node, operation: Operator, name: str, value: Any) -> None:
        """Note whose memory the result `name` shares, as torch's own kernels show it by `value`.

        Schemas don't say so of all that may: `einsum`, `sum_to_size`, a dropout that is off. They say it of
        some that may copy: a `reshape` of a transposed tensor.
        """
        schema, facts = schema_of(operation.target), facts_of(operation.target)
        given = [(each, self.env.get(each)) for each in node.all_input_nodes]
        found = [(each, ref.name) for each, ref in given if isinstance(ref, Ref) and _share(each, value)]
        bases = [(each, base) for each, base in found if base in operation.operands]
        if bases:
            base, of = bases[0]
            self.root[name] = self.root[of]
            if _is_same(base.meta["val"], value) and self._is_seen(operation, of, name):
                self.whole[name] = of
        elif operation.operands and any(each.alias_info is not None for each in schema.returns):
            known = [_memory(each.meta.get("val")) for each in (node, *node.all_input_nodes)]
            is_copy = not found and None not in known
            self.root[name] = name if is_copy else self.root[operation.operands[0]]
        if self.root[name] != name and (facts.put_back is not None or facts.undo is not None):
            self.views[name] = operation

    def _is_seen(self, operation: Operator, of: str, name: str) -> bool:
        """Whether writes to `name` are writes to `of` for autograd, too, and on all devices."""
        facts = facts_of(operation.target)
        return self.specs[of] == self.specs[name] and not facts.shares_on_some


def _share(node: fx.Node, value: Any) -> bool:
    """Whether the node's tensor and `value` share memory."""
    ours, theirs = _memory(node.meta.get("val")), _memory(value)
    return ours is not None and ours == theirs


def _memory(value: Any) -> int | None:
    """A number that tensors of the same memory share."""
    has_memory = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return int(storage_key(value.untyped_storage())) if has_memory else None


def _is_same(given: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether two tensors of the same memory have the same elements, place by place."""
    ours, theirs = (
        (each.shape, each.stride(), each.storage_offset(), each.dtype, each.is_conj(), each.is_neg())
        for each in (given, value)
    )
    return ours == theirs


def spec_of(value: torch.Tensor, *, requires_grad: bool = False) -> TensorSpec:
    """The tensor's spec; a sparse tensor's has no shape, as a program takes no part of it."""
    shape = tuple(value.shape) if value.layout is torch.strided else ()
    return TensorSpec(shape, value.dtype, requires_grad, value.layout)


def input_name(kind: InputKind, target: str, *, taken: dict[str, TensorSpec]) -> str:
    """A name for an input of the graph that is an identifier and not taken."""
    name = re.sub(r"\W", "_", target)
    if kind is InputKind.CONSTANT or not name.isidentifier():
        name = ("constant_" if kind is InputKind.CONSTANT else "layer_") + name
    while name in taken:
        name += "_"
    return name


def refused(node: fx.Node, found: str, wanted: str, remedy: str) -> TraceError:
    """The error that names the user's line of `node`, or its module."""
    where = source_of(node) or f"module {module_of(node) or 'of the whole model'}"
    return TraceError(where=where, found=found, wanted=wanted, remedy=remedy)
