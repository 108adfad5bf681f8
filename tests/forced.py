"""Programs under forced strategies, run on simulated ranks and compared with the model itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import autopar.ops
import autopar.runtime.collectives.placement_moves  # noqa: F401  (registers the operators that programs call)
from autopar.convert.path import tree
from autopar.core.graph import Graph, Operator
from autopar.core.mesh import Mesh
from autopar.core.placement import B, Layout, Placement, R
from autopar.core.program import Program
from autopar.core.strategy import GATHERED, Option, Strategy
from autopar.proof.ranks import assemble, distribute, run, total_gradient
from autopar.rewrite.rank_program import rewrite
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import options_of
from autopar.trace.export import trace

Forced = tuple[Dims, Program]


def traced(model: nn.Module, *args: Tensor) -> tuple[Graph, dict[str, Tensor]]:
    """The graph and the full value of each of its inputs."""
    found = trace(model, args)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    users = iter(found.arguments.tensors)
    values = {
        item.name: state[item.target] if item.target in state else next(users) for item in found.graph.inputs
    }
    return found.graph, {name: value.detach().clone() for name, value in values.items()}


def option(operation: Operator, dims: Dims, wanted: Placement) -> Option:
    """The option that lays the operator's result as `wanted`, or the gathered one."""
    found = options_of(operation, dims)
    return next(
        (item for item in found if item.results[0] == wanted), next(i for i in found if i.factor == GATHERED)
    )


def forced(graph: Graph, dims: Dims, choose: Callable[[Operator], Strategy]) -> Program:
    """A program from a strategy for each operator; inputs lie as their first use takes them."""
    strategies = {item.name: choose(item) for item in graph.operators}
    needs: dict[str, list[Layout]] = {name: [] for name in graph.specs}
    sources: dict[str, Layout] = {}
    whole: Layout = (R,) * len(dims.mesh.shape)
    for item in graph.operators:
        for index, name in enumerate(item.operands):
            needs[name].append(tuple(option.operands[index] for option in strategies[item.name]))
        for index, result in enumerate(item.results):
            if result:
                sources[result] = tuple(option.results[index] for option in strategies[item.name])
    inputs = {}
    for item in graph.inputs:
        first = needs[item.name][0] if needs[item.name] else whole
        inputs[item.name] = tuple(R if placement == B else placement for placement in first)
    for name in graph.outputs:
        needs[name].append(whole)
    for buffer, value in graph.writes:
        needs[value].append(inputs[buffer])
    sources |= inputs
    moves = {
        name: tree(
            sources[name],
            wanted,
            lambda move: 1.0,
            legal=lambda layout, name=name: dims.legal(name, layout),
            differentiable=graph.specs[name].requires_grad,
        )
        for name, wanted in needs.items()
    }
    return Program(dims.mesh, inputs, strategies, moves, dict.fromkeys(graph.outputs, whole))


def check_against_serial(
    model: nn.Module, mesh: Mesh, x: Tensor, *, by: Callable[[Graph, Mesh], Forced]
) -> None:
    """Outputs, gradients and buffers of the forced program on simulated ranks equal the model's own."""
    graph, values = traced(model, x)
    dims, program = by(graph, mesh)
    for item in graph.inputs:
        values[item.name].requires_grad_(item.spec.requires_grad)
    locals_ = distribute(values, program.inputs, dims)
    ranks = range(mesh.num_devices)
    outputs = [out[0] for out in run([rewrite(graph, program, dims, rank=rank) for rank in ranks], locals_)]
    serial = model(x)
    assert all(torch.allclose(output, serial) for output in outputs)
    serial.square().mean().backward()
    torch.autograd.backward([output.square().mean() / len(outputs) for output in outputs])
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for item in graph.inputs:
        mine, layout = [local[item.name] for local in locals_], program.inputs[item.name]
        if item.target in parameters:
            gradient = total_gradient(item.name, mine, layout, dims)
            assert torch.allclose(gradient, parameters[item.target].grad), item.target  # type: ignore[arg-type]
        elif item.mutated:
            assert torch.allclose(assemble(item.name, mine, layout, dims), buffers[item.target]), item.target
