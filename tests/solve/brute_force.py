"""The best plan of a small graph by trying them all, with nothing of the solver's reasoning.

Conversions of one tensor to several layouts are the cheapest tree in the graph of moves
(Dreyfus and Wagner, 1971, over subsets of the layouts needed).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

import networkx as nx
import torch

from autopar.cluster import ClusterSpec
from autopar.convert.moves import canonical, moves
from autopar.convert.path import interesting, tree
from autopar.core.costs import Collective, DeviceModel
from autopar.core.graph import Graph, InputKind, Ref
from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.placement import B, Layout, R
from autopar.core.program import Program
from autopar.cost.machine.collectives import CollectiveTable, Point, Series
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.solve.choices.fold import Folding
from autopar.solve.choices.space import Borders, Space, build_space
from tests.proof.models import Script

aten = torch.ops.aten
Distances = Mapping[Layout, Mapping[Layout, float]]

# So slow that sizes of a test matter: about 1 ms for a thousand elements.
DEVICE = DeviceModel("slow", "cpu", ((torch.float64, 1e7),), bandwidth=1e7, launch_seconds=1e-5)


def random_prices(graph: Graph, mesh: Mesh, random: Random) -> Prices:
    """Costs of a slow device whose collectives are priced at random, each kind for itself."""
    points: dict[Series, tuple[Point, ...]] = {}
    for kind in Collective:
        for size in {*mesh.shape, mesh.num_devices}:
            small = 10 ** random.uniform(-6, -3)
            points[kind, size, 1] = ((1, small), (100_000, small * 10 ** random.uniform(0, 3)))
    model = CostModel(DEVICE, {}, CollectiveTable(points))
    cluster = ClusterSpec(devices_per_node=mesh.num_devices)
    return Prices(graph, Dims(graph, find_atoms(graph), mesh), cluster, model)


def unfolded(graph: Graph) -> Folding:
    return Folding({item.name: item.name for item in graph.operators}, {}, 1)


def small_space(
    graph: Graph, prices: Prices, random: Random, *, most: int, layouts: int, local: bool = False
) -> Space:
    """At most so many strategies of each operator and layouts of each input, the plain ones among them."""
    space = build_space(
        graph, prices, unfolded(graph), borders=Borders(local_inputs=local, local_outputs=local)
    )

    def some(items: Sequence[Any], count: int) -> list[Any]:
        return [items[0], *random.sample(list(items[1:]), min(count - 1, len(items) - 1))]

    return Space(
        {name: some(offered, most) for name, offered in space.strategies.items()},
        {name: some(offered, layouts) for name, offered in space.inputs.items()},
        space.outputs,
    )


class BruteForce:
    """Every plan of a space, each with its cheapest conversions."""

    def __init__(self, graph: Graph, prices: Prices, space: Space) -> None:
        self.graph, self.prices, self.space = graph, prices, space
        self.tree, self.far = cache(self._tree), cache(self._far)
        self.layouts = cache(self._layouts)
        self.ends = cache(self._ends)
        self.paths = cache(self._paths)
        self.touched = {
            name: [i.name for i in graph.operators if name in (*i.operands, *i.results)]
            for name in graph.specs
        }

    def best(self) -> float:
        """Seconds of the cheapest plan."""
        return min(self.seconds(strategies) for strategies in self.strategies())

    def best_within(self, cap: int) -> float:
        """Seconds of the cheapest plan whose peak is at most `cap` bytes; infinite if there is none."""
        return min((seconds for seconds, peak in self.plans() if peak <= cap), default=math.inf)

    def strategies(self) -> Iterator[dict[str, Any]]:
        names = list(self.space.strategies)
        for chosen in itertools.product(*self.space.strategies.values()):
            yield dict(zip(names, chosen, strict=True))

    def seconds(self, strategies: Mapping[str, Any]) -> float:
        """The cheapest with these strategies: every input then chooses its layout for itself."""
        total = sum(self.prices.operator(i, strategies[i.name]).seconds for i in self.graph.operators)
        for name in self.tensors():
            layouts = self.space.inputs.get(name, [None])
            total += min(self.tensor(name, strategies, layout) for layout in layouts)
        return total

    def tensors(self) -> list[str]:
        uses = self.graph.consumers()
        written = {value for _, value in self.graph.writes}
        return [
            name for name in self.graph.specs if uses[name] or name in self.graph.outputs or name in written
        ]

    def tensor(self, name: str, strategies: Mapping[str, Any], layout: Layout | None) -> float:
        """Seconds of a tensor's conversions, and of its update if it is a weight."""
        chosen = tuple(strategies[item] for item in self.touching(name))
        choices = self.space.outputs.get(name, [None])
        best = min(self.conversions(name, layout, output, chosen) for output in choices)
        if layout is None or not self.is_weight(name):
            return best
        return self.prices.step_weight * self.prices.update(name, layout) + best

    def conversions(
        self, name: str, layout: Layout | None, output: Layout | None, chosen: tuple[Any, ...]
    ) -> float:
        """Seconds of a tensor's conversions; a gradient sum that can wait counts once a step."""
        source, needs = self.ends(name, layout, output, chosen)
        whole = self.tree(name, source, frozenset(needs) - {source})
        waits = layout is not None and self.is_weight(name) and self.prices.step_weight < 1.0
        if waits and source == (R,) and source not in needs:
            sync = self.prices.gradient_sync(name, Move(0, (R,), (B,)))
            whole = min(
                whole, self.prices.step_weight * sync + self.tree(name, (B,), frozenset(needs) - {(B,)})
            )
        return whole

    def _ends(
        self, name: str, layout: Layout | None, output: Layout | None, chosen: tuple[Any, ...]
    ) -> tuple[Layout, list[Layout]]:
        """The layout in which a tensor is made, and those in which it is used."""
        strategies = dict(zip(self.touching(name), chosen, strict=True))
        source, needs = layout, []
        for item in self.graph.operators:
            for index, result in enumerate(item.results):
                if result == name:
                    source = tuple(option.results[index] for option in strategies[item.name])
            for index, operand in enumerate(item.operands):
                if operand == name:
                    needs.append(tuple(option.operands[index] for option in strategies[item.name]))
        if output is not None:
            needs.append(output)
        needs += [self.space.inputs[buffer][0] for buffer, value in self.graph.writes if value == name]
        assert source is not None
        differentiable = self.prices.training and self.graph.specs[name].requires_grad
        source, *needs = (canonical(each, differentiable=differentiable) for each in (source, *needs))
        return source, needs

    def touching(self, name: str) -> list[str]:
        """The operators that make or take a tensor."""
        return self.touched[name]

    def is_weight(self, name: str) -> bool:
        return any(item.name == name and item.kind is InputKind.PARAMETER for item in self.graph.inputs)

    def plans(self) -> Iterator[tuple[float, int]]:
        """(seconds, peak bytes) of every plan."""
        for seconds, program in self.programs():
            yield seconds, PricedProgram(self.prices, program).peak.nbytes

    def programs(self) -> Iterator[tuple[float, Program]]:
        """Every plan with its seconds and its cheapest conversions."""
        inputs = list(self.space.inputs)
        for strategies in self.strategies():
            for layouts in itertools.product(*self.space.inputs.values()):
                kept = dict(zip(inputs, layouts, strict=True))
                seconds = sum(
                    self.prices.operator(i, strategies[i.name]).seconds for i in self.graph.operators
                )
                seconds += sum(self.tensor(name, strategies, kept.get(name)) for name in self.tensors())
                if seconds < math.inf:
                    outputs = {name: offered[0] for name, offered in self.space.outputs.items()}
                    moves = {name: self.moves(name, strategies, kept.get(name)) for name in self.tensors()}
                    yield seconds, Program(self.prices.dims.mesh, kept, strategies, moves, outputs)

    def moves(self, name: str, strategies: Mapping[str, Any], layout: Layout | None) -> tuple[Move, ...]:
        """A tensor's cheapest conversions to where `plans` want it."""
        output = self.space.outputs[name][0] if name in self.space.outputs else None
        chosen = tuple(strategies[item] for item in self.touching(name))
        return self.paths(name, layout, output, chosen)

    def _paths(
        self, name: str, layout: Layout | None, output: Layout | None, chosen: tuple[Any, ...]
    ) -> tuple[Move, ...]:
        source, needs = self.ends(name, layout, output, chosen)
        return tree(
            source,
            needs,
            lambda move: self.prices.move(name, move),
            legal=lambda reached: self.prices.dims.legal(name, reached),
            differentiable=self.graph.specs[name].requires_grad,
        )

    def _layouts(self, name: str) -> set[Layout]:
        """All layouts in which any strategy makes or takes the tensor: paths may lead through them."""
        uses = self.graph.consumers()[name]
        taken = [(item, place, "operands") for item, place in uses]
        made = [
            (item, item.results.index(name), "results")
            for item in self.graph.operators
            if name in item.results
        ]
        differentiable = self.prices.training and self.graph.specs[name].requires_grad
        return {
            canonical(tuple(getattr(o, of)[place] for o in strategy), differentiable=differentiable)
            for item, place, of in (*taken, *made)
            for strategy in self.space.strategies[item.name]
        } | {*self.space.inputs.get(name, ()), *self.space.outputs.get(name, ())}

    def _tree(self, name: str, source: Layout, needs: frozenset[Layout]) -> float:
        """Seconds of the cheapest tree of moves from `source` to every layout of `needs`."""
        if not needs:
            return 0.0
        if any(item.name == name and item.mutated for item in self.graph.inputs):
            return math.inf  # a buffer that is written stays where it is
        return _steiner(self.far(name), source, sorted(needs, key=str))

    def _far(self, name: str) -> Distances:
        """Seconds of the cheapest path between any two layouts of a tensor."""
        differentiable = self.prices.training and self.graph.specs[name].requires_grad
        price = self.prices.gradient_sync if self.is_weight(name) else self.prices.move
        placements = interesting(self.layouts(name), differentiable=differentiable)
        graph: nx.DiGraph[Layout] = nx.DiGraph()
        for node in itertools.product(*placements):
            if self.prices.dims.legal(name, node):
                graph.add_node(node)
                for move in moves(node, placements):
                    if self.prices.dims.legal(name, move.target):
                        graph.add_edge(node, move.target, weight=price(name, move))
        return dict(nx.all_pairs_dijkstra_path_length(graph))


def _steiner(far: Distances, root: Layout, ends: Sequence[Layout]) -> float:
    best = [dict.fromkeys(far, math.inf) for _ in range(1 << len(ends))]
    for mask in range(1, len(best)):
        if mask & (mask - 1) == 0:
            end = ends[mask.bit_length() - 1]
            best[mask] = {node: far[node].get(end, math.inf) for node in far}
            continue
        parts = [part for part in range(1, mask) if part & mask == part]
        joined = {node: min(best[part][node] + best[mask ^ part][node] for part in parts) for node in far}
        best[mask] = {node: min(far[node][via] + joined[via] for via in far[node]) for node in far}
    return best[-1][root]


# -- small graphs -----------------------------------------------------------------------------------------


def chain() -> Graph:
    s = Script()
    h = s.linear(s.user(4, 16), 24)
    h = s.linear(s.call(aten.gelu.default, Ref(h)), 8)
    return s.graph(s.call(aten.sum.default, Ref(h)))


def branches() -> Graph:
    s = Script()
    x = s.linear(s.user(4, 8), 12)
    joined = s.call(aten.add.Tensor, Ref(s.linear(x, 12)), Ref(x))
    return s.graph(s.call(aten.sum.default, Ref(s.call(aten.mul.Tensor, Ref(joined), Ref(x)))))


def twice() -> Graph:
    s = Script()
    h = s.linear(s.user(6, 10), 12)
    square = s.call(aten.mul.Tensor, Ref(h), Ref(h))
    return s.graph(s.call(aten.sum.default, Ref(square)), h)


def scores() -> Graph:
    s = Script()
    x = s.user(8, 12, grad=True)
    other = s.call(aten.transpose.int, Ref(x), 0, 1)
    product = s.call(aten.matmul.default, Ref(x), Ref(other))
    return s.graph(s.call(aten.sum.default, Ref(s.call(aten.softmax.int, Ref(product), 1))))


def widened() -> Graph:
    """A small weight that an operator without work of its own makes large."""
    s = Script()
    wide = s.call(aten.expand.default, Ref(s.call(aten.neg.default, Ref(s.weight(8, 1)))), [8, 40])
    return s.graph(s.call(aten.sum.default, Ref(s.call(aten.mul.Tensor, Ref(wide), Ref(s.user(8, 40))))))


def parts() -> Graph:
    """A view with two results, one of which leaves."""
    s = Script()
    h = s.linear(s.user(4, 6), 12)
    first, second = s.calls(aten.chunk.default, Ref(h), 2, 1)
    return s.graph(s.call(aten.sum.default, Ref(second)), first)


def normalised() -> Graph:
    s = Script()
    x, weight = s.user(4, 4, 8, 6), s.weight(4, 4, 3, 3)
    h = s.call(aten.conv2d.default, Ref(x), Ref(weight), None, [1, 1], [1, 1])
    running = [s.buffer(torch.zeros(4).double()), s.buffer(torch.ones(4).double())]
    affine = [s.weight(4), s.weight(4)]
    h = s.call(aten.batch_norm.default, Ref(h), *map(Ref, affine + running), True, 0.1, 1e-5, False)
    return s.graph(s.call(aten.mean.default, Ref(s.call(aten.relu.default, Ref(h)))))


def blocks(count: int) -> Graph:
    """A chain of `count` equal blocks between two other operators."""
    s = Script()
    x = s.linear(s.user(4, 6), 8)
    for _ in range(count):
        x = s.linear(s.call(aten.gelu.default, Ref(s.linear(x, 16))), 8)
    return s.graph(s.call(aten.sum.default, Ref(x)))


def whole(mesh: Mesh) -> Layout:
    return (R,) * len(mesh.shape)


GRAPHS = (chain, branches, twice, scores, widened, parts, normalised)
