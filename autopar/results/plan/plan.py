"""A plan: the program that was decided on, and what it will cost, as data and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.core.fingerprint import Fingerprint
from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.core.placement import Layout, show
from autopar.core.program import Program
from autopar.core.timeline import Moment, StageCost
from autopar.results.files import codec
from autopar.results.files.plan_laws import broken_laws
from autopar.results.files.text import html_of, text_of
from autopar.results.plan.frontier import Frontier
from autopar.results.plan.plan_subject import PlanSubject
from autopar.results.plan.step_parts import StepParts

ONE_DEVICE = "one device"  # the name of the strategy that leaves all others idle


@dataclass(frozen=True, slots=True)
class Layer:
    """One operator's line in the plan: its factor on each axis, seconds and bytes on one device, for one
    micro-batch.

    `communication` counts what is inside the operator and the conversions of what it takes, among them
    the sums of weights' gradients, which are made once a step.
    """

    name: str
    op: str
    module: str
    strategy: tuple[str | None, ...]
    kinds: tuple[str | None, ...]  # batch, domain, filter or channel, for each axis
    compute: float
    communication: float
    nbytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage's line: the modules of its first and last operator, seconds of one micro-batch
    and of handing on its output and its gradient, those of a step's gradient sums, and the bytes that it
    takes at its peak on one device."""

    rank: int
    first: str
    last: str
    operators: int
    forward: float
    backward: float
    send_output: float
    send_gradient: float
    sync: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A tensor that waits for backward in host memory: how it lies, and its bytes on one device, for one
    micro-batch."""

    name: str
    layout: Layout
    nbytes: int


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another strategy beside the plan; `feasible` under the memory cap. `reason` says why it has no plan, or
    why it isn't taken although it is faster; `parts` are those of its step."""

    name: str
    step_seconds: float | None
    peak_bytes: int | None
    feasible: bool
    reason: str = ""
    parts: StepParts = StepParts()

    def as_dict(self) -> dict[str, Any]:
        """The strategy as the command line's JSON shows it."""
        return {
            "name": self.name,
            "step_seconds": self.step_seconds,
            "peak_bytes": self.peak_bytes,
            "feasible": self.feasible,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision with its predictions; `print` it, `save` it, or take `as_dict()`.

    `status` is "optimal", "gap_limit" or "time_limit"; `gap` is relative to a proven bound; with stages
    a note says what it covers. Seconds are those of a whole step with all micro-batches; `compute` and
    `communication` of the average pipeline rank, which does nothing for a share `bubble` of the step.
    Bytes are those of the fullest rank. `measured_share` is the part of predicted operator time that
    rests on measurements, `interpolated_share` what of the rest follows from measurements of other sizes;
    laps of what is measured lie about `scatter` from their medians, and predicted steps that differ by less
    than `error` can't be told apart, both relatively.
    `graph` is what was planned, one micro-batch of it, and `devices` what for.
    """

    program: Program
    cluster: str
    layers: tuple[Layer, ...]
    conversions: tuple[str, ...]
    status: str
    gap: float
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    peak_bytes: int
    state_bytes: int
    memory_cap: int | None
    measured_share: float
    sharded_flops_share: float
    gathered_ops: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    parameter_bytes: tuple[int, ...]  # of each rank
    notes: tuple[str, ...] = ()
    pipeline: Pipeline = Pipeline()
    stages: tuple[Stage, ...] = ()
    stage_costs: tuple[StageCost, ...] = ()  # what a simulation of the schedule takes, for each stage
    bubble: float = 0.0
    offloaded: tuple[Offloaded, ...] = ()
    offload_seconds: float = 0.0  # of the step, that it waits for copies to and from host memory
    host_bytes: int = 0  # of weights there, with gradients and optimizer state, of each device
    graph: Fingerprint = Fingerprint()
    interpolated_share: float = 0.0
    error: float = 0.0
    scatter: float = 0.0
    devices: str = ""  # nodes, devices of each and their kind, as in "2 x 4 h100"
    parts: StepParts = StepParts()  # of the step, which they add up to
    serial: Alternative | None = None  # one device of the cluster by itself, with as many micro-batches
    moments: tuple[Moment, ...] = ()  # of a step without stages: of one micro-batch, and what comes once
    frontier: Frontier | None = None  # what less memory would cost, where that was asked for
    scope: str = ""  # of which plans the gap speaks, if not of all with these stages and micro-batches
    programs: tuple[Program, ...] = ()  # of each pipeline rank, where their meshes are unlike
    subject: PlanSubject | None = None  # the model and batch, of a plan that was asked for by itself

    @property
    def split_unit(self) -> str:
        """The noun of which `sharded_flops_share` is a part: flops, or operators where none does any."""
        return "flops" if any(layer.flops for layer in self.layers) else "operators"

    @property
    def mesh(self) -> Mesh:
        return self.program.mesh

    @property
    def mesh_name(self) -> str:
        """The mesh of every stage, or those of all joined by +."""
        return " + ".join(map(str, self.pipeline.meshes or (self.mesh,)))

    def axis_size(self, axis: int) -> str:
        """Devices of an axis, for each stage where meshes are unlike."""
        return " + ".join(str(mesh.shape[axis]) for mesh in self.pipeline.meshes or (self.mesh,))

    @property
    def all_programs(self) -> tuple[Program, ...]:
        """The programs that ranks run: one, or that of each stage."""
        return self.programs or (self.program,)

    def program_of(self, rank: int) -> Program:
        """The program whose stages a pipeline rank runs."""
        return self.programs[rank] if self.programs else self.program

    @property
    def shared_evenly(self) -> float | None:
        """Seconds of one device's operators by the number of devices: no plan computes in less, but where
        parts compute faster than the whole. None where one device was not looked at."""
        if self.serial is None or not self.serial.parts.compute:
            return None
        return self.serial.parts.compute / len(self.parameter_bytes)

    @property
    def alone(self) -> Alternative | None:
        """One device by itself, if it is predicted to be as fast as all and its memory does."""
        serial = self.serial
        if serial is None or not serial.feasible or serial.step_seconds is None:
            return None
        return serial if serial.step_seconds <= self.step_seconds else None

    def save(self, path: str | Path) -> None:
        """Write the whole plan as JSON; raises InputError where that can't be done."""
        codec.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote; raises InputError for another file, or another version's."""
        return codec.load(cls, path, broken_laws)

    def as_dict(self) -> dict[str, Any]:
        """The plan as the command line's JSON shows it."""
        axes = [self.mesh.name(axis) for axis in self.mesh.axes]
        return {
            "status": self.status,
            "gap": self.gap,
            "scope": self.scope,
            "shared_evenly": self.shared_evenly,
            "subject": str(self.subject) if self.subject else None,
            "cluster": self.cluster,
            "mesh": self.mesh_name,
            "step_seconds": self.step_seconds,
            "parts": self.parts.as_dict(),
            "compute_seconds": self.compute_seconds,
            "communication_seconds": self.communication_seconds,
            "peak_bytes": self.peak_bytes,
            "state_bytes": self.state_bytes,
            "memory_cap": self.memory_cap,
            "measured_share": self.measured_share,
            "interpolated_share": self.interpolated_share,
            "error": self.error,
            "scatter": self.scatter,
            "sharded_flops_share": self.sharded_flops_share,
            "gathered_ops": list(self.gathered_ops),
            "layers": [
                {
                    "name": layer.name,
                    "op": layer.op,
                    "strategy": dict(zip(axes, layer.strategy, strict=True)),
                    "parallelism": dict(zip(axes, layer.kinds, strict=True)),
                    "compute_seconds": layer.compute,
                    "communication_seconds": layer.communication,
                    "bytes": layer.nbytes,
                }
                for layer in self.layers
            ],
            "pipeline": {
                "ranks": self.pipeline.ranks,
                "stages": self.pipeline.num_stages,
                "micro_batches": self.pipeline.micro_batches,
                "schedule": self.pipeline.schedule.value,
                "starts": list(self.pipeline.starts),
                "stage_seconds": [stage.forward + stage.backward for stage in self.stages],
                "stage_bytes": [stage.nbytes for stage in self.stages],
                "bubble": self.bubble,
            },
            "moments": [
                {
                    "phase": moment.phase.value,
                    "layer": moment.layer,
                    "seconds": moment.seconds,
                    "bytes": moment.nbytes,
                }
                for moment in self.moments
            ],
            "conversions": list(self.conversions),
            "offload": {
                "tensors": [
                    {"name": item.name, "layout": show(item.layout), "bytes": item.nbytes}
                    for item in self.offloaded
                ],
                "bytes": sum(item.nbytes for item in self.offloaded),
                "seconds": self.offload_seconds,
            },
            "host": {"weights": list(self.program.on_host), "bytes": self.host_bytes},
            "outputs": {name: show(layout) for name, layout in self.program.outputs.items()},
            "serial": self.serial.as_dict() if self.serial else None,
            "alternatives": [item.as_dict() for item in self.alternatives],
            "frontier": self.frontier.as_dict() if self.frontier else None,
            "parameter_bytes": list(self.parameter_bytes),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        """HTML of the key figures, for a notebook."""
        return html_of(self)
