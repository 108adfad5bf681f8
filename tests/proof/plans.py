"""Random plans of a graph, not good ones: any strategy, any layout, any path between them.

Then the proof: the rewritten programs on simulated ranks against the serial graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor
from torch.fx import GraphModule

from autopar.convert.moves import canonical, effect
from autopar.convert.path import Price
from autopar.core.gathering import Gathering
from autopar.core.graph import Graph, GraphInput, InputKind, Operator
from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.offload import OffloadedTensor
from autopar.core.placement import Layout, P, Placement, R, Shard
from autopar.core.program import Program
from autopar.core.recompute import Segment
from autopar.core.strategy import GATHERED, Strategy
from autopar.proof.ranks import Meaning, distribute, run, total_gradient
from autopar.proof.simulated import simulate, simulate_typed
from autopar.rewrite.rank_program import rewrite
from autopar.rewrite.recompute import recomputing
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms, is_legal, options_of
from autopar.solve.choices.kinds import Kinds
from tests.forced_programs import connect, whole
from tests.proof.models import ROUNDING, Model, serial

EVEN = [Mesh(shape) for shape in ((2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2), (1, 2), (2, 1), (1,))]
MESHES = [*EVEN, *map(Mesh.parse, ("1:2", "1:3:5", "3:1x2", "2x1:2"))]
RATES = (0.01, 0.1, 1.0, 3.0)  # of moves, drawn for each kind and axis
GATHERINGS = (*Gathering, *[Gathering.REGATHER] * 3)  # drawn so often, as few weights can be regathered
COSTLY = (0.01, 1.0, 6.0, 6.0)  # of P -> B, so that P -> R -> B is met as well
TRIES = 8  # illegal draws of a strategy, after which the operator is gathered
FLOOR = 1e-3  # of the largest magnitude of the kind: true gradients can be 0
LEAST = 1e-6  # and of all that is compared: inputs and weights are of order 1
TOLERANCE = 1e-7  # of errors, nearly always
ROUNDINGS = 100  # times as much as one of each tensor
MOST = 0.1  # that rounding may excuse

ROWS = [
    "p_to_r",
    "r_to_b",
    "p_to_b",
    "p_to_r_to_b",
    "s_to_r",
    "s_to_b",
    "p_to_s",
    "r_to_s",
    "b_to_s",
    "s_to_p",
    "r_to_p",
    "b_to_r",
    "b_to_p",
    "s_to_s",
    *(WRITTEN := ("exchange", "convolution", "s_to_b_regather", "s_to_r_regather")),  # in no move's name
]


# -- drawing ----------------------------------------------------------------------------------------------


def draw_program(random: Random, graph: Graph, dims: Dims, *, whole_outputs: bool = False) -> Program:
    """Strategies, stored layouts and paths, all at random."""
    strategies = {item.name: draw_strategy(random, item, dims) for item in graph.operators}

    def store(item: GraphInput, needs: Sequence[Layout]) -> Layout:
        if item.mutated:
            return canonical(needs[0], differentiable=False)
        return draw_layout(random, item.name, needs, dims)

    def leave(name: str) -> Layout:
        return whole(dims) if whole_outputs else draw_output(random, name, graph, dims)

    program = connect(graph, dims, strategies, store=store, leave=leave, price=draw_price(random))
    gatherings = {name: random.choice(GATHERINGS) for name in weights(graph)}
    return replace(program, gatherings=gatherings, recompute=draw_parts(random, len(graph.operators)))


def draw_price(random: Random) -> Price:
    """A rate for each kind of move and axis, drawn when it is first met."""
    rates: dict[tuple[str, tuple[int, ...]], float] = {}

    def price(move: Move) -> float:
        name = effect(move).name
        return rates.setdefault((name, move.axes), random.choice(COSTLY if name == "p_to_b" else RATES))

    return price


def draw_parts(random: Random, operators: int) -> tuple[Segment, ...]:
    """What is recomputed: in every second program nothing, else some runs of operators."""
    ends = sorted(random.randint(0, operators) for _ in range(random.choice((0, 0, 2, 4))))
    pairs = zip(ends[::2], ends[1::2], strict=True)
    return tuple((first, stop) for first, stop in pairs if first < stop)


def draw_offloaded(random: Random, graph: Graph, program: Program) -> tuple[OffloadedTensor, ...]:
    """What is offloaded: in every second program nothing, else about half of what operators make, and of its
    conversions, in any order. No part that is recomputed has any of it."""
    recomputed = {place for first, stop in program.recompute for place in range(first, stop)}
    barred = {name for place in recomputed for name in _touched(graph.operators[place])}
    found = [
        (name, tuple(option.results[index] for option in program.strategies[item.name]))
        for item in graph.operators
        for index, name in enumerate(item.results)
        if name and name not in barred
    ]
    found += [(name, move.target) for name, _ in found for move in program.moves.get(name, ())]
    chosen = [each for each in dict.fromkeys(found) if random.random() < 0.5]
    random.shuffle(chosen)
    return tuple(chosen) if random.random() < 0.5 else ()


def _touched(operation: Operator) -> list[str]:
    return [*operation.operands, *(name for name in operation.results if name)]


def draw_strategy(random: Random, operation: Operator, dims: Dims) -> Strategy:
    """A legal strategy; sharded options are drawn more often than there are of them."""
    options = options_of(operation, dims)
    sharded = [option for option in options if option.shards]
    others = [option for option in options if not option.shards]
    for _ in range(TRIES):
        strategy = tuple(
            random.choice(sharded if sharded and random.random() < 0.65 else others) for _ in dims.mesh.shape
        )
        if is_legal(operation, strategy, dims):
            return strategy
    (gathered,) = (option for option in options if option.factor == GATHERED)
    return (gathered,) * len(dims.mesh.shape)


def draw_layout(random: Random, name: str, needs: Sequence[Layout], dims: Dims) -> Layout:
    """How an input is kept: whole, or split on any atom, as somebody takes it or not."""
    shards = [Shard(dim, atom) for dim, atoms in enumerate(dims.atoms.of[name]) for atom in range(len(atoms))]
    placements: list[Placement] = [R, R, *shards]
    wanted = [tuple(item if isinstance(item, Shard) else R for item in layout) for layout in needs]
    for _ in range(TRIES):
        layout = tuple(random.choice(placements) for _ in dims.mesh.shape)
        if wanted and random.random() < 0.5:
            layout = random.choice(wanted)
        if dims.legal(name, layout):
            return layout
    return whole(dims)


def draw_output(random: Random, name: str, graph: Graph, dims: Dims) -> Layout:
    """The loss leaves as R or P, whatever else leaves as R or S."""
    if name != graph.loss:
        return draw_layout(random, name, [], dims)
    return tuple(random.choice((R, R, P)) for _ in dims.mesh.shape)


# -- the proof --------------------------------------------------------------------------------------------


def prove(model: Model, program: Program, dims: Dims) -> tuple[float, str]:
    """The largest relative error of loss, outputs, gradients and buffers, and where it is."""
    graph, mesh = model.graph, dims.mesh
    written = [rewrite(graph, program, dims, rank=rank) for rank in range(mesh.num_devices)]
    programs = [recomputing(each.graph, each, graph, program, name="Rank") for each in written]
    wanted = serial(model)
    cotangents = _cotangents(graph, wanted)
    _backward(wanted, cotangents)
    worst: tuple[float, str] = (0.0, "-")
    for meaning in (simulate, simulate_typed):
        found = _prove(
            model, program, dims, programs, [each.constants for each in written], wanted, cotangents, meaning
        )
        worst = max(worst, found)
    return worst


def limit_of(error: float, magnified: Callable[[], float]) -> float:
    """Below what an error is rounding's: more than usual only where a rounding of each tensor changes serial
    results by `magnified`, as where what hardly varies is normalised. Faults are as large as values."""
    return TOLERANCE if error < TOLERANCE else min(MOST, max(TOLERANCE, ROUNDINGS * magnified()))


def magnified(model: Model, dims: Dims) -> float:
    """The largest relative change of the serial outputs and gradients by rounding."""
    wanted, found = serial(model), serial(model, noise=ROUNDING)
    cotangents = _cotangents(model.graph, wanted)
    errors = Errors(dims)
    for each in (wanted, found):
        _backward(each, cotangents)
    for name in model.graph.outputs:
        errors.add("output", name, found[name].detach(), wanted[name].detach())
    for item in model.graph.inputs:
        if (theirs := wanted[item.name].grad) is not None:
            mine = found[item.name].grad
            errors.add("gradient", item.name, torch.zeros_like(theirs) if mine is None else mine, theirs)
    return errors.worst("serial")[0]


def _cotangents(graph: Graph, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.full_like(values[name], 1.0) if name == graph.loss else values[name].detach().cos()
        for name in graph.outputs
        if values[name].requires_grad
    }


def _backward(values: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]) -> None:
    if cotangents:
        torch.autograd.backward([values[name] for name in cotangents], list(cotangents.values()))


def _prove(
    model: Model,
    program: Program,
    dims: Dims,
    programs: Sequence[GraphModule],
    constants: Sequence[Mapping[str, Tensor]],
    wanted: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
    meaning: Meaning,
) -> tuple[float, str]:
    graph = model.graph
    full = {
        item.name: model.tensors[item.name].requires_grad_(item.spec.requires_grad) for item in graph.inputs
    }
    locals_ = distribute(full, program.inputs, dims)
    torch.manual_seed(model.seed)
    held = [local | dict(own) for local, own in zip(locals_, constants, strict=True)]
    outputs = run(programs, held, meaning=meaning)
    errors = Errors(dims)
    count = len(graph.outputs)
    for place, name in enumerate(graph.outputs):
        errors.values(
            "output", name, program.outputs[name], [local[place] for local in outputs], wanted[name]
        )
    for place, (buffer, value) in enumerate(graph.writes, start=count):
        errors.values(
            "buffer", buffer, program.inputs[buffer], [local[place] for local in outputs], wanted[value]
        )
    for item in graph.inputs:
        if item.mutated:
            shares = [local[item.name] for local in locals_]
            errors.values("buffer", item.name, program.inputs[item.name], shares, wanted[item.name])
    roots, seeds = [], []
    for place, name in enumerate(graph.outputs):
        if name in cotangents:
            layout = program.outputs[name]
            copies = replicas(layout, dims.mesh) if meaning is simulate else 1
            for rank, local in enumerate(outputs):
                part = dims.part(name, layout, dims.mesh.coordinate(rank))
                roots.append(local[place])
                seeds.append(part.take(cotangents[name]) / copies)
    connected = [(root, seed) for root, seed in zip(roots, seeds, strict=True) if root.requires_grad]
    if connected:
        torch.autograd.backward([root for root, _ in connected], [seed for _, seed in connected])
    for item in graph.inputs:
        if item.spec.requires_grad:
            theirs = wanted[item.name].grad
            shares = [local[item.name] for local in locals_]
            layout = program.inputs[item.name]
            errors.gradient(item.name, layout, shares, theirs, typed=meaning is simulate_typed)
    return errors.worst(meaning.__name__)


def replicas(layout: Layout, mesh: Mesh) -> int:
    """How many ranks hold one and the same part."""
    return torch.Size(size for size, item in zip(mesh.shape, layout, strict=True) if item == R).numel()


@dataclass
class Errors:
    """Absolute gaps of every tensor, judged by the magnitude of the tensor and of its kind."""

    dims: Dims
    gaps: list[tuple[str, str, float, float]] = field(default_factory=list)

    def values(self, kind: str, name: str, layout: Layout, locals_: Sequence[Tensor], wanted: Tensor) -> None:
        """Every rank's part, summed over the axes on which it is partial, is the serial one's."""
        mesh, tensor = self.dims.mesh, name if name in self.dims.atoms.of else ""
        partial = [axis for axis, item in enumerate(layout) if item == P]
        for rank in range(mesh.num_devices):
            mine = torch.stack([locals_[other].detach() for other in mesh.group(partial, rank)]).sum(0)
            theirs = self.dims.part(tensor, layout, mesh.coordinate(rank)).take(wanted.detach())
            self.add(kind, name, mine, theirs)

    def gradient(
        self, name: str, layout: Layout, locals_: Sequence[Tensor], wanted: Tensor | None, *, typed: bool
    ) -> None:
        """Typed, every rank holds its part's gradient; else the sum over ranks is the gradient."""
        whole = torch.zeros(self.dims.graph.specs[name].shape, dtype=locals_[0].dtype)
        theirs = whole if wanted is None else wanted
        if not typed:
            self.add("gradient", name, total_gradient(name, locals_, layout, self.dims), theirs)
            return
        for rank, local in enumerate(locals_):
            mine = torch.zeros_like(local) if local.grad is None else local.grad
            part = self.dims.part(name, layout, self.dims.mesh.coordinate(rank))
            self.add("gradient", name, mine, part.take(theirs))

    def add(self, kind: str, name: str, mine: Tensor, theirs: Tensor) -> None:
        if mine.shape != theirs.shape:
            self.gaps.append((kind, name, float("inf"), 0.0))
        elif mine.numel():
            a, b = mine.to(torch.float64), theirs.to(torch.float64)
            gap = float((a - b).abs().max())
            self.gaps.append((kind, name, float("inf") if gap != gap else gap, float(b.abs().max())))

    def worst(self, meaning: str) -> tuple[float, str]:
        largest: Counter[str] = Counter()
        for kind, _, _, size in self.gaps:
            largest[kind] = max(largest[kind], size)  # type: ignore[assignment]
        return max(
            (
                (gap / max(size, FLOOR * largest[kind], LEAST), f"{kind} {name} ({meaning})")
                for kind, name, gap, size in self.gaps
            ),
            default=(0.0, "-"),
        )


# -- what was drawn ---------------------------------------------------------------------------------------


@dataclass
class Histogram:
    """In how many examples each mesh, kind of parallelism and row of the move table was met."""

    examples: int = 0
    meshes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    recomputed: Counter[str] = field(default_factory=Counter)  # programs with such an operator
    offloaded: Counter[str] = field(default_factory=Counter)  # programs that move what such an operator makes

    def add(self, model: Model, program: Program, dims: Dims) -> None:
        self.examples += 1
        self.meshes[str(dims.mesh)] += 1
        self.operators.update({item.target._schema.name[6:] for item in model.graph.operators})
        kinds = Kinds(model.graph, dims)
        used = {
            kinds.of(item, option)
            for item in model.graph.operators
            for option, size in zip(program.strategies[item.name], dims.mesh.shape, strict=True)
            if size > 1
        }
        self.kinds.update(kind.value for kind in used if kind)
        self.kinds.update({"replicated"} if used == {None} else ())
        self.rows.update(rows(model.graph, program, dims))
        self.recomputed.update(
            {
                item.target._schema.name[6:]
                for first, stop in program.recompute
                for item in model.graph.operators[first:stop]
            }
        )

        moved = {name for name, _ in program.offload}
        self.offloaded.update(
            {
                item.target._schema.name[6:]
                for item in model.graph.operators
                if moved.intersection(item.results)
            }
        )

    def __str__(self) -> str:
        def line(name: str, found: Counter[str]) -> str:
            return f"  {name:<12}" + "  ".join(f"{key} {count}" for key, count in found.most_common())

        return "\n".join(
            [
                f"{self.examples} programs of random strategies equal their serial models; met in:",
                line("meshes", self.meshes),
                line("kinds", self.kinds),
                line("conversions", self.rows),
                line("operators", self.operators),
                line("recomputed", self.recomputed),
                line("offloaded", self.offloaded),
            ]
        )


def rows(graph: Graph, program: Program, dims: Dims) -> set[str]:
    """Rows of the move table that the program takes, on axes where they do something."""
    found = set()
    for moves in program.moves.values():
        real = [move for move in moves if any(dims.mesh.shape[axis] > 1 for axis in move.axes)]
        found |= {effect(move).name for move in real}
        into = {(move.axis, move.target) for move in real if effect(move).name == "p_to_r"}
        if any((move.axis, move.source) in into for move in real if effect(move).name == "r_to_b"):
            found.add("p_to_r_to_b")
    written = rewrite(graph, program, dims, rank=0).graph
    called = {str(node.target) for node in written.nodes}
    return found | {name for name in WRITTEN if f"autopar.{name}.default" in called}


def dims_of(model: Model, mesh: Mesh) -> Dims:
    return Dims(model.graph, find_atoms(model.graph), mesh)


def weights(graph: Graph) -> list[str]:
    return [item.name for item in graph.inputs if item.kind is InputKind.PARAMETER]
