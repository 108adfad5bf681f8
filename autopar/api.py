"""The two doors: `plan` decides and prints, `parallelize` decides and runs.

trace       nn.Module -> graph of ATen operators          trace/
annotate    measured costs of every strategy               cost/
solve       integer program over all placements            solve/
rewrite     local operators and collectives of a rank      rewrite/
run         DTensor parameters outside, local ones inside  runtime/
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

import autopar.ops
import autopar.runtime.collectives.placement_moves
import autopar.runtime.collectives.random  # noqa: F401  (register the rules and the operators that programs call)
from autopar.cluster import ClusterSpec
from autopar.comparing.measured import Job, run_rows
from autopar.comparing.profile import Bar, Profile
from autopar.comparing.profile import profile as measure_profile
from autopar.comparing.strategies import Comparer
from autopar.compiler import Auto, Compiler
from autopar.core.force import Force, Parallelism, Pins
from autopar.core.gathering import ShardState
from autopar.core.mesh import Mesh
from autopar.core.offload import Offload
from autopar.core.pipeline import stages_per_rank
from autopar.core.recompute import Recompute
from autopar.core.schedule import ScheduleKind, check_schedule
from autopar.core.timeline import Timeline
from autopar.cost.machine.model import Progress
from autopar.errors import InputError
from autopar.planning.agree import agree
from autopar.planning.optimizer_state import OptimizerLike, state_of
from autopar.planning.options import AUTO, DEFAULT_OPTIMIZER, Options, settle
from autopar.planning.request import DEFAULT_GAP, Request
from autopar.proof.check import Report, check, check_input
from autopar.results.comparison import Comparison
from autopar.results.plan import Plan
from autopar.rewrite.render import describe
from autopar.runtime.launch import worker
from autopar.runtime.module import serial_model
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.schedules.fill_bubbles import order_of
from autopar.schedules.simulate import simulate
from autopar.trace.call_signature import LossFunction, split_inputs
from autopar.trace.target import Target, load_target
from autopar.units import parse_bytes
from costdb.database import Database

TIMEOUT = timedelta(minutes=10)
PIPELINE = "pipeline"  # the kind of parallelism that no operator has
Reach = Literal["global", "local"]  # the whole batch on every rank, or each rank's own part
Choice = TypeVar("Choice", bound=Enum)


def plan(
    model: nn.Module,
    cluster: ClusterSpec,
    example_inputs: Any = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    mesh: Mesh | str | None = None,
    force: Force | Pins | str | None = None,
    memory: int | str | None = None,
    time_limit: float | None = None,
    gap: float = DEFAULT_GAP,
    optimizer: OptimizerLike = DEFAULT_OPTIMIZER,
    stages: int | str | None = None,
    micro_batches: int | str | None = None,
    schedule: str = AUTO,
    recompute: str = "auto",
    offload: str = "auto",
    shard_state: str = "auto",
    costdb: str | None = None,
    measure: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Find the best placement of `model` on `cluster`; no process group is needed.

    `example_inputs` is the global batch: a tuple of positional arguments, a dict of keyword
    arguments, or one tensor; with `loss_fn` the arguments that it takes after the output come last.
    `force` is a pure kind ("batch", "domain", "filter", "channel", or "pipeline": one device for each
    stage), one kind for each axis ("batch+filter"), or pins of single layers, by name, to a factor for
    each axis. `memory` caps bytes per device;
    `optimizer` sizes its state: "sgd", "sgd-momentum", "adam", "adamw", or a class, a function of the
    parameters, or an optimizer, of which the size is measured. With `stages` the devices form so many
    pipeline ranks, with `micro_batches` a step is cut in time; both ask for `train_step`. `schedule` is
    one of gpipe, 1f1b, interleaved, zb1p, zbv, dualpipev. Each of the three can be "auto"; so are both
    numbers where None, but 1 where layers are forced. A `mesh` leaves as many stages as it goes into the
    devices, unless their number is given. With `recompute` "all" little is kept for backward and the rest
    is computed again; with "auto" as much as it takes to meet the memory cap, where that is faster than
    other ways to meet it. `offload` says which tensors wait for backward in the host's memory, where the
    cluster has a link to it: "none", with one stage "all" that are worth a copy, or with "auto" as many as a
    memory cap asks for and hide behind compute, in stages of schedules that don't split backward.
    `shard_state` says what of the trainable weights' state is stored in shards, as far as their dims are long
    enough: "none", "optimizer" (and gradients, but for full copies of weights and gradients that last all
    step), "gradients" (full weights last from forward to backward), "weights", or as is best for each,
    "auto".

    Raises InfeasibleError, SolverError, TraceError or InputError, also for what `parallelize` refuses.
    """
    serial_model.check(model)
    request = make_request(mesh, force, memory, time_limit, gap, optimizer, measure, shard_state=shard_state)
    request, auto = with_pipeline(
        request, cluster, force, stages, micro_batches, schedule, recompute=recompute, offload=offload
    )
    args, kwargs = split_inputs(example_inputs, example_kwargs)
    compiler = Compiler(cluster, request, loss_fn, costdb=costdb, progress=progress)
    if auto:
        found = compiler.find_pipeline(model, args, kwargs, auto)
    else:
        found = compiler.find(compiler.trace_step(model, args, kwargs).graph, request)
    compiler.check_lengths(model, args, kwargs, found)
    return found


def timeline(plan: Plan) -> Timeline:
    """The step of a plan with stages as its schedule runs it, from the plan's seconds and bytes.

    `timeline_text` draws it and `write_trace` writes it for a trace viewer (autopar.draw); its
    `schedule` prints the order of each rank. Raises InputError for a plan without stages.
    """
    pipeline = plan.pipeline
    if not pipeline.is_staged:
        raise InputError(
            where="timeline",
            found="a plan without pipeline stages",
            wanted="one whose ranks do different things at different times",
            remedy="plan with --stages",
        )
    return simulate(order_of(pipeline), plan.stage_costs)


def parallelize(
    model: nn.Module,
    cluster_spec: ClusterSpec,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    mesh: Mesh | str | None = None,
    force: Force | Pins | str | None = None,
    memory: int | str | None = None,
    time_limit: float | None = None,
    gap: float | None = None,
    optimizer: OptimizerLike | None = None,
    stages: int | str | None = None,
    micro_batches: int | str | None = None,
    schedule: str | None = None,
    recompute: str | None = None,
    offload: str | None = None,
    shard_state: str | None = None,
    costdb: str | None = None,
    measure: bool | None = None,
    exact_random: bool = False,
    timeout: timedelta = TIMEOUT,
    inputs: Reach = "global",
    outputs: Reach = "global",
) -> ParallelModule:
    """The model as a module that runs on the whole cluster; call it on every rank alike.

    With examples it plans at once, otherwise at the first call; until then its parameters cannot be
    read. Rank 0 plans (and measures what is missing), the others receive the plan, and all continue
    with rank 0's parameters and random state. With `loss_fn` calling the module returns the loss.
    `exact_random` draws the serial dropout masks, whole, on every rank: for proofs.

    The other options are those of `plan`. Where one is None it is what `autopar run` was told, as in
    `autopar run SCRIPT --cluster local:4 --stages 2`, by the environment variable AUTOPAR_OPTIONS, which
    holds a JSON object of options by name; or else the default of `plan`.

    Every rank passes the global batch, or with `inputs="local"` the samples that it needs alone:
    `parallel.samples` says which, `parallel.sampler(dataset)` gives a DataLoader their indices. The
    examples are of the global batch all the same; other global batches are prepared by `prepare`. A rank
    loads the rows that its program takes of any input: where the plan gathers the output for the loss,
    that takes all targets, and every rank loads all samples.

    Outputs and losses are global on every rank. With `outputs="local"` the plan leaves each output,
    but a scalar loss, as it lies: replicated over an axis, or in parts, of which the module returns
    this rank's; `parallel.output_parts` says which. A loss that is computed from a part is a part
    itself: the global loss is the sum of the local ones over the ranks that hold different parts. So
    divide by the global number of samples where the loss is a mean,

        loss = F.cross_entropy(parallel(x), y, reduction="sum") / global_batch_size

    and run backward from it on every rank; ranks that hold the same part must compute the same.

    Raises InputError outside a launcher, or where the world is not the cluster.
    """
    local_inputs, local_outputs = is_local("inputs", inputs), is_local("outputs", outputs)
    if local_inputs and example_inputs is None and example_kwargs is None:
        raise InputError(
            where='parallelize with inputs="local"',
            found="no example inputs",
            wanted="an example of the global batch, from which each rank's samples follow",
            remedy="pass example_inputs, on every rank those of a whole batch",
        )
    require_launcher()
    worker.init(cluster_spec.device_type, timeout.total_seconds())
    cluster_spec.check_world(dist.get_world_size())
    options = settle(
        mesh=mesh,
        force=force,
        memory=memory,
        time_limit=time_limit,
        gap=gap,
        optimizer=optimizer,
        stages=stages,
        micro_batches=micro_batches,
        schedule=schedule,
        recompute=recompute,
        offload=offload,
        shard_state=shard_state,
        costdb=costdb,
        measure=measure,
    )
    request, auto = request_of(options, cluster_spec)
    request = replace(request, local_inputs=local_inputs, local_outputs=local_outputs)
    compiler = Compiler(
        cluster_spec, request, loss_fn, costdb=options.costdb, exact_random=exact_random, timeout=timeout
    )
    share_random_state()
    if auto:
        found = agreed(compiler, model, split_inputs(example_inputs, example_kwargs), auto)
        request = settled(request, found)
        compiler = replace(compiler, request=request, plan=found)
    parallel = ParallelModule(
        model,
        compiler,
        describe=describe,
        device=compiler.device(),
        timeout=timeout,
        by_steps=request.stages > 1 or request.micro_batches > 1,
        exact_random=exact_random,
        local_inputs=local_inputs,
    )
    if example_inputs is not None or example_kwargs is not None:
        args, kwargs = split_inputs(example_inputs, example_kwargs)
        parallel.prepare(*args, **kwargs)
    return parallel


def verify(
    target: Target,
    cluster: ClusterSpec,
    *,
    mesh: Mesh | str | None = None,
    force: Force | Pins | str | None = None,
    memory: int | str | None = None,
    time_limit: float | None = None,
    gap: float = DEFAULT_GAP,
    stages: int | str | None = None,
    micro_batches: int | str | None = None,
    schedule: str = AUTO,
    recompute: str = "auto",
    offload: str = "auto",
    shard_state: str = "auto",
    costdb: str | None = None,
    steps: int = 3,
    processes: bool = False,
) -> Report:
    """Prove the plan of `target` against eager serial training in float64, over `steps` steps of SGD.

    On simulated ranks, or with `processes` on real ones. The plan may rest on estimates, so nothing is
    measured. The other options are those of `plan`.
    """
    request = make_request(
        mesh, force, memory, time_limit, gap, "sgd-momentum", measure=False, shard_state=shard_state
    )
    request, auto = with_pipeline(
        request, cluster, force, stages, micro_batches, schedule, recompute=recompute, offload=offload
    )
    found = None
    if auto:
        check_input(target, cluster, steps=steps, processes=processes, micro_batches=auto.micro_batches or 1)
        compiler = Compiler(cluster, request, target.loss_fn, costdb=costdb)
        found = compiler.find_pipeline(target.model, target.args, target.kwargs, auto)
        request = settled(request, found)
    with Database.open(costdb) as database:
        return check(
            target, cluster, request, steps=steps, processes=processes, database=database, plan=found
        )


def compare(
    target: Target | str,
    cluster: ClusterSpec,
    *,
    memory: int | str | None = None,
    time_limit: float | None = None,
    gap: float = DEFAULT_GAP,
    optimizer: str = "adam",
    shard_state: str = "auto",
    costdb: str | None = None,
    measure: bool = True,
    run: bool = False,
    bar: Bar | None = None,
) -> Comparison:
    """Every pure strategy, data with filter, data with spatial, and the solver's own plan, side by side.

    `target` is "file.py:function", as on the command line, or a model with example inputs; without
    `run` it may be on the meta device, and no process group is needed. With `run` every row that fits
    takes some training steps, with `optimizer`, on real processes of this machine, and the comparison
    says how well that agrees. The other options are those of `plan`; `time_limit` is that of each row.

    Raises what `plan` raises if no row fits, and with `run` InputError for another cluster than this
    machine, WorkerError.
    """
    request = make_request(None, None, memory, time_limit, gap, optimizer, measure, shard_state=shard_state)
    made = load_target(target) if isinstance(target, str) else target
    serial_model.check(made.model)
    if run:
        return run_rows(Job(made.source, cluster, request, optimizer, costdb, bar), made)
    with Database.open(costdb) as database, bar.shown() if bar else nullcontext():
        return Comparer(made, cluster, request, database, bar).compare()


def profile(
    cluster: ClusterSpec,
    target: Target | None = None,
    *,
    mesh: Mesh | str | None = None,
    costdb: str | None = None,
    bar: Bar,
) -> Profile:
    """Measure the collectives of `cluster`, which must be local, and the operator calls of `target`."""
    request = make_request(mesh, None, None, None, DEFAULT_GAP, "adam", measure=True)
    with Database.open(costdb) as database:
        return measure_profile(cluster, database, target=target, request=request, bar=bar)


def request_of(options: Options, cluster: ClusterSpec) -> tuple[Request, Auto | None]:
    """What the search takes, and the numbers of stages and micro-batches if any is to be chosen; raises
    InputError for options that make no sense."""
    request = make_request(
        options.mesh,
        options.force,
        options.memory,
        options.time_limit,
        options.gap,
        options.optimizer,
        options.measure,
        shard_state=options.shard_state,
    )
    request, auto = with_pipeline(
        request,
        cluster,
        options.force,
        options.stages,
        options.micro_batches,
        options.schedule,
        recompute=options.recompute,
        offload=options.offload,
    )
    cluster.stage(request.stages)
    return request, auto


def make_request(
    mesh: Mesh | str | None,
    force: Force | Pins | str | None,
    memory: int | str | None,
    time_limit: float | None,
    gap: float,
    optimizer: OptimizerLike,
    measure: bool,
    *,
    shard_state: str = AUTO,
) -> Request:
    """Options as the user writes them -> what the search takes."""
    if time_limit is not None and not 0 < time_limit < math.inf:
        raise InputError(
            where="time limit",
            found=f"{time_limit:g} s",
            wanted="more than 0 s",
            remedy="give it some seconds",
        )
    if not 0 <= gap < 1:
        raise InputError(
            where="gap", found=f"{gap:g}", wanted="at least 0 and less than 1", remedy="write 0.01 for 1 %"
        )
    return Request(
        mesh=Mesh.parse(mesh) if isinstance(mesh, str) else mesh,
        force=None if isinstance(force, Mapping) else _force(force),
        pins=force if isinstance(force, Mapping) else None,
        memory=parse_bytes(memory, where="memory") if isinstance(memory, str) else memory,
        time_limit=time_limit,
        gap=gap,
        measure=measure,
        optimizer=state_of(optimizer),
        shard_state=ShardState.parse(shard_state),
    )


def _force(force: Force | str | None) -> Force | None:
    """The kinds that a text names; none for pipelining, which no operator does."""
    if not isinstance(force, str) or force == PIPELINE:
        return None if isinstance(force, str) else force
    kinds = {kind.value: kind for kind in Parallelism}
    names = force.split("+")
    if not kinds.keys() >= set(names):
        raise InputError(
            where="force",
            found=repr(force),
            wanted=", ".join((*kinds, PIPELINE)),
            remedy="choose one kind of parallelism, or join one for each axis by +",
        )
    return kinds[force] if len(names) == 1 else tuple(kinds[name] for name in names)


def with_pipeline(
    request: Request,
    cluster: ClusterSpec,
    force: Force | Pins | str | None,
    stages: int | str | None,
    micro_batches: int | str | None,
    schedule: str,
    *,
    recompute: str = AUTO,
    offload: str = AUTO,
) -> tuple[Request, Auto | None]:
    """The request with its pipeline, and the numbers of it if any is to be chosen; raises InputError for
    what torch's schedules can't run."""
    kinds = {kind.value: kind for kind in ScheduleKind}
    if schedule not in (*kinds, AUTO):
        raise InputError(
            where="--schedule",
            found=repr(schedule),
            wanted=", ".join((*kinds, AUTO)),
            remedy="choose one of these",
        )
    request = replace(
        request,
        recompute=_choice("--recompute", recompute, Recompute),
        offload=_choice("--offload", offload, Offload),
    )
    kind = kinds.get(schedule)
    default = 1 if force and force != PIPELINE else AUTO
    if stages in (None, AUTO) and request.mesh and cluster.num_devices % request.mesh.num_devices == 0:
        stages = cluster.num_devices // request.mesh.num_devices
    ranks = _number("--stages", default if stages is None else stages)
    count = _number("--micro-batches", default if micro_batches is None else micro_batches)
    if force == PIPELINE:
        if ranks not in (None, 1, cluster.num_devices):
            raise InputError(
                where="--stages",
                found=str(stages),
                wanted=f"{cluster.num_devices}: pure pipelining has one device for each stage",
                remedy="leave out --stages or --force pipeline",
            )
        ranks = cluster.num_devices
    if request.offload is Offload.ALL:
        ranks = 1 if ranks is None else ranks
        _check_offload(cluster, ranks)
    request = replace(request, schedule=kind)
    if ranks is None or count is None:
        return request, Auto(ranks, count, exactly=micro_batches is None)
    if ranks != 1 and kind is not None:
        check_schedule(kind, ranks=ranks, stages_per_rank=stages_per_rank(kind), micro_batches=count)
    return replace(request, stages=ranks, micro_batches=count), None


def _choice(option: str, value: str, choices: type[Choice]) -> Choice:
    names = {str(each.value): each for each in choices}
    if value not in names:
        raise InputError(
            where=option, found=repr(value), wanted=", ".join(names), remedy="choose one of these"
        )
    return names[value]


def _check_offload(cluster: ClusterSpec, ranks: int) -> None:
    """Raise InputError if nothing can be offloaded, although that is asked for."""
    found = None
    if ranks != 1:
        found, wanted = f"all with {ranks} stages", "one stage, whose forward backward follows at once"
        remedy = "leave out --stages, or write --offload auto"
    elif cluster.host is None and cluster.device_type == "cpu":
        found, wanted = "all on CPUs, whose memory is the host's", "devices with memory of their own"
        remedy = "write --offload none"
    elif cluster.host is None:
        found, wanted = "all on a cluster without a link to the host", "how fast copies to the host are"
        remedy = "add links.host to the cluster's file, or ClusterSpec(host=Link(...))"
    if found:
        raise InputError(where="--offload", found=found, wanted=wanted, remedy=remedy)


def settled(request: Request, plan: Plan) -> Request:
    """The request with the pipeline and the mesh that were chosen."""
    pipeline = plan.pipeline
    return replace(
        request,
        mesh=plan.mesh,
        stages=pipeline.ranks,
        micro_batches=pipeline.micro_batches,
        schedule=pipeline.schedule,
    )


def _number(option: str, value: int | str) -> int | None:
    """A count of at least 1, None for "auto"."""
    if value == AUTO:
        return None
    if isinstance(value, int) and value >= 1 or isinstance(value, str) and value.isdecimal() and int(value):
        return int(value)
    raise InputError(
        where=option, found=repr(value), wanted="at least 1, or auto", remedy=f"write {option} 2"
    )


def agreed(
    compiler: Compiler, model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], auto: Auto
) -> Plan:
    """The plan, and so the pipeline, that rank 0 chooses for all; collective."""
    args, kwargs = call
    if not args and not kwargs:
        raise InputError(
            where="parallelize",
            found="stages or micro-batches to be chosen, and no example of the batch",
            wanted="an example of the global batch",
            remedy="pass example_inputs, or give both numbers",
        )

    compiler.measure_links()
    return agree(lambda company: compiler.find_pipeline(model, args, kwargs, auto, company), compiler.cluster)


def is_local(option: str, value: str) -> bool:
    """Whether `value` of an option is "local"; raises InputError unless it is "global" then."""
    if value in ("global", "local"):
        return value == "local"
    raise InputError(
        where=option,
        found=repr(value),
        wanted="'global' or 'local'",
        remedy="say whether every rank holds the whole batch or its own part",
    )


def require_launcher() -> None:
    """Raise InputError unless a process group or a launcher says which rank this process is."""
    if dist.is_initialized() or "RANK" in os.environ:
        return
    raise InputError(
        where="parallelize",
        found="no process group and no launcher",
        wanted="one process for each device",
        remedy="put the code into a script and start it with `autopar run SCRIPT --cluster local:4` "
        "or torchrun; plan() works here",
    )


def share_random_state() -> None:
    """All ranks go on with rank 0's CPU generator: replicas must draw one mask."""
    state = torch.get_rng_state()
    box = [state]
    dist.broadcast_object_list(box, src=0)
    torch.set_rng_state(box[0])
