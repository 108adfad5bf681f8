"""Runs the stages of one rank by a schedule of torch.distributed.pipelining, one step at a time.

    micro-batches --> schedule: forward and backward of every stage --> losses on the last stage
    gradients: summed over the mesh of the stage from its last backward on, beside the rest of the schedule,
               then over the copies of a tied weight, delivered once

The ranks of a pipeline that have the same place in their meshes form its group: rank i of a stage
exchanges with rank i of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.core.pipeline import Pipeline
from autopar.core.placement import Shard
from autopar.core.schedule import SPLIT_BACKWARD
from autopar.errors import InputError
from autopar.runtime.collectives import groups, transport
from autopar.runtime.collectives.random import ExactDraws, Stream
from autopar.runtime.compiled.compiler import check_pipeline
from autopar.runtime.executable import StagedExecutable
from autopar.runtime.execute.stage import StageModule
from autopar.runtime.execute.unflushed import StaleBatch, Unflushed
from autopar.runtime.execute.unlike_stages import UnlikeSchedule
from autopar.runtime.execute.weight_versions import WeightVersions
from autopar.runtime.parameters.parameters import add_gradient, local
from autopar.trace.micro_batches import MicroBatch


class StagedProgram:
    """Ties the stages of this rank to the tensors of a parallel module, and runs their schedules.

    `find(target)()` is the outer parameter or buffer of that name, on this rank; `group` are the ranks
    with this one's place in their meshes, one of each pipeline rank.
    """

    def __init__(
        self,
        made: StagedExecutable,
        find: Callable[[str], Callable[[], Any]],
        *,
        mesh: DeviceMesh,
        device: torch.device,
        bucket_bytes: int | None,
        timeout: timedelta,
        stream: Stream | None,
    ) -> None:
        from autopar.runtime.execute.torch_stage import (
            schedule_of,  # with torch's compiler, which takes a second
        )

        self.executable = made
        self._find, self._device, self._stream = find, device, stream
        self._stages_of = partial(_stages_of, made, mesh=mesh, device=device, bucket_bytes=bucket_bytes)
        self._stages = self._stages_of(find)
        self.group = pipeline_group(made, timeout)
        self._from_last = partial(send_from_last, pipeline=made.pipeline, group=self.group)
        self._tied = _tied_groups(made, timeout)
        self._parts = {item.target: item for item in made.inputs}
        self._weights: Sequence[float] = ()
        self._scale: Tensor | None = None  # of the losses from which backward starts
        self._schedule: Any
        self._sends: Any  # what is on its way
        if made.pipeline.meshes:
            (stage,) = self._stages
            self._schedule = self._sends = UnlikeSchedule(made.pipeline, stage, self._weighted, device)
        else:
            self._schedule, self._sends = schedule_of(made, self._stages, self._weighted, self.group, device)
        self._draws: int | ExactDraws = 0
        self._raised = False
        self._unflushed: Unflushed | None = None
        self._tells: bool | None = None  # of stages that are compiled

    @property
    def _is_last(self) -> bool:
        return any(each.stage == self.executable.pipeline.num_stages - 1 for each in self.executable.stages)

    def train(self, batch: Sequence[MicroBatch], scale: Tensor | None = None) -> Tensor:
        """Run forward and backward of all micro-batches; return the loss of the batch, on every rank.

        Gradients, those of the loss times `scale`, are added to the parameters' `.grad`.
        """
        self._begin(batch)
        self._scale = scale
        with self._whole():
            losses = self._run(len(batch), self._schedule.step)
            self._deliver(self._stages)
            self._end()
            return self._share(losses if scale is None else [loss / scale for loss in losses])

    def train_stale(
        self, batch: Sequence[MicroBatch], following: Sequence[MicroBatch] | None, versions: WeightVersions
    ) -> Tensor:
        """Train at the weights of the step before. The `following` batch begins to come in, which then is the
        next one; without it all is flushed."""
        if self._raised:
            raise _broken_off()
        unflushed = self._unflushed = self._unflushed or self._unflush(versions)
        mine, turn = unflushed.following or StaleBatch(batch, self._stale_seed()), versions.next_turn()
        alike = self._stream is None  # stages seed the default generator for other batches each
        with self._whole(), torch.random.fork_rng([], enabled=alike):
            coming = None if following is None else StaleBatch(following, self._stale_seed())
            losses = unflushed.run(turn, mine, coming)
            self._deliver([unflushed.stages[turn]])
            unflushed.stages[turn].end()
            return unflushed.share(self._total(losses))

    def _unflush(self, versions: WeightVersions) -> Unflushed:
        (even,), (odd,) = (self._stages_of(versions.finder(turn, self._find)) for turn in (0, 1))
        for stage in () if self._tells is None else (even, odd):
            stage.compile(tells=bool(self._tells))
        return Unflushed((even, odd), self.group, self.executable.pipeline, self._device)

    def drop(self) -> None:
        """Forget the batch that has begun to come in; collective."""
        if self._unflushed is not None and not self._raised:
            self._unflushed.drop()

    def evaluate(self, batch: Sequence[MicroBatch]) -> Tensor:
        """Compute the loss of the batch, on every rank, without gradients."""
        self._begin(batch)
        self._scale = None
        with torch.no_grad(), self._whole():
            losses = self._run(len(batch), self._schedule.eval)
            self._end()
            return self._share(losses)

    def _all_stages(self) -> list[StageModule]:
        return [*self._stages, *(self._unflushed.stages if self._unflushed else ())]

    def compile(self, *, tells: bool) -> None:
        """Compile the stages, at their next calls."""
        check_pipeline(self.executable.pipeline)
        self._tells = tells
        for stage in self._all_stages():
            stage.compile(tells=tells)

    def untie(self) -> None:
        """Let go of the parameters' storage."""
        for stage in self._all_stages():
            stage.untie()

    def _end(self) -> None:
        for stage in self._stages:
            stage.end()
        if isinstance(self._draws, ExactDraws):
            self._draws.end(self._from_last)

    # -- a step ---------------------------------------------------------------------------------

    def _begin(self, batch: Sequence[MicroBatch]) -> None:
        if self._raised:
            raise _broken_off()
        self._draws = self._seed()
        for stage in self._stages:
            stage.begin(batch, self._draws)
        self._weights = [micro.weight for micro in batch]

    def _seed(self) -> int | ExactDraws:
        return ExactDraws(self._device) if self._stream is None else self._stream.next()

    def _stale_seed(self) -> int | ExactDraws:
        """Batches of which one begins before the other ends can't follow each other in one generator."""
        return ExactDraws(self._device, torch.initial_seed()) if self._stream is None else self._stream.next()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Around what must run to its end. If it raises, nothing is waited for, as others may never come; and
        no step follows, which could take a message of this one for its own."""
        self._raised = True
        try:
            yield
            self._raised = False
        finally:
            if self._raised:
                self._sends.forget()
                for stage in self._stages:
                    stage.forget()
                if self._unflushed is not None:
                    self._unflushed.forget()

    def _run(self, count: int, step: Callable[..., Any]) -> list[Tensor]:
        """Run `count` micro-batches; return their weighted losses, none but on the last stage."""
        numbers, losses = torch.arange(count), []  # type: ignore[var-annotated]
        target = numbers if self._is_last else None
        step(micro_batch=numbers, target=target, losses=losses, return_outputs=False)
        self._sends.end()
        return [loss.detach() for loss in losses]

    def _weighted(self, loss: Tensor, number: Tensor) -> Tensor:
        loss = loss * self._weights[int(number)]
        return loss if self._scale is None else loss * self._scale

    def _share(self, losses: Sequence[Tensor]) -> Tensor:
        """The sum of the losses, from the rank that holds the last stage."""
        value = self._total(losses)
        self._from_last(value)
        return value

    def _total(self, losses: Sequence[Tensor]) -> Tensor:
        """The sum of losses; of none, room for it."""
        if losses:
            return sum(losses[1:], losses[0])
        (spec,) = self.executable.outputs
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)

    # -- gradients ------------------------------------------------------------------------------

    def _deliver(self, stages: Sequence[StageModule]) -> None:
        """Add this step's gradients, summed over ranks, to the parameters'."""
        totals: dict[str, Tensor] = {}
        for stage in stages:
            stage.launch_rest()
        for stage in stages:
            for index, gradient in stage.take():
                target = stage.learned[index].target
                totals[target] = totals[target] + gradient if target in totals else gradient
        self._sum_copies(totals)
        for target, total in totals.items():
            self._add(target, total)

    def _sum_copies(self, totals: dict[str, Tensor]) -> None:
        """Sum the gradients of tied weights over the stages that have a copy; all take part, with a gradient
        or without."""
        arrivals = []
        for target, group in self._tied.items():
            if group is not None and self.executable.pipeline.meshes:
                self._sum_parts(totals, target, group)
            elif group is not None:
                mine = totals.get(target)
                total = torch.zeros_like(local(self._find(target)())) if mine is None else mine.contiguous()
                arrivals.append(transport.start_sum(total, group, later=True))
                totals[target] = total
        for arrived in arrivals:
            arrived()

    def _sum_parts(self, totals: dict[str, Tensor], target: str, group: dist.ProcessGroup) -> None:
        """Sum the gradient of a tied weight over stages on unlike meshes, where it lies in other parts."""
        part, held = self._parts[target], local(self._find(target)())
        full = torch.zeros(part.spec.shape, dtype=held.dtype, device=held.device)
        coordinate = self.executable.mesh.coordinate(dist.get_rank() - groups.first_of(self.executable.mesh))
        counts = not any(
            place and not isinstance(each, Shard) for place, each in zip(coordinate, part.layout, strict=True)
        )  # of ranks with the same rows the first one
        if counts and target in totals:
            part.part.put(totals[target], full)
        dist.all_reduce(full, group=group)
        totals[target] = part.part.take(full).clone(memory_format=torch.contiguous_format)

    def _add(self, target: str, total: Tensor) -> None:
        add_gradient(self._find(target)(), total)


def _stages_of(
    made: StagedExecutable,
    find: Callable[[str], Callable[[], Any]],
    *,
    mesh: DeviceMesh,
    device: torch.device,
    bucket_bytes: int | None,
) -> list[StageModule]:
    """The stages of this rank, on the tensors that `find` finds."""
    return [
        StageModule(
            each,
            find,
            mesh=mesh,
            device=device,
            shorter=shorter,
            splits_backward=made.pipeline.schedule in SPLIT_BACKWARD,
            bucket_bytes=bucket_bytes,
        )
        for each, shorter in zip_longest(made.stages, made.shorter)
    ]


def send_from_last(value: Tensor, pipeline: Pipeline, group: dist.ProcessGroup) -> None:
    """Have all ranks take a value from those that hold the last stage."""
    last = pipeline.rank_of(pipeline.num_stages - 1)
    if pipeline.meshes:
        dist.broadcast(value, src=pipeline.first(last, 0))
    else:
        dist.broadcast(value, group=group, group_src=pipeline.host(last))


def _broken_off() -> InputError:
    return InputError(
        where="a step of the parallel module",
        found="a step before it that raised in the middle, whose messages may still be on their way",
        wanted="steps that run to their end on all ranks",
        remedy="end all processes, and go on from a checkpoint",
    )


def pipeline_group(made: StagedExecutable, timeout: timedelta) -> dist.ProcessGroup:
    """The group of the ranks with this one's place in their meshes, in the order of the world: a pipeline
    rank's number there is that of its host. Collective."""
    if made.pipeline.meshes:  # which exchange with many ranks each
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    devices, mine = made.mesh.num_devices, None
    for place in range(devices):
        group = groups.of_ranks(
            [host * devices + place for host in range(made.pipeline.ranks)], timeout=timeout
        )
        mine = group or mine
    assert mine is not None
    return mine


def _tied_groups(made: StagedExecutable, timeout: timedelta) -> dict[str, dist.ProcessGroup | None]:
    """For each weight on several pipeline ranks the group of its copies, None on other ranks; collective."""
    devices = made.mesh.num_devices
    requires_grad = {item.target: item.spec.requires_grad for item in made.inputs}
    found: dict[str, dist.ProcessGroup | None] = {}
    known: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for target in sorted(made.holders):
        holders = made.holders[target]
        if len(holders) < 2 or not requires_grad[target]:
            continue
        if holders not in known and made.pipeline.meshes:
            members = [rank for holder in holders for rank in _members(made.pipeline, holder)]
            known[holders] = groups.of_ranks(members, timeout=timeout)
        if holders not in known:
            known[holders] = None
            for place in range(devices):
                members = sorted(made.pipeline.host(rank) * devices + place for rank in holders)
                group = groups.of_ranks(members, timeout=timeout)
                known[holders] = group or known[holders]
        found[target] = known[holders]
    return found


def _members(pipeline: Pipeline, rank: int) -> range:
    """The ranks of the world in a pipeline rank whose mesh is its own."""
    first = pipeline.first(rank, 0)
    return range(first, first + pipeline.meshes[rank].num_devices)
