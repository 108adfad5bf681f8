"""All ranks' programs interpreted in step, in one process.

Node by node, every rank's call is evaluated; at a collective the ranks of each group meet, and the
collective's independent meaning (simulated.py) acts on the list of their tensors. Autograd through
it gives every gradient: no process group, no hand-written backward. A part that is recomputed in
backward is so on all ranks together; what is offloaded waits in storages that stand for the host's.

The sum over ranks of the gradients of a Replicate tensor is its gradient, so a Replicate result is
seeded with 1/n of its gradient on each of n ranks. Where a graph has backwards of the user's own, which
needn't be linear, every rank's gradient of a Replicate tensor is whole instead, as in a program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from autopar.core.graph import Graph
from autopar.core.mesh import parse_key
from autopar.core.operator_facts import is_random
from autopar.core.placement import Layout, R
from autopar.errors import CheckError
from autopar.proof.precision import in_float64
from autopar.proof.simulated import Call, simulate, simulate_typed
from autopar.rewrite.rank_program import RankProgram
from autopar.runtime.saved.offload import moves, saving_there
from autopar.runtime.saved.recompute import Recomputed
from autopar.sharding.atoms import Dims
from autopar.sharding.rule import has_linear_backward
from autopar.torch_seams.schemas import schema_of

Meaning = Callable[[Any, Sequence[Call]], list[Tensor]]


class HasGraph(Protocol):
    """A rank's program, or its program of one stage."""

    @property
    def graph(self) -> fx.Graph: ...


def run(
    programs: Sequence[HasGraph], inputs: Sequence[Mapping[str, Tensor]], *, meaning: Meaning = simulate
) -> list[tuple[Tensor, ...]]:
    """The outputs of all ranks; `inputs[rank]` are its local tensors by name.

    `meaning` says what the collectives do: `simulate` or `simulate_typed`.
    """
    with saving_there() if moves(programs[0].graph) else nullcontext():
        return _run(programs, inputs, meaning)


def _run(
    programs: Sequence[HasGraph], inputs: Sequence[Mapping[str, Tensor]], meaning: Meaning
) -> list[tuple[Tensor, ...]]:
    environments: list[dict[fx.Node, Any]] = [{} for _ in programs]
    steps = list(zip(*(program.graph.nodes for program in programs), strict=True))
    for nodes in steps:
        _check_alike(nodes)
        for program, node, environment, local in zip(programs, nodes, environments, inputs, strict=True):
            if node.op == "placeholder":
                name = str(node.target)
                environment[node] = local[name] if name in local else _constants(program)[name]
        if nodes[0].op == "call_function":
            _step(nodes, environments, meaning)
        if nodes[0].op == "call_module":
            _recompute(programs, nodes, environments, meaning)
        if nodes[0].op == "output":
            return [
                tuple(fx.node.map_arg(node.args[0], environment.__getitem__))
                for node, environment in zip(nodes, environments, strict=True)
            ]
    raise AssertionError("a program without an output")


def _constants(program: HasGraph) -> Mapping[str, Tensor]:
    """Tensors that a rank's program holds from the start."""
    assert isinstance(program, RankProgram), "a module takes all that it holds as its inputs"
    return program.constants


def _check_alike(nodes: Sequence[fx.Node]) -> None:
    if len({(node.op, node.target) for node in nodes}) > 1:
        raise CheckError(
            where="programs of the ranks",
            found=", ".join(str(node.target) for node in nodes),
            wanted="the same operator on every rank",
            remedy="let the rule's `lower` write the same calls everywhere",
        )


def _step(nodes: Sequence[fx.Node], environments: Sequence[dict[fx.Node, Any]], meaning: Meaning) -> None:
    calls = [
        (
            fx.node.map_arg(node.args, environment.__getitem__),
            fx.node.map_arg(node.kwargs, environment.__getitem__),
        )
        for node, environment in zip(nodes, environments, strict=True)
    ]
    target: Any = nodes[0].target
    if getattr(target, "namespace", "") == "autopar" and not is_random(target):
        results = _meet(target, calls, meaning)
    else:
        results = _each(target, calls)
    for node, environment, result in zip(nodes, environments, results, strict=True):
        environment[node] = result


def _recompute(
    programs: Sequence[HasGraph],
    nodes: Sequence[fx.Node],
    environments: Sequence[dict[fx.Node, Any]],
    meaning: Meaning,
) -> None:
    """Run the module that every rank calls, a part that is recomputed, as one for all ranks."""
    parts = [_part(program, node) for program, node in zip(programs, nodes, strict=True)]
    tensors = [
        fx.node.map_arg(node.args, environment.__getitem__)
        for node, environment in zip(nodes, environments, strict=True)
    ]
    mutated = [
        rank * len(mine) + place
        for rank, (part, mine) in enumerate(zip(parts, tensors, strict=True))
        for place in part.mutated
    ]
    together = Recomputed(
        _Together([_body(part) for part in parts], meaning),
        mutated=mutated,
        to_the_end=any(part.to_the_end for part in parts),
    )
    results = together(*(tensor for mine in tensors for tensor in mine))
    for node, environment, result in zip(nodes, environments, _shares(results, len(nodes)), strict=True):
        environment[node] = result


def _part(program: HasGraph, node: fx.Node) -> Recomputed:
    assert isinstance(program, fx.GraphModule)
    found = program.get_submodule(str(node.target))
    assert isinstance(found, Recomputed)
    return found


def _body(part: Recomputed) -> fx.GraphModule:
    assert isinstance(part.body, fx.GraphModule)
    return part.body


class _Together(nn.Module):
    """The bodies of one part on all ranks, as one: it takes and returns the tensors of rank after rank."""

    def __init__(self, bodies: Sequence[HasGraph], meaning: Meaning) -> None:
        super().__init__()
        self.bodies, self.meaning = list(bodies), meaning

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        names = [str(node.target) for node in self.bodies[0].graph.nodes if node.op == "placeholder"]
        inputs = [dict(zip(names, mine, strict=True)) for mine in _shares(tensors, len(self.bodies))]
        results = run(self.bodies, inputs, meaning=self.meaning)
        return tuple(tensor for mine in results for tensor in mine)


def _shares(tensors: Sequence[Tensor], ranks: int) -> list[Sequence[Tensor]]:
    length = len(tensors) // ranks
    return [tensors[rank * length : (rank + 1) * length] for rank in range(ranks)]


def _each(target: Any, calls: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Every rank draws from the generator as it stood before the operator."""
    if not is_random(target) and has_linear_backward(target):
        return [in_float64(target, args, kwargs) for args, kwargs in calls]
    state, results = torch.get_rng_state(), []
    for args, kwargs in calls:
        torch.set_rng_state(state)
        results.append(in_float64(target, args, kwargs))
    return results


def _meet(target: Any, calls: Sequence[Call], meaning: Meaning) -> list[Any]:
    names = [item.name for item in schema_of(target).arguments]
    if "group" not in names:  # a rank meets nobody but its host
        return [meaning(target, [call])[0] for call in calls]
    place = names.index("group")
    mesh, axes = parse_key(calls[0][0][place])
    results: list[Any] = [None] * len(calls)
    for rank in range(len(calls)):
        group = mesh.group(axes, rank)
        if results[rank] is None:
            for member, result in zip(group, meaning(target, [calls[item] for item in group]), strict=True):
                results[member] = result
    return results


def distribute(
    full: Mapping[str, Tensor], layouts: Mapping[str, Layout], dims: Dims
) -> list[dict[str, Tensor]]:
    """Each rank's own leaf tensors, cut out of the full ones."""
    return [
        {
            name: _leaf(dims.part(name, layout, dims.mesh.coordinate(rank)).take(full[name]), full[name])
            for name, layout in layouts.items()
        }
        for rank in range(dims.mesh.num_devices)
    ]


def _leaf(local: Tensor, full: Tensor) -> Tensor:
    return local.detach().clone().requires_grad_(full.requires_grad)


def total_gradient(name: str, locals_: Sequence[Tensor], layout: Layout, dims: Dims) -> Tensor:
    """The full gradient: every rank's share added in its place."""
    shape = dims.graph.specs[name].shape
    total = torch.zeros(shape, dtype=locals_[0].dtype)
    for rank, local in enumerate(locals_):
        if local.grad is not None:
            dims.part(name, layout, dims.mesh.coordinate(rank)).add(local.grad, total)
    if has_custom_backwards(dims.graph):
        replicas = (size for size, placement in zip(dims.mesh.shape, layout, strict=True) if placement == R)
        return total / math.prod(replicas)
    return total


def has_custom_backwards(graph: Graph) -> bool:
    """Whether gradients must travel whole, since some operator's backward isn't linear in them."""
    return not all(has_linear_backward(item.target) for item in graph.operators)


def meaning_for(graph: Graph) -> Meaning:
    """The meaning of collectives in a graph's programs: typed where some backward isn't linear."""
    return simulate_typed if has_custom_backwards(graph) else simulate


def seed_share(graph: Graph, ranks: int) -> float:
    """The part of a result's gradient with which each of its replicas is seeded."""
    return 1.0 if has_custom_backwards(graph) else 1 / ranks


def assemble(name: str, locals_: Sequence[Tensor], layout: Layout, dims: Dims) -> Tensor:
    """The full tensor; replicas must hold the same bits of truth."""
    full = torch.zeros(dims.graph.specs[name].shape, dtype=locals_[0].dtype)
    for rank, local in enumerate(locals_):
        dims.part(name, layout, dims.mesh.coordinate(rank)).put(local.detach(), full)
    for rank, local in enumerate(locals_):
        mine = dims.part(name, layout, dims.mesh.coordinate(rank)).take(full)
        if not torch.allclose(mine, local.detach(), rtol=1e-6, atol=1e-9, equal_nan=True):
            raise CheckError(
                where=f"{name} on rank {rank}",
                found=f"a replica that differs by {float((mine - local).abs().max()):.3g}",
                wanted="equal replicas",
                remedy="report this model: a placement is wrong",
            )
    return full
