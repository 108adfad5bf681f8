"""The best plan with every way of gathering every weight, by trying them all, on meshes of one axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import networkx as nx

from autopar.convert.moves import canonical, moves
from autopar.convert.path import interesting
from autopar.core.gathering import Gathering
from autopar.core.move import Move
from autopar.core.placement import B, Layout, P, R, Shard
from autopar.core.program import Program
from autopar.cost.program.priced_program import PricedProgram
from tests.solve.brute_force import BruteForce


def is_gather(move: Move) -> bool:
    """S -> R and S -> B."""
    return isinstance(move.placements[0], Shard) and move.placements[1] in (R, B)


class EveryGathering(BruteForce):
    """Every plan of a space, weights in shards gathered in each of its ways."""

    def gathered_plans(self) -> Iterator[tuple[float, int]]:
        """(seconds, peak bytes) of every plan, with each way of gathering every weight."""
        for seconds, program in self.gathered_programs():
            yield seconds, PricedProgram(self.prices, program).peak.nbytes

    def gathered_programs(self) -> Iterator[tuple[float, Program]]:
        """Every plan with its seconds, with each way of gathering every weight."""
        inputs = list(self.space.inputs)
        outputs = {name: offered[0] for name, offered in self.space.outputs.items()}
        for strategies in self.strategies():
            work = sum(self.prices.operator(i, strategies[i.name]).seconds for i in self.graph.operators)
            for layouts in itertools.product(*self.space.inputs.values()):
                kept = dict(zip(inputs, layouts, strict=True))
                rest = [name for name in self.tensors() if not self.is_weight(name)]
                seconds = work + sum(self.tensor(name, strategies, kept.get(name)) for name in rest)
                if seconds == math.inf:
                    continue
                fixed = {name: self.moves(name, strategies, kept.get(name)) for name in rest}
                weights = [name for name in self.tensors() if self.is_weight(name)]
                every = [list(self.ways(name, strategies, kept[name])) for name in weights]
                for ways in itertools.product(*every):
                    moves = fixed | {name: way[2] for name, way in zip(weights, ways, strict=True)}
                    gatherings = {name: way[1] for name, way in zip(weights, ways, strict=True)}
                    mesh = self.prices.dims.mesh
                    program = Program(mesh, kept, strategies, moves, outputs, gatherings=gatherings)
                    yield seconds + sum(way[0] for way in ways), program

    def ways(
        self, name: str, strategies: Mapping[str, Any], layout: Layout
    ) -> Iterator[tuple[float, Gathering, tuple[Move, ...]]]:
        """For each way of gathering a weight its seconds, with the cheapest conversions."""
        source, needs = self.ends(name, layout, None, tuple(strategies[item] for item in self.touching(name)))
        update = self.prices.step_weight * self.prices.update(name, layout)
        sharded = self.space.gatherings if layout != (R,) else ()
        for gathering in sharded or (Gathering.KEEP,):
            best: tuple[float, tuple[Move, ...]] = (math.inf, ())
            for made in self.trees(name, source, needs):
                summed = any(move.placements[0] == P for move in made)
                if summed and gathering is not Gathering.KEEP:
                    continue
                if self.space.gatherings or not (summed or any(map(is_gather, made))):
                    seconds = self.way(name, source, needs, made, strategies, gathering)
                    best = min(best, (seconds, made), key=lambda way: way[0])
            if best[0] < math.inf:
                yield update + best[0], gathering, best[1]

    def trees(self, name: str, source: Layout, needs: Sequence[Layout]) -> Iterator[tuple[Move, ...]]:
        """Every tree of moves from `source` whose ends are `needs`."""
        placements = interesting(self.layouts(name), differentiable=True)
        steps: nx.DiGraph[Layout] = nx.DiGraph()
        for node in itertools.product(*placements):
            steps.add_edges_from((node, move.target) for move in moves(node, placements))

        def grow(reached: dict[Layout, Move], left: list[Layout]) -> Iterator[tuple[Move, ...]]:
            if not left:
                yield tuple(reached.values())
            elif left[0] in (source, *reached):
                yield from grow(reached, left[1:])
            else:
                for start in (source, *reached):
                    for path in nx.all_simple_paths(steps, start, left[0]):
                        new = {after: Move(0, before, after) for before, after in itertools.pairwise(path)}
                        if not new.keys() & {source, *reached}:
                            yield from grow(reached | new, left[1:])

        yield from grow({}, list(dict.fromkeys(needs)))

    def way(
        self,
        name: str,
        source: Layout,
        needs: Sequence[Layout],
        made: Sequence[Move],
        strategies: Mapping[str, Any],
        gathering: Gathering,
    ) -> float:
        """Seconds of a weight's moves in one micro-batch, with the share of what is done once a step."""
        before = {move.target: move for move in made}
        total, end = 0.0, source
        once: set[Move] = set()
        while end not in needs:
            onward = [move for move in made if move.source == end]
            leads = onward[0].placements == (R, B) or (gathering is Gathering.ONCE and is_gather(onward[0]))
            if len(onward) > 1 or not leads:
                break
            once.add(onward[0])
            end = onward[0].target
        for move in made:
            total += self.prices.gradient_sync(name, move) * (
                self.prices.step_weight if move in once else 1.0
            )
        for item, place in self.graph.consumers()[name] if gathering is Gathering.REGATHER else ():
            if place in self.prices.operator(item, strategies[item.name]).saved.operands:
                at = canonical(
                    tuple(option.operands[place] for option in strategies[item.name]), differentiable=True
                )
                while at in before:
                    if is_gather(before[at]):
                        total += self.prices.move_parts(name, before[at])[0]
                    at = before[at].source
        return total
