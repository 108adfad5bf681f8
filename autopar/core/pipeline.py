"""How one training step is cut: in time into micro-batches, over the graph into pipeline stages.

world    rank 0  1 | 2  3 | 4  5        3 pipeline ranks of a 1 x 2 mesh: the mesh is the minor part
stages        0    |  1   |  2          loop placement, one stage each
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from autopar.core.graph import Graph, InputKind
from autopar.core.mesh import Mesh
from autopar.core.schedule import ScheduleKind, rank_of_stage
from autopar.core.timeline import StageCost

VIRTUAL = (ScheduleKind.INTERLEAVED, ScheduleKind.ZBV, ScheduleKind.DUALPIPEV)


def stages_per_rank(schedule: ScheduleKind) -> int:
    """Stages on each pipeline rank: two for V and interleaved schedules, else one."""
    return 2 if schedule in VIRTUAL else 1


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`ranks` groups of devices, each a mesh of its own, hold the stages; `starts[s]` is the number of
    the first operator of stage s. Without stages `ranks` is 1 and `starts` is (0,). Where the schedule's
    waits are filled with gradients of weights (fill_bubbles.py) `filling` are the stages' planned costs.
    `hosts` says for each rank which group of the world's devices, in their order, holds it; () if each holds
    the rank of its own number. `meshes` are those of each rank, () if all have the plan's."""

    ranks: int = 1
    micro_batches: int = 1
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    starts: tuple[int, ...] = (0,)
    filling: tuple[StageCost, ...] = ()
    hosts: tuple[int, ...] = ()
    meshes: tuple[Mesh, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.starts)

    @property
    def is_staged(self) -> bool:
        return self.ranks > 1

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds `stage`."""
        return rank_of_stage(self.schedule, stage, self.ranks)

    def host(self, rank: int) -> int:
        """The group of the world's devices that holds a pipeline rank."""
        return self.hosts[rank] if self.hosts else rank

    def rank_on(self, host: int) -> int:
        """The pipeline rank that a group of the world's devices holds."""
        return self.hosts.index(host) if self.hosts else host

    def first(self, rank: int, devices: int) -> int:
        """The first rank of the world in a pipeline rank, of so many devices unless meshes are unlike."""
        if self.meshes:
            return sum(mesh.num_devices for mesh in self.meshes[:rank])
        return self.host(rank) * devices

    def placed(self, world_rank: int, devices: int) -> tuple[int, int]:
        """The pipeline rank that has a rank of the world, and its place in the mesh there."""
        if not self.meshes:
            host, place = divmod(world_rank, devices)
            return self.rank_on(host), place
        ends = list(accumulate(mesh.num_devices for mesh in self.meshes))
        rank = bisect_right(ends, world_rank)
        return rank, world_rank - self.first(rank, devices)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)


def inseparable(graph: Graph) -> dict[int, str]:
    """Numbers of operators at which no stage may begin, each with the buffer for which: one that is read
    before and written after, or the other way round. A micro-batch reads what the one before it wrote, so
    readers and writer of a buffer share a stage."""
    makers = {name: index for index, item in enumerate(graph.operators) for name in item.results if name}
    found: dict[int, str] = {}
    for buffer, value in graph.writes:
        readers = [index for index, item in enumerate(graph.operators) if buffer in item.operands]
        ends = [*readers, makers.get(value, 0)] if readers else [0]
        found |= dict.fromkeys(range(min(ends) + 1, max(ends) + 1), buffer)
    return found


def stages_of_uses(graph: Graph, starts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The stage of each use of each parameter and buffer, in the order of the operators."""
    return {
        target: tuple(bisect_right(starts, index) - 1 for index in uses)
        for target, uses in _uses(graph).items()
    }


def kept_starts(graph: Graph, known: Mapping[str, tuple[int, ...]], stages: int) -> tuple[int, ...]:
    """The cut that leaves every parameter and buffer on its stages, which are `known` for each use: before
    the first operator that uses one on a later stage. Where a graph uses one more or less often, its first
    stage alone counts."""
    least = [0] * len(graph.operators)
    for target, uses in _uses(graph).items():
        stages_of = known.get(target, (0,))
        stages_of = stages_of if len(stages_of) == len(uses) else stages_of[:1] * len(uses)
        for index, stage in zip(uses, stages_of, strict=True):
            least[index] = max(least[index], stage)
    later = ((index for index, stage in enumerate(least) if stage >= wanted) for wanted in range(1, stages))
    return (0, *(next(indices, len(least)) for indices in later))


def _uses(graph: Graph) -> dict[str, list[int]]:
    """The operators that use each parameter and buffer, by its target; one for each of its operands."""
    kinds = InputKind.PARAMETER, InputKind.BUFFER
    uses: dict[str, list[int]] = {item.name: [] for item in graph.inputs if item.kind in kinds}
    for index, item in enumerate(graph.operators):
        for name in item.operands:
            if name in uses:
                uses[name].append(index)
    return {item.target: uses[item.name] for item in graph.inputs if item.name in uses}
