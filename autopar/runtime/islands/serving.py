"""A server on island 0 and learners on the others: gradients go up, parameters come down.

    learner     batch, backward, optimizer.step ── "batch 7 at parameters 3" ──> server
                                                <── "send" or "drop" ──
                gradients ──>                       takes them, steps at every k ──>
                                                <── parameters 4

The learner's own optimizer takes no step: its gradients are gone before it does. Buffers travel with them,
those of the last gradient of an update are the server's. Which learner is next
follows from who speaks first; the server's first rank sees it and tells its others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.runtime.collectives.roll_call import everybody
from autopar.runtime.islands.exchanges import IslandExchange, T
from autopar.runtime.islands.joining import Islands
from autopar.runtime.islands.messages import SERVER, Mark, Message
from autopar.runtime.parameters.parameters import local
from autopar.updates.event_log import EventLog, GradientEvent
from autopar.updates.rules import IslandRule, Server

POLL_SECONDS = 0.5e-3  # between looks at who has spoken
DROP, SEND, END = 0, 1, 2  # a server's answers
MARK = Mark(SERVER)
_SPOKEN = "spoken_{learner}"


class LearnerExchange(IslandExchange):
    """Hands gradients to the server, and takes parameters from it."""

    is_saved = False  # the server is

    def __init__(self, islands: Islands, model: nn.Module) -> None:
        super().__init__(islands, model)
        self.version, self.batch = 0, 0
        self.taken = 0  # batches of the loop up to the last that was handed over
        self.has_ended = False

    def epochs(self, asked: int) -> int:
        return sys.maxsize  # until the server ends

    def batches(self, batches: Iterator[T]) -> Iterator[T]:
        for batch in batches:
            yield batch
            if self.has_ended:
                return

    @contextmanager
    def around(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        _require_one(optimizers, self.islands.rule)
        self.require_optimizers(optimizers)
        handles = [each.register_step_pre_hook(self._push) for each in optimizers]
        try:
            with super().around(optimizers):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def leaves(self, step: int, asked: bool) -> bool:
        return False  # the server says when all leave

    @torch.no_grad()
    def _push(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hand over the gradients of this batch, and go on at the parameters that come back."""
        self.require_no_closure(args, kwargs)
        self.require_alike()
        if self.has_ended:
            self._forget()
            return
        if torch.distributed.get_rank() == 0:
            self.islands.store.add(_SPOKEN.format(learner=self.islands.mine), 1)
        taken, self.taken = self.step + 1 - self.taken, self.step + 1
        self.across.send(0, (torch.tensor([self.batch, self.version, taken]),), MARK)
        self.batch += 1
        if int(self.across.receive(0, MARK)[0]) == SEND:
            handed = [*self._gradients(), *self.buffers()]
            self.across.send(0, tuple(tensor.reshape(-1) for tensor in handed), MARK)
        answer = self.across.receive(0, MARK)
        self.has_ended, self.version = int(answer[0][0]) == END, int(answer[0][1])
        for tensor, values in zip(self.state(), answer[1:], strict=True):
            tensor.copy_(values.view_as(tensor))
        self._forget()

    def _gradients(self) -> list[Tensor]:
        """Gradients of this rank's parts; one that isn't there is empty."""
        return [local(item).new_empty(0) if item.grad is None else local(item.grad) for _, item in self.named]

    def _forget(self) -> None:
        """Leave the optimizer nothing to step along."""
        for _, item in self.named:
            item.grad = None


class ServerExchange(IslandExchange):
    """Keeps the parameters, and steps along the mean of every `k` gradients."""

    def __init__(self, islands: Islands, model: nn.Module) -> None:
        super().__init__(islands, model)
        assert isinstance(islands.rule, Server)
        self.rule, self.log = islands.rule, EventLog()
        islands.log = self.log
        self._version = 0
        self._buffers: Message = ()
        self._has_ended = False
        self._heard = dict.fromkeys(islands.learners, 0)
        self._order: list[int] = []  # learners that have spoken and weren't answered

    def batches(self, batches: Iterator[T]) -> Iterator[T]:
        return iter(())

    def serve(self, optimizers: Sequence[torch.optim.Optimizer], batches: int, done: int) -> Iterator[int]:
        """Take as many steps as the learners' batches give, and yield the number of each; then end them."""
        (optimizer,) = optimizers
        waiting: list[int] = []  # whose gradients were taken, and who wait for parameters
        left = batches * len(self.islands.learners) - done * self.rule.k
        while left >= self.rule.k:
            version = self._version
            events: list[GradientEvent] = []
            sums: list[Tensor] = []
            while len(events) < self.rule.k:
                learner = self._next()
                batch, read, taken = (int(item) for item in self.across.receive(learner, MARK)[0])
                event = GradientEvent(learner, batch, read)
                if self.rule.cancel and read < version:
                    self._drop(event, version)
                    continue
                sums = self._take(event, sums)
                events.append(event)
                left -= taken
                if self.rule.wait == "batches":
                    self._answer(learner, version)  # goes on at what there is
                else:
                    waiting.append(learner)
            self._step(optimizer, sums, len(events))
            self.log.updates.append(tuple(events))
            self._version = version + 1
            for learner in waiting:
                self._answer(learner, version + 1)
            waiting = []
            yield version + 1
        self._end()

    def _next(self) -> int:
        """The learner that has spoken first of those that wait for an answer; the same on all ranks."""
        found = None
        while found is None:
            if torch.distributed.get_rank() == 0:
                found = self._look()
            found = everybody(found)[0] if torch.distributed.get_world_size() > 1 else found
            if found is None:
                time.sleep(POLL_SECONDS)
        return found

    def _look(self) -> int | None:
        for learner, heard in self._heard.items():
            spoken = self.islands.store.add(_SPOKEN.format(learner=learner), 0)
            if spoken > heard:
                self._heard[learner] = heard + 1
                self._order.append(learner)
        return self._order.pop(0) if self._order else None

    @torch.no_grad()
    def _take(self, event: GradientEvent, sums: list[Tensor]) -> list[Tensor]:
        """Add a learner's gradients to those of this update."""
        self.across.send(event.learner, (torch.tensor([SEND]),), MARK)
        arrived = self.across.receive(event.learner, MARK)
        gradients, self._buffers = arrived[: len(self.named)], arrived[len(self.named) :]
        return [_added(a, b) for a, b in zip(sums, gradients, strict=True)] if sums else list(gradients)

    def _drop(self, event: GradientEvent, version: int) -> None:
        self.across.send(event.learner, (torch.tensor([DROP]),), MARK)
        self.log.dropped.append(event)
        self._answer(event.learner, version)

    def _answer(self, learner: int, version: int, word: int = SEND) -> None:
        """Send the parameters of now."""
        values: Message = tuple(tensor.reshape(-1).clone() for tensor in self.state())
        self.across.send(learner, (torch.tensor([word, version]), *values), MARK)

    def _step(self, optimizer: torch.optim.Optimizer, sums: Sequence[Tensor], count: int) -> None:
        """Step along the mean of gradients; buffers are the last one's."""
        optimizer.zero_grad()
        for (_, item), total in zip(self.named, sums, strict=True):
            if total.numel():
                item.grad = torch.zeros_like(item)
                local(item.grad).copy_((total / count).view_as(local(item)))
        optimizer.step()
        optimizer.zero_grad()
        for buffer, values in zip(self.buffers(), self._buffers, strict=True):
            buffer.copy_(values.view_as(buffer))

    def _end(self) -> None:
        """Answer each learner's next batch by the end, with the last parameters."""
        self._has_ended = True
        for _ in self.islands.learners:
            learner = self._next()
            batch, read, _ = (int(item) for item in self.across.receive(learner, MARK)[0])
            self.across.send(learner, (torch.tensor([DROP]),), MARK)
            self.log.dropped.append(GradientEvent(learner, batch, read))
            self._answer(learner, self._version, END)

    @contextmanager
    def around(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        _require_one(optimizers, self.islands.rule)
        with super().around(optimizers):
            try:
                yield
            except SystemExit:  # asked to leave
                if not self._has_ended:
                    self._end()
                raise

    def leaves(self, step: int, asked: bool) -> bool:
        return asked


def _added(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two gradients, of which one or both may be empty."""
    return a + b if a.numel() and b.numel() else a if a.numel() else b


def _require_one(optimizers: Sequence[torch.optim.Optimizer], rule: IslandRule) -> None:
    """Raise InputError unless there is one optimizer, which the server steps."""
    if len(optimizers) != 1:
        raise InputError(
            where=f"autopar.steps with updates={rule}",
            found=f"{len(optimizers)} optimizers",
            wanted="one, which the server steps for all",
            remedy="pass optimizer= to autopar.steps",
        )
