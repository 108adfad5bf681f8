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
from torch.distributed.tensor import DTensor

from autopar.core.executable import StagedExecutable
from autopar.core.schedule import SPLIT_BACKWARD
from autopar.micro_batches import MicroBatch
from autopar.runtime import groups
from autopar.runtime.bound import summed
from autopar.runtime.gradient_sync import assign
from autopar.runtime.parameters import local
from autopar.runtime.stage import Stage


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
        from autopar.runtime.torch_stage import schedule_of  # with torch's compiler, which takes a second

        self.executable = made
        self._find, self._device, self._bucket_bytes = find, device, bucket_bytes
        self._stages = [
            Stage(
                each,
                find,
                mesh=mesh,
                device=device,
                exact_random=exact_random,
                shorter=shorter,
                splits_backward=made.pipeline.schedule in SPLIT_BACKWARD,
            )
            for each, shorter in zip_longest(made.stages, made.shorter)
        ]
        self.group = pipeline_group(made, timeout)
        self._tied = _tied_groups(made, timeout)
        self._weights: Sequence[float] = ()
        self._schedule, self._sends = schedule_of(made, self._stages, self._weighted, self.group, device)

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
        self._sends.end()
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
