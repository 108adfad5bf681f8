"""One generic proof for every operator: each strategy equals the unsplit call, values and gradients.

The operands start Replicate, are converted to what the strategy takes, and the results are
converted back, so that every placement that the rule names is exercised with its gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import autopar.runtime.collectives.placement_moves
import autopar.runtime.collectives.random  # noqa: F401  (registers the operators that programs call)
from autopar.convert.path import tree
from autopar.core.graph import Graph, GraphInput, InputKind, Operator, Ref, TensorSpec, may_learn
from autopar.core.mesh import Mesh
from autopar.core.operator_facts import facts_of
from autopar.core.placement import Layout, R
from autopar.core.program import Program
from autopar.core.strategy import Strategy
from autopar.proof.precision import raise_tensor, widest
from autopar.proof.ranks import assemble, distribute, meaning_for, run, seed_share, total_gradient
from autopar.proof.simulated import simulate_typed
from autopar.rewrite.rank_program import RankProgram, rewrite
from autopar.sharding.atoms import Dims
from autopar.sharding.rule import Sample
from autopar.sharding.strategies import dims_of, strategies_of
from autopar.torch_seams import pytree
from autopar.torch_seams.schemas import schema_of


class OneOperator:
    """A sample as a graph of one operator, its operands the graph's inputs."""

    def __init__(self, sample: Sample) -> None:
        leaves, self.structure = pytree.tree_flatten((sample.args, sample.kwargs))
        self.sample = sample
        self.tensors: dict[str, Tensor] = {}
        replaced: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                name = f"operand_{len(self.tensors)}"
                self.tensors[name] = raise_tensor(leaf.detach())
                replaced.append(Ref(name))
            else:
                replaced.append(torch.float64 if leaf is torch.float32 else leaf)
        args, kwargs = pytree.tree_unflatten(replaced, self.structure)
        self.leaves = replaced
        hidden = facts_of(sample.target).hidden_writes
        written = [args[place] for place in hidden.arguments] if hidden else []
        self.buffers = [argument.name for argument in written if isinstance(argument, Ref)]
        for name, tensor in self.tensors.items():
            fixed = name in self.buffers or name in sample.constant
            tensor.requires_grad_(may_learn(tensor.dtype) and not fixed)
        self.graph = self._graph(tuple(args), dict(kwargs))

    def value(self, name: str) -> Tensor | None:
        """The value of an operand which a rule may take for a constant: integers."""
        tensor = self.tensors[name]
        return None if may_learn(tensor.dtype) else tensor

    def serial(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Results of the unsplit call and its operands (fresh leaves)."""
        operands = {
            name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
            for name, tensor in self.tensors.items()
        }
        leaves = [operands[leaf.name] if isinstance(leaf, Ref) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        results = self.sample.target(*args, **kwargs)
        found = [results] if isinstance(results, Tensor) else list(results)
        return found[: facts_of(self.sample.target).usable_results], operands

    def _graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        specs = {
            name: TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for name, tensor in self.tensors.items()
        }
        inputs = tuple(
            GraphInput(name, InputKind.USER, name, spec, mutated=name in self.buffers, value=self.value(name))
            for name, spec in specs.items()
        )
        state = torch.get_rng_state()
        results, _ = self.serial()
        torch.set_rng_state(state)
        names = tuple(f"result_{index}" for index in range(len(results)))
        for name, result in zip(names, results, strict=True):
            specs[name] = TensorSpec(tuple(result.shape), result.dtype, result.requires_grad)
        usable = facts_of(self.sample.target).usable_results
        rest = 0 if usable is None else len(schema_of(self.sample.target).returns) - len(names)
        operation = Operator("operator", self.sample.target, args, kwargs, (*names, *[None] * rest))
        return Graph(inputs, (operation,), names, specs)


def program_for(graph: Graph, strategy: Strategy, dims: Dims) -> Program:
    """Operands and results Replicate outside, converted to what `strategy` takes and gives."""
    whole: Layout = (R,) * len(dims.mesh.shape)
    operation = graph.operators[0]
    needs: dict[str, list[Layout]] = {item.name: [] for item in graph.inputs}
    for index, name in enumerate(operation.operands):
        needs[name].append(tuple(option.operands[index] for option in strategy))
    mutated = {item.name for item in graph.inputs if item.mutated}
    inputs = {name: needs[name][0] if name in mutated else whole for name in needs}
    sources = dict(inputs)
    for index, result in enumerate(operation.results):
        if result:
            sources[result] = tuple(option.results[index] for option in strategy)
            needs[result] = [whole]
    moves = {
        name: tree(
            sources[name],
            wanted,
            lambda move: 1.0,
            legal=functools.partial(dims.legal, name),
            differentiable=graph.specs[name].requires_grad,
        )
        for name, wanted in needs.items()
    }
    return Program(dims.mesh, inputs, {operation.name: strategy}, moves, dict.fromkeys(graph.outputs, whole))


def strategies(sample: Sample, mesh: Mesh) -> Iterator[tuple[OneOperator, Dims, Strategy]]:
    """Every strategy that the rule of the sample's operator offers on `mesh`."""
    one = OneOperator(sample)
    dims = dims_of(one.graph, mesh)
    for strategy in strategies_of(one.graph.operators[0], dims):
        yield one, dims, strategy


def error(one: OneOperator, dims: Dims, strategy: Strategy, *, seed: int = 0) -> float:
    """The largest difference from the unsplit call, in results, gradients and buffers."""
    return max(differences(one, dims, strategy, seed=seed).values(), default=0.0)


def differences(one: OneOperator, dims: Dims, strategy: Strategy, *, seed: int = 0) -> dict[str, float]:
    """The largest error of each result and gradient against the unsplit call, by name. For an operand that
    the operator writes, it is the error of the operand itself."""
    torch.manual_seed(seed)
    wanted, operands = one.serial()
    gradients = [torch.randn_like(item) for item in wanted if item.requires_grad]
    torch.autograd.backward([item for item in wanted if item.requires_grad], gradients)
    program = program_for(one.graph, strategy, dims)
    programs = [rewrite(one.graph, program, dims, rank=rank) for rank in range(dims.mesh.num_devices)]
    locals_ = distribute(one.tensors, program.inputs, dims)
    torch.manual_seed(seed)
    outputs = run(programs, locals_, meaning=meaning_for(one.graph))
    found: dict[str, float] = {}

    def note(what: str, gap: float) -> None:
        found[what] = max(math.inf if math.isnan(gap) else gap, found.get(what, 0.0))

    for local in outputs:
        for index, (ours, theirs) in enumerate(zip(local, wanted, strict=True)):
            note(f"result {index}", _gap(ours, theirs))
    roots, seeds = [], []
    share = seed_share(one.graph, len(outputs))
    for local in outputs:
        differentiable = [item for item in local if item.requires_grad]
        roots += differentiable
        seeds += [item * share for item in gradients[: len(differentiable)]]
    torch.autograd.backward(roots, seeds)
    for name, operand in operands.items():
        shares = [local[name] for local in locals_]
        if name in one.buffers:
            note(name, _gap(assemble(name, shares, program.inputs[name], dims), operand))
        elif operand.grad is not None:
            total = total_gradient(name, shares, program.inputs[name], dims)
            note(f"gradient of {name}", _gap(total, operand.grad))
    torch.manual_seed(seed)
    typed = _typed_errors(distribute(one.tensors, program.inputs, dims), programs, gradients, operands)
    for name, gap in typed:
        note(f"gradient of {name}", gap)
    return found


def _typed_errors(
    locals_: Sequence[Mapping[str, Tensor]],
    programs: Sequence[RankProgram],
    gradients: Sequence[Tensor],
    operands: Mapping[str, Tensor],
) -> Iterator[tuple[str, float]]:
    """The difference of each rank's gradient, when gradients travel as in a program."""
    outputs = run(programs, locals_, meaning=simulate_typed)
    roots = [item for local in outputs for item in local if item.requires_grad]
    torch.autograd.backward(roots, list(gradients) * len(outputs))
    wanted = {name: item.grad for name, item in operands.items() if item.grad is not None}
    for local in locals_:
        for name, item in wanted.items():
            mine = local[name].grad
            yield name, _gap(torch.zeros_like(item) if mine is None else mine, item)


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest finite value where that exceeds 1."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not theirs.numel():
        return 0.0
    difference = (widest(ours) - widest(theirs)).abs()
    alike = (ours == theirs) | (ours.isnan() & theirs.isnan())
    largest = float(widest(theirs).nan_to_num(0.0, 0.0, 0.0).abs().max())
    return float(difference.masked_fill(alike, 0.0).max()) / max(1.0, largest)
