"""Random pipelines of random programs: any cut, any number of micro-batches, unequal shares.

draw_trained -> draw_program -> draw_pipeline -> simulate_pipeline --.
             \\-> eager torch, micro-batch after micro-batch ----------> the largest error
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor, fx, nn

from autopar.core.graph import Graph, InputKind
from autopar.core.pipeline import Pipeline
from autopar.core.program import Program
from autopar.proof.pipeline import PipelinedGraph, simulate_pipeline
from autopar.proof.verdict import Record, difference, floor_of
from autopar.proof.verify import MOMENTUM, RATE, seed
from autopar.rewrite.rank_program import rewrite
from autopar.rewrite.split_stages import StageProgram, split
from autopar.runtime.saved.offload import offload
from autopar.sharding.atoms import Dims
from autopar.trace.micro_batches import MicroBatch
from tests.proof.models import ROUNDING, Model, aten, evaluate, leaves
from tests.proof.plans import LEAST

MOST_STAGES, MOST_MICRO_BATCHES = 4, 4
STEPS = 2
STEEP = 100.0  # a gradient with which a step at verify's rate moves weights by as much as they are

# -- drawing ----------------------------------------------------------------------------------------------


def draw_pipeline(random: Random, model: Model) -> Pipeline:
    """Cuts anywhere; a stage may be empty."""
    stages = random.randint(1, MOST_STAGES)
    starts = sorted(random.randint(0, len(model.graph.operators)) for _ in range(stages - 1))
    return Pipeline(stages, random.randint(1, MOST_MICRO_BATCHES), starts=(0, *starts))


def draw_batch(random: Random, model: Model, count: int) -> list[MicroBatch]:
    """Micro-batches with the model's numbers in another order each, and with shares of any size."""
    generator = torch.Generator().manual_seed(model.seed)
    shares = [random.uniform(0.2, 1.0) for _ in range(count)]
    weights = [1.0 if is_sum(model.graph) else share / sum(shares) for share in shares]
    return [
        MicroBatch(tuple(_shuffled(item, generator) for item in users(model)), share / sum(shares), weight)
        for share, weight in zip(shares, weights, strict=True)
    ]


def is_sum(graph: Graph) -> bool:
    """Whether the loss is the sum that an operator takes last."""
    return any(graph.loss in item.results and "sum" in str(item.target) for item in graph.operators)


def users(model: Model) -> list[Tensor]:
    """The user's tensors, in the order of the graph's inputs."""
    return [
        model.tensors[item.name].detach().requires_grad_(item.spec.requires_grad)
        for item in model.graph.inputs
        if item.kind is InputKind.USER
    ]


def _shuffled(value: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(value.numel(), generator=generator)
    return value.detach().flatten()[order].view(value.shape).requires_grad_(value.requires_grad)


# -- the proof --------------------------------------------------------------------------------------------


def prove_pipeline(
    model: Model,
    program: Program,
    dims: Dims,
    pipeline: Pipeline,
    batch: Sequence[MicroBatch],
    programs: Sequence[Program] = (),
) -> tuple[float, str]:
    """The largest relative error of losses, gradients, parameters and buffers, and where it is."""
    graph = model.graph
    paths = [item.target for item in graph.inputs if item.kind is InputKind.USER]
    theirs = accumulate(model, batch, steps=1)
    steep = any(float(item.abs().max()) > STEEP for item in theirs.gradients.values())
    steps = 1 if steep else STEPS  # rounding would grow as the weights do
    theirs = theirs if steep else accumulate(model, batch, steps=steps)
    ours = simulate_pipeline(
        holder(model),
        batch,
        paths,
        PipelinedGraph(graph, program, pipeline, programs=programs),
        steps=steps,
    )
    return max(_errors(ours, theirs))


def magnified(model: Model, batch: Sequence[MicroBatch]) -> float:
    """The largest relative change of a serial step by rounding."""
    found, wanted = (accumulate(model, batch, steps=1, noise=noise) for noise in (ROUNDING, 0.0))
    return max(_errors(found, wanted))[0]


def _errors(ours: Record, theirs: Record) -> Iterator[tuple[float, str]]:
    for kind in ("loss", "gradients", "parameters", "buffers"):
        mine, wanted = getattr(ours, kind), getattr(theirs, kind)
        floor = max(floor_of(wanted), LEAST)  # all true gradients can be 0
        for name in mine.keys() | wanted.keys():
            yield difference(mine.get(name), wanted.get(name), floor), f"{kind} {name}"


def holder(model: Model) -> nn.Module:
    """A module that has the graph's parameters and buffers."""
    found = nn.Module()
    for item in model.graph.inputs:
        value = model.tensors[item.name].detach().clone()
        if item.kind is InputKind.PARAMETER:
            found.register_parameter(item.target, nn.Parameter(value, requires_grad=item.spec.requires_grad))
        elif item.kind is InputKind.BUFFER:
            found.register_buffer(item.target, value)
    return found


def accumulate(model: Model, batch: Sequence[MicroBatch], *, steps: int, noise: float = 0.0) -> Record:
    """SGD by eager torch: gradients add up over the weighted micro-batches, then a step."""
    graph, record, state = model.graph, Record(), leaves(model)
    kinds = {kind: [item.name for item in graph.inputs if item.kind is kind] for kind in InputKind}
    learned = {name: state[name] for name in kinds[InputKind.PARAMETER] if state[name].requires_grad}
    optimizer = torch.optim.SGD(list(learned.values()), lr=RATE, momentum=MOMENTUM) if learned else None
    for step in range(steps):
        for weight in learned.values():
            weight.grad = torch.zeros_like(weight)
        total = torch.zeros((), dtype=torch.float64)
        for number, micro in enumerate(batch):
            torch.manual_seed(seed(step, number))
            inputs = state | dict(zip(kinds[InputKind.USER], micro.tensors, strict=True))
            values = evaluate(graph.operators, inputs, noise=noise)
            loss = values[graph.outputs[0]] * micro.weight
            if loss.requires_grad:
                loss.backward()
            total += loss.detach()
            state |= {buffer: values[value].detach() for buffer, value in graph.writes}
        record.loss[f"{step}:loss"] = total
        record.gradients |= {f"{step}:{name}": item.grad.clone() for name, item in learned.items()}  # type: ignore[union-attr]
        if optimizer:
            optimizer.step()
    record.parameters = {name: state[name].detach() for name in kinds[InputKind.PARAMETER]}
    record.buffers = {name: state[name].detach() for name in kinds[InputKind.BUFFER]}
    return record


# -- what was drawn ---------------------------------------------------------------------------------------

MASKS = {aten.gt.Scalar, aten.ne.Scalar}  # by which drawn models look at the user's tensors


@dataclass
class Histogram:
    """In how many examples each number of stages and micro-batches, each mesh and each trap was met."""

    examples: int = 0
    stages: Counter[int] = field(default_factory=Counter)
    micro_batches: Counter[int] = field(default_factory=Counter)
    meshes: Counter[str] = field(default_factory=Counter)
    traps: Counter[str] = field(default_factory=Counter)

    def add(self, model: Model, program: Program, dims: Dims, pipeline: Pipeline) -> None:
        self.examples += 1
        self.stages[pipeline.num_stages] += 1
        self.micro_batches[pipeline.micro_batches] += 1
        self.meshes[str(dims.mesh)] += 1
        self.traps.update(traps(model, program, dims, pipeline))

    def __str__(self) -> str:
        def line(name: str, found: Counter[int] | Counter[str]) -> str:
            return f"  {name:<14}" + "  ".join(f"{key} {count}" for key, count in sorted(found.items()))

        return "\n".join(
            [
                f"{self.examples} pipelines of random programs equal serial accumulation; met in:",
                line("stages", self.stages),
                line("micro-batches", self.micro_batches),
                line("meshes", self.meshes),
                line("traps", self.traps),
            ]
        )


TRAPS = (
    "relay",
    "tied weight on two stages",
    "batch norm before the last stage",
    "dropout after a cut",
    "mask made on two stages",
    "frozen weight",
    "integers for a later stage only",
    "sum loss",
    "mean loss",
    "empty stage",
    "recomputed part",
    "recomputed part over a cut",
    "offloaded tensor",
    "offloaded tensor for a later stage",
)


def traps(model: Model, program: Program, dims: Dims, pipeline: Pipeline) -> set[str]:
    """Which of `TRAPS` the pipeline has."""
    graph = model.graph
    cut = split(rewrite(graph, program, dims, rank=0), graph, pipeline.starts)
    inputs = {item.name: item for item in graph.inputs}
    held = Counter(name for stage in cut for name in stage.inputs)
    requires_grad = {n for n, i in inputs.items() if i.kind is InputKind.PARAMETER and i.spec.requires_grad}
    integers = {
        n for n, i in inputs.items() if i.kind is InputKind.USER and not i.spec.dtype.is_floating_point
    }
    late = integers & set(cut[-1].inputs) - {name for each in cut[:-1] for name in each.inputs}
    calls = [{node.target for node in stage.graph.nodes} for stage in cut]
    last = [item.target for item in graph.operators if graph.loss in item.results]
    found = {
        "relay": any(relayed(stage) for stage in cut),
        "tied weight on two stages": any(held[name] > 1 for name in requires_grad),
        "batch norm before the last stage": any(
            "batch_norm" in str(call) for part in calls[:-1] for call in part
        ),
        "dropout after a cut": any(torch.ops.autopar.dropout_mask.default in part for part in calls[1:]),
        "mask made on two stages": sum(bool(MASKS & part) for part in calls) > 1,
        "frozen weight": any(
            item.kind is InputKind.PARAMETER and not item.spec.requires_grad for item in graph.inputs
        ),
        "integers for a later stage only": len(cut) > 1 and bool(late),
        "sum loss": is_sum(graph),
        "mean loss": not is_sum(graph) and aten.add.Tensor not in last,
        "empty stage": len(set(pipeline.starts)) < len(pipeline.starts),
        "recomputed part": bool(program.recompute),
        "recomputed part over a cut": any(
            first < start < stop for first, stop in program.recompute for start in pipeline.starts
        ),
        "offloaded tensor": any(offload in part for part in calls),
        "offloaded tensor for a later stage": any(
            node.target is offload for stage in cut for node in sources(stage)
        ),
    }
    return {name for name in TRAPS if found[name]}


def relayed(stage: StageProgram) -> list[str]:
    """The values that a stage received and sends on, by name."""
    places = [node for node in stage.graph.nodes if node.op == "placeholder"][: len(stage.received)]
    return [node.name for node in sources(stage) if node in places]


def sources(stage: StageProgram) -> list[fx.Node]:
    """What a stage copies to send it on."""
    return [node for result in results(stage) for node in result.all_input_nodes]


def results(stage: StageProgram) -> list[fx.Node]:
    """What a stage sends on: copies."""
    (output,) = (node for node in stage.graph.nodes if node.op == "output")
    nodes: list[fx.Node] = output.all_input_nodes
    return nodes[: len(stage.sent)]
