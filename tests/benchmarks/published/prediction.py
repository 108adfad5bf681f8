"""Seconds and bytes of a published run's own split, by autopar's prices and schedules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from autopar.cluster import ClusterSpec, Link
from autopar.core.schedule import ScheduleKind
from autopar.core.timeline import StageCost
from autopar.cost.machine.model import CostModel
from autopar.schedules.in_flight import scheduled
from autopar.schedules.simulate_many import CutCosts, step_seconds
from tests.benchmarks.published import stack
from tests.benchmarks.published.pieces import Pieces, price
from tests.benchmarks.published.runs import Run, Shape

# NVLink 4; and of a 400 Gbit/s card for each device what healthy jobs measured of it.
INTRA, INTER = Link(2e-6, 450e9), Link(5e-6, 25e9)
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
    """Predicts runs; pieces are priced once. With `measured_links` the bandwidths that a run's own job
    measured between nodes say in which conditions it ran, and are the cluster's where these are good."""

    measured_links: bool = False
    constants: stack.Stack = stack.Stack()
    _pieces: dict[object, Pieces] = field(default_factory=dict)

    def predict(self, runs: Sequence[Run]) -> list[Prediction]:
        """All runs, those of one schedule together."""
        costs, alike = [self.costs(run) for run in runs], defaultdict(list)
        for number, run in enumerate(runs):
            alike[run.split.pp, run.split.micro_batches].append(number)
        found: dict[int, Prediction] = {}
        for (ranks, count), numbers in alike.items():
            kind = ScheduleKind.ONE_F_ONE_B if count >= ranks else ScheduleKind.GPIPE
            seconds = step_seconds(scheduled(kind, ranks, 1, count), together([costs[n] for n in numbers]))
            for number, each in zip(numbers, seconds.tolist(), strict=True):
                found[number] = Prediction(each, most_bytes(costs[number], count))
        return [found[number] for number in range(len(runs))]

    def cluster(self, run: Run) -> ClusterSpec:
        """The machines of a run."""
        devices = run.split.devices
        nodes, rest = divmod(devices, stack.PER_NODE)
        if rest:
            return ClusterSpec(devices_per_node=devices, device="h100", memory=int(CAP), intra=INTRA)
        inter = INTER
        if self.measured_links and run.all_reduce and not stack.is_slow(run, by_links=True):
            inter = Link(INTER.latency, run.all_reduce / stack.PER_NODE)
        return ClusterSpec(
            nodes=nodes,
            devices_per_node=stack.PER_NODE,
            device="h100",
            memory=int(CAP),
            intra=INTRA,
            inter=inter if nodes > 1 else None,
        )

    def pieces(self, shape: Shape, samples: int, cluster: ClusterSpec) -> Pieces:
        """Those of a group that shares layers; remembered."""
        key = shape, samples, cluster.nodes, cluster.devices_per_node
        if key not in self._pieces:
            self._pieces[key] = price(shape, samples, cluster)
        return self._pieces[key]

    def costs(self, run: Run) -> Sequence[StageCost]:
        """What every stage costs."""
        split, constants, cluster = run.split, self.constants, self.cluster(run)
        part, hop = cluster.stage(split.pp), cluster.hop(split.pp)
        slow = stack.is_slow(run, by_links=self.measured_links)
        bandwidth = CostModel.of(part, None).device.bandwidth
        pieces = self.pieces(run.shape, split.samples, part.stage(split.dp))
        wait = constants.hop if run.mended or run.nodes == 1 else constants.broken_hop
        found: list[StageCost] = []
        for stage in stack.stages(run.shape, split.pp):
            weights = stage.total(pieces, "weights")
            if run.shape.tied and stage.counts[stack.EMBED] and stage.counts[stack.HEAD]:
                weights -= pieces[stack.EMBED].weights
            leaving = [piece.leaving for piece, _ in stage.parts(pieces)][-1:] or [0.0]
            send = wait + leaving[0] / hop.bandwidth
            forward, backward = (
                stack.pass_seconds(stage, pieces, split, constants, backward=each, slow=slow)
                for each in (False, True)
            )
            sync = stack.sum_seconds(stage, weights, split, part, constants, slow=slow, behind=backward)
            kept = int(stage.total(pieces, "kept") - stage.total(pieces, "gathered"))
            working = int(stage.most(pieces, "working") + stage.most(pieces, "gathered"))
            found.append(
                StageCost(
                    forward=forward,
                    input_gradient=backward,
                    weight_gradient=0.0,
                    send_output=send,
                    send_gradient=found[-1].send_output if found else 0.0,
                    sync=sync,
                    update=constants.fixed + stack.update_seconds(weights, split, bandwidth, constants),
                    state=int(stack.state_bytes(weights, split)),
                    kept=kept,
                    working=working,
                )
            )
        return found


def together(costs: Sequence[Sequence[StageCost]]) -> CutCosts:
    """The costs of several runs with equally many stages."""
    return CutCosts(
        **{
            item.name: np.array([[getattr(stage, item.name) for stage in each] for each in costs]).T
            for item in fields(CutCosts)
        }
    )


def most_bytes(costs: Sequence[StageCost], micro_batches: int) -> float:
    """Bytes of the fullest stage, which keeps as many micro-batches as there are stages from it on."""
    return float(
        max(
            stage.state + stage.working + min(micro_batches, len(costs) - number) * stage.kept
            for number, stage in enumerate(costs)
        )
    )
