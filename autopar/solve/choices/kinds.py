"""Which kind of parallelism an option is: batch, domain, filter, channel or experts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from autopar.core.force import Force, Parallelism, name_of
from autopar.core.graph import Graph, InputKind, Operator
from autopar.core.mesh import Mesh
from autopar.core.placement import P, Shard
from autopar.core.strategy import Option
from autopar.errors import InputError
from autopar.sharding.atoms import Atom, Dims
from autopar.sharding.strategies import options_of
from autopar.solve.choices.expert_dims import expert_dims


def kind_by_axis(force: Force, mesh: Mesh) -> tuple[Parallelism, ...]:
    """The kind that is forced on each axis; raises InputError if there are more or fewer kinds than axes."""
    if isinstance(force, Parallelism):
        return (force,) * len(mesh.shape)
    if len(force) != len(mesh.shape):
        raise InputError(
            where=f"--force {name_of(force)}",
            found=f"mesh {mesh}",
            wanted=f"a mesh of {len(force)} axes, one for each kind",
            remedy="choose another --mesh, or one kind for all axes",
        )
    return force


class Kinds:
    """Kind of parallelism of each option.

    Experts shards a mixture's experts (`expert_dims`), in what runs them and in what its weights come from.
    Model parallelism shards a weight's factor: filter if a result has it, channel if it is summed over. Any
    other factor is batch if it reaches the first dim of a user input, else domain. An operator without
    weights goes with its neighbours: by domain if an operator with weights could go on so, although a weight
    may have that dim elsewhere (an image's rows, flattened into a linear layer). A dim along which a weight
    is but repeated, as a class token is for each sample, is none of its factors.
    """

    def __init__(self, graph: Graph, dims: Dims) -> None:
        self.dims = dims
        self.batch: set[Atom] = {
            dims.atoms.components[(item.name, 0, 0)]
            for item in graph.inputs
            if item.kind is InputKind.USER and item.spec.shape
        }
        self._reach_edges()
        self.weights = {item.name for item in graph.inputs if item.kind is InputKind.PARAMETER}
        for item in graph.operators:  # what is made of weights only is one too: a transposed one
            if item.operands and self.weights.issuperset(item.operands):
                self.weights.update(name for name in item.results if name)
        self.repeated = set(self._repeated(graph))
        self.experts = expert_dims(graph, dims, self.weights)
        self.free: set[Atom] = {
            component
            for item in graph.operators
            if self.weights.intersection(item.operands) and not self.weights.issuperset(item.operands)
            for option in options_of(item, dims)
            if option.shards and not self._own(item, option)
            for component in self._components(item, option)
        }

    def _repeated(self, graph: Graph) -> Iterable[Atom]:
        """Along what weights are expanded, and no weight has a dim of its own."""
        for item in graph.operators:
            if item.operands and self.weights.issuperset(item.operands):
                for option in options_of(item, self.dims):
                    if not any(isinstance(place, Shard) for place in option.operands):
                        new = self._components(item, option)
                        yield from (atom for atom in new if not self.dims.is_weight(atom))

    def _reach_edges(self) -> None:
        """Edges of the batch's vertices are of the batch, and so are the vertices to which these lead."""
        atoms, before = self.dims.atoms, 0
        while before < len(self.batch):
            before = len(self.batch)
            for table in atoms.tables:
                ends = {atoms.components[name, dim, 0] for name, dim in (table.base, table.output)}
                self.batch |= ends if ends & self.batch else set()

    def of(self, operation: Operator, option: Option) -> Parallelism | None:
        """The kind of a one-axis option; None if it shards nothing."""
        if not option.shards:
            return None
        components = self._components(operation, option)
        if components & self.experts:
            return Parallelism.EXPERTS
        weighted = bool(self.weights.intersection(operation.operands))
        if weighted:
            model = self._own(operation, option)
        else:
            model = not components & self.free and any(map(self.dims.is_weight, components))
        if model:
            return Parallelism.CHANNEL if P in option.results else Parallelism.FILTER
        return Parallelism.BATCH if components & self.batch else Parallelism.DOMAIN

    def _own(self, operation: Operator, option: Option) -> bool:
        """Whether a weight of the operator's own has the factor."""
        return any(
            isinstance(item, Shard)
            and name in self.weights
            and self.dims.component(name, item) not in self.repeated
            for name, item in zip(operation.operands, option.operands, strict=True)
        )

    def _components(self, operation: Operator, option: Option) -> set[Atom]:
        return {self.dims.component(name, item) for name, item in placed(operation, option)}

    def room(self, operation: Operator, force: Force) -> int:
        """Counts the axes of two or more devices on which the operator could be sharded by the forced kind.
        Axes of one device count if there are no others; only the lengths of its factors matter."""
        lengths = {wanted: self.lengths(operation, wanted) for wanted in Parallelism}
        by_axis = kind_by_axis(force, self.dims.mesh)
        axes = self.axes()
        sizes = [self.dims.mesh.shape[axis] for axis in axes]
        return max(
            sum(factor is not None for factor in chosen)
            for chosen in itertools.product(*((None, *lengths[by_axis[axis]]) for axis in axes))
            if all(
                math.prod(size for size, factor in zip(sizes, chosen, strict=True) if factor == name)
                <= length
                for each in lengths.values()
                for name, length in each.items()
                if name in chosen
            )
        )

    def axes(self) -> list[int]:
        """The axes that count: those of two or more devices, or all if there are none."""
        mesh = self.dims.mesh
        return [axis for axis in mesh.axes if mesh.shape[axis] > 1] or list(mesh.axes)

    def lengths(self, operation: Operator, wanted: Parallelism) -> dict[str, int]:
        """The operator's factors of that kind, and their lengths."""
        return {
            option.factor: self._length(operation, option)
            for option in options_of(operation, self.dims)
            if wanted.has(self.of(operation, option))
        }

    def _length(self, operation: Operator, option: Option) -> int:
        """The factor's extent: that of the shortest dim that it runs through."""
        return min(self.dims.atoms.of[name][item.dim][item.atom] for name, item in placed(operation, option))


def placed(operation: Operator, option: Option) -> list[tuple[str, Shard]]:
    """The tensors that the option splits, operands before results, and how."""
    pairs = [
        *zip(operation.operands, option.operands, strict=True),
        *((name, item) for name, item in zip(operation.results, option.results, strict=True) if name),
    ]
    return [(name, item) for name, item in pairs if isinstance(item, Shard)]
