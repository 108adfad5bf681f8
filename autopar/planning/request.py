"""What the user asks of the search, in the words of the passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.core.costs import ADAM, OptimizerState
from autopar.core.force import Force, Pins
from autopar.core.gathering import ShardState
from autopar.core.mesh import Mesh
from autopar.core.offload import Offload
from autopar.core.pipeline import stages_per_rank
from autopar.core.placement import Layout
from autopar.core.recompute import Recompute
from autopar.core.schedule import ScheduleKind, check_schedule
from autopar.errors import InputError

DEFAULT_GAP = 1e-3
MOST_ACTIONS = 20_000  # of a schedule that nobody asked for by name: timing them all takes seconds


@dataclass(frozen=True, slots=True)
class Request:
    """Every field has the command line's default.

    `memory` is bytes per device, `stored` fixes parameters that lie on the devices already. With
    `local_inputs` user inputs may be passed in parts, as `user_layouts` (by path) says where it can;
    with `local_outputs` all outputs but the loss may leave in parts. `schedule`
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
    alternatives: bool = True
    optimizer: OptimizerState = ADAM
    stored: Mapping[str, Layout] | None = None
    local_inputs: bool = False
    local_outputs: bool = False
    user_layouts: Mapping[str, Layout] | None = None
    stages: int = 1  # pipeline ranks
    micro_batches: int = 1
    schedule: ScheduleKind | None = ScheduleKind.ONE_F_ONE_B
    recompute: Recompute = Recompute.AUTO
    offload: Offload = Offload.AUTO
    shard_state: ShardState = ShardState.AUTO
    homes: Mapping[str, int] | None = None  # the first stage of each parameter, where they lie already
    relay: bool = False  # the stages run one after the other: a call without gradients, no step

    def kinds(self) -> list[ScheduleKind]:
        """The schedule that is asked for, or all that can be run and timed; none without stages. Raises
        InputError, naming the rule, if there is none."""
        if self.stages == 1 or self.relay:
            return []
        found, refused = [], []
        for kind in [self.schedule] if self.schedule else ScheduleKind:
            try:
                check_schedule(
                    kind,
                    ranks=self.stages,
                    stages_per_rank=stages_per_rank(kind),
                    micro_batches=self.micro_batches,
                )
                found.append(kind)
            except InputError as error:
                refused.append(error)
        if not found:
            raise refused[0]
        small = [kind for kind in found if self.actions(kind) <= MOST_ACTIONS]
        return small or [min(found, key=lambda kind: (self.actions(kind), kind is ScheduleKind.GPIPE))]

    def actions(self, kind: ScheduleKind) -> int:
        """Forwards and backwards in a step."""
        return 2 * self.stages * stages_per_rank(kind) * self.micro_batches
