"""Seconds and bytes of a published run's own split, by autopar's prices and schedules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import ClusterSpec, Link
from autopar.core.schedule import ScheduleKind
from autopar.core.timeline import StageCost
from autopar.cost.machine.devices import device_model
from autopar.schedules.in_flight import scheduled
from autopar.schedules.simulate_many import CutCosts, step_seconds
from tests.benchmarks.published import stack
from tests.benchmarks.published.pieces import Pieces, price
from tests.benchmarks.published.runs import Run, Shape, Split

# NVLink 4, and a 400 Gbit/s card for each device.
DEVICE, INTRA, INTER = "h100", Link(2e-6, 450e9), Link(stack.LATENCY, stack.CARD)
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
    measured say in which conditions it ran, and are its links'."""

    measured_links: bool = False
    constants: stack.Stack = stack.Stack()
    _pieces: dict[object, Pieces] = field(default_factory=dict)

    def predict(self, runs: Sequence[Run]) -> list[Prediction]:
        """All runs, those of one schedule together."""
        costs = [self.costs(run, self.constants) for run in runs]
        (seconds,) = simulated([run.split for run in runs], [costs])
        return [
            Prediction(each, most_bytes(stages, run.split.micro_batches))
            for run, stages, each in zip(runs, costs, seconds.tolist(), strict=True)
        ]

    def seconds(self, runs: Sequence[Run], constants: Sequence[stack.Stack]) -> NDArray[np.float64]:
        """Seconds of a step, [constants, run]."""
        variants = [[self.costs(run, each) for run in runs] for each in constants]
        return simulated([run.split for run in runs], variants)

    def pieces(self, shape: Shape, samples: int, tp: int) -> Pieces:
        """Those of a group that shares layers; remembered."""
        key = shape, samples, tp
        if key not in self._pieces:
            nodes = max(1, tp // stack.PER_NODE)
            cluster = ClusterSpec(
                nodes=nodes,
                devices_per_node=tp // nodes,
                device=DEVICE,
                memory=int(CAP),
                intra=INTRA,
                inter=INTER if nodes > 1 else None,
            )
            self._pieces[key] = price(shape, samples, cluster)
        return self._pieces[key]

    def way(self, run: Run, constants: stack.Stack) -> stack.Way:
        """The links of a run."""
        slow = stack.is_slow(run, by_links=self.measured_links)
        if not self.measured_links:
            return stack.way(constants, slow=slow)
        card = None if slow or not run.all_reduce else min(stack.CARD, run.all_reduce / stack.PER_NODE)
        return stack.way(constants, slow=slow, near=run.inside, card=card)

    def costs(self, run: Run, constants: stack.Stack) -> Sequence[StageCost]:
        """What every stage costs."""
        split, way = run.split, self.way(run, constants)
        pieces = self.pieces(run.shape, split.samples, split.tp)
        wait = constants.broken_hop if run.nodes > 1 and not run.mended else 0.0
        crosses = split.devices > stack.PER_NODE
        bandwidth = stack.CARD if crosses else way.near.bandwidth
        known: dict[stack.RankPieces, StageCost] = {}
        found: list[StageCost] = []
        for place, stage in enumerate(stack.stages(run.shape, split.pp)):
            if stage not in known:
                known[stage] = _cost(stage, pieces, run, constants, way)
            last = place == split.pp - 1
            send = wait + (0.0 if last else pieces[stack.BLOCK].leaving / bandwidth)
            back = found[-1].send_output if found else 0.0
            found.append(replace(known[stage], send_output=send, send_gradient=back))
        return found


def _cost(
    stage: stack.RankPieces, pieces: Pieces, run: Run, constants: stack.Stack, way: stack.Way
) -> StageCost:
    """What a stage costs, but for its messages."""
    split, weights = run.split, stage.total(pieces, "weights")
    if run.shape.tied and stage.counts[stack.EMBED] and stage.counts[stack.HEAD]:
        weights -= pieces[stack.EMBED].weights
    forward, backward = (
        stack.pass_seconds(stage, pieces, split, constants, way, backward=each) for each in (False, True)
    )
    count = stack.buckets(stage, run.shape, split.tp)
    bandwidth = device_model(DEVICE).bandwidth
    kept, working = stack.kept_bytes(stage, pieces, run.shape, split)
    return StageCost(
        forward=forward,
        input_gradient=backward,
        weight_gradient=0.0,
        send_output=0.0,
        send_gradient=0.0,
        sync=stack.sum_seconds(weights, count, split, constants, way, behind=backward),
        update=constants.fixed + stack.update_seconds(weights, split, bandwidth, constants),
        state=int(stack.state_bytes(weights, split)),
        kept=kept,
        working=working,
    )


def simulated(
    splits: Sequence[Split], variants: Sequence[Sequence[Sequence[StageCost]]]
) -> NDArray[np.float64]:
    """Seconds of a step, [variant, split]; those of one schedule are simulated together."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, split in enumerate(splits):
        alike[split.pp, split.micro_batches].append(number)
    found = np.zeros((len(variants), len(splits)))
    for (ranks, count), numbers in alike.items():
        kind = ScheduleKind.ONE_F_ONE_B if count >= ranks else ScheduleKind.GPIPE
        costs = together([variant[number] for variant in variants for number in numbers])
        seconds = step_seconds(scheduled(kind, ranks, 1, count), costs)
        found[:, numbers] = np.reshape(seconds, (len(variants), len(numbers)))
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
