"""Everything that autopar knows about an operator family stands in one class: its rule.

The questionnaire, which a class must answer to be registered:

    targets     the ATen overloads of the family
    equation    labels of every dim (see equation.py); relations and options follow from it
    lower       how one rank computes its part, where the plain local call is not enough
    samples     small inputs on which one generic test proves every strategy that is offered

An operator without a rule is not an error: it runs on gathered operands, is priced, and the plan
names it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeAlias

import networkx as nx
import torch

from autopar.core.graph import Operator, Ref, TensorSpec, map_refs
from autopar.core.operator_facts import facts_of
from autopar.core.placement import Layout, R, Shard
from autopar.core.strategy import UNSUMMED, Option, Strategy
from autopar.errors import RuleError
from autopar.sharding.atoms import Atoms, Dim, Dims, Relation, RowScaling, RowTable
from autopar.sharding.equation import Equation, Kind, sharded_option, unsharded_options
from autopar.torch_seams.schemas import schema_of

Handle: TypeAlias = Any  # a value in the program being written: an fx.Node


class Instance:
    """One operator of one graph, with its arguments by their schema names."""

    def __init__(self, operator: Operator, specs: Mapping[str, TensorSpec]) -> None:
        self.operator = operator
        self.specs = specs
        self.operands = operator.operands

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Every argument by name, defaults filled in, tensors as `Ref`."""
        schema = schema_of(self.operator.target)
        found = {item.name: item.default_value for item in schema.arguments}
        found.update(zip(found, self.operator.args, strict=False))
        found.update(self.operator.kwargs)
        return found

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    def shape(self, operand: int = 0) -> tuple[int, ...]:
        return self.specs[self.operands[operand]].shape

    def spec(self, operand: int = 0) -> TensorSpec:
        return self.specs[self.operands[operand]]

    def result_shape(self, result: int = 0) -> tuple[int, ...]:
        name = self.operator.results[result]
        assert name is not None
        return self.specs[name].shape

    def result_dtype(self, result: int = 0) -> torch.dtype:
        name = self.operator.results[result]
        assert name is not None
        return self.specs[name].dtype

    @property
    def num_results(self) -> int:
        return len(self.operator.results)

    def has(self, argument: str) -> bool:
        return isinstance(self.arguments.get(argument), Ref)

    def dim(self, value: int, operand: int = 0) -> int:
        """A dim argument counted from the front."""
        rank = len(self.shape(operand))
        return value % rank if rank else 0


class Emitter(Protocol):
    """Writes calls into the program of one rank."""

    def call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Handle:
        """Append a call; a call with several results gives a tuple of handles."""

    def collective(self, target: Any, args: Sequence[Any], shape: Sequence[int]) -> Handle:
        """Append a collective whose result has `shape` on this rank."""

    def constant(
        self, key: object, spec: TensorSpec, make: Callable[[], torch.Tensor], memory: object = None
    ) -> Handle:
        """A tensor that the rank holds from the start, which `make` gives; one for each key. Where `make`
        gives the same tensor for several keys, `memory` is equal for these."""

    def shape(self, value: Handle) -> tuple[int, ...]:
        """The local shape of a value."""


class Site(Instance):
    """One operator on one rank under one strategy: what `lower` works on."""

    def __init__(
        self,
        operator: Operator,
        *,
        dims: Dims,
        strategy: Strategy,
        coordinate: Sequence[int],
        emitter: Emitter,
        values: Sequence[Handle],
        exact_random: bool = True,
    ) -> None:
        super().__init__(operator, dims.graph.specs)
        self.dims, self.mesh, self.strategy = dims, dims.mesh, strategy
        self.coordinate, self.emitter, self.values = tuple(coordinate), emitter, list(values)
        self.exact_random = exact_random

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return self.mesh.shape

    def operand_layout(self, operand: int) -> Layout:
        return tuple(option.operands[operand] for option in self.strategy)

    def result_layout(self, result: int = 0) -> Layout:
        return tuple(option.results[result] for option in self.strategy)

    def local_result_shape(self, result: int = 0) -> tuple[int, ...]:
        name = self.operator.results[result]
        assert name is not None
        return self.dims.local_shape(name, self.result_layout(result), self.coordinate)

    def has_empty_part(self, operand: int = 0) -> bool:
        """Whether some rank's part of an operand holds no element, as of edges; the same on every rank."""
        name, layout = self.operands[operand], self.operand_layout(operand)
        everywhere = map(self.mesh.coordinate, range(self.mesh.num_devices))
        return any(0 in self.dims.local_shape(name, layout, coordinate) for coordinate in everywhere)

    def axes(self, factor: str) -> tuple[int, ...]:
        """The mesh axes on which atom 0 of `factor` (or `factor` = "name.atom") is sharded."""
        return tuple(axis for axis, option in enumerate(self.strategy) if option.factor == factor)

    def sharding_axes(self, *factors: str) -> tuple[int, ...]:
        """The axes on which any atom of any of `factors` is sharded."""
        return tuple(
            axis
            for axis, option in enumerate(self.strategy)
            if option.shards and option.factor.partition(".")[0] in factors
        )

    def key(self, axes: Iterable[int]) -> str:
        return self.mesh.key(axes)

    def mates(self, axes: Iterable[int]) -> Iterator[tuple[int, ...]]:
        """The coordinates of the ranks that differ from this one along `axes` alone, in order."""
        chosen = set(axes)
        sizes = enumerate(self.mesh.shape)
        return itertools.product(
            *(range(size) if axis in chosen else (self.coordinate[axis],) for axis, size in sizes)
        )

    def value_of(self, operand: int) -> torch.Tensor | None:
        """The value of an operand that is a constant of the graph."""
        name = self.operands[operand]
        return next((item.value for item in self.dims.graph.inputs if item.name == name), None)

    def local_call(self, **overrides: Any) -> Handle:
        """The operator on the local operands, some arguments replaced by name."""
        queue = iter(self.values)
        bound = map_refs((self.operator.args, self.operator.kwargs), lambda _: next(queue))
        args, kwargs = list(bound[0]), dict(bound[1])
        names = [item.name for item in schema_of(self.operator.target).arguments]
        for name, value in overrides.items():
            place = names.index(name)
            if place < len(args):
                args[place] = value
            elif not schema_of(self.operator.target).arguments[place].kwarg_only and place == len(args):
                args.append(value)
            else:
                kwargs[name] = value
        return self.emitter.call(self.operator.target, args, kwargs)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Handle:
        return self.emitter.call(target, args, kwargs)

    def draw(self, target: Any, *args: Any) -> Handle:
        """A call that makes a tensor from nothing, on the program's device."""
        return self.emitter.call(target, args, {"device": torch.device("cpu")})

    def reduce(self, value: Handle, axes: Sequence[int], *, target: Any) -> Handle:
        """An all-reduce of the family of `p_to_r` over `axes`; nothing if there are none."""
        if not axes:
            return value
        return self.emitter.collective(target, (value, self.key(axes)), self.emitter.shape(value))

    def slice_to(
        self, value: Handle, tensor: str, layout: Layout, *, dims: Iterable[int] | None = None
    ) -> Handle:
        """The rank's part of a value that is whole on every rank and shaped like `tensor`, in `dims`."""
        for dim in range(len(self.dims.atoms.of[tensor])) if dims is None else dims:
            for atom in range(len(self.dims.atoms.of[tensor][dim])):
                value = self._slice_atom(value, tensor, Shard(dim, atom), layout)
        return value

    def _slice_atom(self, value: Handle, tensor: str, shard: Shard, layout: Layout) -> Handle:
        start, stop = self.dims.rows(tensor, shard, layout, self.coordinate)
        atoms = self.dims.atoms.of[tensor][shard.dim]
        if shard not in layout:
            return value
        aten = torch.ops.aten
        if len(atoms) == 1:
            return self.call(aten.slice.Tensor, value, shard.dim, start, stop)
        outer = self.dims.local_atoms(tensor, shard.dim, layout, self.coordinate)[: shard.atom]
        inner = atoms[shard.atom + 1 :]
        shape = list(self.emitter.shape(value))
        split = [*outer, atoms[shard.atom], *inner]
        opened = self.call(
            aten.reshape.default, value, [*shape[: shard.dim], *split, *shape[shard.dim + 1 :]]
        )
        cut = self.call(aten.slice.Tensor, opened, shard.dim + shard.atom, start, stop)
        length = self.emitter.shape(cut)
        merged = 1
        for extent in length[shard.dim : shard.dim + len(split)]:
            merged *= extent
        return self.call(aten.reshape.default, cut, [*shape[: shard.dim], merged, *shape[shard.dim + 1 :]])


@dataclass(frozen=True, slots=True)
class Sample:
    """One call on which a rule is proved: real arguments, small and awkward.

    `constant` names operands ("operand_2") that torch cannot differentiate.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    constant: tuple[str, ...] = ()


class Rule(ABC):
    """The rule of one operator family; see the module's questionnaire."""

    targets: ClassVar[tuple[Any, ...]] = ()
    random: ClassVar[bool] = False  # draws from the generator
    is_view: ClassVar[bool] = False  # gives its operand's elements in other dims, where they lie
    passes_layout_on: ClassVar[bool] = False  # gives a tensor that lies as its operand does
    numbers_alike: ClassVar[bool] = False  # floats, but for 0 and 1, change neither strategies nor costs
    reads_values: ClassVar[bool] = False  # of constants, by which ranks have more or less to do

    @abstractmethod
    def equation(self, op: Instance) -> Equation:
        """The labels of every dim of this call."""

    @abstractmethod
    def samples(self) -> Iterable[Sample]:
        """Small calls that reach every strategy, on odd sizes."""

    def lower(self, site: Site) -> Sequence[Handle]:
        """Write the rank's local computation; one handle for each result."""
        result = site.local_call()
        return result if isinstance(result, (tuple, list)) else (result,)

    def reads_position(self, op: Instance, factor: str) -> bool:
        """Whether a row's result depends on its position along `factor`."""
        return False

    def is_uneven(self, op: Instance) -> bool:
        """Whether ranks with parts of one size have more or less to do; then `fullest` is asked."""
        return self.reads_values

    def fullest(self, site: Site) -> tuple[int, ...]:
        """The coordinate of the rank with the most to do, of an operator that `is_uneven`."""
        return site.coordinate

    def relations(self, op: Instance) -> list[Relation]:
        """Groups of dims that are refined and cut alike."""
        equation = self.equation(op)
        groups: dict[str, list[Dim]] = {}
        for name, labels in _labelled(op, equation):
            for dim, label in enumerate(labels):
                if label and equation.kind(label) not in (Kind.WHOLE, Kind.WINDOWED):
                    groups.setdefault(label, []).append((name, dim))
        return [Relation((first,), (other,)) for first, *rest in groups.values() for other in rest]

    def scalings(self, op: Instance) -> list[RowScaling]:
        """Scalings of windowed results: rows of the result for each row of the operand."""
        equation = self.equation(op)
        sources = {
            label: (name, dim)
            for name, labels in zip(op.operands, equation.operands, strict=True)
            for dim, label in enumerate(labels)
            if label in equation.windows
        }
        return [
            RowScaling(sources[label], (name, dim), equation.windows[label].scale)
            for name, labels in zip(op.operator.results, equation.results, strict=True)
            for dim, label in enumerate(labels)
            if name and label and label in sources
        ]

    def tables(self, op: Instance, values: Mapping[str, torch.Tensor]) -> list[RowTable]:
        """Tables of rows that lie in the order of others, by the values of constants."""
        return []

    def options(self, op: Instance, atoms: Atoms) -> list[Option]:
        """Every way to run the operator on one axis."""
        equation = self.equation(op)
        found = unsharded_options(len(op.operands), op.num_results, equation.linear)
        for factor in equation.factors():
            for atom in range(self.depth_of(op, equation, factor, atoms)):
                found.append(sharded_option(equation, factor, atom))
        return found

    def fits(self, strategy: Strategy) -> bool:
        """Whether the operator runs with these options on several axes at once."""
        return True

    def depth_of(self, op: Instance, equation: Equation, factor: str, atoms: Atoms) -> int:
        """How many atoms of `factor` can be sharded: those on which all its dims agree."""
        if equation.kind(factor) is Kind.WINDOWED:
            return 1
        refined = {
            atoms.of[name][dim]
            for name, labels in _labelled(op, equation)
            for dim, label in enumerate(labels)
            if label == factor
        }
        return len(next(iter(refined))) if len(refined) == 1 else 0


def _labelled(op: Instance, equation: Equation) -> list[tuple[str, tuple[str | None, ...]]]:
    pairs = [
        *zip(op.operands, equation.operands, strict=True),
        *zip(op.operator.results, equation.results, strict=True),
    ]
    return [(name, labels) for name, labels in pairs if name is not None]


class Regroup(Rule):
    """A rule for operators that only rename dims: views, splits and stacks of equal parts.

    `relations` says everything: atoms that match are one loop.
    """

    linear: ClassVar[bool] = True

    def equation(self, op: Instance) -> Equation:
        raise RuleError(
            where=str(op.operator.target),
            found="no equation",
            wanted="relations",
            remedy="use Rule.relations",
        )

    @abstractmethod
    def relations(self, op: Instance) -> list[Relation]:
        """Groups of dims on both sides that enumerate the same elements."""

    def scalings(self, op: Instance) -> list[RowScaling]:
        return []

    def options(self, op: Instance, atoms: Atoms) -> list[Option]:
        everything = frozenset(range(len(op.operands)))
        found = unsharded_options(
            len(op.operands), op.num_results, (everything,) if self.linear and everything else ()
        )
        loops = nx.utils.UnionFind()
        for relation in self.relations(op):
            for left, right in atoms.matches(relation):
                loops.union(left, right)
        for loop in loops.to_sets():
            places = {name: Shard(dim, atom) for name, dim, atom in sorted(loop, reverse=True)}
            wanted = (*op.operands, *(name for name in op.operator.results if name))
            if all(name in places for name in wanted):
                operands = tuple(places[name] for name in op.operands)
                results = tuple(places[name] if name else R for name in op.operator.results)
                found.append(Option(f"d{operands[0].dim}.{operands[0].atom}", operands, results))
        return sorted(found, key=lambda option: (option.shards, option.factor))


class Gathered(Rule):
    """The rule of operators that have none: gathered operands, or unsummed ones throughout."""

    numbers_alike = True

    def equation(self, op: Instance) -> Equation:
        none = tuple((None,) * len(op.specs[name].shape) for name in op.operands)
        return Equation(none, tuple(() for _ in op.operator.results))

    def options(self, op: Instance, atoms: Atoms) -> list[Option]:
        """Unsummed gradients travel through torch's own operators alone: an operator of someone else may have
        a backward that isn't linear in the gradient."""
        found = super().options(op, atoms)
        if has_linear_backward(op.operator.target):
            return found
        return [option for option in found if option.factor != UNSUMMED]

    def samples(self) -> Iterable[Sample]:
        return ()


LIBRARIES = (
    "aten",
    "prims",
    "autopar",
    "autopar_graphs",
    "autopar_losses",
)  # torch's and autopar's: backwards are derivatives
RULES: dict[Any, Rule] = {}
GATHER = Gathered()


def register(rule: type[Rule]) -> type[Rule]:
    """Class decorator: an incomplete rule cannot be registered."""
    missing = sorted(getattr(rule, "__abstractmethods__", ()))
    if missing or not rule.targets:
        raise RuleError(
            where=rule.__name__,
            found="no " + ", ".join(missing or ["targets"]),
            wanted="every answer of the questionnaire",
            remedy="add what is missing to the class",
        )
    instance = rule()
    for target in rule.targets:
        if target in RULES:
            raise RuleError(
                where=rule.__name__,
                found=f"{target} registered twice",
                wanted="one class for one operator",
                remedy="remove it from one of them",
            )
        RULES[target] = instance
    return rule


def has_linear_backward(target: Any) -> bool:
    """Whether an operator's backward may take parts of a gradient one by one and add the results. Python's
    own functions, such as `getitem`, may."""
    is_derivative = getattr(target, "namespace", LIBRARIES[0]) in LIBRARIES
    return is_derivative and facts_of(target).has_linear_backward


def rule_of(operator: Operator) -> Rule:
    """The operator's rule, or the one that gathers."""
    return RULES.get(operator.target, GATHER)
