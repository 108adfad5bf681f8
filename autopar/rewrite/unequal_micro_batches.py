"""A plan for one micro-batch, taken for one that is a sample shorter.

    batch of 10, 4 micro-batches      3  3  2  2      planned for 3 samples; each stage has a program for 3
                                                      and one for 2, which send each other the same tensors

Both programs must be of one plan: only then do neighbours agree on what they exchange, and gradients of
all micro-batches are sums of one kind, which are summed over ranks once.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.core.graph import Graph, InputKind
from autopar.core.program import Program
from autopar.errors import InputError
from autopar.runtime.executable import Executable, InputPart, StagedExecutable
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import dims_of, is_legal, options_of


def check_plan(program: Program, graph: Graph, shorter: Graph) -> None:
    """Raise InputError, naming what is in the way, where `program` of `graph` is none of `shorter`."""
    dims = dims_of(shorter, program.mesh)
    found = next(_obstacles(program, graph, shorter, dims), None)
    if found is not None:
        raise _unequal(found)


def check_programs(made: StagedExecutable, shorter: StagedExecutable) -> None:
    """Raise InputError where a rank's programs exchange or sum other tensors in a shorter micro-batch."""
    for long, short in zip(made.stages, shorter.stages, strict=True):
        if _exchanged(long) != _exchanged(short):
            raise _unequal(f"stage {long.stage}, which then sends or receives other tensors")
    if any(_stored(one) != _stored(other) for one, other in zip(made.inputs, shorter.inputs, strict=True)):
        raise _unequal("weights, which would then lie in other parts")


def _obstacles(program: Program, graph: Graph, shorter: Graph, dims: Dims) -> Iterator[str]:
    if [(item.name, item.target) for item in graph.operators] != [
        (item.name, item.target) for item in shorter.operators
    ] or [item.name for item in graph.inputs] != [item.name for item in shorter.inputs]:
        yield "a model that computes with other operators then"
        return
    for item in shorter.operators:
        strategy, offered = program.strategies[item.name], options_of(item, dims)
        if not all(option in offered for option in strategy) or not is_legal(item, strategy, dims):
            factors = "+".join(option.factor for option in strategy)
            yield f"{item.module or item.name} ({item.target}), which can't be split by {factors} then"
    for name, moves in program.moves.items():
        if not all(dims.legal(name, layout) for move in moves for layout in (move.source, move.target)):
            yield f"{name}, which can't be converted then"


def _exchanged(stage: Executable) -> object:
    both = (stage.received, stage.sent)
    tensors = tuple(tuple((spec.dtype, spec.requires_grad) for spec in specs) for specs in both)
    return tensors, stage.writes, [(item.name, item.sync) for item in stage.inputs]


def _stored(item: InputPart) -> object:
    return item.name, item.part if item.kind in (InputKind.PARAMETER, InputKind.BUFFER) else None


def _unequal(found: str) -> InputError:
    return InputError(
        where="the shorter ones of unequal micro-batches",
        found=found,
        wanted="micro-batches that one plan holds for",
        remedy="choose --micro-batches that divides the batch, or fewer of them, or drop samples",
    )
