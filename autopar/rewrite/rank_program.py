"""Graph and Program -> the fx.Graph of one rank: local operators and named collectives.

Conversions are written at their first use, never at the top: autograd runs later-created nodes
first, so a weight converted at the top would have its gradient reduced at the very end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.convert.moves import canonical, effect, gathers, sums_gradients
from autopar.core.gathering import Gathering
from autopar.core.graph import Graph, TensorSpec
from autopar.core.move import Move
from autopar.core.operator_facts import writes
from autopar.core.placement import Layout, Shard, show
from autopar.core.precision import Precision
from autopar.core.program import Program
from autopar.errors import CheckError
from autopar.rewrite.emit import GraphEmitter
from autopar.rewrite.fetch_ahead import fetch_ahead
from autopar.runtime.collectives.grouped_moves import TOGETHER
from autopar.runtime.collectives.placement_moves import DTYPES, SUMMED
from autopar.runtime.saved.host_weights import fetch_target
from autopar.runtime.saved.offload import offload
from autopar.runtime.saved.regather import REGATHER
from autopar.sharding.atoms import Dims
from autopar.sharding.rule import Site, rule_of


@dataclass(frozen=True, slots=True)
class RankProgram:
    """One rank's program: placeholders in the order of the graph's inputs; it returns the graph's
    outputs followed by the new values of the buffers in `graph.writes`. `layers` says which module
    of the model each call (by node name) belongs to, `steps` for which of the graph's operators (by
    number) it was written, those after the last one for the outputs."""

    rank: int
    graph: fx.Graph
    emitter: GraphEmitter
    layers: dict[str, str]
    steps: dict[str, int]
    named: dict[str, tuple[tuple[str, Layout], ...]]  # what of the graph's values a node is, and how laid

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Tensors that the rank's program takes beside the graph's inputs, by placeholder: its parts of a
        structure."""
        used = {str(node.target) for node in self.graph.nodes if node.op == "placeholder" and node.users}
        return {name: value for name, value in self.emitter.constants.items() if name in used}

    def module(self) -> fx.GraphModule:
        return fx.GraphModule(torch.nn.Module(), self.graph, class_name="ParallelProgram")


def rewrite(
    graph: Graph,
    program: Program,
    dims: Dims,
    *,
    rank: int,
    device: torch.device | None = None,
    exact_random: bool = True,
) -> RankProgram:
    """Write the program of `rank`; raises CheckError where a local shape is not what the layout says."""
    writer = _RankWriter(graph, program, dims, dims.mesh.coordinate(rank), device, exact_random)
    writer.write()
    named: dict[str, tuple[tuple[str, Layout], ...]] = {}
    for key, node in writer.values.items():
        named[node.name] = (*named.get(node.name, ()), key)
    written = writer.emitter.graph
    if program.ahead:
        written = fetch_ahead(written, program, writer.steps)
    return RankProgram(rank, written, writer.emitter, writer.layers, writer.steps, named)


class _RankWriter:
    def __init__(
        self,
        graph: Graph,
        program: Program,
        dims: Dims,
        coordinate: Sequence[int],
        device: torch.device | None,
        exact_random: bool,
    ) -> None:
        self.graph, self.program, self.dims, self.coordinate = graph, program, dims, tuple(coordinate)
        self.exact_random = exact_random
        self.reduced = graph.cast_weights
        if program.reduce is not Precision.FP32:
            self.reduced |= graph.cast_alone
        self.emitter = GraphEmitter(device=device)
        self.values: dict[tuple[str, Layout], fx.Node] = {}
        self.on_host: dict[tuple[str, Layout], fx.Node] = {}  # weights, before they are fetched
        self.layers: dict[str, str] = {}
        self.steps: dict[str, int] = {}
        self.parents: dict[tuple[str, Layout], Move] = {
            (name, move.target): move for name, moves in program.moves.items() for move in moves
        }
        self.offloaded = {
            (name, self.canonical(name, layout)): number
            for number, (name, layout) in enumerate(program.offload)
        }
        self.together = {name: names for names in program.together for name in names}
        self.makers = {name: step for step, item in enumerate(graph.operators) for name in item.results}
        self.written: set[int] = set()

    def write(self) -> None:
        for item in self.graph.inputs:
            layout = self.program.inputs[item.name]
            shape = self.dims.local_shape(item.name, layout, self.coordinate)
            spec = TensorSpec(shape, item.spec.dtype, item.spec.requires_grad)
            values = self.on_host if item.name in self.program.on_host else self.values
            values[item.name, self.canonical(item.name, layout)] = self.emitter.placeholder(item.name, spec)
        for step in range(len(self.graph.operators)):
            self.write_operator(step)
        written = len(self.emitter.graph.nodes)
        outputs = [self.value(name, self.program.outputs[name]) for name in self.graph.outputs]
        for node in self.latest(len(self.emitter.graph.nodes) - written):
            self.steps[node.name] = len(self.graph.operators)
        writes = [self.write_buffer(buffer, value) for buffer, value in self.graph.writes]
        self.emitter.graph.output(tuple(outputs + writes))
        self.emitter.graph.eliminate_dead_code(is_impure_node=_is_impure)
        self.emitter.graph.lint()

    def write_operator(self, step: int) -> None:
        """Write an operator that isn't written yet."""
        if step in self.written:
            return
        self.written.add(step)
        operation = self.graph.operators[step]
        strategy = self.program.strategies[operation.name]
        written = len(self.emitter.graph.nodes)
        values = [
            self.value(name, tuple(option.operands[index] for option in strategy))
            for index, name in enumerate(operation.operands)
        ]
        site = Site(
            operation,
            dims=self.dims,
            strategy=strategy,
            coordinate=self.coordinate,
            emitter=self.emitter,
            values=values,
            exact_random=self.exact_random,
        )
        results = rule_of(operation).lower(site)
        for index, (name, value) in enumerate(zip(operation.results, results, strict=True)):
            if name is not None:
                self.define(name, site.result_layout(index), value)
        for node in self.latest(len(self.emitter.graph.nodes) - written):
            self.layers.setdefault(node.name, operation.module)
            self.steps[node.name] = step

    def write_buffer(self, buffer: str, value: str) -> fx.Node:
        """The buffer's value after the step, converted as a part of the operator that makes it."""
        written = len(self.emitter.graph.nodes)
        node = self.value(value, self.program.inputs[buffer])
        step = next((at for at, item in enumerate(self.graph.operators) if value in item.results), 0)
        for each in self.latest(len(self.emitter.graph.nodes) - written):
            self.steps[each.name] = step
        return node

    def latest(self, count: int) -> Iterator[fx.Node]:
        """The `count` nodes that were written last."""
        return itertools.islice(reversed(self.emitter.graph.nodes), count)

    def canonical(self, name: str, layout: Layout) -> Layout:
        return canonical(layout, differentiable=self.graph.specs[name].requires_grad)

    def define(self, name: str, layout: Layout, value: fx.Node) -> None:
        wanted = self.dims.local_shape(name, layout, self.coordinate)
        found = self.emitter.shape(value)
        if wanted != found:
            raise CheckError(
                where=f"{name} as {show(layout)} at {self.coordinate}",
                found=f"local shape {found}",
                wanted=f"{wanted}",
                remedy="report this model: the operator's rule lowers it wrongly",
            )
        self.keep((name, self.canonical(name, layout)), value)

    def keep(self, key: tuple[str, Layout], value: fx.Node) -> fx.Node:
        """Remember a tensor in a layout, from now on by way of `offload` if the plan offloads it."""
        if key in self.offloaded:
            node = self.emitter.graph.call_function(offload, (value, self.offloaded[key]))
            self.emitter.meta[node] = self.emitter.meta[value]
            value = node
        self.values[key] = value
        return value

    def value(self, name: str, layout: Layout) -> fx.Node:
        """Read a tensor in `layout`, converted at most once."""
        key = (name, self.canonical(name, layout))
        if key in self.on_host:
            return self.keep(key, self.fetch(self.on_host.pop(key)))
        if key not in self.values:
            if key not in self.parents:
                raise CheckError(
                    where=f"{name} as {show(layout)}",
                    found="no move that leads there",
                    wanted="a conversion in the plan",
                    remedy="plan anew, and report this model if that is no help",
                )
            return self.keep(key, self.convert(name, self.parents[key]))
        return self.values[key]

    def fetch(self, weight: fx.Node) -> fx.Node:
        """A weight's copy on the device."""
        device = self.emitter.device or torch.device("cpu")
        node = self.emitter.graph.call_function(fetch_target(), (weight, device))
        self.emitter.meta[node] = self.emitter.meta[weight]
        return node

    def convert(self, name: str, move: Move) -> fx.Node:
        if name in self.together and gathers(move):
            return self.gather_together(self.together[name])[name]
        source = self.value(name, move.source)
        target = getattr(torch.ops.autopar, self.operator_of(name, move)).default
        args: list[object] = [source, self.dims.mesh.key(move.axes)]
        before, after = move.placements
        for placement, layout in ((before, move.source), (after, move.target)):
            if isinstance(placement, Shard):
                blocks, sizes = self.dims.split(name, placement, layout, move.axis, self.coordinate)
                args += [placement.dim, blocks, list(sizes)]
        shape = self.dims.local_shape(name, move.target, self.coordinate)
        return self.emitter.collective(target, args, shape)

    def gather_together(self, names: Sequence[str]) -> dict[str, fx.Node]:
        """Weights that one exchange gathers, each remembered in its new layout; their casts come first."""
        for step in (self.makers[name] for name in names if name in self.makers):
            self.write_operator(step)
        moves = {name: next(filter(gathers, self.program.moves[name])) for name in names}
        sources = [self.value(name, move.source) for name, move in moves.items()]
        dims, blocks, sizes = [], [], list[int]()
        for name, move in moves.items():
            shard = move.placements[0]
            assert isinstance(shard, Shard)
            count, own = self.dims.split(name, shard, move.source, move.axis, self.coordinate)
            dims.append(shard.dim)
            blocks.append(count)
            sizes += own
        first, move = next(iter(moves.items()))
        target = getattr(torch.ops.autopar, self.operator_of(first, move, TOGETHER)).default
        args = [sources, self.dims.mesh.key(move.axes), dims, blocks, sizes]
        shapes = [self.dims.local_shape(name, move.target, self.coordinate) for name, move in moves.items()]
        nodes = dict(zip(names, self.emitter.collective_of_list(target, args, shapes), strict=True))
        for name, node in nodes.items():
            self.keep((name, self.canonical(name, moves[name].target)), node)
        return nodes

    def operator_of(self, name: str, move: Move, together: str = "") -> str:
        """The registered operator of a move, or of the group that makes it."""
        regather = gathers(move) and self.program.gathering(name) is Gathering.REGATHER
        return effect(move).name + self.summing(name, move) + together + REGATHER * regather

    def summing(self, name: str, move: Move) -> str:
        """Suffix of a move's name if it sums gradients in a dtype other than the tensor's; "" if not."""
        spec, reduce = self.graph.specs[name], self.program.reduce
        if name not in self.reduced or not sums_gradients(move) or not spec.requires_grad:
            return ""
        return "" if spec.dtype in (DTYPES[reduce], torch.float64) else SUMMED[reduce]


def _is_impure(node: fx.Node) -> bool:
    """Placeholders, outputs, and operators that write, as to running statistics, stay."""
    return node.op in ("placeholder", "output") or (node.op == "call_function" and writes(node.target))
