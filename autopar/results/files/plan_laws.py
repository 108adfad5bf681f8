"""What holds of every plan, and may not of a file that was broken or edited.

Numbers are at least 0 and no larger than a sum of them may be, layouts have a placement for each axis of the
mesh, weights that are gathered together one gather each, those on the host are of plans without stages, none
comes ahead but of them, and stages are as many as the schedule gives its ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from autopar.core.placement import Shard
from autopar.core.schedule import check_schedule
from autopar.errors import InputError, show_value

if TYPE_CHECKING:
    from autopar.core.program import Program
    from autopar.results.plan.plan import Plan

LEAST_QUANTITY = -1e-6  # differences of seconds that are 0 in truth may lie a little below
LARGEST_QUANTITY = 1e30  # seconds, bytes or flops, whose sums and units stay finite
MOST_CHECKED_ACTIONS = 1_000_000  # of all stages: to put more of them in order takes minutes


def broken_laws(plan: Plan) -> Iterator[str]:
    """Laws that a plan breaks, in the words of its file."""
    yield from _numbers("result", plan)
    yield from _axes(plan)
    yield from _groups(plan)
    yield from _on_host(plan)
    yield from _moments(plan)
    yield from _stages(plan)


def _numbers(path: str, value: Any) -> Iterator[str]:
    """Numbers that no cost or count can be. A gap is infinite where a search found no bound in time."""
    most = math.inf if path.endswith(".gap") else LARGEST_QUANTITY
    if isinstance(value, (int, float)) and not LEAST_QUANTITY <= value <= most:
        yield f"{show_value(value)} @ {path}"
    for name, child in _children(value):
        yield from _numbers(f"{path}{name}", child)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if is_dataclass(value):
        yield from ((f".{each.name}", getattr(value, each.name)) for each in fields(value))
    elif isinstance(value, Mapping):
        yield from ((f"[{show_value(key)}]", child) for key, child in value.items())
    elif isinstance(value, tuple):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))


def _axes(plan: Plan) -> Iterator[str]:
    """Layouts, strategies and layers with more or fewer places than the mesh has axes."""
    for number, program in enumerate(plan.programs):
        yield from _lengths(f"programs[{number}]", program, len(plan.mesh.shape))
    yield from _lengths("program", plan.program, len(plan.mesh.shape))
    axes = len(plan.mesh.shape)
    places: dict[str, tuple[Any, ...]] = {
        **{f"layers[{index}].strategy": layer.strategy for index, layer in enumerate(plan.layers)},
        **{f"layers[{index}].kinds": layer.kinds for index, layer in enumerate(plan.layers)},
        **{f"offloaded[{index}].layout": item.layout for index, item in enumerate(plan.offloaded)},
    }
    yield from _unlike(places, axes)


def _lengths(where: str, program: Program, axes: int) -> Iterator[str]:
    """Layouts and strategies of a program with more or fewer places than its mesh has axes."""
    places: dict[str, tuple[Any, ...]] = {
        **{f"{where}.inputs[{show_value(name)}]": layout for name, layout in program.inputs.items()},
        **{f"{where}.outputs[{show_value(name)}]": layout for name, layout in program.outputs.items()},
        **{f"{where}.strategies[{show_value(name)}]": item for name, item in program.strategies.items()},
    }
    for name, moves in program.moves.items():
        for index, move in enumerate(moves):
            places[f"{where}.moves[{show_value(name)}][{index}]"] = move.source
            places[f"{where}.moves[{show_value(name)}][{index}].target"] = move.target
    yield from _unlike(places, axes)


def _unlike(places: Mapping[str, tuple[Any, ...]], axes: int) -> Iterator[str]:
    yield from (
        f"{len(place)} for a mesh of {axes} axes @ result.{path}"
        for path, place in places.items()
        if len(place) != axes
    )


def _groups(plan: Plan) -> Iterator[str]:
    """Weights that are gathered together, but have other moves than that gather, or are in two groups."""
    program, seen = plan.program, set[str]()
    for index, names in enumerate(program.together):
        moves = [move for name in names for move in program.moves.get(name, ())]
        alike = len({(move.axis, str(move.target[move.axis : move.axis + 1])) for move in moves}) == 1
        alone = all(len(program.moves.get(name, ())) == 1 for name in names)
        gathers = all(
            move.axis < len(move.source) and isinstance(move.source[move.axis], Shard) for move in moves
        )
        if not (alike and alone and gathers) or len({*names}) < len(names) or not seen.isdisjoint(names):
            yield f"{show_value(names)} @ result.program.together[{index}]"
        seen.update(names)


def _on_host(plan: Plan) -> Iterator[str]:
    """Weights on the host that are no inputs, or are there twice, or belong to a plan with stages; others
    that come ahead from there."""
    for index, program in enumerate((plan.program, *plan.programs)):
        names, where = program.on_host, f"programs[{index - 1}]" if index else "program"
        strange = [name for name in names if name not in program.inputs or names.count(name) > 1]
        if strange or (names and plan.pipeline.is_staged):
            yield f"{show_value((strange or names)[0])} @ result.{where}.on_host"
        for name in set(program.ahead) - set(names):
            yield f"{show_value(name)} @ result.{where}.ahead"


def _moments(plan: Plan) -> Iterator[str]:
    """Moments of operators that the plan hasn't got, or too many."""
    if len(plan.moments) * plan.pipeline.micro_batches > MOST_CHECKED_ACTIONS:
        yield f"{len(plan.moments)} moments of each micro-batch @ result.moments"
    for index, moment in enumerate(plan.moments):
        if moment.layer is not None and moment.layer >= len(plan.layers):
            yield f"layer {show_value(moment.layer)} of {len(plan.layers)} @ result.moments[{index}]"


def _stages(plan: Plan) -> Iterator[str]:
    """Numbers of stages, and what is said of each, that don't go together."""
    pipeline = plan.pipeline
    stages, count = pipeline.num_stages, pipeline.micro_batches
    if stages * count > MOST_CHECKED_ACTIONS:
        yield f"{stages} stages by {show_value(count)} micro-batches @ result.pipeline"
        return
    if pipeline.ranks < 1 or count < 1:
        yield f"{show_value(pipeline.ranks)} ranks, {show_value(count)} micro-batches @ result.pipeline"
        return
    if list(pipeline.starts) != sorted({0, *pipeline.starts}):
        yield f"starts {show_value(pipeline.starts)}, which don't ascend from 0 @ result.pipeline"
    if not pipeline.is_staged:
        return
    meshes = tuple(program.mesh for program in plan.programs)
    if meshes != pipeline.meshes or len(meshes) not in (0, pipeline.ranks):
        told = f"{len(plan.programs)} programs, {len(pipeline.meshes)} meshes"
        yield f"{told} of {show_value(pipeline.ranks)} ranks @ result.pipeline"
    if sorted(pipeline.hosts) not in ([], list(range(pipeline.ranks))):
        yield f"hosts {show_value(pipeline.hosts)} of {show_value(pipeline.ranks)} ranks @ result.pipeline"
    if stages % pipeline.ranks or not {len(plan.stages), len(plan.stage_costs)} <= {stages}:
        told = f"{len(plan.stages)} of them told, {len(plan.stage_costs)} with costs"
        yield f"{stages} stages on {show_value(pipeline.ranks)} ranks, {told} @ result.pipeline"
        return
    try:
        per_rank = stages // pipeline.ranks
        check_schedule(pipeline.schedule, ranks=pipeline.ranks, stages_per_rank=per_rank, micro_batches=count)
    except InputError as cause:
        yield f"{cause.found}, where {cause.wanted} is wanted @ result.pipeline"
