"""From a plan's layouts of the user inputs to the samples that each rank loads.

The batch is dim 0 of the first user tensor. Another user input is batched if its dim 0 runs through
the same elements, which the graph's operators tell and equal lengths don't; or through the vertices of a
graph, from which edges lead to those of dim 0 of another. A rank loads the smallest range of rows that
covers what its program takes of every batched input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import networkx as nx

from autopar.core.graph import Graph, GraphInput, InputKind, Operator
from autopar.core.part import Part
from autopar.core.placement import Layout
from autopar.core.samples import Samples
from autopar.sharding.atoms import Atom, Dims
from autopar.trace.forms.sparse_products import PRODUCT
from autopar.trace.rewrites.edge_operators import PICK, PLACE


def find_samples(graph: Graph, layouts: Mapping[str, Layout], dims: Dims) -> Samples | None:
    """Rows of the global batch that each rank loads; None for a model without input dims."""
    users = [item for item in graph.inputs if item.kind is InputKind.USER and item.spec.shape]
    if not users:
        return None
    vertices = nx.Graph(_same_vertices(graph, dims))
    batched = [item for item in users if _are_alike(_batch(item, dims), _batch(users[0], dims), vertices)]
    parts = [
        {
            item.target: dims.part(item.name, layouts[item.name], dims.mesh.coordinate(rank))
            for item in batched
        }
        for rank in range(dims.mesh.num_devices)
    ]
    rows = tuple(_cover([part.span(0) for part in mine.values()]) for mine in parts)
    return Samples(
        size=users[0].spec.shape[0],
        rows=rows,
        inputs=frozenset(parts[0]),
        exact=frozenset(
            path
            for path in parts[0]
            if all(_is_exact(mine[path], loaded) for mine, loaded in zip(parts, rows, strict=True))
        ),
    )


def _batch(item: GraphInput, dims: Dims) -> tuple[tuple[int, Atom], ...]:
    """Lengths and components of the atoms of dim 0: equal for dims that run through the same samples."""
    sizes = dims.atoms.of[item.name][0]
    return tuple((size, dims.atoms.components[item.name, 0, atom]) for atom, size in enumerate(sizes))


def _are_alike(
    some: tuple[tuple[int, Atom], ...], others: tuple[tuple[int, Atom], ...], vertices: nx.Graph[Atom]
) -> bool:
    if some == others:
        return True
    if len(some) != 1 or len(others) != 1 or some[0][0] != others[0][0]:
        return False
    ends = some[0][1], others[0][1]
    return all(end in vertices for end in ends) and nx.has_path(vertices, *ends)


def _same_vertices(graph: Graph, dims: Dims) -> Iterator[tuple[Atom, Atom]]:
    """Components of dim 0 at both ends of edges, where these may be one dim."""
    makers = graph.makers()
    for item in graph.operators:
        result = item.results[0]
        if result is None or item.target not in (PRODUCT, PLACE):
            continue
        bases = [item.operands[3]] if item.target == PRODUCT else _bases(makers, item.operands[0])
        for name in bases:
            sizes, made = dims.atoms.of[name][0], dims.atoms.of[result][0]
            if len(sizes) == 1 and sizes == made:
                yield dims.atoms.components[name, 0, 0], dims.atoms.components[result, 0, 0]


def _bases(makers: Mapping[str, Operator], rows: str) -> list[str]:
    """The tensors whose rows are picked for messages."""
    found, left, seen = [], [rows], set[str]()
    while left:
        name = left.pop()
        if name in seen or name not in makers:
            continue
        seen.add(name)
        if makers[name].target == PICK:
            found.append(makers[name].operands[0])
        elif makers[name].target != PLACE:
            left += makers[name].operands
    return found


def _cover(spans: list[range]) -> range:
    return range(min(span.start for span in spans), max(span.stop for span in spans))


def _is_exact(part: Part, rows: range) -> bool:
    """Whether the part is exactly `rows`."""
    within = part.within(rows)
    return within is not None and within.is_whole
