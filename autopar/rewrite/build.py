"""Traced graph and plan -> one rank's executable: rewrite, defer the gradient sums, cut into stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from autopar.core.gathering import Gathering
from autopar.core.graph import Graph, InputKind, TensorSpec
from autopar.core.part import whole as whole_part
from autopar.core.pipeline import stages_of_uses
from autopar.core.placement import replicated
from autopar.core.program import Program
from autopar.results.plan.plan import Plan
from autopar.rewrite.defer_sync import DeferredSync, defer
from autopar.rewrite.hoist import hoist
from autopar.rewrite.late_gradients import make_late
from autopar.rewrite.overlap import overlap
from autopar.rewrite.rank_program import RankProgram, rewrite
from autopar.rewrite.recompute import recomputing
from autopar.rewrite.samples import find_samples
from autopar.rewrite.split_stages import StageProgram, split
from autopar.rewrite.stage_borders import unlike_stages
from autopar.runtime.collectives.placement_moves import DTYPES
from autopar.runtime.executable import Executable, InputPart, OutputPart, StagedExecutable
from autopar.runtime.parameters.parameters import sharding_key
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import dims_of
from autopar.trace.export import Traced


def build(
    traced: Traced,
    plan: Plan,
    *,
    rank: int,
    exact_random: bool,
    device: torch.device | None = None,
    room: float = 0.0,
) -> Executable:
    """One rank's executable under `plan`, which has no stages; needs no process group.

    Exchanges that take at most `room` bytes start early: gathers of weights, sums, those of gradients.
    """
    graph, program = traced.graph, plan.program
    dims = dims_of(graph, plan.mesh)
    mine = rewrite(graph, program, dims, rank=rank, device=device, exact_random=exact_random)
    parameters = [item.name for item in graph.inputs if item.kind is InputKind.PARAMETER]
    body, deferred = defer(mine.graph, parameters, _gathered_once(program))
    unread = _leave_out_unread(body, graph)
    if room > 0:
        body = _early(body, graph, program, dims, mine, room=room)
    parts = (*_parts(traced, plan, dims, rank, deferred), *_made_for(mine, plan))
    outputs = _outputs(graph, plan, dims, rank, graph.outputs)
    parting = {item.key for item in outputs if item.key is not None}
    return Executable(
        mesh=plan.mesh,
        module=recomputing(body, mine, traced.graph, program, name="ParallelProgram"),
        inputs=tuple(item for item in parts if item.name not in unread),
        outputs=outputs,
        writes=tuple(buffer for buffer, _ in graph.writes),
        rebuild=traced.results.rebuild,
        groups=tuple(sorted(_group_keys(body) | _deferred_keys(deferred) | parting)),
        constants=_constants(graph, mine),
        plan=plan,
        layers=mine.layers,
        samples=find_samples(graph, program.inputs, dims),
        cutting=traced.cutting,
        structure=traced.structure,
    )


def build_stages(
    traced: Traced, plan: Plan, *, rank: int, exact_random: bool, device: torch.device | None = None
) -> StagedExecutable:
    """The executables of the stages of one rank of the world, whose graph has the loss as its output."""
    graph, pipeline = traced.graph, plan.pipeline
    mine, place = pipeline.placed(rank, plan.mesh.num_devices)
    if plan.programs:
        made = unlike_stages(graph, plan, mine, place, device=device, exact_random=exact_random)
        plan = replace(plan, program=plan.program_of(mine))
        whole, cut, borders = made.whole, made.stages, made.borders
    else:
        dims = dims_of(graph, plan.mesh)
        whole = rewrite(graph, plan.program, dims, rank=place, device=device, exact_random=exact_random)
        cut, borders = split(whole, graph, pipeline.starts), None
    dims = dims_of(graph, plan.mesh)
    stages = tuple(
        replace(_stage(traced, plan, dims, place, whole, cut[index], stage=index), borders=borders)
        for index in pipeline.stages_of(mine)
    )
    users: dict[str, tuple[int, ...]] = {
        item.target: found
        for item in graph.inputs
        if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        if (found := tuple(index for index, each in enumerate(cut) if item.name in each.inputs))
    }
    uses = stages_of_uses(graph, pipeline.starts)
    return StagedExecutable(
        mesh=plan.mesh,
        pipeline=pipeline,
        stages=stages,
        inputs=_parts(traced, plan, dims, place, {}),
        holders={target: tuple(sorted(set(map(pipeline.rank_of, each)))) for target, each in users.items()},
        stages_of_uses={
            target: uses[target] if set(uses[target]) == set(found) else found[:1]
            for target, found in users.items()
        },
        groups=tuple(sorted({key for each in stages for key in each.groups})),
        outputs=tuple(graph.specs[name] for name in graph.outputs),
        cutting=traced.cutting,
        plan=plan,
        structure=traced.structure,
    )


def _early(
    body: fx.Graph, graph: Graph, program: Program, dims: Dims, mine: RankProgram, *, room: float
) -> fx.Graph:
    """A copy of a rank's program whose exchanges start early, each kind of them within `room` bytes."""
    weights = {item.name: item.spec for item in graph.inputs if item.kind is InputKind.PARAMETER}
    sizes = {node.name: value.nbytes for node, value in mine.emitter.meta.items()}
    body = overlap(body, weights, room=room, steps=mine.steps, segments=program.recompute)
    body = hoist(body, lambda node: sizes[node.name], room=room, steps=mine.steps, segments=program.recompute)

    def result_bytes(step: int) -> int:
        """Bytes of an operator's result on the rank that has most."""
        operator = graph.operators[step]
        name = next(each for each in operator.results if each is not None)
        layout = tuple(option.results[0] for option in program.strategies[operator.name])
        most = dims.local_shape(name, layout, dims.largest(name, layout))
        return math.prod(most) * graph.specs[name].dtype.itemsize

    if not any(graph.specs[name].requires_grad for name in graph.outputs):
        return body
    return make_late(body, result_bytes, room=room, steps=mine.steps, segments=program.recompute)


def _stage(
    traced: Traced,
    plan: Plan,
    dims: Dims,
    place: int,
    whole: RankProgram,
    program: StageProgram,
    *,
    stage: int,
) -> Executable:
    graph = traced.graph
    parameters = [item.name for item in graph.inputs if item.kind is InputKind.PARAMETER]
    body, deferred = defer(program.graph, parameters, _gathered_once(plan.program))
    taken = set(program.inputs) - _leave_out_unread(body, graph)
    parts = (*_parts(traced, plan, dims, place, deferred), *_made_for(whole, plan))
    inputs = [item for item in parts if item.name in taken]
    return Executable(
        mesh=plan.mesh,
        module=recomputing(body, whole, graph, plan.program, name=f"Stage{stage}"),
        inputs=tuple(inputs),
        outputs=_outputs(graph, plan, dims, place, program.outputs),
        writes=program.writes,
        rebuild=traced.results.rebuild,
        groups=tuple(sorted(_group_keys(body) | _deferred_keys(deferred))),
        constants=_constants(graph, whole),
        plan=plan,
        stage=stage,
        received=program.received,
        sent=program.sent,
        layers=whole.layers,
    )


def _parts(
    traced: Traced, plan: Plan, dims: Dims, rank: int, deferred: Mapping[str, DeferredSync]
) -> tuple[InputPart, ...]:
    """How a rank of the mesh takes each input of the graph."""
    users = list(traced.arguments.paths)
    layouts = plan.program.inputs
    return tuple(
        InputPart(
            name=item.name,
            kind=item.kind,
            target=item.target,
            spec=item.spec,
            layout=layouts[item.name],
            part=dims.part(item.name, layouts[item.name], plan.mesh.coordinate(rank)),
            aliases=item.aliases,
            mutated=item.mutated,
            sync=deferred[item.name].key if item.name in deferred else None,
            gathers=deferred[item.name].gathers if item.name in deferred else (),
            reduce=_reduced(deferred.get(item.name)),
            on_host=item.name in plan.program.on_host,
            position=users.index(item.target) if item.kind is InputKind.USER else -1,
        )
        for item in traced.graph.inputs
    )


def _reduced(deferred: DeferredSync | None) -> torch.dtype | None:
    return None if deferred is None or deferred.reduce is None else DTYPES[deferred.reduce]


def _made_for(program: RankProgram, plan: Plan) -> tuple[InputPart, ...]:
    """How a rank takes the constants that were made for it: whole."""
    return tuple(
        InputPart(
            name=name,
            kind=InputKind.CONSTANT,
            target=name,
            spec=TensorSpec(tuple(value.shape), value.dtype),
            layout=replicated(len(plan.mesh.shape)),
            part=whole_part(value.shape),
        )
        for name, value in program.emitter.constants.items()
    )


def _leave_out_unread(body: fx.Graph, graph: Graph) -> set[str]:
    """The constants that a rank's program doesn't read, such as a graph of which it has its block; it takes
    them no more."""
    constants = {item.name for item in graph.inputs if item.kind is InputKind.CONSTANT}
    found = [node for node in body.nodes if node.op == "placeholder" and not node.users]
    found = [node for node in found if str(node.target) in constants]
    for node in found:
        body.erase_node(node)
    return {str(node.target) for node in found}


def _constants(graph: Graph, program: RankProgram) -> dict[str, Tensor]:
    """Collect all constants of a rank's program that it reads."""
    used = {str(node.target) for node in program.graph.nodes if node.op == "placeholder" and node.users}
    found = {item.target: item.value for item in graph.inputs if item.name in used}
    read = {target: value for target, value in found.items() if value is not None}
    return read | program.emitter.constants


def _outputs(graph: Graph, plan: Plan, dims: Dims, rank: int, names: Sequence[str]) -> tuple[OutputPart, ...]:
    """How a rank of the mesh gives each of some outputs."""
    layouts, coordinate = plan.program.outputs, plan.mesh.coordinate(rank)
    return tuple(
        OutputPart(
            name=name,
            spec=graph.specs[name],
            part=dims.part(name, layouts[name], coordinate),
            key=sharding_key(plan.mesh, layouts[name]),
        )
        for name in names
    )


def _gathered_once(program: Program) -> set[str]:
    return {name for name in program.gatherings if program.gathering(name) is Gathering.ONCE}


def _deferred_keys(deferred: Mapping[str, DeferredSync]) -> set[str]:
    """Every group key of what is done once a step."""
    keys = {str(gather.arguments[0]) for item in deferred.values() for gather in item.gathers}
    return keys | {item.key for item in deferred.values() if item.key is not None}


def _group_keys(graph: fx.Graph) -> set[str]:
    """Every group key that the program names, but that of no axis: a rank by itself."""
    arguments = (item for node in graph.nodes if node.op == "call_function" for item in node.args)
    return {item for item in arguments if isinstance(item, str) and "@" in item[1:]}
