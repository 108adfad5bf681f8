"""From a plan's layouts of the user inputs to the samples that each rank loads.

The batch is dim 0 of the first user tensor. Another user input is batched if its dim 0 runs through
the same elements, which the graph's operators tell and equal lengths don't. A rank loads the smallest
range of rows that covers what its program takes of every batched input.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.core.graph import Graph, GraphInput, InputKind
from autopar.core.part import Part
from autopar.core.placement import Layout
from autopar.core.samples import Samples
from autopar.sharding.atoms import Atom, Dims


def find_samples(graph: Graph, layouts: Mapping[str, Layout], dims: Dims) -> Samples | None:
    """Which rows of the global batch each rank loads; None for a model that takes no tensor with dims."""
    users = [item for item in graph.inputs if item.kind is InputKind.USER and item.spec.shape]
    if not users:
        return None
    batched = [item for item in users if _batch(item, dims) == _batch(users[0], dims)]
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


def _cover(spans: list[range]) -> range:
    return range(min(span.start for span in spans), max(span.stop for span in spans))


def _is_exact(part: Part, rows: range) -> bool:
    """Whether the part is all of `rows`, and nothing but them."""
    within = part.within(rows)
    return within is not None and within.is_whole
