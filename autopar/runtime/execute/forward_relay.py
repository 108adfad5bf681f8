"""A call of a module with stages: the whole batch goes from stage to stage, without gradients.

    rank 0   stage 0 --.                          .--> outputs
    rank 1             '--> stage 1 --.           |
    rank 2                            '--> stage 2 --> outputs, to all ranks

Nothing overlaps, as there is one batch only: for training and for long evaluations there are `train_step`
and `eval_step`. What a rank returns is what the serial model returns in its present mode, so that batch
norm sees the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.core.graph import TensorSpec, may_learn
from autopar.errors import InputError
from autopar.runtime.collectives.random import ExactDraws, Stream
from autopar.runtime.executable import StagedExecutable
from autopar.runtime.execute.stage import StageModule
from autopar.runtime.execute.staged_program import pipeline_group, send_from_last
from autopar.runtime.execute.unlike_stages import StageMail, receive_values
from autopar.trace.micro_batches import MicroBatch


class Relay:
    """Runs the stages of this rank for one kind of call; `find` and `group` are those of StagedProgram."""

    def __init__(
        self,
        made: StagedExecutable,
        find: Callable[[str], Callable[[], Any]],
        *,
        mesh: DeviceMesh,
        device: torch.device,
        timeout: timedelta,
        stream: Stream | None,
    ) -> None:
        self.executable = made
        self._device, self._stream = device, stream
        self._stages = {each.stage: StageModule(each, find, mesh=mesh, device=device) for each in made.stages}
        self.group = pipeline_group(made, timeout)
        self._from_last = partial(send_from_last, pipeline=made.pipeline, group=self.group)
        numbers = self._stages if made.pipeline.meshes else ()
        self._mail = {number: StageMail(made.pipeline, number, device) for number in numbers}

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output for the global `tensors`, on every rank; collective.

        Where gradients are enabled, backward from it raises InputError.
        """
        with torch.no_grad():
            draws = ExactDraws(self._device) if self._stream is None else self._stream.next()
            outputs = self._share(self._run(MicroBatch(tuple(tensors), 1.0), draws))
            if isinstance(draws, ExactDraws):
                draws.end(self._from_last)
        if torch.is_grad_enabled():
            learning = [tensor for tensor in tensors if tensor.requires_grad]
            outputs = tuple(_refusing(value, learning) for value in outputs)
        return self.executable.stages[0].rebuild(outputs)

    def compile(self, *, tells: bool) -> None:
        """Compile the stages, at their next calls."""
        for stage in self._stages.values():
            stage.compile(tells=tells)

    def untie(self) -> None:
        """Let go of the parameters' storage."""
        for stage in self._stages.values():
            stage.untie()

    def _run(self, batch: MicroBatch, draws: int | ExactDraws) -> tuple[Tensor, ...]:
        """Results of this rank's last stage: on the last stage's rank the outputs."""
        pipeline = self.executable.pipeline
        values: tuple[Tensor, ...] = ()
        for number, stage in self._stages.items():
            stage.begin([batch], draws)
            if mail := self._mail.get(number):
                values = stage.run(receive_values(mail, stage, 0), 0)
                stage.end()
                if (borders := stage.borders(0)) is not None:
                    mail.send(values, borders.sent, back=False)
                mail.end()
                continue
            if number and number - 1 not in self._stages:
                source = pipeline.host(pipeline.rank_of(number - 1))
                values = tuple(self._receive(spec, source) for spec in stage.executable.received)
            values = stage.run(values, 0)
            stage.end()
            if number + 1 < pipeline.num_stages and number + 1 not in self._stages:
                following = pipeline.host(pipeline.rank_of(number + 1))
                for value in values:
                    dist.send(value, group=self.group, group_dst=following)
        return values

    def _receive(self, spec: TensorSpec, source: int) -> Tensor:
        value = self._empty(spec)
        dist.recv(value, group=self.group, group_src=source)
        return value

    def _share(self, made: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs on every rank, from the one that holds the last stage."""
        pipeline, specs = self.executable.pipeline, self.executable.outputs
        last = pipeline.num_stages - 1
        values = [value.contiguous() for value in made] if last in self._stages else map(self._empty, specs)
        shared = tuple(values)
        for value in shared:
            self._from_last(value)
        return shared

    def _empty(self, spec: TensorSpec) -> Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device=self._device)


class _Refuse(torch.autograd.Function):
    """The identity; its backward says how a model with stages is trained."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *_: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise InputError(
            where="backward from a call of the parallel module",
            found="a plan with pipeline stages, whose calls keep nothing for backward",
            wanted="train_step(*batch): forward and backward of all micro-batches in one, and their loss",
            remedy="replace loss = model(*batch); loss.backward() by loss = model.train_step(*batch)",
        )


def _refusing(value: Tensor, learning: Sequence[Tensor]) -> Tensor:
    """The value, from which no backward may start, nor one to inputs that are `learning`; one without a
    gradient as it is."""
    if not may_learn(value.dtype):
        return value
    refused: Tensor = _Refuse.apply(value, torch.ones((), requires_grad=True), *learning)  # type: ignore[no-untyped-call]
    return refused
