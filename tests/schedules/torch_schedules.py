"""Torch's own schedules on stand-in stages: their orders, and what each rank posts and waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from autopar.core.schedule import Action, ActionKind, ScheduleKind
from autopar.core.timeline import StageCost

SINGLE = {
    ScheduleKind.GPIPE: torch_schedules.ScheduleGPipe,
    ScheduleKind.ONE_F_ONE_B: torch_schedules.Schedule1F1B,
}
MULTI = {
    ScheduleKind.INTERLEAVED: torch_schedules.ScheduleInterleaved1F1B,
    ScheduleKind.ZB1P: torch_schedules.ScheduleInterleavedZeroBubble,
    ScheduleKind.ZBV: torch_schedules.ScheduleZBVZeroBubble,
    ScheduleKind.DUALPIPEV: torch_schedules.ScheduleDualPipeV,
}
Shape = tuple[ScheduleKind, int, int, int]  # ranks, stages per rank, micro-batches


@dataclass(frozen=True)
class Transfer:
    """One micro-batch's output (to the next stage) or gradient (to the previous) on its way."""

    source: int
    target: int
    micro_batch: int


@dataclass(frozen=True)
class Post:
    """Begin, on this side, a send or receive; the other side posts the same transfer."""

    transfer: Transfer


@dataclass(frozen=True)
class Wait:
    transfer: Transfer


Program: TypeAlias = list[Action | Post | Wait]


def multi(shape: Shape) -> Any:
    """Torch's schedule of several stages per rank, on what its constructor asks of stages."""
    kind, ranks, stages, micro_batches = shape
    stand_ins = [
        SimpleNamespace(num_stages=ranks * stages, group_size=ranks, group_rank=0, submod=None)
        for _ in range(stages)
    ]
    return MULTI[kind](stand_ins, micro_batches)  # type: ignore[arg-type]


def multi_programs(shape: Shape) -> list[Program]:
    """What torch's runtime does on each rank, by the rules of its `_perform_action`."""
    schedule = multi(shape)
    rank_of, last = schedule.stage_index_to_group_rank, len(schedule.stage_index_to_group_rank) - 1
    ends = {"SEND_F": (0, 1), "RECV_F": (-1, 0), "SEND_B": (0, -1), "RECV_B": (1, 0)}

    def steps(action: Any) -> Iterable[Action | Post | Wait]:
        stage, kind, n = action.stage_index, action.computation_type.value, action.microbatch_index
        if kind in ends:
            source, target = ends[kind]
            yield Post(Transfer(stage + source, stage + target, n))
        elif kind in "FBIW":
            giver = {"F": stage - 1, "W": -1}.get(kind, stage + 1)
            if 0 <= giver <= last and rank_of[giver] != rank_of[stage]:
                yield Wait(Transfer(giver, stage, n))
            yield Action(stage, ActionKind(kind), n)

    return [
        [step for action in order for half in action.sub_actions or (action,) for step in steps(half)]
        for order in schedule.pipeline_order_with_comms.values()
    ]


class Recorder:
    """A stage that writes down what torch's loop computes on it; its sends and receives are Transfers."""

    def __init__(self, index: int, stages: int) -> None:
        self.stage_index, self.num_stages, self.is_last = index, stages, index == stages - 1
        self.program: Program = []

    def _send(self, target: int, n: int) -> list[Transfer]:
        return [Transfer(self.stage_index, target, n)] if 0 <= target < self.num_stages else []

    def _receive(self, source: int, n: int) -> list[Transfer]:
        return [Transfer(source, self.stage_index, n)] if 0 <= source < self.num_stages else []

    def get_fwd_recv_ops(self, n: int) -> list[Transfer]:
        return self._receive(self.stage_index - 1, n)

    def get_fwd_send_ops(self, n: int) -> list[Transfer]:
        return self._send(self.stage_index + 1, n)

    def get_bwd_recv_ops(self, n: int) -> list[Transfer]:
        return self._receive(self.stage_index + 1, n)

    def get_bwd_send_ops(self, n: int) -> list[Transfer]:
        return self._send(self.stage_index - 1, n)

    def forward_one_chunk(self, n: int, *_: Any, **__: Any) -> None:
        self.program.append(Action(self.stage_index, ActionKind.FORWARD, n))

    def backward_one_chunk(self, n: int, **_: Any) -> None:
        self.program.append(Action(self.stage_index, ActionKind.BACKWARD, n))

    def perform_reduce_grad(self, *_: Any) -> None:
        pass


def single_programs(shape: Shape, patch: pytest.MonkeyPatch) -> list[Program]:
    """What torch's loop for one stage per rank does on each rank: run, with sends that only write down."""
    kind, ranks, _, micro_batches = shape
    programs: list[Program] = []

    def post(transfers: Sequence[Transfer], desc: str = "") -> Sequence[Transfer]:
        programs[-1].extend(map(Post, transfers))
        return transfers

    def wait(transfers: Sequence[Transfer]) -> None:
        programs[-1].extend(map(Wait, transfers))

    patch.setattr(torch_schedules, "_batch_p2p", post)
    patch.setattr(torch_schedules, "_sorted_batch_p2p", lambda transfers, desc: {0: post(transfers)})
    patch.setattr(torch_schedules, "_wait_batch_p2p", wait)
    for rank in range(ranks):
        stage = Recorder(rank, ranks)
        programs.append(stage.program)
        schedule = SINGLE[kind](stage, micro_batches)  # type: ignore[arg-type]
        patch.setattr(schedule, "_initialize_stage", lambda *_: None)
        schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches)
    return programs


def rendezvous_seconds(programs: list[Program], costs: Sequence[StageCost], hop: float) -> float:
    """How long the programs take if a transfer begins when both sides have posted it and lasts `hop`."""
    now, left = [0.0] * len(programs), [list(program) for program in programs]
    posted: dict[Transfer, float] = {}
    there: dict[Transfer, float] = {}
    while any(left):
        before = sum(map(len, left))
        for rank, program in enumerate(left):
            while program:
                match program[0]:
                    case Action(stage, kind, _):
                        now[rank] += costs[stage].seconds(kind)
                    case Post(transfer) if transfer in posted:
                        there[transfer] = max(posted[transfer], now[rank]) + hop
                    case Post(transfer):
                        posted[transfer] = now[rank]
                    case Wait(transfer) if transfer in there:
                        now[rank] = max(now[rank], there[transfer])
                    case Wait():
                        break
                program.pop(0)
        assert sum(map(len, left)) < before, "torch's programs deadlock"
    return max(now)
