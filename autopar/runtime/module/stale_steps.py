"""A loop whose pipeline isn't flushed between steps: the next batch comes in while this one drains.

    loop     batch t, and what comes next ──> the body: train_step(batch t) ──> border
    ranks    F and B of t, first forwards of t+1       optimizer.step

So the loop is a batch ahead of its body, but where ranks must meet: before a save, at the end of an epoch,
and once in `FLUSH_STRIDE` steps, when signals are heard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import is_
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.errors import InputError
from autopar.results.plan.plan import Plan
from autopar.runtime.collectives.roll_call import pause_meetings
from autopar.runtime.execute.staged_program import StagedProgram
from autopar.runtime.execute.weight_versions import WeightVersions
from autopar.runtime.islands.exchanges import SavedExchange
from autopar.runtime.programs.program_cache import Entry
from autopar.schedules.unflushed import COPIES
from autopar.torch_seams.tensors import version_of
from autopar.trace.call.call_signature import Arguments, flatten_arguments, split_inputs
from autopar.trace.micro_batches import MicroBatch
from autopar.units import show_bytes, show_seconds
from autopar.updates.rules import Stale

FLUSH_STRIDE = 64  # steps
_END: Any = object()
T = TypeVar("T")
Split = Callable[[Arguments], Sequence[MicroBatch]]


@dataclass(slots=True)
class StaleSteps:
    """What a module's steps have of its loop: the weights of batches, this batch and the next."""

    rule: Stale
    versions: WeightVersions = field(default_factory=WeightVersions)
    in_loop: bool = False
    batch: Any = _END  # that the body takes
    coming: Any = _END  # the one after it
    writes: Sequence[int] = ()  # to the tensors of this batch, when it came
    under_way: StagedProgram | None = None  # in which the next batch has begun
    has_room: list[StagedProgram] = field(default_factory=list)

    def train(self, program: StagedProgram, call: Arguments, split: Split) -> Tensor:
        """A step of the loop's batch, in which the next one begins if it is of the same kind."""
        self._require(call)
        if program not in self.has_room:
            self.require_room(program.executable.plan)
            self.has_room.append(program)
        following = None if self.coming is _END else call_of(self.coming)
        if following is None or following.key != call.key or program.executable.structure:
            following = None
        loss = program.train_stale(split(call), split(following) if following else None, self.versions)
        self.under_way, self.batch = program if following else None, _END
        pause_meetings(following is not None)
        return loss

    def _require(self, call: Arguments) -> None:
        """Raise InputError for a step of another batch than the loop's."""
        wanted = None if self.batch is _END else call_of(self.batch)
        where = "outside of autopar.steps" if not self.in_loop else "of other tensors than the loop's batch"
        if wanted is not None and wanted.key == call.key and all(map(is_, wanted.tensors, call.tensors)):
            if writes_to(wanted) == self.writes:
                return
            where = "of a batch that was written in place after the loader gave it"
        raise InputError(
            where=f"train_step with updates={self.rule}",
            found="a second step in the body of the loop" if wanted is None and self.in_loop else where,
            wanted="one step of each batch as the loop gives it, of which the next has begun already",
            remedy="write `for batch in autopar.steps(...): parallel.train_step(*batch)`, and let the "
            "loader's collate_fn make what the step takes",
        )

    def same(self, known: Entry[Any] | None, reason: str) -> Entry[Any]:
        """The program in which the batch has begun, found without asking other ranks.

        Raises InputError if it is another one now.
        """
        if known is None or known.program is not self.under_way:
            raise InputError(
                where=f"train_step with updates={self.rule}",
                found=f"another program than that in which the batch has begun: {reason}",
                wanted="a model that stays as it is while steps go on",
                remedy="change it before or after autopar.steps",
            )
        return known

    def require_room(self, plan: Plan) -> None:
        """Raise InputError where the copies of the weights don't fit beside what the plan holds."""
        copies = COPIES * max(plan.parameter_bytes, default=0)
        if plan.memory_cap is not None and plan.peak_bytes + copies > plan.memory_cap:
            raise InputError(
                where=f"train_step with updates={self.rule}",
                found=f"{show_bytes(plan.peak_bytes)} at the plan's peak, and {show_bytes(copies)} of "
                "two more versions of the weights",
                wanted=f"no more than the cap of {show_bytes(plan.memory_cap)}",
                remedy=f"plan with memory={max(0, plan.memory_cap - copies)}, which leaves room for them",
            )

    def describe(self, plan: Plan, seconds: float) -> str:
        """What the rule is, and takes."""
        copies = show_bytes(COPIES * max(plan.parameter_bytes, default=0))
        return (
            f"updates   {self.rule}: gradients at the weights of one step before; {show_seconds(seconds)} a "
            f"step in steady state, {show_seconds(plan.step_seconds)} where flushed (predicted)\n"
            f"          {copies} for two more versions of the weights; Adam and AdamW may want a lower "
            "rate or warm-up\n"
            "          a norm over all gradients, as of clipping, has ranks wait for each other at each step"
        )

    def drop(self) -> None:
        """Forget the batch that has begun; collective."""
        if self.under_way is not None:
            with suppress(RuntimeError):  # of ranks that have ended
                self.under_way.drop()
        self.under_way, self.batch, self.coming = None, _END, _END
        pause_meetings(False)


def call_of(batch: Any) -> Arguments:
    """The call of a step with what a loader gives: a tuple, a dict, a tensor, or a call itself."""
    if isinstance(batch, Arguments):
        return batch
    args, kwargs = split_inputs(batch)
    return flatten_arguments(args, kwargs)


def writes_to(call: Arguments) -> list[int]:
    """How often each tensor of a call was written in place."""
    return [version_of(tensor) for tensor in call.tensors]


@dataclass(frozen=True, slots=True)
class _DrawnBatch:
    """A batch of a loader, if there was one, and the `writes` to its tensors when it came."""

    batch: Any = _END
    writes: Sequence[int] = ()


def _drawn(batches: Iterator[Any]) -> _DrawnBatch:
    batch = next(batches, _END)
    return _DrawnBatch() if batch is _END else _DrawnBatch(batch, writes_to(call_of(batch)))


class StaleExchange(SavedExchange):
    """Lets the loop be a batch ahead of its body."""

    def __init__(self, stale: StaleSteps) -> None:
        self.stale, self.said = stale, str(stale.rule)

    def ahead(self, batches: Iterator[T], flushes: Callable[[], bool]) -> Iterator[T]:
        held = _drawn(batches)
        while held.batch is not _END:
            stops = flushes()
            coming = _DrawnBatch() if stops else _drawn(batches)
            self.stale.batch, self.stale.writes, self.stale.coming = held.batch, held.writes, coming.batch
            yield held.batch
            if self.stale.batch is not _END and self.stale.under_way is not None:
                raise InputError(
                    where=f"autopar.steps with updates={self.said}",
                    found="a body without train_step, whose batch has begun",
                    wanted="a step of each batch",
                    remedy="choose samples in the loader",
                )
            held = _drawn(batches) if stops else coming

    @contextmanager
    def around(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        self.stale.in_loop = True
        self.stale.versions.begin()
        try:
            yield
        finally:
            self.stale.in_loop = False
            self.stale.drop()
            self.stale.versions.end()

    def save(self, folder: Path, step: int, keep: int) -> None:
        if self.stale.under_way is not None:
            raise InputError(
                where=f"a save of autopar.steps with updates={self.said}",
                found="a step in which the next batch has begun",
                wanted="a step after which the loop saves, with nothing under way",
                remedy="leave saves to save_every=",
            )
        super().save(folder, step, keep)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.stale.versions.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.stale.versions.load_state_dict(state["weights"])
