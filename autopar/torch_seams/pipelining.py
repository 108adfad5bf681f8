"""Stages and schedules of torch.distributed.pipelining, by public names of what they do inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from autopar.torch_seams.required import expect, required

with required():
    start_p2p: Callable[[list[dist.P2POp]], list[dist.Work]] = schedules._batch_p2p
    """Start sends and receives together, as torch's schedules do."""

    wait_p2p: Callable[[list[dist.Work]], None] = schedules._wait_batch_p2p
    """Wait for these."""

    action_of: Callable[[str], Any] = schedules._Action.from_str
    """What a rank does in one slot of a schedule, from its name."""

for _name in (
    *("_prepare_forward_infra", "_prepare_backward_infra"),
    *("_retrieve_recv_activations", "_retrieve_recv_grads"),
):
    expect(hasattr(PipelineStage, _name), f"PipelineStage.{_name}")


def set_order(schedule: Any, orders: Mapping[int, Sequence[str]]) -> None:
    """Let a schedule of several stages run in this order of actions of each rank."""
    schedule.pipeline_order = {rank: list(map(action_of, slots)) for rank, slots in orders.items()}
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)


class ReceivingStage(PipelineStage):
    """A stage that is told when its buffers are made, and when a micro-batch's tensors have come."""

    def prepared(self, receives: Mapping[int, Sequence[Any]]) -> None:
        """Buffers were made for these, by micro-batch."""

    def activations_came(self, micro_batch: int) -> None:
        """What the stage before sent has come."""

    def gradients_came(self, micro_batch: int) -> None:
        """What the stage after sent has come."""

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_forward_infra(*args, **kwargs)
        self.prepared(self.args_recv_info)
        return made

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_backward_infra(*args, **kwargs)
        self.prepared(self.grad_recv_info)
        return made

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        found = super()._retrieve_recv_activations(fwd_chunk_id)
        self.activations_came(fwd_chunk_id)
        return found

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        found = super()._retrieve_recv_grads(bwd_chunk_id)
        self.gradients_came(bwd_chunk_id)
        return found

    def _validate_fwd_outputs(self, outputs: tuple[Any, ...]) -> None:
        """Older torch compares every micro-batch's with the first one's."""
