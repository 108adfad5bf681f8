"""Stages as torch.distributed.pipelining runs them, under its schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules as torch_schedules

from autopar.core.graph import TensorSpec
from autopar.core.schedule import ScheduleKind
from autopar.runtime.executable import StagedExecutable
from autopar.runtime.execute.stage import StageModule
from autopar.schedules.deliveries import Message, proved
from autopar.schedules.fill_bubbles import order_of
from autopar.torch_seams.pipelining import ReceivingStage, set_order, start_p2p, wait_p2p
from autopar.torch_seams.receive_buffers import let_go, prepare, take_tensors

SINGLE: dict[ScheduleKind, Any] = {  # one stage for each rank
    ScheduleKind.GPIPE: torch_schedules.ScheduleGPipe,
    ScheduleKind.ONE_F_ONE_B: torch_schedules.Schedule1F1B,
}
MULTIPLE: dict[ScheduleKind, Any] = {
    ScheduleKind.INTERLEAVED: torch_schedules.ScheduleInterleaved1F1B,
    ScheduleKind.ZB1P: torch_schedules.ScheduleInterleavedZeroBubble,
    ScheduleKind.ZBV: torch_schedules.ScheduleZBVZeroBubble,
    ScheduleKind.DUALPIPEV: torch_schedules.ScheduleDualPipeV,
}


def schedule_of(
    made: StagedExecutable,
    stages: Sequence[StageModule],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[Any, Sends]:
    """Torch's schedule of a rank's stages, and the rank's sends, to be ended after each step of it; `loss_fn`
    takes the last stage's output and the micro-batch's number, `group` are the ranks of the pipeline."""
    pipeline = made.pipeline
    options = {"loss_fn": loss_fn, "scale_grads": False}
    if pipeline.schedule in SINGLE:
        sends = Sends({})
        (wrapped,) = (_torch_stage(stage, made, group, device, None) for stage in stages)
        return SINGLE[pipeline.schedule](wrapped, pipeline.micro_batches, **options), sends
    order = order_of(pipeline)
    sends = Sends(proved(order, group.rank()))
    several = [_torch_stage(stage, made, group, device, sends) for stage in stages]
    schedule = MULTIPLE[pipeline.schedule](several, pipeline.micro_batches, **options)
    if pipeline.filling:
        set_order(schedule, {rank: list(map(str, slots)) for rank, slots in enumerate(order.orders)})
    return schedule, sends


class Sends:
    """Messages that a rank has sent and that may be on their way, until a reply proves that they arrived.

    Torch's schedules of several stages wait for all sends when the step ends, and keep their tensors in
    memory until then.
    """

    def __init__(self, proved: Mapping[Message, Sequence[Message]]) -> None:
        self._proved = proved
        self._works: dict[Message, list[dist.Work]] = {}

    def start(self, message: Message, operations: list[dist.P2POp]) -> None:
        """Send as torch's schedules do: on GPUs both ends must."""
        self._works[message] = start_p2p(operations)

    def end_proved(self, message: Message) -> None:
        """Let go of what has arrived, now that `message` has come."""
        for each in self._proved.get(message, ()):
            wait_p2p(self._works.pop(each, []))

    def end(self) -> None:
        """Wait for what is left."""
        while self._works:
            wait_p2p(self._works.popitem()[1])

    def forget(self) -> None:
        """Drop the handles of transfers that may never end."""
        self._works.clear()


def _torch_stage(
    stage: StageModule,
    whole: StagedExecutable,
    group: dist.ProcessGroup,
    device: torch.device,
    sends: Sends | None,
) -> _TorchStage:
    made = stage.executable
    last = made.stage == whole.pipeline.num_stages - 1
    sent = whole.outputs if last else made.sent
    wrapped = _TorchStage(
        stage,
        made.stage,
        whole.pipeline.num_stages,
        device,
        input_args=tuple(map(_example, made.received)),
        output_args=tuple(map(_example, sent)),
        group=group,
        dw_builder=None if stage.between else _nothing_left,
        sends=sends,
    )
    if whole.pipeline.hosts:  # under schedules of one stage a rank, which ask nothing else of the group
        wrapped.stage_index_to_group_rank = dict(enumerate(whole.pipeline.hosts))
    return wrapped


def _example(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad)


def _nothing_left() -> Callable[[], None]:
    """For stages whose backward isn't split: that of the inputs does all, that of the weights nothing."""
    return lambda: None


class _TorchStage(ReceivingStage):
    """A stage that holds no more than it needs, whose micro-batches may differ in size.

    Receive buffers last from the receive to what uses them, each in the shape of its own micro-batch (see
    `receive_buffers`). Losses, which torch collects, let go of their micro-batch, whose received tensors
    the leaves of its graph are. With `sends` a stage sends for itself and gives torch nothing to send.

    In `eval` torch asks for the gradient of a neighbour on the same rank too, and finds none.
    """

    submod: StageModule

    def __init__(self, *args: Any, sends: Sends | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sends = sends

    def prepared(self, receives: Mapping[int, Sequence[Any]]) -> None:
        for chunk in receives.values():
            let_go(chunk, self.device)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        if not self.is_first:
            prepare(self.args_recv_info[fwd_chunk_id], self.submod.received(fwd_chunk_id), self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if self.has_backward and not self.is_last:
            prepare(self.grad_recv_info[bwd_chunk_id], self.submod.sent(bwd_chunk_id), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def activations_came(self, micro_batch: int) -> None:
        self._came(Message(self.stage_index - 1, True, micro_batch), self.args_recv_info[micro_batch])

    def gradients_came(self, micro_batch: int) -> None:
        self._came(Message(self.stage_index + 1, False, micro_batch), self.grad_recv_info[micro_batch])

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        between = None if full_backward else self.submod.between
        with between.first_half(self.submod.parameters()) if between else self._learning():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None:
            loss.detach_()
        if between is not None and self.has_backward:
            received, groups, *_ = self.backward_state[bwd_chunk_id]
            for value in received:
                if value.requires_grad:  # a leaf of autograd's graph; what is read of it yet is in boxes
                    value.grad, value.data = None, value.data.new_empty(0)
            self.backward_state[bwd_chunk_id] = (), groups, (), None  # all that the second half asks for

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._learning() if self.submod.between else nullcontext():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _learning(self) -> AbstractContextManager[None]:
        """Around what makes gradients of weights: W, or all of B, or all of I where backward isn't split."""
        return self.submod.learning() if self.has_backward else nullcontext()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        return self._started(Message(self.stage_index, True, fwd_chunk_id), operations)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_first:
            gradients, specs = self.bwd_cache[bwd_chunk_id], self.submod.received(bwd_chunk_id)
            self.bwd_cache[bwd_chunk_id] = tuple(map(self._sent_back, gradients, specs))
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        return self._started(Message(self.stage_index, False, bwd_chunk_id), operations)

    def _started(self, message: Message, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """The operations that are left to torch."""
        if self._sends is None:
            return operations
        self._sends.start(message, operations)
        return []

    def _sent_back(self, gradient: Tensor | None, spec: TensorSpec) -> Tensor | None:
        """The gradient of a received value; zeros if it got none, as the stage before waits for it."""
        if gradient is not None or not spec.requires_grad:
            return gradient
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            # Where there is no gradient, torch writes zeros.
            prepare(self.grad_recv_info[mb_index], self.submod.sent(mb_index), self.device)
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _came(self, message: Message, receives: Sequence[Any]) -> None:
        """Let go of its buffers, and of what it proves; if no tensor came, it proves nothing."""
        if self._sends is not None and take_tensors(receives):
            self._sends.end_proved(message)
        let_go(receives, self.device)
