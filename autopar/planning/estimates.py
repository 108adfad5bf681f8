"""What a step with K stages and M micro-batches would take, told from one assignment of another micro-batch.

    t(M)     seconds of a micro-batch: what its launches cost stays, and gradients as large as an embedding,
             the rest shrinks with its samples, as far as the devices that share them get equally many
    slowest  of t(M), on the slowest of K stages; t(M)/K where ranks have several stages, which even out
    bubble   (K - 1) t/K, or less where ranks have several stages or can do the weights' gradients meanwhile

    seconds = M slowest + (sync + update)/K + bubble + hops

No cut is sought and no schedule run through, so these are hardly above what the best cut comes to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.core.costs import LinkLike
from autopar.core.mesh import Mesh
from autopar.core.pipeline import stages_per_rank
from autopar.core.schedule import SPLIT_BACKWARD, ScheduleKind
from autopar.cost.machine.collectives import send_recv
from autopar.cost.program.step import StepCost

HALVINGS = 40  # of the interval in which a bottleneck is sought
OTHERWISE = 1.05  # times as slow at most: what samples don't divide among devices evenly is split otherwise


@dataclass(frozen=True, slots=True)
class PipelineEstimate:
    """K and M on a mesh, with estimated seconds and bytes, and whether these ask for recomputing."""

    ranks: int
    mesh: Mesh
    micro_batches: int
    seconds: float
    nbytes: float
    recomputes: bool = False


class StepEstimate(NamedTuple):
    """Seconds and bytes of a step, and whether it recomputes anything."""

    seconds: float
    nbytes: float
    recomputes: bool = False


@dataclass(frozen=True, slots=True)
class MeshEstimate:
    """Costs of one of `count` micro-batches on one mesh, all `ranks` stages together.

    Seconds: `work` of operators alone, each divided as if all devices shared it; `slowest` of the slowest
    stage of the most even cut; `weights` of gradients of weights alone; `hiding` of the work behind which
    gradient sums can hide; `fixed` of what doesn't shrink with the samples. `shards` says for which part of
    the seconds the `samples` are shared by how many devices; only where assignments are free can uneven ones
    be split otherwise. `hop_bytes` are the bytes of the values that cross a good cut. If everything is
    recomputed, that takes `recompute_seconds` and `lean_bytes` are saved. Without stages copies of
    `hidden_bytes` of the saved tensors are overlapped, to the host and back.
    """

    ranks: int
    mesh: Mesh
    count: int
    samples: int
    cost: StepCost
    work: float
    slowest: float
    weights: float
    hiding: float
    fixed: float
    shards: Mapping[int, float]
    free: bool
    hop_bytes: int
    hop: LinkLike
    state_bytes: int
    saved_bytes: int
    recompute_seconds: float
    lean_bytes: int
    hidden_bytes: int = 0
    pace: float = 1.0  # of unlike ranks: the part of the slowest one's seconds that stages by speed take

    def points(self, kind: ScheduleKind | None, micro_batches: int) -> Iterator[StepEstimate]:
        """Estimates of the step: as it is, with tensors offloaded as far as copies hide, and with all
        recomputed that can be."""
        seconds = self.seconds(kind, micro_batches)
        hidden = self.hidden_bytes * self.count / micro_batches if kind is None else 0.0
        nbytes = self.nbytes(kind, micro_batches, self.saved_bytes)
        yield StepEstimate(seconds, nbytes)
        yield StepEstimate(seconds, nbytes - hidden)
        lean = self.nbytes(kind, micro_batches, self.lean_bytes)
        extra = micro_batches * self.scaled(self.recompute_seconds, micro_batches) / self.ranks
        if lean < nbytes:
            yield StepEstimate(seconds + extra, lean, recomputes=True)

    def seconds(self, kind: ScheduleKind | None, micro_batches: int) -> float:
        """Estimated seconds of a step if memory had no end."""
        cost, others = self.cost, self.ranks - 1
        hop = send_recv(self.hop_bytes * self.count // micro_batches, self.hop) if others else 0.0
        several = 1 if kind is None else stages_per_rank(kind)
        split = 2 * self.weights if kind in SPLIT_BACKWARD else 0.0
        bubble = others * max(0.0, self.scaled(cost.micro_batch - split, micro_batches)) / several
        slowest = cost.micro_batch / self.ranks if several > 1 else self.slowest
        busy = micro_batches * max(self.pace * self.scaled(slowest, micro_batches), hop)
        exposed = cost.sync - min(cost.summed, self.scaled(self.hiding, micro_batches))
        return busy + (exposed + cost.update + self.pace * bubble) / self.ranks + 2 * others * hop

    @property
    def work_seconds(self) -> float:
        """Estimated seconds of the operators alone for the whole batch at once: no plan takes much less."""
        return self.scaled(self.work, 1)

    def nbytes(self, kind: ScheduleKind | None, micro_batches: int, kept: int) -> float:
        """Estimated bytes of the fullest rank."""
        flight = min(micro_batches, _flight(kind, self.ranks)) / self.ranks
        return self.state_bytes / self.ranks + kept * self.count / micro_batches * flight

    def scaled(self, seconds: float, micro_batches: int) -> float:
        """Seconds of the screened micro-batch as those of one of `micro_batches`."""
        share = seconds / self.cost.micro_batch if self.cost.micro_batch else 0.0
        fixed = min(share * self.fixed, seconds)
        uneven = self.unevenness(micro_batches) / self.unevenness(self.count)
        uneven = min(uneven, OTHERWISE) if self.free else uneven
        return fixed + (seconds - fixed) * self.count / micro_batches * uneven

    def unevenness(self, micro_batches: int) -> float:
        """Relative excess of the device with most samples over the average one."""
        samples = self.samples * self.count / micro_batches
        return sum(share * math.ceil(samples / by) * by / samples for by, share in self.shards.items())


def choice_of(
    alike: Sequence[MeshEstimate], micro_batches: int, kinds: Sequence[ScheduleKind], cap: float
) -> PipelineEstimate:
    """The choice of the best schedule, without `kinds` of none, among assignments on one mesh."""
    found = [
        _mixed([point for each in alike for point in each.points(kind, micro_batches)], cap)
        for kind in kinds or (None,)
    ]
    best = min(found, key=lambda each: (each.nbytes > cap, each.seconds))
    return PipelineEstimate(alike[0].ranks, alike[0].mesh, micro_batches, *best)


def _mixed(points: Sequence[StepEstimate], cap: float) -> StepEstimate:
    """The fastest that fits, of these or of any two in proportion; the smallest if none does."""
    fitting = [each for each in points if each.nbytes <= cap]
    if not fitting:
        return min(points, key=lambda each: (each.nbytes, each.seconds))
    found = list(fitting)
    for one in points:
        for other in fitting if one.nbytes > cap else ():
            share = (one.nbytes - cap) / (one.nbytes - other.nbytes)
            seconds = (1 - share) * one.seconds + share * other.seconds
            found.append(StepEstimate(seconds, cap, one.recomputes or other.recomputes))
    return min(found, key=lambda each: (each.seconds, -each.nbytes))  # no more is spared than need be


def _flight(kind: ScheduleKind | None, ranks: int) -> float:
    """How many micro-batches the fullest rank keeps at once, in units of what all its stages keep of one.

    Source: Qi et al., 2023 and 2024; what waits for gradients of weights counts as a whole one."""
    match kind:
        case None:
            return 1.0
        case ScheduleKind.GPIPE:
            return math.inf
        case ScheduleKind.INTERLEAVED:
            several = stages_per_rank(kind)
            return ((several + 1) * ranks - 1) / several
        case ScheduleKind.DUALPIPEV:
            return ranks + 0.5
        case _:
            return ranks


def bottleneck(seconds: Sequence[float], parts: int) -> float:
    """Seconds of the slowest of `parts` neighbouring parts where that is least."""
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    low, high = max(float(sums[-1]) / parts, max(seconds, default=0.0)), float(sums[-1])
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        place = 0
        for _ in range(parts):
            place = int(np.searchsorted(sums, sums[place] + middle, side="right")) - 1
        low, high = (low, middle) if place == len(sums) - 1 else (middle, high)
    return high
