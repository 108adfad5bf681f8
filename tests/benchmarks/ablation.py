"""Why an integer program? What is simpler, beside it, on the same costs.

    greedy      each operator in turn takes what is cheapest by itself and from where its operands lie
    cut first   stages by the seconds of one device, then the program for this cut (hierarchical.py)
    program     cut and placement together, as `autopar.plan` decides
    LP bound    what the relaxation proves that no plan can beat

Two stages of four H100s on paper, four micro-batches, 1F1B. Conversions, cuts and what is recomputed
under a cap are the best for each, so that the ways differ in what they are named for alone.

python -m tests.benchmarks ablation
python -m tests.benchmarks.ablation tail vocabulary     those whose name has the word
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Annotated, Any, TypeAlias

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from autopar.convert.path import tree
from autopar.core.graph import Graph, Operator
from autopar.core.mesh import Mesh
from autopar.core.placement import Layout
from autopar.core.schedule import ScheduleKind
from autopar.core.strategy import Strategy
from autopar.errors import InfeasibleError
from autopar.planning.asked.request import Request
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.planner import Planner
from autopar.planning.search import MeshDecision, decide
from autopar.solve.choices.space import Space
from autopar.solve.stages.step import Step
from autopar.units import show_seconds
from examples.characters import gpt
from examples.photographs import unet
from tests.benchmarks.hierarchical import Way, cuts, decide_after
from tests.benchmarks.planning import cluster
from tests.benchmarks.wide_resnet import Bottleneck

Target: TypeAlias = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor] | None]
CLUSTER = cluster(2, 4)
REQUEST = Request(
    mesh=Mesh((4,)),
    pipeline_ranks=2,
    micro_batches=4,
    schedule=ScheduleKind.ONE_F_ONE_B,
    measure=False,
    alternatives=False,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A net, made on the meta device; under `tight` of the bytes that its plan takes without a cap."""

    name: str
    make: Callable[[], Target]
    tight: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What a way came to: seconds of deciding, and of the step; infinite if it doesn't meet the cap."""

    way: str
    seconds: float
    step: float


def transformer(blocks: int, hidden: int, vocabulary: int, batch: int) -> Target:
    tokens = torch.zeros(batch, 512, dtype=torch.long)
    return gpt(blocks, hidden, 16, vocabulary, 512), (tokens, tokens), None


def skips() -> Target:
    images = torch.zeros(16, 3, 256, 256)
    return unet(64, 4), (images, images), F.mse_loss


def tail() -> Target:
    """Three wide blocks on small images, behind one on larger ones."""
    blocks = [Bottleneck(2048 if index else 1024, 512, factor=4, stride=1) for index in range(3)]
    net = nn.Sequential(
        nn.Conv2d(3, 1024, 7, stride=8, padding=3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return nn.Sequential(net, nn.Linear(2048, 1024)), _labelled(64, 112), F.cross_entropy


def _labelled(batch: int, side: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, 3, side, side), torch.zeros(batch, dtype=torch.long)


CASES = (
    Case("loose cap", partial(transformer, 4, 2048, 8192, 32)),
    Case("tight cap", partial(transformer, 4, 2048, 8192, 32), tight=0.7),
    Case("skips of a U-Net", skips),
    Case("tail of a wide residual net", tail),
    Case("vocabulary of 131,072", partial(transformer, 2, 1024, 131072, 32)),
    Case("plain", partial(transformer, 16, 1024, 256, 128)),
)


def graph_of(case: Case) -> Graph:
    with torch.device("meta"):
        model, inputs, loss_fn = case.make()
    graph: Graph = Planner(CLUSTER, REQUEST, loss_fn).trace_step(model, inputs, {}).graph
    return graph


def run(case: Case) -> list[Row]:
    """All ways, each from prices that are known already; the bound last."""
    graph, request = graph_of(case), REQUEST
    known = decide(graph, CLUSTER, request)
    if case.tight is not None:
        request = replace(request, memory=int(case.tight * known.step.peak_bytes))
    joint, seconds = timed(lambda: decide(graph, CLUSTER, request))
    rows = [Row("program", seconds, joint.step.seconds)]
    cut, seconds = timed(lambda: cut_first(joint))
    rows.append(Row("cut first", seconds, cut))
    step, seconds = timed(lambda: greedy(joint))
    rows.append(Row("greedy", seconds, step))
    bound, seconds = timed(lambda: relaxation(joint))
    return [*rows, Row("LP bound", seconds, bound)]


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and its processor seconds."""
    begun = time.process_time()
    return function(), time.process_time() - begun


def cut_first(joint: MeshDecision) -> float:
    found = decide_after(joint, cuts(joint.problem)[Way.CUT_FIRST])
    return math.inf if isinstance(found, InfeasibleError) else found.plan.step_seconds


def fresh(joint: MeshDecision) -> MeshProblem:
    """The decision's problem, nothing solved yet."""
    same = joint.problem
    return MeshProblem(same.graph, same.mesh, same.cluster, same.model, same.request, same.cap, same.hop)


def relaxation(joint: MeshDecision) -> float:
    """The bound on all placements and cuts; nothing is rounded or cut for it."""
    problem = fresh(joint)
    problem.solve(problem.ask())
    return joint.step.bound


def greedy(joint: MeshDecision) -> float:
    """The step of strategies that are chosen one by one, in the operators' order."""
    problem = fresh(joint)
    problem.spaces[None] = Greedy(problem, joint.problem.spaces[None]).space()
    try:
        step: Step = problem.plan(problem.ask(cap=problem.cap))
    except InfeasibleError:
        return math.inf
    return step.seconds


class Greedy:
    """Strategies, one for each operator."""

    def __init__(self, problem: MeshProblem, offered: Space) -> None:
        self.graph, self.prices, self.folding = problem.graph, problem.prices, problem.folding
        self.offered = offered
        self.weights = {item.name for item in self.graph.inputs if item.spec.requires_grad}
        self.lies: dict[str, Sequence[Layout]] = {name: offered.inputs[name] for name in offered.inputs}
        self.way = cache(self._way)

    def space(self) -> Space:
        """The space in which nothing but conversions and the layouts of inputs and outputs is left to
        choose."""
        chosen: dict[str, Strategy] = {}
        for item in self.graph.operators:
            name = self.folding.class_of[item.name]
            if name not in chosen:
                chosen[name] = min(self.offered.strategies[name], key=partial(self.seconds, item))
            for index, result in enumerate(item.results):
                if result:
                    self.lies[result] = [tuple(option.results[index] for option in chosen[name])]
        return replace(self.offered, strategies={name: [each] for name, each in chosen.items()})

    def seconds(self, item: Operator, strategy: Strategy) -> float:
        """The operator's own, and those of bringing each operand from where it lies."""
        found = self.prices.operator(item, strategy).seconds
        for index, name in enumerate(item.operands):
            need = tuple(option.operands[index] for option in strategy)
            found += min(self.way(name, layout, need) for layout in self.lies[name])
        return found

    def _way(self, name: str, layout: Layout, need: Layout) -> float:
        def price(move: Any) -> float:
            if name in self.weights:
                return self.prices.weight_move(name, move, leads=True)
            return self.prices.move(name, move)

        moves = tree(
            layout,
            [need],
            price,
            legal=partial(self.prices.dims.legal, name),
            differentiable=self.graph.specs[name].requires_grad,
        )
        return sum(map(price, moves))


def table(found: dict[str, list[Row]]) -> Table:
    shown = Table("", "", "CPU s", "step", "slower than the bound", title="Ablation")
    for name, rows in found.items():
        bound = rows[-1].step
        for row in rows:
            step = "over the cap" if math.isinf(row.step) else show_seconds(row.step)
            above = "" if math.isinf(row.step) else f"{row.step / bound - 1:.1%}"
            shown.add_row(name if row is rows[0] else "", row.way, f"{row.seconds:.1f}", step, above)
    return shown


def main(
    names: Annotated[list[str] | None, typer.Argument(help="cases whose name has this word")] = None,
) -> None:
    """Decide six nets in four ways, and print what each costs."""
    chosen = [case for case in CASES if not names or any(name in case.name for name in names)]
    if not chosen:
        raise typer.BadParameter(f"cases: {', '.join(case.name for case in CASES)}")
    Console(width=110).print(table({case.name: run(case) for case in chosen}))


if __name__ == "__main__":
    typer.run(main)
