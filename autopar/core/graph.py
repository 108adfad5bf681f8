"""The traced model as frozen data: tensors named by strings, operators in execution order.

A graph is in single-assignment form. Every tensor is a graph input (parameter, buffer, constant
or user input) or one result of exactly one operator. Operators keep the ATen overload that was
traced and its arguments, with every tensor replaced by `Ref(name)`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import torch

from autopar.core.operator_facts import facts_of

Tree: TypeAlias = Any  # nested tuples, lists and dicts of an operator's arguments


def may_learn(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can have a gradient: real or complex floats."""
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape (elements), dtype and whether a gradient flows through the tensor; sparse ones have no shape that
    could be split."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    layout: torch.layout = torch.strided

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        sparse = "" if self.layout is torch.strided else f"{str(self.layout).removeprefix('torch.')} "
        return f"{sparse}{name}[{','.join(map(str, self.shape))}]" + ("*" if self.requires_grad else "")


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of the tensor called `name` inside an operator's arguments."""

    name: str


class ProcessNumber(int):
    """A number that means something in this process alone: no part of what a graph or a call is."""

    def __str__(self) -> str:
        return "_"


class InputKind(Enum):
    """Origin of a graph's input: the model's state, its code or the user."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    USER = "user"


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A tensor that comes from outside; `target` is its qualified name in the model."""

    name: str
    kind: InputKind
    target: str
    spec: TensorSpec
    aliases: tuple[str, ...] = ()  # further names of what is tied
    mutated: bool = False  # written in place by an operator (running statistics)
    value: torch.Tensor | None = field(default=None, compare=False)  # of a constant
    exact: torch.Tensor | None = field(default=None, compare=False)  # in more digits, where that is rounded


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an ATen overload; `results` holds None for results that nobody can use.

    `order` is the memory order of operand 0's dims where a random operator draws in it, empty if
    that is the dims' own order. `checkpoint` is the number of the region that the model itself recomputes
    in backward, 0 outside of them. `operands` are the tensors of all uses, in the order of the
    arguments; a tensor used twice appears twice.
    """

    name: str
    target: Any  # torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[str | None, ...]
    module: str = ""  # qualified name of the module that called it, for printing
    source: str = ""  # the user's own line, for errors
    order: tuple[int, ...] = ()
    checkpoint: int = 0
    operands: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = tuple(ref.name for ref in refs((self.args, self.kwargs)))
        object.__setattr__(self, "operands", names)


class DerivedValues(dict[str, Any]):
    """Values that other rooms derive from one, each made once. Copies and pickles begin empty."""

    def __reduce__(self) -> tuple[type[DerivedValues], tuple[()]]:
        return DerivedValues, ()


@dataclass(frozen=True, slots=True)
class Graph:
    """A traced model.

    `outputs` are the tensors that leave the graph; `writes` says which buffer takes which tensor
    at the end of the step (`num_batches_tracked`). `beside` are bytes of structure, of whose values it is
    made and which caller and model hold beside it. `loads` are, for each router whose example ran, the rows
    that chose each expert.
    """

    inputs: tuple[GraphInput, ...]
    operators: tuple[Operator, ...]
    outputs: tuple[str, ...]
    specs: dict[str, TensorSpec]
    writes: tuple[tuple[str, str], ...] = ()
    loss: str | None = None
    notes: tuple[str, ...] = field(default=())  # what tracing changed or dropped, for the plan
    beside: int = 0
    loads: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    decided_by: str | None = None  # a line of the user's where values of inputs decide what is computed
    derived: DerivedValues = field(default_factory=DerivedValues, init=False, repr=False, compare=False)

    def consumers(self) -> dict[str, list[tuple[Operator, int]]]:
        """Uses of each tensor: operators, and the position among their operands."""
        uses: dict[str, list[tuple[Operator, int]]] = {name: [] for name in self.specs}
        for operator in self.operators:
            for position, name in enumerate(operator.operands):
                uses[name].append((operator, position))
        return uses

    def makers(self) -> dict[str, Operator]:
        """The operator that gives each tensor, but for inputs."""
        return {name: item for item in self.operators for name in item.results if name}

    @property
    def cast_weights(self) -> frozenset[str]:
        """Names of casts of weights to fewer bits; their gradients are summed in the weights' own dtype."""
        weights = {item.name: item.spec for item in self.inputs if item.kind is InputKind.PARAMETER}
        return frozenset(
            str(item.results[0])
            for item in self.operators
            if facts_of(item.target).is_cast and item.operands[0] in weights and item.results[0]
            if self.specs[item.results[0]].dtype.itemsize < weights[item.operands[0]].dtype.itemsize
        )

    @property
    def cast_alone(self) -> frozenset[str]:
        """Weights of which nothing but casts to fewer bits is used."""
        casts, uses = self.cast_weights, self.consumers()
        return frozenset(
            item.name
            for item in self.inputs
            if item.kind is InputKind.PARAMETER and uses[item.name] and item.name not in self.outputs
            if all(casts.issuperset(user.results) for user, _ in uses[item.name])
        )

    @property
    def checkpoints(self) -> tuple[tuple[int, int], ...]:
        """The regions that the model itself recomputes in backward: operators [first, stop)."""
        runs = itertools.groupby(enumerate(self.operators), key=lambda each: each[1].checkpoint)
        regions = [[index for index, _ in run] for number, run in runs if number]
        return tuple((region[0], region[-1] + 1) for region in regions)


def refs(tree: Tree) -> Iterator[Ref]:
    """Every `Ref` in nested tuples, lists and dicts, in order."""
    match tree:
        case Ref():
            yield tree
        case tuple() | list():
            for item in tree:
                yield from refs(item)
        case dict():
            for item in tree.values():
                yield from refs(item)


def map_refs(tree: Tree, replace: Callable[[Ref], Tree]) -> Tree:
    """`tree` with every `Ref` replaced."""
    match tree:
        case Ref():
            return replace(tree)
        case tuple():
            return tuple(map_refs(item, replace) for item in tree)
        case list():
            return [map_refs(item, replace) for item in tree]
        case dict():
            return {key: map_refs(item, replace) for key, item in tree.items()}
        case _:
            return tree


def eager_target(item: Operator) -> Callable[..., Any]:
    """The overload that computes the operator on tensors that lie in memory in whatever way: a graph has no
    copies that only make them contiguous."""
    target: Callable[..., Any] = facts_of(item.target).any_strides or item.target
    return target


def memory_order(value: torch.Tensor) -> tuple[int, ...]:
    """The dims of a tensor like `value` from the slowest to the fastest; empty if that is 0, 1, 2 ...

    A mask made like a transposed tensor is filled with random numbers in the order of its memory.
    """
    strided = torch.empty_strided(value.shape, value.stride(), device="meta")
    strides = torch.empty_like(strided).stride()
    order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
    long = [dim for dim in order if value.shape[dim] > 1]
    return () if long == sorted(long) else order


@dataclass(frozen=True, slots=True)
class Call:
    """A local operator call that can be measured: an overload and arguments with
    `TensorSpec` leaves where tensors stand."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    derived: DerivedValues = field(default_factory=DerivedValues, init=False, repr=False, compare=False)

    def key(self) -> str:
        """Canonical text of the call, made once; calls of equal text cost the same on one device."""
        if "key" not in self.derived:
            self.derived["key"] = self._text()
        return str(self.derived["key"])

    def _text(self) -> str:

        def show(tree: Tree) -> str:
            match tree:
                case tuple() | list():
                    return "(" + ",".join(map(show, tree)) + ")"
                case dict():
                    return "{" + ",".join(f"{key}={show(tree[key])}" for key in sorted(tree)) + "}"
                case _:
                    return str(tree)

        return f"{self.target}{show(self.args)}{show(self.kwargs) if self.kwargs else ''}"
