"""Runs the stages of one rank by a schedule of torch.distributed.pipelining, one step at a time.

    micro-batches --> schedule: forward and backward of every stage --> losses on the last stage
    gradients: summed over the mesh of the stage, then over the copies of a tied weight, delivered once

The ranks of a pipeline that have the same place in their meshes form its group: rank i of a stage
exchanges with rank i of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from autopar.core.executable import StagedExecutable
from autopar.core.graph import TensorSpec
from autopar.core.schedule import ScheduleKind
from autopar.micro_batches import MicroBatch
from autopar.runtime import groups
from autopar.runtime.bound import summed
from autopar.runtime.gradient_sync import assign
from autopar.runtime.parameters import local
from autopar.runtime.stage import Stage, splits_cleanly

SINGLE: dict[ScheduleKind, Any] = {ScheduleKind.GPIPE: ScheduleGPipe, ScheduleKind.ONE_F_ONE_B: Schedule1F1B}
MULTIPLE: dict[ScheduleKind, Any] = {
    ScheduleKind.INTERLEAVED: ScheduleInterleaved1F1B,
    ScheduleKind.ZB1P: ScheduleInterleavedZeroBubble,
    ScheduleKind.ZBV: ScheduleZBVZeroBubble,
    ScheduleKind.DUALPIPEV: ScheduleDualPipeV,
}


class StagedProgram:
    """This rank's stages, tied to the tensors of a parallel module, and their schedules.

    `find(target)()` is the outer parameter or buffer of that name, on this rank; `group` are the ranks
    with this one's place in their meshes, one of each pipeline rank.
    """

    def __init__(
        self,
        made: StagedExecutable,
        find: Callable[[str], Callable[[], Any]],
        *,
        mesh: Any,
        device: torch.device,
        bucket_bytes: int,
        timeout: timedelta,
        exact_random: bool,
    ) -> None:
        self.executable = made
        self._find, self._device, self._bucket_bytes = find, device, bucket_bytes
        self._stages = [
            Stage(each, find, mesh=mesh, device=device, exact_random=exact_random, shorter=shorter)
            for each, shorter in zip_longest(made.stages, made.shorter)
        ]
        self.group = pipeline_group(made, timeout)
        self._tied = _tied_groups(made, timeout)
        self._weights: Sequence[float] = ()
        self._schedule = self._make_schedule()

    @property
    def _is_last(self) -> bool:
        return any(each.stage == self.executable.pipeline.num_stages - 1 for each in self.executable.stages)

    def train(self, batch: Sequence[MicroBatch]) -> Tensor:
        """Forward and backward of all micro-batches; the loss of the batch, on every rank.

        Gradients are added to the parameters' `.grad`.
        """
        losses = self._run(batch, self._schedule.step)
        self._deliver()
        self._end()
        return self._share(losses)

    def evaluate(self, batch: Sequence[MicroBatch]) -> Tensor:
        """The loss of the batch, on every rank, without gradients."""
        with torch.no_grad():
            losses = self._run(batch, self._schedule.eval)
            self._end()
            return self._share(losses)

    def untie(self) -> None:
        """Let go of the parameters' storage."""
        for stage in self._stages:
            stage.untie()

    def _end(self) -> None:
        for stage in self._stages:
            stage.end()

    # -- a step ---------------------------------------------------------------------------------

    def _run(self, batch: Sequence[MicroBatch], step: Callable[..., Any]) -> list[Tensor]:
        """The weighted losses of the micro-batches; empty but on the last stage."""
        seed = torch.initial_seed()
        for stage in self._stages:
            stage.begin(batch, seed)
        self._weights = [1.0 if self.executable.loss_is_sum else micro.share for micro in batch]
        numbers, losses = torch.arange(len(batch)), []  # type: ignore[var-annotated]
        target = numbers if self._is_last else None
        step(micro_batch=numbers, target=target, losses=losses, return_outputs=False)
        return [loss.detach() for loss in losses]

    def _weighted(self, loss: Tensor, number: Tensor) -> Tensor:
        return loss * self._weights[int(number)]

    def _share(self, losses: Sequence[Tensor]) -> Tensor:
        """The sum of the losses, from the rank that holds the last stage."""
        pipeline = self.executable.pipeline
        total = sum(losses) if losses else None
        (spec,) = self.executable.outputs
        value = torch.zeros(spec.shape, dtype=spec.dtype, device=self._device) if total is None else total
        assert isinstance(value, Tensor)
        dist.broadcast(value, group=self.group, group_src=pipeline.rank_of(pipeline.num_stages - 1))
        return value

    def _make_schedule(self) -> Any:
        pipeline = self.executable.pipeline
        stages = [self._torch_stage(stage) for stage in self._stages]
        options = {"loss_fn": self._weighted, "scale_grads": False}
        if pipeline.schedule in SINGLE:
            return SINGLE[pipeline.schedule](stages[0], pipeline.micro_batches, **options)
        return MULTIPLE[pipeline.schedule](stages, pipeline.micro_batches, **options)

    def _torch_stage(self, stage: Stage) -> PipelineStage:
        made = stage.executable
        last = made.stage == self.executable.pipeline.num_stages - 1
        sent = self.executable.outputs if last else made.sent
        return _TorchStage(
            stage,
            made.stage,
            self.executable.pipeline.num_stages,
            self._device,
            input_args=tuple(map(_example, made.received)),
            output_args=tuple(map(_example, sent)),
            group=self.group,
            dw_builder=None if splits_cleanly(made) else _nothing_left,
        )

    # -- gradients ------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Sum this step's gradients over ranks, and add them to the parameters'."""
        totals: dict[str, Tensor] = {}
        for stage in self._stages:
            gradients = stage.take()
            self._sum(stage, gradients)
            for index, gradient in sorted(gradients.items()):
                target = stage.learned[index].target
                totals[target] = totals[target] + gradient if target in totals else gradient
        for target, group in self._tied.items():
            if group is not None:
                self._sum_copies(target, totals, group)
        for target, total in totals.items():
            self._add(target, total)

    def _sum(self, stage: Stage, gradients: dict[int, Tensor]) -> None:
        """Over the ranks of the stage's mesh, in buckets, in place of the local gradients."""
        flights = []
        for bucket in assign(summed(stage.learned), self._bucket_bytes):
            members = [member for member in bucket.members if member.index in gradients]
            if members:
                flat = torch.cat([gradients[member.index].reshape(-1) for member in members])
                work = dist.all_reduce(flat, group=groups.group(bucket.key), async_op=True)
                flights.append((members, flat, work))
        for members, flat, work in flights:
            work.wait()
            shapes = [gradients[member.index].shape for member in members]
            totals = torch.split(flat, [shape.numel() for shape in shapes])
            for member, total, shape in zip(members, totals, shapes, strict=True):
                gradients[member.index] = total.view(shape)

    def _sum_copies(self, target: str, totals: dict[str, Tensor], group: dist.ProcessGroup) -> None:
        """Over the stages that have a copy of a tied weight; all take part, with a gradient or without."""
        mine = totals.get(target)
        total = torch.zeros_like(local(self._find(target)())) if mine is None else mine.contiguous()
        dist.all_reduce(total, group=group)
        totals[target] = total

    def _add(self, target: str, total: Tensor) -> None:
        outer = self._find(target)()
        if outer.grad is None:
            outer.grad = DTensor(total, outer._spec, requires_grad=False)
        else:
            with torch.no_grad():
                local(outer.grad).add_(total)


def _nothing_left() -> Callable[[], None]:
    """For stages whose backward isn't split: that of the inputs does all, that of the weights nothing."""
    return lambda: None


class _TorchStage(PipelineStage):
    """A stage that holds no more than it needs, whose micro-batches may differ in size.

    Receive buffers last from the receive to what uses them, each in the shape of its own micro-batch:
    torch makes those of all micro-batches, like the first, before the first step, and keeps them. Losses,
    which torch collects, let go of their micro-batch, whose received tensors the leaves of its graph are.

    In `eval` torch asks for the gradient of a neighbour on the same rank too, and finds none.
    """

    submod: Stage

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_forward_infra(*args, **kwargs)
        for chunk in self.args_recv_info.values():
            self._empty(chunk)
        return made

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_backward_infra(*args, **kwargs)
        for chunk in self.grad_recv_info.values():
            self._empty(chunk)
        return made

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        if not self.is_first:
            self._fill(self.args_recv_info[fwd_chunk_id], self.submod.received(fwd_chunk_id))
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if self.has_backward and not self.is_last:
            self._fill(self.grad_recv_info[bwd_chunk_id], self.submod.sent(bwd_chunk_id))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        found = super()._retrieve_recv_activations(fwd_chunk_id)
        self._empty(self.args_recv_info[fwd_chunk_id])
        return found

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        found = super()._retrieve_recv_grads(bwd_chunk_id)
        self._empty(self.grad_recv_info[bwd_chunk_id])
        return found

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and (full_backward or self.dw_builder):
            loss.detach_()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        state = self.backward_state.get(bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if state is not None and self.is_last:
            for loss in state[2] if isinstance(state[2], tuple) else (state[2],):
                loss.detach_()

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_first:
            gradients, specs = self.bwd_cache[bwd_chunk_id], self.submod.received(bwd_chunk_id)
            self.bwd_cache[bwd_chunk_id] = tuple(map(self._sent_back, gradients, specs))
        return super().get_bwd_send_ops(bwd_chunk_id)

    def _sent_back(self, gradient: Tensor | None, spec: TensorSpec) -> Tensor | None:
        """The gradient of a received value; zeros if it got none, as the stage before waits for it."""
        if gradient is not None or not spec.requires_grad:
            return gradient
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Older torch compares every micro-batch's with the first one's."""

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            # Where there is no gradient, torch writes zeros.
            self._fill(self.grad_recv_info[mb_index], self.submod.sent(mb_index))
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _fill(self, infos: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
        """Give those that receive a tensor a buffer."""
        for info, spec in zip(infos, specs, strict=False):  # the first stage has arguments
            if info.buffer is not None:
                info.buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)

    def _empty(self, infos: Sequence[Any]) -> None:
        """Let go of the buffers; one without memory stands for those to come."""
        for info in infos:
            if getattr(info, "buffer", None) is not None:
                info.buffer = torch.empty(0, device=self.device)


def pipeline_group(made: StagedExecutable, timeout: timedelta) -> dist.ProcessGroup:
    """The group of the ranks with this one's place in their meshes; collective."""
    devices, mine = made.mesh.num_devices, None
    for place in range(devices):
        group = groups.of_ranks(
            [rank * devices + place for rank in range(made.pipeline.ranks)], timeout=timeout
        )
        mine = group or mine
    assert mine is not None
    return mine


def _tied_groups(made: StagedExecutable, timeout: timedelta) -> dict[str, dist.ProcessGroup | None]:
    """For each weight on several pipeline ranks the group of its copies, None on other ranks; collective."""
    devices = made.mesh.num_devices
    learns = {item.target: item.spec.requires_grad for item in made.inputs}
    found: dict[str, dist.ProcessGroup | None] = {}
    known: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for target in sorted(made.holders):
        holders = made.holders[target]
        if len(holders) < 2 or not learns[target]:
            continue
        if holders not in known:
            known[holders] = None
            for place in range(devices):
                group = groups.of_ranks([rank * devices + place for rank in holders], timeout=timeout)
                known[holders] = group or known[holders]
        found[target] = known[holders]
    return found


def _example(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad)
