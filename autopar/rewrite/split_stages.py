"""Cuts one rank's program into the programs of pipeline stages.

    operators    0   1   2 | 3   4 | 5   6           starts = (0, 3, 5)
    x ---------> conv ... -.-> conv -.-> conv -> loss
                     skip -'-> relay-'-> cat          what crosses several cuts is handed on by each stage

A value that is sent keeps its layout: rank i of a stage sends its local tensor to rank i of the next
one, and receives the local gradient. So a cut may lie anywhere, whatever the placements.

Nothing is sent that every stage can make for itself: what depends on parameters alone (a tied
weight and its conversions), and what has no gradient and depends on the user's inputs (masks,
positions) are written into each stage that needs them. A buffer that micro-batches write is read and
written by one stage, which hands on what comes from it. Draws of serial random masks, and of noise that is
made from nothing, are repeated in all later stages, so that a generator that starts alike stands alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Argument

from autopar.core.graph import Graph, InputKind, TensorSpec
from autopar.core.operator_facts import facts_of, is_random
from autopar.errors import InputError
from autopar.rewrite.rank_program import RankProgram


@dataclass(frozen=True, slots=True)
class StageProgram:
    """One rank's program of one stage.

    Its placeholders are the values `received` from the stage before, then its own `inputs` (names of
    the graph's inputs, in their order). It returns the values that it sends on, as contiguous
    tensors of their own, the graph's `outputs` that it makes, and the new values of `writes`.
    """

    graph: fx.Graph
    received: tuple[TensorSpec, ...]
    sent: tuple[TensorSpec, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    writes: tuple[str, ...]


def split(program: RankProgram, graph: Graph, starts: Sequence[int]) -> tuple[StageProgram, ...]:
    """The programs of all stages; stage s has the operators from number `starts[s]` on.

    All outputs of the graph are made by the last stage.
    """
    return _Splitter(program, graph, starts).split()


def crossing(program: RankProgram, graph: Graph, starts: Sequence[int], cut: int) -> list[fx.Node]:
    """The nodes of a rank's program that cross the cut after stage `cut`, as they are made."""
    return _Splitter(program, graph, starts).crossing(cut)


def one_stage(
    program: RankProgram, graph: Graph, starts: Sequence[int], stage: int, sent: Sequence[fx.Node]
) -> StageProgram:
    """The program of one stage, which sends these nodes to the next: what that receives of them may be laid
    otherwise there."""
    return _Splitter(program, graph, starts).stage(stage, sent)


class _Splitter:
    def __init__(self, program: RankProgram, graph: Graph, starts: Sequence[int]) -> None:
        self.program, self.graph, self.starts = program, graph, tuple(starts)
        self.nodes = list(program.graph.nodes)
        self.kinds = {item.name: item.kind for item in graph.inputs}
        self.written = {item.name for item in graph.inputs if item.mutated}
        self.written |= {buffer for buffer, _ in graph.writes}
        self.made_from: dict[fx.Node, frozenset[InputKind]] = {}  # of nodes that every stage can make
        self.stage_for: dict[fx.Node, int] = {}  # of all other nodes
        for node in self.nodes:
            self.classify(node)
        results: list[fx.Node] = list(self.nodes[-1].args[0])
        count = len(graph.outputs)
        self.outputs = results[:count]
        self.writes = {
            buffer: (value, self.stage_of(value))
            for (buffer, _), value in zip(graph.writes, results[count:], strict=True)
        }
        self.check_writes()
        self.last = self.last_uses()

    def check_writes(self) -> None:
        """Raise InputError for a buffer that is read in one stage and written in another."""
        for buffer, (_, stage) in self.writes.items():
            for node, other in self.stage_for.items():
                if other != stage and any(str(item.target) == buffer for item in node.all_input_nodes):
                    raise InputError(
                        where=f"buffer {buffer}",
                        found=f"stage {other} reads it for {node.name}, stage {stage} writes it",
                        wanted="one stage for both: a micro-batch reads what the one before it wrote",
                        remedy="cut the model elsewhere, or plan without stages",
                    )

    def classify(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.made_from[node] = frozenset({self.kinds.get(str(node.target), InputKind.CONSTANT)})
        elif node.op == "call_function":
            if self.is_free(node):
                self.made_from[node] = self.sources(node)
            else:
                self.stage_for[node] = self.stage_of(node)

    def sources(self, node: fx.Node) -> frozenset[InputKind]:
        return frozenset().union(*(self.made_from[item] for item in node.all_input_nodes))

    def is_free(self, node: fx.Node) -> bool:
        """Whether each stage can compute the value for itself: from weights alone, or without weights and
        without a gradient. Values that depend on what micro-batches write are never free, as only one stage
        has them."""
        if is_random(node.target) or not all(item in self.made_from for item in node.all_input_nodes):
            return False
        if any(str(item.target) in self.written for item in node.all_input_nodes):
            return False
        sources = self.sources(node)
        if InputKind.USER not in sources:
            return True
        return InputKind.PARAMETER not in sources and not self.needs_gradient(node)

    def needs_gradient(self, node: fx.Node) -> bool:
        value = self.program.emitter.meta.get(node)
        return value is not None and value.requires_grad

    def stage_of(self, node: fx.Node) -> int:
        """The stage of the operator for which the node was written."""
        step = self.program.steps.get(node.name, 0)
        return max(0, bisect_right(self.starts, step) - 1)

    # -- what crosses ---------------------------------------------------------------------------

    def last_uses(self) -> dict[fx.Node, int]:
        """For each value that is not free, the last stage that uses it."""
        final = len(self.starts) - 1
        last: dict[fx.Node, int] = {}
        for node, stage in self.stage_for.items():
            for item in node.all_input_nodes:
                if item in self.stage_for:
                    last[item] = max(last.get(item, stage), stage)
        for item in self.outputs:
            if item in self.stage_for:
                last[item] = final
        return last

    def crossing(self, cut: int) -> list[fx.Node]:
        """The values that stage `cut` sends to the next one, in the order in which they are made."""
        return [node for node, stage in self.stage_for.items() if stage <= cut < self.last.get(node, stage)]

    # -- writing --------------------------------------------------------------------------------

    def split(self) -> tuple[StageProgram, ...]:
        return tuple(self.stage(index) for index in range(len(self.starts)))

    def stage(self, index: int, sends: Sequence[fx.Node] | None = None) -> StageProgram:
        final = len(self.starts) - 1
        received = self.crossing(index - 1) if index else []
        sent = self.crossing(index) if index < final and sends is None else list(sends or ())
        outputs = self.outputs if index == final else []
        writes = {buffer: value for buffer, (value, stage) in self.writes.items() if stage == index}
        body = self.body(index, [*outputs, *writes.values()])
        body |= {node for node in self.nodes if node.op == "placeholder" and node.target in writes}
        graph, made = fx.Graph(), {}
        for node in received:
            made[node] = graph.placeholder(node.name)
        inputs = [node for node in self.nodes if node.op == "placeholder" and node in body]
        for node in self.nodes:
            if node in body:
                for unknown in (item for item in node.all_input_nodes if item not in made):
                    made[unknown] = self.stand_in(graph, unknown)
                made[node] = graph.node_copy(node, lambda old: made[old])
        results = [_contiguous(graph, made[node]) for node in sent]
        results += [made[node] for node in (*outputs, *writes.values())]
        graph.output(tuple(results))
        graph.lint()
        return StageProgram(
            graph=graph,
            received=tuple(map(self.spec, received)),
            sent=tuple(map(self.spec, sent)),
            inputs=tuple(str(node.target) for node in inputs),
            outputs=tuple(self.graph.outputs) if index == final else (),
            writes=tuple(writes),
        )

    def body(self, index: int, results: Sequence[fx.Node]) -> set[fx.Node]:
        """The stage's own nodes, draws of earlier stages, and what they need that every stage can make."""
        body = {node for node, stage in self.stage_for.items() if stage == index}
        body |= {
            node for node, stage in self.stage_for.items() if stage < index and self.is_serial_draw(node)
        }
        waiting = [item for node in body for item in node.all_input_nodes]
        waiting += results
        while waiting:
            node = waiting.pop()
            if node in self.made_from and node not in body:
                body.add(node)
                waiting += node.all_input_nodes
        return body

    def is_serial_draw(self, node: fx.Node) -> bool:
        """Whether the serial model draws these numbers too, and equally many for any values of the
        operands."""
        own = (
            node.target is torch.ops.autopar.shard_mask.default
        )  # of a shard: the serial model draws no such
        if not is_random(node.target) or own:
            return False
        return facts_of(node.target).draws_each or all(
            item in self.made_from for item in node.all_input_nodes
        )

    def stand_in(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        """A tensor of a value's size, for a draw that only takes its turn."""
        value, device = self.program.emitter.meta[node], self.program.emitter.device
        options: dict[str, Argument] = {"dtype": value.dtype}
        if device is not None:
            options["device"] = device
        return graph.call_function(torch.ops.aten.zeros.default, (list(value.shape),), options)

    def spec(self, node: fx.Node) -> TensorSpec:
        value = self.program.emitter.meta[node]
        return TensorSpec(tuple(value.shape), value.dtype, value.requires_grad)


def _contiguous(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """Copy a value: what is sent must be no view, and lie in memory as the receiver expects it."""
    return graph.call_function(
        torch.ops.aten.clone.default, (value,), {"memory_format": torch.contiguous_format}
    )
