"""Atoms and cuts: into what every dim of a graph can be split, and where.

**Atoms.** A dim is refined into a product of atoms, the outermost first, over everything that the
graph does to it. A fused qkv projection of 3 x 4 heads x 8 becomes (3, 4, 8), and its heads can be
sharded. Refinement travels along *relations*: groups of dims, on two tensors, that run through the
same elements in the same order.

    linear   y[n,o] = x[n,i] w[o,i]     (x.0) ~ (y.0)      (w.0) ~ (y.1)
    view     [b,s,h] -> [b*s,h]         (x.0, x.1) ~ (y.0)
    split    [b,3h] -> 3 of [b,h]       (x.1) ~ (3, y.1)

**Cuts.** Atoms joined by relations have one cut. Where a strided window joins two components, the
coarse one takes the fine one's boundaries divided by the stride and rounded up, so that branches
that meet again agree, and a window never needs more than kernel - 1 rows of other ranks:

    a rank's last output is ceil(b / s) - 1, which reads up to (ceil(b / s) - 1) s - p + k - 1,
    and that is at most b - 1 + (k - 1 - p); its first reads from ceil(b / s) s - p >= b - p on

Boundaries that the strides divide need fewer rows, or none where the window is as wide as its
stride, so the fine cut keeps to a multiple of the strides as far as that leaves the ranks even. A
component too short for its share of the boundaries has a cut of its own, and the exchange that
fetches the window's rows moves the difference. Where the mesh gives its ranks shares, rows are cut by these;
what weights have in common is cut evenly.

**Tables.** Edges in the order of their destinations are cut where these are, whatever their number:

    destinations   0 0 0 1 3 3     starts  0 3 4 4 6      vertices cut at 0 2 4, edges at 0 4 6
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import networkx as nx
import torch
from torch import Tensor

from autopar.core.costs import IMBALANCE
from autopar.core.cut import (
    Cut,
    aligned,
    balanced,
    by_shares,
    chunked,
    has_empty,
    longest,
    longest_place,
    most_for_a_share,
    nested,
    part,
)
from autopar.core.graph import Graph, InputKind
from autopar.core.mesh import Mesh
from autopar.core.part import Part
from autopar.core.placement import Layout, Shard
from autopar.core.strategy import Option

Dim = tuple[str, int]  # tensor, dim
Atom = tuple[str, int, int]  # tensor, dim, atom
Group = tuple[Dim | int, ...]
Ways = tuple[int | tuple[int, ...], ...]  # of each axis its size, or its shares

# How much longer than an even share a part may be for the sake of aligned boundaries. Ranks that
# wait lose this share of every operator at that size; an exchange of a few rows is cheaper.
UNEVEN = 0.05
# How many times its share the fullest part of edges may have for vertices and edges to be cut together: ranks
# that wait lose more by then than an exchange of edges costs.
MOST_EDGE_SHARES = 3


@dataclass(frozen=True, slots=True)
class Relation:
    """Two groups of dims (or plain numbers) that enumerate the same elements in the same order."""

    left: Group
    right: Group


@dataclass(frozen=True, slots=True)
class RowScaling:
    """`output` has `scale` rows for each row of `source`: a windowed factor."""

    source: Dim
    output: Dim
    scale: Fraction


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """Rows of `output` in the order of the rows of `base`: row i of `base` has the output rows `starts[i]` to
    `starts[i + 1]`."""

    base: Dim
    output: Dim
    starts: Tensor
    digest: str

    @staticmethod
    def of(base: Dim, output: Dim, index: Tensor, length: int) -> RowTable:
        """Table from the `base` row of each `output` row; `index` must rise, and `base` has `length` rows."""
        starts = torch.searchsorted(index, torch.arange(length + 1))
        return RowTable(base, output, starts, hashlib.blake2b(starts.numpy().tobytes()).hexdigest())


class Atoms:
    """The refinement of every dim of a graph, and the components of atoms that are cut alike."""

    def __init__(
        self,
        graph: Graph,
        relations: Sequence[Relation],
        scalings: Sequence[RowScaling],
        tables: Sequence[RowTable] = (),
    ) -> None:
        self.sizes: dict[Dim, int] = {
            (name, dim): size for name, spec in graph.specs.items() for dim, size in enumerate(spec.shape)
        }
        self.bounds: dict[Dim, set[int]] = {dim: {1, max(1, size)} for dim, size in self.sizes.items()}
        self._refine([relation for relation in relations if not self._is_empty(relation)])
        self.of: dict[str, tuple[tuple[int, ...], ...]] = {
            name: tuple(self._atoms((name, dim)) for dim in range(len(spec.shape)))
            for name, spec in graph.specs.items()
        }
        self.components = nx.utils.UnionFind(
            (name, dim, atom)
            for name, dims in self.of.items()
            for dim, atoms in enumerate(dims)
            for atom in range(len(atoms))
        )
        for relation in relations:
            for left, right in self.matches(relation):
                self.components.union(left, right)
        self.scalings, self.tables = tuple(scalings), tuple(tables)

    def _is_empty(self, relation: Relation) -> bool:
        items = (*relation.left, *relation.right)
        return any(self.sizes[item] == 0 for item in items if not isinstance(item, int))

    def _refine(self, relations: Sequence[Relation]) -> None:
        by_dim: dict[Dim, list[Relation]] = {}
        for relation in relations:
            for item in (*relation.left, *relation.right):
                if not isinstance(item, int):
                    by_dim.setdefault(item, []).append(relation)
        waiting = dict.fromkeys(relations)
        while waiting:
            relation = next(iter(waiting))
            del waiting[relation]
            marks = self._marks(relation.left) | self._marks(relation.right)
            for item, offset in (*self._offsets(relation.left), *self._offsets(relation.right)):
                if not isinstance(item, int) and self._add(item, offset, marks):
                    waiting.update(dict.fromkeys(by_dim[item]))

    def _offsets(self, group: Group) -> list[tuple[Dim | int, int]]:
        """Each item with the number of elements that it steps over."""
        found, offset = [], 1
        for item in reversed(group):
            found.append((item, offset))
            offset *= item if isinstance(item, int) else self.sizes[item]
        return found

    def _marks(self, group: Group) -> set[int]:
        marks: set[int] = set()
        for item, offset in self._offsets(group):
            marks |= {offset * bound for bound in ((1, item) if isinstance(item, int) else self.bounds[item])}
        return marks

    def _add(self, item: Dim, offset: int, marks: set[int]) -> bool:
        known = self.bounds[item]
        before = len(known)
        for mark in sorted(marks):
            bound, rest = divmod(mark, offset)
            fits = rest == 0 and 1 < bound < self.sizes[item] and self.sizes[item] % bound == 0
            if fits and all(bound % other == 0 or other % bound == 0 for other in known):
                known.add(bound)
        return len(known) > before

    def _atoms(self, item: Dim) -> tuple[int, ...]:
        bounds = sorted(self.bounds[item], reverse=True)
        if len(bounds) < 2:
            return (self.sizes[item],)
        return tuple(high // low for high, low in itertools.pairwise(bounds))

    def matches(self, relation: Relation) -> list[tuple[Atom, Atom]]:
        """Pairs of atoms on both sides that are the same loop."""
        left, right = self._spans(relation.left), self._spans(relation.right)
        return [(left[span], right[span]) for span in left.keys() & right.keys()]

    def _spans(self, group: Group) -> dict[tuple[int, int], Atom]:
        spans: dict[tuple[int, int], Atom] = {}
        for item, offset in self._offsets(group):
            if isinstance(item, int):
                continue
            bounds = sorted(self.bounds[item], reverse=True)
            for atom, (high, low) in enumerate(itertools.pairwise(bounds)):
                spans[(offset * high, offset * low)] = (*item, atom)
        return spans


def fullest_share(loads: Sequence[Sequence[int]], parts: int) -> float | None:
    """Rows of the fullest of so many ranks, in even shares, of the routers whose experts got these rows."""
    shares: list[float] = []
    for rows in loads:
        if len(rows) >= parts and (total := sum(rows)):
            cut = itertools.pairwise(balanced(len(rows), parts))
            shares.append(parts * max(sum(rows[start:stop]) for start, stop in cut) / total)
    return max(shares, default=None)


class Dims:
    """Cuts of a graph's atoms on one mesh, and every local size that follows from them; and what each
    operator then offers, by the sign that equal ones share, which strategies.py fills."""

    def __init__(self, graph: Graph, atoms: Atoms, mesh: Mesh, imbalance: float | None = None) -> None:
        self.graph, self.atoms, self.mesh, self.imbalance = graph, atoms, mesh, imbalance
        self._subsets = [
            axes
            for count in range(1, len(mesh.shape) + 1)
            for axes in itertools.combinations(mesh.axes, count)
        ]
        weights = {
            atoms.components[(item.name, dim, atom)]
            for item in graph.inputs
            if item.kind is InputKind.PARAMETER
            for dim, parts in enumerate(atoms.of[item.name])
            for atom in range(len(parts))
        }
        self._weights = weights
        self._cuts: dict[tuple[Atom, Ways], Cut] = {}
        self._shapes: dict[tuple[str, Layout, tuple[int, ...]], tuple[int, ...]] = {}
        self._largest: dict[tuple[str, Layout, tuple[tuple[int, ...], ...]], tuple[int, ...]] = {}
        self.among: tuple[tuple[int, ...], ...] = ()  # coordinates of ranks, () for all
        self._legal: dict[tuple[str, Layout], bool] = {}
        self.options: dict[int, tuple[Option, ...]] = {}
        self.strategies: dict[int, tuple[tuple[Option, ...], ...]] = {}
        self.sign_of: dict[str, int] = {}
        self.memo: dict[object, Any] = {}  # what rules have cut for ranks, by what it depends on
        self._anchors: dict[Atom, tuple[Atom, Fraction, int]] = {}
        self._tables: dict[Atom, tuple[Atom, RowTable]] = {}
        self._anchor()
        self._follow_tables()

    def fullest(self, parts: int) -> float:
        """Rows of the fullest of so many ranks of experts, in even shares: as is said, was measured, or is
        assumed."""
        if self.imbalance is not None:
            return self.imbalance
        return fullest_share(self.graph.loads, parts) or IMBALANCE

    # -- cuts ---------------------------------------------------------------------------------------

    def _length(self, component: Atom) -> int:
        name, dim, atom = component
        return self.atoms.of[name][dim][atom]

    def _anchor(self) -> None:
        """Find the component whose cut each component that is joined by strides follows. Also the scale
        between them, and the unit that the followed cut keeps to."""
        edges = nx.DiGraph()
        for scaling in self.atoms.scalings:
            ends = [(name, dim, 0) for name, dim in (scaling.source, scaling.output)]
            if all(len(self.atoms.of[name][dim]) == 1 for name, dim, _ in ends):
                source, output = (self.atoms.components[end] for end in ends)
                known = edges.get_edge_data(source, output)
                if source != output and (known is None or _terms(scaling.scale) < _terms(known["scale"])):
                    edges.add_edge(source, output, scale=scaling.scale)
                    edges.add_edge(output, source, scale=1 / scaling.scale)
        for base in sorted(edges.nodes, key=lambda item: (-self._length(item), item)):
            if base not in self._anchors:
                self._follow(base, edges)

    def _follow(self, base: Atom, edges: nx.DiGraph[Atom]) -> None:
        """Give `base` a cut of its own and let every component within reach follow it."""
        scales = {base: Fraction(1)}
        for source, output in nx.bfs_edges(edges, base):
            scales[output] = scales[source] * edges.edges[source, output]["scale"]
        unit = self._unit(self._length(base), scales.values())
        for component, scale in scales.items():
            if component in self._anchors:
                continue
            self._anchors[component] = (base, scale, unit)
            if component != base and any(
                has_empty(self.cut(component, axes))
                for axes in self._subsets
                if self._count(axes) <= self._length(component)
            ):
                del self._anchors[component]
            self._cuts.clear()

    def _follow_tables(self) -> None:
        """Cut the rows that a table puts in order where those are cut to which they belong.

        Not if some part would have several times its share on this mesh; parts may be empty."""
        waiting = sorted(
            self.atoms.tables, key=lambda each: len(each.starts)
        )  # graphs, their vertices, edges
        while waiting:
            length = len(waiting[0].starts)
            alike = [each for each in waiting if len(each.starts) == length]
            # Vertices that are cut between graphs come first, so that edges are cut with these.
            table = min(alike, key=lambda each: self._component(each.base) not in self._tables)
            waiting.remove(table)
            base, output = self._component(table.base), self._component(table.output)
            whole = all(len(self.atoms.of[name][dim]) == 1 for name, dim in (table.base, table.output))
            taken = {output} & (self._tables.keys() | self._anchors.keys() | self._weights)
            if not whole or taken or output in self._followed(base):
                continue
            self._tables[output] = base, table
            if not all(self._is_even(output, axes) for axes in self._subsets):
                del self._tables[output]
            self._cuts.clear()

    def _component(self, dim: Dim) -> Atom:
        found: Atom = self.atoms.components[(*dim, 0)]
        return found

    def _followed(self, component: Atom) -> set[Atom]:
        """The component, and those where it is cut by tables."""
        found = {component}
        while component in self._tables:
            component, _ = self._tables[component]
            found.add(component)
        return found

    def _is_even(self, component: Atom, axes: tuple[int, ...]) -> bool:
        """Whether no part is much longer than its share."""
        length, parts = self._length(component), self._count(axes)
        base, _ = self._tables[component]
        if parts > min(length, self._length(base)):
            return True  # of so few rows there is no such cut at all
        return self._longest(self.cut(component, axes), axes) <= MOST_EDGE_SHARES * -(-length // parts)

    def _unit(self, length: int, scales: Iterable[Fraction]) -> int:
        """The largest common stride whose multiples still cut `length` rows evenly."""
        even = -(-length // self.mesh.num_devices)
        unit = 1
        for scale in sorted(scales, reverse=True):
            wanted = math.lcm(unit, scale.denominator)
            cut = self._cut_rows(length, self.mesh.axes, wanted)
            if not has_empty(cut) and self._longest(cut, self.mesh.axes) <= even * (1 + UNEVEN):
                unit = wanted
        return unit

    def cut(self, component: Atom, axes: tuple[int, ...]) -> Cut:
        """Boundaries, in the atom's own elements, of the parts on these axes."""
        key = (component, self._ways(axes))
        if key not in self._cuts:
            self._cuts[key] = self._make_cut(component, axes)
        return self._cuts[key]

    def _ways(self, axes: tuple[int, ...]) -> Ways:
        """What cuts follow from: axes of as many ranks with equal shares cut alike."""
        shape, shares = self.mesh.shape, self.mesh.shares
        return tuple((shares[axis] if shares else ()) or shape[axis] for axis in axes)

    def _shape(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.mesh.shape[axis] for axis in axes)

    def _count(self, axes: tuple[int, ...]) -> int:
        return math.prod(self._shape(axes))

    def _longest(self, cut: Cut, axes: tuple[int, ...]) -> float:
        """Rows of the longest part; where ranks have shares, for its share."""
        if not self.mesh.shares:
            return longest(cut)
        shares = itertools.product(*map(self.mesh.shares_of, axes))
        return most_for_a_share(cut, list(map(math.prod, shares)))

    def _cut_rows(self, length: int, axes: tuple[int, ...], unit: int) -> Cut:
        """Boundaries in multiples of `unit` rows, even or by the ranks' shares."""
        if any(self.mesh.shares[axis] for axis in axes if self.mesh.shares):
            return by_shares(length, tuple(map(self.mesh.shares_of, axes)), unit)
        sizes = self._shape(axes)
        return aligned(length, sizes, unit) if unit > 1 else nested(length, sizes, balanced)

    def way_of_cutting(self, component: Atom) -> object:
        """A key that is equal for components that are cut alike on one mesh, by whatever sizes; also of other
        graphs."""
        if component in self._tables:
            base, table = self._tables[component]
            return (
                self._length(component),
                component in self._weights,
                self.way_of_cutting(base),
                table.digest,
            )
        base, *way = self._anchors.get(component, (component,))
        followed = self._length(base), base in self._weights, *way
        return self._length(component), component in self._weights, followed

    def ways_of_cutting(self, name: str) -> object:
        """A key that is equal for tensors of equal sizes, in this graph, that are cut alike on one mesh."""
        atoms = self.atoms.of[name]
        owns = [
            self.component(name, Shard(dim, atom))
            for dim, row in enumerate(atoms)
            for atom in range(len(row))
        ]
        return atoms, tuple(map(self.way_of_cutting, owns))

    def _make_cut(self, component: Atom, axes: tuple[int, ...]) -> Cut:
        length = self._length(component)
        if component in self._tables:
            owner, table = self._tables[component]
            return tuple(table.starts[torch.tensor(self.cut(owner, axes))].tolist())
        base, scale, unit = self._anchors.get(component, (component, Fraction(1), 1))
        if base != component:
            fine = self.cut(base, axes)
            return tuple(min(length, math.ceil(bound * scale)) for bound in fine[:-1]) + (length,)
        if component not in self._weights:
            return self._cut_rows(length, axes, unit)
        subsets = [subset for subset in self._subsets if self._count(subset) <= length]
        sizes = self._shape(axes)
        if not any(has_empty(nested(length, self._shape(subset), chunked)) for subset in subsets):
            return nested(length, sizes, chunked)
        return aligned(length, sizes, unit) if unit > 1 else nested(length, sizes, balanced)

    # -- what a layout means for a tensor -------------------------------------------------------------

    def component(self, name: str, shard: Shard) -> Atom:
        found: Atom = self.atoms.components[(name, shard.dim, shard.atom)]
        return found

    def is_weight(self, component: Atom) -> bool:
        """Whether some parameter has a dim with this component: sharding it is model parallelism."""
        return component in self._weights

    def legal(self, name: str, layout: Layout) -> bool:
        """Whether every shard of `layout` exists and has rows on every rank; only parts of vertices may be
        empty."""
        key = (name, layout)
        if key not in self._legal:
            self._legal[key] = self._is_legal(name, layout)
        return self._legal[key]

    def _is_legal(self, name: str, layout: Layout) -> bool:
        for shard in {placement for placement in layout if isinstance(placement, Shard)}:
            dims = self.atoms.of[name]
            if shard.dim >= len(dims) or shard.atom >= len(dims[shard.dim]):
                return False
            axes = self._axes(shard, layout)
            if self._count(axes) > dims[shard.dim][shard.atom]:
                return False
            component = self.component(name, shard)
            if component not in self._tables and has_empty(self.cut(component, axes)):
                return False
        return True

    def _axes(self, shard: Shard, layout: Layout) -> tuple[int, ...]:
        return tuple(axis for axis, placement in enumerate(layout) if placement == shard)

    def rows(self, name: str, shard: Shard, layout: Layout, coordinate: Sequence[int]) -> tuple[int, int]:
        """The elements [start, stop) of the atom that the rank at `coordinate` owns."""
        axes = self._axes(shard, layout)
        if not axes:
            return 0, self.atoms.of[name][shard.dim][shard.atom]
        cut = self.cut(self.component(name, shard), axes)
        return part(cut, self._shape(axes), [coordinate[axis] for axis in axes])

    def local_atoms(self, name: str, dim: int, layout: Layout, coordinate: Sequence[int]) -> tuple[int, ...]:
        """The local length of every atom of `dim`."""
        spans = (
            self.rows(name, Shard(dim, atom), layout, coordinate)
            for atom in range(len(self.atoms.of[name][dim]))
        )
        return tuple(stop - start for start, stop in spans)

    def local_shape(self, name: str, layout: Layout, coordinate: Sequence[int]) -> tuple[int, ...]:
        """The shape of the rank's local tensor."""
        key = (name, layout, tuple(coordinate))
        if key not in self._shapes:
            shape = list(self.graph.specs[name].shape)
            for shard in {placement for placement in layout if isinstance(placement, Shard)}:
                start, stop = self.rows(name, shard, layout, coordinate)
                shape[shard.dim] = shape[shard.dim] // self.atoms.of[name][shard.dim][shard.atom]
                shape[shard.dim] *= stop - start
            self._shapes[key] = tuple(shape)
        return self._shapes[key]

    def seen_by(self, places: Sequence[tuple[int, ...]]) -> Dims:
        """Dims with the same cuts, whose largest part is sought among the ranks at `places` alone."""
        seen = copy(self)
        seen.among = tuple(places)
        return seen

    def largest(self, name: str, layout: Layout) -> tuple[int, ...]:
        """The coordinate of a rank with the largest part; 0 on axes that don't split the tensor."""
        key = (name, layout, self.among)
        if key not in self._largest and self.among:
            self._largest[key] = max(
                self.among, key=lambda place: math.prod(self.local_shape(name, layout, place))
            )
        if key not in self._largest:
            coordinate = [0] * len(layout)
            for shard in {placement for placement in layout if isinstance(placement, Shard)}:
                axes = self._axes(shard, layout)
                place = longest_place(self.cut(self.component(name, shard), axes))
                for axis in reversed(axes):
                    place, coordinate[axis] = divmod(place, self.mesh.shape[axis])
            self._largest[key] = tuple(coordinate)
        return self._largest[key]

    def part(self, name: str, layout: Layout, coordinate: Sequence[int]) -> Part:
        """The rank's part of the full tensor."""
        atoms = self.atoms.of[name]
        return Part(
            atoms,
            tuple(
                tuple(
                    self.rows(name, Shard(dim, atom), layout, coordinate) for atom in range(len(atoms[dim]))
                )
                for dim in range(len(atoms))
            ),
        )

    def split(
        self, name: str, shard: Shard, layout: Layout, axis: int, coordinate: Sequence[int]
    ) -> tuple[int, tuple[int, ...]]:
        """(blocks, sizes) of `shard` along `axis` as the collectives take them.

        `layout` is the one in which `axis` does shard it; sizes are elements of the tensor's dim
        within each of the local blocks, one for every rank along the axis.
        """
        blocks = math.prod(self.local_atoms(name, shard.dim, layout, coordinate)[: shard.atom])
        inner = math.prod(self.local_atoms(name, shard.dim, layout, coordinate)[shard.atom + 1 :])
        sizes = []
        for index in range(self.mesh.shape[axis]):
            place = [*coordinate[:axis], index, *coordinate[axis + 1 :]]
            start, stop = self.rows(name, shard, layout, place)
            sizes.append((stop - start) * inner)
        return blocks, tuple(sizes)


def _terms(scale: Fraction) -> int:
    """How large a scale's terms are: of 1/2 and 54/107 between the same components the former is followed."""
    return max(scale.numerator, scale.denominator)
