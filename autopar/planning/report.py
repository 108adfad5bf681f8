"""The plan as it is printed and carried: a row for each operator, totals, stages, notes."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.cluster import ClusterSpec
from autopar.convert.moves import effect, sums_gradients
from autopar.core.fingerprint import fingerprint_of
from autopar.core.force import Force, Parallelism
from autopar.core.graph import Graph, InputKind
from autopar.core.pipeline import Pipeline, kept_starts, stages_per_rank
from autopar.core.precision import Precision
from autopar.core.program import Program
from autopar.core.strategy import Option
from autopar.cost.program.gathering import regathers
from autopar.cost.program.moments import moments
from autopar.cost.program.offload import offloaded, wait_seconds
from autopar.cost.program.values import Values
from autopar.planning.apart import error_of, interpolated_share, measured_share, scatter_of
from autopar.planning.asked.request import Request
from autopar.planning.edge_cuts import edge_notes
from autopar.planning.group_orders import hosts_of, rank_notes
from autopar.planning.links import described, link_notes
from autopar.planning.shares import pace_notes
from autopar.planning.step_parts import step_parts
from autopar.planning.training_notes import host_notes, loss_notes, overlap_notes, training_notes
from autopar.results.plan.plan import Alternative, Layer, Offloaded, Plan, Stage
from autopar.sharding.atoms import Dims
from autopar.sharding.needed_rows import AT_RUN_TIME
from autopar.solve.choices.kinds import Kinds, kind_by_axis
from autopar.solve.choices.shard_state import gathering_notes, when, whole_notes
from autopar.solve.stages.joint_bound import MOST_OPERATORS
from autopar.solve.stages.step import Step
from autopar.solve.stages.user_checkpoints import notes as checkpoint_notes
from autopar.trace.backwards.custom_operator import title_of

SUM_ROUNDING = 1e-12  # of sums in another order


def report(
    step: Step,
    cluster: ClusterSpec,
    alternatives: Sequence[Alternative],
    cap: int | None,
    request: Request,
) -> Plan:
    """The plan that a step is, beside its alternatives; `cap` is bytes per device."""
    solution = step.solution
    priced, program = solution.priced, solution.program
    graph, prices = priced.graph, priced.prices
    kinds = Kinds(graph, prices.dims)
    weights = {item.name for item in graph.inputs if item.kind is InputKind.PARAMETER}
    paid: set[tuple[str, object]] = set()
    regathering = [0.0] * len(graph.operators)
    for each in regathers(priced):
        regathering[each.place] += each.seconds
    layers = []
    for place, item in enumerate(graph.operators):
        strategy: tuple[Option, ...] = program.strategies[item.name]
        price = prices.on_rank(_rank_with(place, step)).operator(item, strategy)
        moves = regathering[place]
        for name in dict.fromkeys(item.operands):
            for move in program.moves.get(name, ()):
                if (name, move) not in paid:
                    paid.add((name, move))
                    grouped = priced.grouped_seconds.get((name, move.target))
                    moves += (
                        sum(grouped)
                        if grouped
                        else (prices.gradient_sync if name in weights else prices.move)(name, move)
                    )
        layers.append(
            Layer(
                name=item.name,
                op=str(item.target),
                module=item.module,
                strategy=tuple(option.factor if option.shards else None for option in strategy),
                kinds=tuple(kind.value if (kind := kinds.of(item, option)) else None for option in strategy),
                compute=price.compute,
                communication=price.communication + moves,
                nbytes=solution.peak.by_operator[item.name],
                flops=price.flops
                * math.prod(
                    size for size, option in zip(program.mesh.shape, strategy, strict=True) if option.shards
                ),
            )
        )
    compute = sum(layer.compute for layer in layers)
    measured, between = measured_share(priced), interpolated_share(priced)
    scatter = scatter_of(priced)
    pipeline = pipeline_of(graph, step, request)
    if (ranks := priced.prices.ranks) and not request.relay:
        pipeline = replace(pipeline, hosts=hosts_of(ranks, cluster.blocks(len(ranks))))
    return Plan(
        program=program,
        cluster=described(cluster, prices.model.collectives),
        layers=tuple(layers),
        conversions=tuple(
            f"{name}: {move} ({effect(move).name}{when(program, name, move)})"
            for name, moves in program.moves.items()
            for move in moves
        ),
        status="gap_limit"
        if solution.status == "optimal" and (step.cut or step.gap > max(request.gap, 1e-6))
        else solution.status,
        gap=step.gap,
        step_seconds=step.seconds,
        compute_seconds=request.micro_batches * compute / request.pipeline_ranks,
        communication_seconds=_communication(step, compute, request),
        peak_bytes=step.peak_bytes,
        state_bytes=step.state_bytes,
        memory_cap=cap if cap is None or step.cut is None else cap + step.cut.rooms[step.cut.fullest],
        measured_share=measured,
        interpolated_share=between,
        scatter=scatter,
        error=error_of(measured, between, scatter),
        sharded_flops_share=sharded_share(graph, kinds, layers, request.force),
        gathered_ops=tuple(
            f"{item.name} ({title_of(item.target, item.args)})"
            for item in graph.operators
            if prices.is_gathered(item)
        ),
        alternatives=tuple(alternatives),
        parameter_bytes=_parameter_bytes(graph, prices.dims, step, priced.values, pipeline),
        notes=(
            *graph.notes,
            *edge_notes(graph, prices.dims.atoms, prices.dims.mesh.num_devices),
            *gathering_notes(graph, program),
            *whole_notes(graph, prices.dims, program, request.shard_state),
            *_reduced(graph, program),
            *_expert_notes(layers, prices.dims),
            *_notes(graph, step, request),
            *link_notes(cluster, prices.model.collectives),
            *pace_notes(priced),
            *rank_notes(step, request.micro_batches),
        ),
        pipeline=pipeline,
        stages=_stages(graph, step),
        stage_costs=step.cut.stages if step.cut else (),
        bubble=_bubble(step, request),
        offloaded=tuple(Offloaded(*item.tensor, item.nbytes) for item in offloaded(priced)),
        offload_seconds=0.0 if step.cut else request.micro_batches * sum(wait_seconds(priced)),
        host_bytes=sum(prices.owned_bytes(name, program.inputs[name]) for name in program.on_host),
        graph=fingerprint_of(graph),
        devices=cluster.devices,
        parts=step_parts(step, pipeline),
        moments=() if pipeline.is_staged else moments(priced),
    )


def pipeline_of(graph: Graph, step: Step, request: Request) -> Pipeline:
    """The stages and micro-batches of a step."""
    if request.relay:
        assert request.schedule is not None and request.stages_of_uses is not None
        stages = request.pipeline_ranks * stages_per_rank(request.schedule)
        starts = kept_starts(graph, request.stages_of_uses, stages)
        return Pipeline(request.pipeline_ranks, 1, request.schedule, starts, hosts=request.hosts)
    if step.cut is None or step.schedule is None:
        return Pipeline(micro_batches=request.micro_batches)
    return Pipeline(
        request.pipeline_ranks, request.micro_batches, step.schedule.kind, step.cut.starts, step.filling
    )


def _communication(step: Step, compute: float, request: Request) -> float:
    """Seconds that a rank spends on communication in a step; with stages that of the average rank."""
    hops = sum(stage.send_output + stage.send_gradient for stage in step.cut.stages) if step.cut else 0.0
    sync = sum(stage.sync for stage in step.cut.stages) if step.cut else step.cost.exposed
    beside = step.cost.micro_batch - compute
    repeated = (beside if beside > SUM_ROUNDING * compute else 0.0) + hops
    return (request.micro_batches * repeated + sync) / request.pipeline_ranks


def _bubble(step: Step, request: Request) -> float:
    """The share of the step in which the average rank does nothing for its stages."""
    if step.cut is None:
        return 0.0
    stages = step.cut.stages
    work = sum(stage.forward + stage.input_gradient + stage.weight_gradient for stage in stages)
    busy = request.micro_batches * work + sum(stage.update for stage in stages)
    return max(0.0, 1.0 - busy / (request.pipeline_ranks * step.seconds))


def _stages(graph: Graph, step: Step) -> tuple[Stage, ...]:
    if step.cut is None or step.schedule is None:
        return ()
    operators, starts = graph.operators, step.cut.starts
    found = []
    for number, cost in enumerate(step.cut.stages):
        stop = starts[number + 1] if number + 1 < len(starts) else len(operators)
        own = operators[starts[number] : stop]
        names = [item.module or item.name for item in own]
        found.append(
            Stage(
                rank=step.schedule.rank_of(number),
                first=names[0] if names else "",
                last=names[-1] if names else "",
                operators=len(own),
                forward=cost.forward,
                backward=cost.input_gradient + cost.weight_gradient,
                send_output=cost.send_output,
                send_gradient=cost.send_gradient,
                sync=cost.sync,
                nbytes=step.cut.stage_bytes[number],
            )
        )
    return tuple(found)


def _reduced(graph: Graph, program: Program) -> tuple[str, ...]:
    """Note on the dtype in which gradients are summed, if not float32."""
    if program.reduce is Precision.FP32:
        return ()
    word = program.reduce.value
    if not graph.cast_weights:
        return (f"no weight is cast: gradients are summed in their own dtype, not in {word}",)
    count = sum(
        graph.specs[name].requires_grad and any(map(sums_gradients, program.moves.get(name, ())))
        for name in graph.cast_weights | graph.cast_alone
    )
    return (f"gradients of {count} cast weights are summed over ranks in {word}",)


def _expert_notes(layers: Sequence[Layer], dims: Dims) -> tuple[str, ...]:
    """What is expected of routers, where rows choose experts that lie on several ranks."""
    splits = [
        math.prod(
            size for size, factor in zip(dims.mesh.shape, layer.strategy, strict=True) if _routes(factor)
        )
        for layer in layers
        if any(map(_routes, layer.strategy))
    ]
    if not splits:
        return ()
    share = max(map(dims.fullest, splits))
    source = "as measured on the example" if dims.imbalance is None and dims.graph.loads else "--imbalance"
    return (f"the fullest rank of experts is expected to run {share:.3g} of an even share ({source})",)


def _routes(factor: str | None) -> bool:
    """Whether a factor gives ranks experts that rows choose."""
    return factor is not None and factor.partition(".")[0] in AT_RUN_TIME


def _notes(graph: Graph, step: Step, request: Request) -> tuple[str, ...]:
    """Notes on the cost of the user's own checkpoints, and on the scope of the gap with stages."""
    counted: tuple[str, ...] = ()
    if request.relay:
        return ("the stages run one after the other; bytes are those of all of them together",)
    if request.training:
        counted = (*training_notes(graph), *checkpoint_notes(graph, step, request.recompute))
    counted = (
        *counted,
        *loss_notes(graph, request),
        *host_notes(step, len(graph.operators), request.micro_batches),
    )
    counted = (*counted, *overlap_notes(step, request))
    if step.cut is None:
        return counted
    everywhere = step.cut.places == len(graph.operators)
    places = "" if everywhere else f" at {step.cut.places} of {len(graph.operators)} places"
    if len(graph.operators) <= MOST_OPERATORS:
        return (*counted, "the gap covers all ways to split operators, with all cuts into stages")
    return (
        *counted,
        f"the gap covers all cuts{places} into stages of operators that are split as here; of other splits "
        "it counts what stages compute and exchange, without their waits",
    )


def _parameter_bytes(
    graph: Graph, dims: Dims, step: Step, values: Values, pipeline: Pipeline
) -> tuple[int, ...]:
    """Bytes of weights on each rank of the world: of all weights, or of those of its stages."""
    mesh, layouts = dims.mesh, step.solution.program.inputs
    found = [[0] * mesh.num_devices for _ in range(step.schedule.ranks if step.cut and step.schedule else 1)]
    for item in graph.inputs:
        if item.kind is not InputKind.PARAMETER:
            continue
        layout, size = layouts[item.name], item.spec.dtype.itemsize
        own = [
            math.prod(dims.local_shape(item.name, layout, mesh.coordinate(place))) * size
            for place in range(mesh.num_devices)
        ]
        for rank in _ranks_with(values.source(item.name).carriers, step):
            host = pipeline.host(rank) if len(found) > 1 else 0
            found[host] = [one + other for one, other in zip(found[host], own, strict=True)]
    return tuple(itertools.chain.from_iterable(found))


def _ranks_with(operators: Sequence[int], step: Step) -> set[int]:
    """The pipeline ranks whose stages have one of the operators."""
    return {_rank_with(place, step) for place in operators or (0,)}


def _rank_with(operator: int, step: Step) -> int:
    """The pipeline rank whose stage has an operator."""
    if step.cut is None or step.schedule is None:
        return 0
    return step.schedule.rank_of(bisect.bisect(step.cut.starts, operator) - 1)


def sharded_share(graph: Graph, kinds: Kinds, layers: Sequence[Layer], force: Force | None) -> float:
    """The part of all flops that operators do which are sharded; where none does any, of the operators.

    With `force`, only of operators that have a factor of the kind that is forced on an axis, as long as
    the axis, and only those count as sharded that are so on as many axes as their factors are long
    enough for.
    """
    wanted = kind_by_axis(force, kinds.dims.mesh) if force else None
    total = sharded = 0
    has_flops = any(layer.flops for layer in layers)
    for item, layer in zip(graph.operators, layers, strict=True):
        weight = layer.flops if has_flops else 1
        axes = 1 if force is None else kinds.room(item, force)
        done = sum(
            kind is not None and (wanted is None or wanted[axis].has(Parallelism(kind)))
            for axis, kind in enumerate(layer.kinds)
        )
        total += weight if axes else 0
        sharded += weight if axes and done >= axes else 0
    return sharded / total if total else 0.0
