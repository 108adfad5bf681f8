"""Seconds and bytes of a published run's own split, by autopar's prices and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cluster import ClusterSpec, Link
from autopar.core.schedule import ScheduleKind
from autopar.core.timeline import StageCost
from autopar.cost.machine.model import CostModel
from autopar.schedules.in_flight import scheduled
from autopar.schedules.simulate import simulate
from tests.benchmarks.published import stack
from tests.benchmarks.published.pieces import Pieces, price
from tests.benchmarks.published.runs import Run, Shape

PER_NODE = 8
INTRA, INTER = Link(2e-6, 450e9), Link(5e-6, 50e9)  # NVLink 4, and a 400 Gbit/s card for each device
CAP = 80e9  # bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a step, and the bytes of the fullest device."""

    seconds: float
    nbytes: float

    @property
    def fits(self) -> bool:
        return self.nbytes <= CAP


@dataclass(slots=True)
class Predictor:
    """Predicts runs; pieces are priced once. With `measured_links` a run's bandwidths between nodes are those
    that its own job measured."""

    measured_links: bool = False
    _pieces: dict[object, Pieces] = field(default_factory=dict)

    def predict(self, run: Run) -> Prediction:
        """One run."""
        split, cluster = run.split, self.cluster(run)
        part = cluster.stage(split.pp)
        costs = self.costs(run, part, cluster.hop(split.pp))
        kind = ScheduleKind.ONE_F_ONE_B if split.micro_batches >= split.pp else ScheduleKind.GPIPE
        timeline = simulate(scheduled(kind, split.pp, 1, split.micro_batches), costs)
        return Prediction(timeline.seconds, float(timeline.peak.nbytes))

    def cluster(self, run: Run) -> ClusterSpec:
        """The machines of a run."""
        devices = run.split.devices
        nodes, rest = divmod(devices, PER_NODE)
        if rest:
            return ClusterSpec(devices_per_node=devices, device="h100", memory=int(CAP), intra=INTRA)
        inter = INTER
        if self.measured_links and run.all_reduce:
            inter = Link(INTER.latency, min(INTER.bandwidth, run.all_reduce / PER_NODE))
        return ClusterSpec(
            nodes=nodes,
            devices_per_node=PER_NODE,
            device="h100",
            memory=int(CAP),
            intra=INTRA,
            inter=inter if nodes > 1 else None,
        )

    def pieces(self, shape: Shape, samples: int, cluster: ClusterSpec) -> Pieces:
        """Those of a group that shares layers; remembered."""
        key = shape, samples, str(cluster)
        if key not in self._pieces:
            self._pieces[key] = price(shape, samples, cluster)
        return self._pieces[key]

    def costs(self, run: Run, part: ClusterSpec, hop: Link) -> Sequence[StageCost]:
        """What every stage costs; `part` of the cluster is one stage's."""
        split, model = run.split, CostModel.of(part, None)
        pieces = self.pieces(run.shape, split.samples, part.stage(split.dp))
        found: list[StageCost] = []
        for stage in stack.stages(run.shape, split.pp):
            weights = stage.total(pieces, "weights")
            if run.shape.tied and stage.counts[stack.EMBED] and stage.counts[stack.HEAD]:
                weights -= pieces[stack.EMBED].weights
            leaving = [piece.leaving for piece, _ in stage.parts(pieces)][-1:] or [0.0]
            send = hop.latency + leaving[0] / hop.bandwidth
            found.append(
                StageCost(
                    forward=stage.total(pieces, "forward"),
                    input_gradient=stage.total(pieces, "backward"),
                    weight_gradient=0.0,
                    send_output=send,
                    send_gradient=found[-1].send_output if found else 0.0,
                    sync=stack.sum_seconds(weights, split, part, model),
                    update=stack.update_seconds(weights, split, model),
                    state=int(stack.state_bytes(weights, split)),
                    kept=int(stage.total(pieces, "kept")),
                    working=int(stage.most(pieces, "working")),
                    early=int(stage.most(pieces, "working")),
                )
            )
        return found
