"""What a plan says of graphs whose vertices it may split: how many edges lead from part to part."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from autopar.core.graph import Graph
from autopar.sharding.atoms import Atoms
from autopar.sharding.vertex_order import edge_cut
from autopar.trace.forms.sparse_products import PRODUCT
from autopar.trace.rewrites.edge_operators import PICK, PLACE

Edges = tuple[Tensor, Tensor]  # where they come from, and where they lead


def edge_notes(graph: Graph, atoms: Atoms, devices: int) -> tuple[str, ...]:
    """A line for each structure of a graph, of as many vertices at both ends of its edges."""
    if devices < 2:
        return ()
    lines = (_line(length, *edges, devices) for length, edges in _structures(graph, atoms))
    return tuple(dict.fromkeys(lines))


def _structures(graph: Graph, atoms: Atoms) -> Iterator[tuple[int, Edges]]:
    values = {item.name: item.value for item in graph.inputs if item.value is not None}
    picks: dict[object, dict[str, int]] = {}  # by the edges that they make: sources, and of how many vertices
    for item in graph.operators:
        if item.target is PICK and item.results[0] is not None:
            made = atoms.components[item.results[0], 0, 0]
            picks.setdefault(made, {})[item.operands[1]] = graph.specs[item.operands[0]].shape[0]
    for item in graph.operators:
        if item.target is PRODUCT:
            rows, columns, _, x = item.operands
            if graph.specs[x].shape[0] == item.args[4]:
                yield item.args[4], (values[columns], values[rows])
        if item.target is PLACE:
            messages, target = item.operands
            for source, length in picks.get(atoms.components[messages, 0, 0], {}).items():
                if source != target and length == item.args[2]:
                    yield length, (values[source], values[target])


def _line(length: int, source: Tensor, target: Tensor, devices: int) -> str:
    text = f"graph of {length} vertices and {len(source)} edges"
    reached = int((torch.bincount(target, minlength=1) > 0).sum())
    if reached < devices:
        few = f"edges lead to {reached} vertices, fewer than {devices} devices, some of which have none: "
        return f"{text}: {few}use fewer devices, or split features"
    if length < devices:
        return f"{text}: fewer vertices than {devices} devices: use fewer devices, or split features"
    cut = edge_cut(source, target, length, devices)
    gathered = length * (devices - 1)
    return (
        f"{text}: in {devices} ranges of vertices {cut.crossing:.1%} of the edges come from another, with "
        f"{cut.rows} rows to exchange where a gather brings {gathered}; "
        f"the fullest has {cut.fullest:.2f} times its share"
    )
