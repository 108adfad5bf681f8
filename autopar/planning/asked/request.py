"""What the user asks of the search, in the words of the passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from autopar.cluster import ClusterSpec
from autopar.core.costs import ADAM, OptimizerState
from autopar.core.force import Force, Pins
from autopar.core.gathering import ShardState
from autopar.core.graph import Graph
from autopar.core.loss_pieces import LossPieces
from autopar.core.mesh import Mesh
from autopar.core.offload import Offload
from autopar.core.outputs import Outputs
from autopar.core.pipeline import stages_per_rank
from autopar.core.placement import Layout
from autopar.core.precision import Precision
from autopar.core.recompute import Recompute
from autopar.core.schedule import SPLIT_BACKWARD, ScheduleKind, check_schedule
from autopar.cost.machine.devices import GPUS
from autopar.errors import InputError, show_value
from autopar.planning.asked.optimizer_state import state_of
from autopar.planning.asked.option_values import PIPELINE
from autopar.planning.asked.options import DEFAULT_GAP, MEASURE_SECONDS, Options
from autopar.results.plan.plan import Plan
from autopar.trace.forward.autocast import Autocast

MOST_DEFAULT_ACTIONS = 20_000  # of a schedule that nobody asked for by name: timing them all takes seconds
_FEW = 4  # meshes that a message names


class Auto(NamedTuple):
    """Pipeline ranks and micro-batches, None where the planner chooses; `exactly` if only such micro-batches
    that together compute what the batch does."""

    ranks: int | None
    micro_batches: int | None
    exactly: bool


@dataclass(frozen=True, slots=True)
class Request:
    """Every field has the command line's default.

    `memory` is bytes per device, `stored` fixes parameters that lie on the devices already. With
    `local_inputs` user inputs may be passed in parts, as `user_layouts` (by path) says where it can;
    `outputs` says which may leave in parts. `schedule`
    None is the fastest of all that torch can run with so many stages and micro-batches.
    """

    mesh: Mesh | None = None
    force: Force | None = None
    pins: Pins | None = None
    memory: int | None = None
    time_limit: float | None = None
    gap: float = DEFAULT_GAP
    training: bool = True
    measure: bool = True
    measure_seconds: float = MEASURE_SECONDS  # at most
    alternatives: bool = True
    optimizer: OptimizerState = ADAM
    stored: Mapping[str, Layout] | None = None
    local_inputs: bool = False
    outputs: Outputs = Outputs.AUTO
    user_layouts: Mapping[str, Layout] | None = None
    pipeline_ranks: int = 1  # `--stages`
    micro_batches: int = 1
    batch_dims: Mapping[str | int, int | None] | None = None  # that hold samples, where the user says so
    static: tuple[str, ...] = ()  # arguments and buffers that are structure, where the user says so
    schedule: ScheduleKind | None = ScheduleKind.ONE_F_ONE_B
    recompute: Recompute = Recompute.AUTO
    loss_pieces: LossPieces = LossPieces.AUTO
    offload: Offload = Offload.AUTO
    shard_state: ShardState = ShardState.AUTO
    dtype: Precision = Precision.FP32  # what calls compute in that aren't under autocast themselves
    reduce_dtype: Precision = Precision.FP32  # what gradients of cast weights are summed in over ranks
    stages_of_uses: Mapping[str, tuple[int, ...]] | None = None  # of parameters that lie already
    compile: bool = False  # programs
    overlap: bool = False  # gathers of weights and compute
    imbalance: float | None = None  # rows of the fullest rank of experts, in even shares, as the user says
    hosts: tuple[int, ...] = ()  # of pipeline ranks whose stages lie already, as in `Pipeline`
    meshes: tuple[Mesh, ...] = ()  # of the stages, where each has its own
    on_host: frozenset[str] | None = None  # weights that lie already, by target: those in the host's memory
    relay: bool = False  # the stages run one after the other: a call without gradients, no step

    def autocast(self, cluster: ClusterSpec) -> Autocast:
        """The state of autocast around calls: the caller's where that casts."""
        now = Autocast.now(cluster.device_type)
        return now if now.dtype is not None else Autocast.of(cluster.device_type, self.dtype)

    @property
    def in_pieces(self) -> bool:
        """Whether graphs are traced with their losses in pieces."""
        return self.loss_pieces is LossPieces.ALL

    def cap(self, cluster: ClusterSpec) -> int | None:
        """Bytes of a device that a plan may take, None where nobody says."""
        return cluster.memory if self.memory is None else self.memory

    def settled(self, plan: Plan) -> Request:
        """The request with the pipeline and the mesh that `plan` has."""
        pipeline = plan.pipeline
        return replace(
            self,
            mesh=None if pipeline.meshes else plan.mesh,
            meshes=pipeline.meshes,
            pipeline_ranks=pipeline.ranks,
            micro_batches=pipeline.micro_batches,
            schedule=pipeline.schedule,
        )

    def leaves_parts(self, graph: Graph) -> bool:
        """Whether outputs beside the loss may leave the program in parts."""
        beside_loss = self.training and graph.loss is not None
        return self.outputs is Outputs.LOCAL or (self.outputs is Outputs.AUTO and beside_loss)

    def kinds(self) -> list[ScheduleKind]:
        """The schedule that is asked for, or all that can be run and timed; none without stages. Raises
        InputError, naming the rule, if there is none."""
        if self.pipeline_ranks == 1 or self.relay:
            return []
        found, refused = [], []
        for kind in [self.schedule] if self.schedule else self.runnable():
            try:
                check_schedule(
                    kind,
                    ranks=self.pipeline_ranks,
                    stages_per_rank=stages_per_rank(kind),
                    micro_batches=self.micro_batches,
                )
                found.append(kind)
            except InputError as error:
                refused.append(error)
        if not found:
            raise refused[0]
        small = [kind for kind in found if self.actions(kind) <= MOST_DEFAULT_ACTIONS]
        return small or [min(found, key=lambda kind: (self.actions(kind), kind is ScheduleKind.GPIPE))]

    def runnable(self) -> list[ScheduleKind]:
        """All schedules but those that what is asked for rules out: a compiled backward is one piece."""
        return [kind for kind in ScheduleKind if not (self.compile and kind in SPLIT_BACKWARD)]

    def actions(self, kind: ScheduleKind) -> int:
        """Forward and backward actions in a step, of all micro-batches and stages."""
        return 2 * self.pipeline_ranks * stages_per_rank(kind) * self.micro_batches


def request_of(options: Options, cluster: ClusterSpec) -> tuple[Request, Auto | None]:
    """The request for a search, and the numbers of stages and micro-batches if any is to be chosen.

    Raises InputError for options that make no sense, and for what torch's schedules can't run.
    """
    check_cluster(cluster)
    values = options.read()
    _check_dtype(values["dtype"], cluster)
    force, meshes = values["force"], values["mesh"]
    own = meshes if isinstance(meshes, tuple) else ()
    if own:
        values = {**values, "mesh": None, "stages": _stages_of(own, values)}
    request = Request(
        mesh=values["mesh"],
        meshes=own,
        force=None if isinstance(force, Mapping) else force,
        pins=force if isinstance(force, Mapping) else None,
        memory=values["memory"],
        time_limit=values["time_limit"],
        gap=values["gap"],
        measure=values["measure"],
        measure_seconds=values["measure_seconds"],
        optimizer=state_of(values["optimizer"]),
        schedule=values["schedule"],
        recompute=values["recompute"],
        loss_pieces=values["loss_pieces"],
        offload=values["offload"],
        shard_state=values["shard_state"],
        dtype=values["dtype"],
        reduce_dtype=values["reduce_dtype"],
        batch_dims=values["batch_dims"],
        compile=values["compile"],
        overlap=values["overlap"],
        static=values["static"],
        imbalance=values["imbalance"],
    )
    if request.compile:
        request = _compiled(request)
    ranks, count = _numbers(options, values, cluster)
    ranks = len(own) or ranks
    if request.mesh:
        _check_mesh(request.mesh, cluster, ranks or 1)
    if request.offload in (Offload.ALL, Offload.STATE):
        ranks = 1 if ranks is None else ranks
        _check_offload(request.offload, cluster, ranks)
    if ranks is None or count is None:
        return request, Auto(ranks, count, exactly=options.micro_batches is None)
    kind = request.schedule
    if ranks != 1 and kind is not None:
        check_schedule(kind, ranks=ranks, stages_per_rank=stages_per_rank(kind), micro_batches=count)
    if not own:
        cluster.stage(ranks)
    return replace(request, pipeline_ranks=ranks, micro_batches=count), None


def check_overlap(request: Request) -> None:
    """Raise InputError where gathers are to start early in stages."""
    if request.overlap and request.pipeline_ranks > 1:
        raise InputError(
            where="--overlap",
            found=f"a plan with {request.pipeline_ranks} stages",
            wanted="one without, in which gathers of weights start early",
            remedy="leave out --overlap, or write --stages 1",
        )


def _compiled(request: Request) -> Request:
    """The request where programs are compiled: nothing is offloaded unless it is asked for, which is refused,
    as are schedules that split backward."""
    found = []
    if request.offload in (Offload.ALL, Offload.STATE):
        found.append((f"--offload {request.offload.value}", "none or auto", "leave out --offload"))
    if request.overlap:
        found.append(("--overlap", "no gathers that start early", "leave out --overlap"))
    if request.schedule in SPLIT_BACKWARD:
        kinds = ", ".join(kind.value for kind in request.runnable())
        found.append((f"--schedule {request.schedule.value}", kinds, "leave out --schedule"))
    if found:
        names, wanted, remedies = zip(*found, strict=True)
        raise InputError(
            where="--compile",
            found=" and ".join(names),
            wanted=", ".join(wanted) + ": a compiled backward is one piece",
            remedy=" and ".join(remedies) + ", or --compile",
        )
    return replace(request, offload=Offload.NONE)


def check_cluster(cluster: object) -> None:
    """Raise InputError for what is no ClusterSpec."""
    if not isinstance(cluster, ClusterSpec):
        raise InputError(
            where="cluster",
            found=f"{show_value(cluster)}, a {type(cluster).__name__}",
            wanted="a ClusterSpec",
            remedy="write ClusterSpec.local(2), or ClusterSpec.from_toml(file)",
        )


def _check_dtype(dtype: Precision, cluster: ClusterSpec) -> None:
    """Raise InputError for bfloat16 on GPUs that only emulate it, slower than they compute in float32."""
    known, wanted = GPUS.get(cluster.device.lower()), Autocast.of(cluster.device_type, dtype).dtype
    rates = dict(known.flops) if known is not None else {}
    lacks = wanted in rates and rates[wanted] <= rates[torch.float32]
    if wanted is torch.bfloat16 and cluster.device == "cuda" and torch.cuda.is_available():
        lacks = not torch.cuda.is_bf16_supported(including_emulation=False)
    if lacks:
        raise InputError(
            where="--dtype",
            found=f"{dtype.value} on {cluster.device}, whose tensor cores lack it",
            wanted="a dtype that the devices compute in",
            remedy="write --dtype fp16 and train with torch.amp.GradScaler, or --dtype fp32",
        )


def check_timeout(timeout: object) -> None:
    """Raise InputError for a value that is no time for collectives to wait."""
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise InputError(
            where="timeout",
            found=f"{show_value(timeout)}, a {type(timeout).__name__}",
            wanted="a timedelta of more than 0 seconds",
            remedy="write timeout=timedelta(minutes=10)",
        )


def _numbers(
    options: Options, values: Mapping[str, Any], cluster: ClusterSpec
) -> tuple[int | None, int | None]:
    """Pipeline ranks and micro-batches, None where they are to be chosen; `values` are what was read."""
    mesh, ranks, count = values["mesh"], values["stages"], values["micro_batches"]
    pure = options.force == PIPELINE
    if ranks is None and mesh and cluster.num_devices % mesh.num_devices == 0:
        ranks = cluster.num_devices // mesh.num_devices
    elif options.stages is None and options.force and not pure:
        ranks = 1
    if pure and ranks not in (None, 1, cluster.num_devices):
        raise InputError(
            where="--stages",
            found=str(ranks),
            wanted=f"{cluster.num_devices}: pure pipelining has one device for each stage",
            remedy="leave out --stages or --force pipeline",
        )
    return cluster.num_devices if pure else ranks, count


def _stages_of(meshes: tuple[Mesh, ...], values: Mapping[str, Any]) -> int:
    """The number of stages whose meshes are given; raises InputError beside another number, or without
    micro-batches."""
    if values["stages"] not in (None, len(meshes)) or values["micro_batches"] is None:
        raise InputError(
            where="--mesh " + "+".join(map(str, meshes)),
            found=f"{values['stages'] or 'auto'} stages, {values['micro_batches'] or 'auto'} micro-batches",
            wanted=f"{len(meshes)} stages, of which each has its mesh, and a number of micro-batches",
            remedy=f"write --stages {len(meshes)} --micro-batches {4 * len(meshes)}",
        )
    return len(meshes)


def _check_mesh(mesh: Mesh, cluster: ClusterSpec, ranks: int) -> None:
    """Raise InputError for a mesh of more or fewer devices than each of the pipeline ranks has."""
    part = cluster.stage(ranks)
    if mesh.num_devices != part.num_devices:
        whose = "the cluster" if ranks == 1 else f"each of {ranks} stages"
        fitting = ", ".join(f"--mesh {each}" for each in part.meshes()[:_FEW])
        raise InputError(
            where=f"--mesh {mesh}",
            found=f"{mesh.num_devices} devices",
            wanted=f"the {part.num_devices} of {whose}",
            remedy=f"write {fitting}, or leave it out",
        )


def _check_offload(offload: Offload, cluster: ClusterSpec, ranks: int) -> None:
    """Raise InputError if nothing can be offloaded, although that is asked for. Weights of CPUs may be, into
    a part of their memory: so what GPUs would do can be tried."""
    found, is_state = None, offload is Offload.STATE
    if ranks != 1:
        found = f"{offload.value} with {ranks} stages"
        wanted = "one stage" if is_state else "one stage, whose forward backward follows at once"
        remedy = "leave out --stages, or write --offload auto"
    elif cluster.host is None and cluster.device_type == "cpu" and not is_state:
        found, wanted = "all on CPUs, whose memory is the host's", "devices with memory of their own"
        remedy = "write --offload none"
    elif cluster.host is None and cluster.device_type != "cpu":
        found = f"{offload.value} on a cluster without a link to the host"
        wanted = "how fast copies to the host are"
        remedy = "add links.host to the cluster's file, or ClusterSpec(host=Link(...))"
    if found:
        raise InputError(where="--offload", found=found, wanted=wanted, remedy=remedy)
