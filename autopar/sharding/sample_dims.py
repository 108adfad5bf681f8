"""Which dims of a batch's inputs hold its samples: found by their flow to the loss, or given by name.

Of all loops over dims of inputs that no weight has it is the first along which the loss is a sum or a mean;
if there is none, the one along which only statistics of the batch are in the way, or else the only one that
gets as far as the loss (sample_independence.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.core.graph import Graph, GraphInput, InputKind
from autopar.sharding.atoms import Atom, Dims
from autopar.sharding.made_constants import made_constants
from autopar.sharding.sample_independence import SampleFlow
from autopar.sharding.sample_values import Role


def find_batch(graph: Graph, dims: Dims) -> tuple[SampleFlow | None, str | None]:
    """The flow of the samples, None where their dim can't be told; and why not, or what cutting them would
    change."""
    made = made_constants(graph)
    flows = [SampleFlow(graph, dims, {loop}, made=made) for loop in _loops(graph, dims)]
    if not flows:
        return None, "no input has a dim that no weight has"
    best = min(flow.depth for flow in flows)
    nearest = [flow for flow in flows if flow.depth == best]
    if best == 1:
        nearest = [flow for flow in nearest if _is_normalised(flow)] or nearest
    told = best < 2 or (best == 2 and len(nearest) == 1)
    return (nearest[0] if told else None), nearest[0].obstacle


def _loops(graph: Graph, dims: Dims) -> Iterator[Atom]:
    """Loops over the dims of user inputs, each once, that are no weight's; one of length 1 can't be cut."""
    seen = set()
    for item in graph.inputs:
        if item.kind is InputKind.USER:
            for dim, atoms in enumerate(dims.atoms.of[item.name]):
                for atom, size in enumerate(atoms):
                    loop = dims.atoms.components[(item.name, dim, atom)]
                    if size > 1 and loop not in seen and not dims.is_weight(loop):
                        seen.add(loop)
                        yield loop


def samples_elsewhere(graph: Graph, dims: Dims) -> tuple[GraphInput, int] | None:
    """The first user input with dims and the dim that holds its samples, if that isn't dim 0: rows of dim 0
    meet, while those of the other go apart to all outputs."""
    users = [item for item in graph.inputs if item.kind is InputKind.USER and item.spec.shape]
    if not users:
        return None
    first = users[0]
    roles = [_roles_of_outputs(graph, dims, first, dim) for dim in range(len(first.spec.shape))]
    if Role.MIXED not in roles[0]:
        return None
    apart = {Role.ROWS, Role.SUM, Role.MEAN}
    dim = next((dim for dim, found in enumerate(roles) if found and found <= apart), None)
    return None if dim is None else (first, dim)


def _roles_of_outputs(graph: Graph, dims: Dims, item: GraphInput, dim: int) -> set[Role]:
    """Roles of outputs with regard to an input dim's rows; none for a dim that weights have too."""
    loop = dims.atoms.components[(item.name, dim, 0)]
    if dims.is_weight(loop) or item.spec.shape[dim] < 2:
        return set()
    flow = SampleFlow(graph, dims, {loop})
    return {flow.values[name].role for name in graph.outputs}


def _is_normalised(flow: SampleFlow) -> bool:
    """Whether the samples are in dim 0 of all operands of batch norms, as the user says."""
    return all(any(place.dim == 0 for place in flow.places(item.operands[0])) for item in flow.statistics)


def said_batch(graph: Graph, dims: Dims, said: Mapping[str, int | None]) -> SampleFlow:
    """The flow of samples in the dims that are `said`, by path of the input; None for an input without."""
    names = {item.target: item.name for item in graph.inputs if item.kind is InputKind.USER}
    batch = {
        dims.atoms.components[(names[path], dim, 0)]
        for path, dim in said.items()
        if dim is not None and path in names
    }
    whole = frozenset(names[path] for path, dim in said.items() if dim is None and path in names)
    return SampleFlow(graph, dims, batch, whole, trusted=True)
