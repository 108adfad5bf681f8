"""1F1B that isn't flushed at the border of a step: while a batch drains, the next one comes in.

    rank 0   F0 F1 F2 F3 B0 F4'B1 F5'B2 ...        ' of the next batch, at weights of its own
    rank 1      F0 F1 B0 F2 B1 F3 B2 F4'B3 ...     (Narayanan 2021, PipeDream-2BW)

Rank r of K has up to w = K - 1 - r micro-batches under way between two calls, of which the stage before has
sent one more. Their leaves are copies of the weights (weight_versions.py), which the optimizer's step leaves
alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.core.graph import TensorSpec
from autopar.core.pipeline import Pipeline
from autopar.runtime.collectives.random import ExactDraws
from autopar.runtime.execute.stage import StageModule
from autopar.trace.micro_batches import MicroBatch

LOSS_TAG = 1  # of messages, beside those of micro-batches


@dataclass(slots=True)
class StaleBatch:
    """The micro-batches of a step, with the seed of their masks."""

    micro_batches: Sequence[MicroBatch]
    seed: int | ExactDraws


@dataclass(slots=True)
class _MicroBatchFlight:
    """A micro-batch between its forward and its backward."""

    number: int
    received: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    sends: list[dist.Work]


class StagePeer(NamedTuple):
    """The rank of a group that has a stage."""

    group: dist.ProcessGroup
    rank: int


@dataclass(slots=True)
class Unflushed:
    """The one stage of this rank, as two modules that take turns: `stages[turn]` is that of this batch.

    `group` are the ranks of the pipeline.
    """

    stages: tuple[StageModule, StageModule]
    group: dist.ProcessGroup
    pipeline: Pipeline
    device: torch.device
    following: StaleBatch | None = None  # that has begun to come in
    _batches: list[StaleBatch | None] = field(default_factory=lambda: [None, None])
    _flights: deque[_MicroBatchFlight] = field(default_factory=deque)
    _arrivals: deque[tuple[list[Tensor], list[dist.Work]]] = field(default_factory=deque)
    _sent_back: list[dist.Work] = field(default_factory=list)
    _told: list[dist.Work] = field(default_factory=list)
    _losses: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))

    @property
    def num_stages(self) -> int:
        return self.pipeline.num_stages

    @property
    def _stage(self) -> int:
        return self.stages[0].executable.stage

    @property
    def _is_last(self) -> bool:
        return self._stage == self.num_stages - 1

    def run(self, turn: int, batch: StaleBatch, following: StaleBatch | None) -> list[Tensor]:
        """Run all of `batch`, and first forwards of the `following` one, which must be the next call's.

        Returns losses, on the last stage. Collective over the stages.
        """
        under_way, count = self.num_stages - 1 - self._stage, len(batch.micro_batches)
        forwards = deque((turn, number) for number in range(len(self._flights), count))
        if following is not None:  # the last of these is only made ready for
            forwards.extend((1 - turn, number) for number in range(under_way + 1))
        if self._batches[turn] is None:
            self._begin(turn, batch)
        if not self._arrivals:
            self._expect(forwards)
        while len(self._flights) < under_way:
            self._forward(forwards)
        for number in range(count):
            gradients = self._expect_back(turn, number)
            if forwards and forwards[0] != (1 - turn, under_way):
                if forwards[0] == (1 - turn, 0) and following is not None:
                    self._begin(1 - turn, following)
                self._forward(forwards)
            self._backward(turn, *gradients)
        self._batches[turn], self.following = None, following
        losses, self._losses[turn][:] = list(self._losses[turn]), []
        return losses

    def drop(self) -> None:
        """Let what is under way come to its end, and forget it. Collective over the stages."""
        for _, works in self._arrivals:
            _wait(works)
        for flight in self._flights:
            _wait(flight.sends)
        self.wait()
        self.forget()

    def wait(self) -> None:
        """Wait until others have what was sent to them."""
        _wait(self._sent_back)
        _wait(self._told)

    def forget(self) -> None:
        """Let go of all that is under way, and may never end."""
        self._flights.clear()
        self._arrivals.clear()
        self._sent_back, self._told, self.following = [], [], None
        self._batches[:] = None, None
        for losses, stage in zip(self._losses, self.stages, strict=True):
            losses.clear()
            stage.forget()

    def share(self, loss: Tensor) -> Tensor:
        """The loss from the last stage, which doesn't wait for the others."""
        if self._is_last:
            _wait(self._told)
            others = range(self.num_stages - 1)
            self._told = [_send(loss, self._peer(stage), LOSS_TAG) for stage in others]
        else:
            _wait([_receive(loss, self._peer(self.num_stages - 1), LOSS_TAG)])
        return loss

    # -- a micro-batch ----------------------------------------------------------------------------

    def _begin(self, turn: int, batch: StaleBatch) -> None:
        self._batches[turn] = batch
        self.stages[turn].begin(batch.micro_batches, batch.seed)

    def _expect(self, forwards: Sequence[tuple[int, int]]) -> None:
        """Get ready to receive the next micro-batch, if there is one."""
        if self._stage and forwards:
            turn, number = forwards[0]
            # The next batch's is like this one's, and begins later.
            known = self.stages[turn if self._batches[turn] else 1 - turn]
            tensors = [self._room(spec) for spec in known.received(number)]
            works = [_receive(tensor, self._peer(self._stage - 1)) for tensor in tensors]
            self._arrivals.append((tensors, works))

    def _forward(self, forwards: deque[tuple[int, int]]) -> None:
        turn, number = forwards.popleft()
        received: tuple[Tensor, ...] = ()
        stage, batch = self.stages[turn], self._batches[turn]
        assert batch is not None
        if self._stage:
            tensors, works = self._arrivals.popleft()
            _wait(works)
            specs = stage.received(number)
            received = tuple(
                tensor.requires_grad_(spec.requires_grad) for tensor, spec in zip(tensors, specs, strict=True)
            )
        self._expect(forwards)
        results = stage.run(received, number)
        sends = []
        if self._is_last:
            results = (results[0] * batch.micro_batches[number].weight,)
            self._losses[turn].append(results[0].detach())
        else:
            sends = [_send(each.detach(), self._peer(self._stage + 1)) for each in results]
        self._flights.append(_MicroBatchFlight(number, received, results, sends))

    def _expect_back(self, turn: int, number: int) -> tuple[list[Tensor | None], list[dist.Work]]:
        """Get ready to receive the gradients of what micro-batch `number` has sent on."""
        if self._is_last:
            return [None], []
        specs = self.stages[turn].sent(number)
        gradients = [self._room(spec) if spec.requires_grad else None for spec in specs]
        works = [_receive(each, self._peer(self._stage + 1)) for each in gradients if each is not None]
        return gradients, works

    def _backward(self, turn: int, gradients: list[Tensor | None], works: list[dist.Work]) -> None:
        flight, stage = self._flights.popleft(), self.stages[turn]
        _wait(works)
        _wait(flight.sends)
        roots = [
            (result, gradient)
            for result, gradient in zip(flight.results, gradients, strict=True)
            if result.requires_grad and (self._is_last or gradient is not None)
        ]
        with stage.learning():
            if roots:
                results, weights = zip(*roots, strict=True)
                torch.autograd.backward(results, weights)
        _wait(self._sent_back)
        back = [
            torch.zeros_like(each) if each.grad is None else each.grad
            for each in flight.received
            if each.requires_grad
        ]
        self._sent_back = [_send(each.contiguous(), self._peer(self._stage - 1)) for each in back]

    def _peer(self, stage: int) -> StagePeer:
        return StagePeer(self.group, self.pipeline.host(stage))

    def _room(self, spec: TensorSpec) -> Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device=self.device)


def _send(tensor: Tensor, peer: StagePeer, tag: int = 0) -> dist.Work:
    work = dist.isend(tensor.contiguous(), group=peer.group, group_dst=peer.rank, tag=tag)
    assert work is not None
    return work


def _receive(tensor: Tensor, peer: StagePeer, tag: int = 0) -> dist.Work:
    work = dist.irecv(tensor, group=peer.group, group_src=peer.rank, tag=tag)
    assert work is not None
    return work


def _wait(works: list[dist.Work]) -> None:
    """Wait for these, which are none then."""
    while works:
        works.pop(0).wait()
