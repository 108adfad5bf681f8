"""Runs the stage of one rank where meshes of stages are unlike, in the order of its schedule.

    rank of stage 0     F0   F1   B0   F2   B1 ...      each F ends with messages to every rank of the next
    ranks of stage 1         F0   B0   F1   B1 ...      stage that takes a part of the value (stage_borders)

torch.distributed.pipelining knows one rank for each stage, so the messages are sent here. What an action has
to send starts together with what the next one receives: two ranks that send to each other don't wait in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.core.graph import TensorSpec
from autopar.core.pipeline import Pipeline
from autopar.core.schedule import ActionKind
from autopar.core.stage_borders import StageBorders, StageMessage
from autopar.runtime.execute.stage import StageModule
from autopar.schedules.orders import build_schedule


class StageMail:
    """Sends and receives the values of one stage, and their gradients, part by part."""

    def __init__(self, pipeline: Pipeline, stage: int, device: torch.device) -> None:
        self._before, self._after = (pipeline.first(stage + by, 0) for by in (-1, 1))
        self._device = device
        self._waiting: list[dist.P2POp] = []
        self._works: list[dist.Work] = []

    def send(self, values: Sequence[Tensor | None], items: Sequence[StageMessage], *, back: bool) -> None:
        """Send parts of values to the ranks after, of gradients `back` to those before; where there is no
        gradient none of it is sent, nor asked for."""
        for item in items:
            value = values[item.value]
            assert value is not None
            part = item.part.take(value.detach()).contiguous()
            self._waiting.append(dist.P2POp(dist.isend, part, self._peer(item, ahead=not back)))

    def receive(
        self, specs: Sequence[TensorSpec], items: Sequence[StageMessage], *, back: bool
    ) -> list[Tensor]:
        """The values from the ranks before, or gradients `back` from those after, put together."""
        pieces = [
            torch.empty(item.part.shape, dtype=specs[item.value].dtype, device=self._device) for item in items
        ]
        receives = [
            dist.P2POp(dist.irecv, piece, self._peer(item, ahead=back))
            for item, piece in zip(items, pieces, strict=True)
        ]
        for work in self._start(receives):
            work.wait()
        found = [torch.zeros(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs]
        for item, piece in zip(items, pieces, strict=True):
            item.part.add(piece, found[item.value])
        return found

    def end(self) -> None:
        """Wait until all that was sent has arrived."""
        self._works += self._start([])
        for work in self._works:
            work.wait()
        self._works.clear()

    def forget(self) -> None:
        """Drop the handles of transfers that may never end."""
        self._waiting.clear()
        self._works.clear()

    def _peer(self, item: StageMessage, *, ahead: bool) -> int:
        return (self._after if ahead else self._before) + item.peer

    def _start(self, receives: list[dist.P2POp]) -> list[dist.Work]:
        """Start what waits to be sent, and these; the works of the latter."""
        if self._device.type == "cuda":  # whose works are those of the whole batch
            works = dist.batch_isend_irecv([*self._waiting, *receives]) if self._waiting or receives else []
            self._waiting.clear()
            return works
        started = [dist.isend(each.tensor, each.peer) for each in self._waiting]
        self._works += [work for work in started if work is not None]
        self._waiting.clear()
        waited = [dist.irecv(each.tensor, each.peer) for each in receives]
        return [work for work in waited if work is not None]


class UnlikeSchedule:
    """One rank's actions of GPipe or 1F1B; `loss_fn` takes the last stage's output and the micro-batch's
    number."""

    def __init__(
        self,
        pipeline: Pipeline,
        stage: StageModule,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
    ) -> None:
        number = stage.executable.stage
        self._stage, self._loss_fn, self._is_last = stage, loss_fn, number == pipeline.num_stages - 1
        self._mail = StageMail(pipeline, number, device)
        schedule = build_schedule(
            pipeline.schedule, ranks=pipeline.ranks, stages_per_rank=1, micro_batches=pipeline.micro_batches
        )
        self._actions = list(schedule.actions(number))
        self._kept: dict[int, tuple[tuple[Tensor, ...], Sequence[Tensor]]] = {}

    def step(self, *, micro_batch: Tensor, losses: list[Tensor], **_: object) -> None:
        """Run forward and backward of all micro-batches."""
        for action in self._actions:
            number = action.micro_batch
            if action.kind is ActionKind.FORWARD:
                self._forward(micro_batch[number], losses)
            else:
                self._backward(number)
        self._mail.end()

    def eval(self, *, micro_batch: Tensor, losses: list[Tensor], **_: object) -> None:
        """Run forward of all micro-batches."""
        for number in micro_batch:
            self._forward(number, losses)
            self._kept.pop(int(number))
        self._mail.end()

    def end(self) -> None:
        """Nothing is on its way once a step is over."""

    def forget(self) -> None:
        """Drop what a step that raised has left behind."""
        self._mail.forget()
        self._kept.clear()

    def _forward(self, micro_batch: Tensor, losses: list[Tensor]) -> None:
        number = int(micro_batch)
        received = receive_values(self._mail, self._stage, number)
        results = self._stage.run(received, number)
        if self._is_last:
            loss = self._loss_fn(results[0], micro_batch)
            losses.append(loss.detach())
            results = (loss,)
        else:
            self._mail.send(results, _borders(self._stage, number).sent, back=False)
        self._kept[number] = received, results

    def _backward(self, number: int) -> None:
        received, results = self._kept.pop(number)
        borders = _borders(self._stage, number)
        gradients: list[Tensor | None] = [None]
        if not self._is_last:
            gradients = list(self._mail.receive(self._stage.sent(number), borders.received_back, back=True))
        pairs = [each for each in zip(results, gradients, strict=True) if each[0].requires_grad]
        with self._stage.learning():
            if pairs:
                tensors, seeds = zip(*pairs, strict=True)
                torch.autograd.backward(tensors, seeds)
        back = [
            torch.zeros_like(value) if value.requires_grad and value.grad is None else value.grad
            for value in received
        ]
        self._mail.send(back, borders.sent_back, back=True)


def receive_values(mail: StageMail, stage: StageModule, number: int) -> tuple[Tensor, ...]:
    """What a stage receives of a micro-batch from the one before: leaves of its graph."""
    specs = stage.received(number)
    values = mail.receive(specs, _borders(stage, number).received, back=False) if specs else []
    learns = torch.is_grad_enabled()
    return tuple(
        value.requires_grad_(spec.requires_grad and learns) for value, spec in zip(values, specs, strict=True)
    )


def _borders(stage: StageModule, number: int) -> StageBorders:
    found = stage.borders(number)
    assert found is not None
    return found
