"""A training loop that goes on: from the newest save, with the next sample, and leaves when it is asked to.

load ──> batch ──> the loop's body ──> border ──> batch ...
                                         ├── every `save_every` steps: save
                                         └── a signal on any rank: save, exit code 75
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.collectives.roll_call import collective, compare, everybody, meets
from autopar.runtime.collectives.statements import StatementPart
from autopar.runtime.islands.exchanges import Exchange, exchange_of
from autopar.runtime.islands.joining import Islands
from autopar.runtime.launch.flight_record import note_step
from autopar.runtime.launch.leaving import LeaveRequest, leave_run
from autopar.runtime.module.extra_values import require_alike_extra
from autopar.runtime.module.parallel_module import ParallelModule, runner_of
from autopar.runtime.module.sampler import BatchSampler
from autopar.runtime.module.saves import KEPT_SAVES, finish_saves, load, require_folder, save
from autopar.runtime.module.stale_steps import FLUSH_STRIDE, StaleExchange
from autopar.runtime.module.step_reports import StepClock, StepReport
from autopar.runtime.module.taken_gradients import marking_taken, pending_gradient

REPORT_EVERY = 100  # steps, likewise
SAVE_EVERY = 1000  # steps, where nobody says another number


@dataclass(eq=False)
class Steps:
    """The batches of a run, which `autopar.steps` makes; `step` are those that are done, in all.

    `epoch` is the one under way. `extra`, plain values and tensors, may be set at any time: it is saved, and
    at the beginning it is what was.
    """

    model: nn.Module
    loader: Iterable[Any]
    folder: Path
    epochs: int
    save_every: int
    keep: int
    sampler: Any
    others: dict[str, Any]
    clock: StepClock
    islands: Islands | None = None
    exchange: Exchange = field(default_factory=Exchange)
    background: bool = False
    on_report: Callable[[StepReport], object] | None = None
    extra: Any = None
    step: int = 0
    epoch: int = 0
    _saved: int | None = field(default=None, repr=False)
    _is_first: bool = field(default=True, repr=False)
    _in_body: bool = field(default=False, repr=False)  # of the loop, with a batch that isn't counted yet
    _has_stepped: bool = field(default=False, repr=False)  # the optimizer, in that body
    _due: int | None = field(default=None, repr=False)  # the step at which a save was, and hasn't been made

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        with (
            LeaveRequest() as request,
            marking_taken(self._optimizers, self._note),
            self.exchange.around(self._optimizers),
        ):
            for _ in self.exchange.serve(self._optimizers, self.epochs * len(self.sampler), self.step):
                self._end_step(request)
            for batch in self.exchange.batches(self._batches()):
                self._in_body, self._has_stepped = True, False
                yield batch
                self._end_step(request)
            has_changed = self.exchange.finish()
        if (self._saved != self.step or has_changed) and self.exchange.is_saved:
            self._save(background=False)
        finish_saves()

    def _batches(self) -> Iterator[Any]:
        """All batches of the epochs that are left."""
        for epoch in range(self.sampler.epoch, self.exchange.epochs(self.epochs)):
            self.epoch = epoch
            self.sampler.set_epoch(epoch)
            yield from self.exchange.ahead(self.sampler.count(self.loader), self._flushes)

    def _flushes(self) -> bool:
        """Whether nothing may be under way after the step to come, as ranks meet then."""
        step = self.step + 1
        return self._due is not None or step % self.save_every == 0 or step % FLUSH_STRIDE == 0

    def _end_step(self, request: LeaveRequest) -> None:
        """Count the step, let islands exchange what is due, and do what is due at its border."""
        self.step, self._in_body = self.step + 1, False
        self.exchange.after_step(self.step)
        self._border(request)

    def save(self, *, background: bool | None = None) -> Path:
        """Save the run now; on all ranks, after the optimizer's step in a body, or after the loop.

        Raises InputError on every rank where gradients are pending, which would be lost, and before the
        optimizer's step, as the batch under way wouldn't come again.
        """
        if pending := self._pending():
            raise _never_taken(pending, f"in step {self.step + self._in_body}")
        if self._in_body and self._optimizers and not self._has_stepped:
            raise InputError(
                where="a save of autopar.steps",
                found=f"step {self.step + 1} under way, without the optimizer's step",
                wanted="a place between steps",
                remedy="call it at the end of the loop's body, after optimizer.step()",
            )
        return self._save(background=background)

    def _note(self) -> None:
        self._has_stepped = True

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        given = self.others["optimizer"]
        return [given] if isinstance(given, torch.optim.Optimizer) else list(given or ())

    def _pending(self) -> str:
        """A parameter whose gradient no optimizer has taken, on any rank; collective."""
        with collective("gradients that are pending"):
            return next(filter(None, everybody(pending_gradient(self.model, self._optimizers))), "")

    def _save(self, *, background: bool | None = None) -> Path:
        self.exchange.save(self.folder, self.step + self._in_body, self.keep)
        path = save(
            self.folder,
            self.model,
            sampler=self.sampler,
            step=self.step + self._in_body,
            extra=self.extra,
            keep=self.keep,
            background=self.background if background is None else background,
            **self.others,
        )
        self._saved, self._due = self.step + self._in_body, None
        return path

    def _may_save(self) -> bool:
        """Whether the save that is due loses no gradient; else it waits for the next border that may.

        Raises InputError on every rank where none has been for `save_every` steps.
        """
        pending = self._pending()
        if pending and self._due is None:
            self._due = self.step
        if pending and self._due is not None and self.step - self._due >= self.save_every:
            raise _never_taken(pending, f"after each of steps {self._due} to {self.step}")
        return not pending

    def _report(self) -> None:
        """Report every so many steps; the first, which makes programs, isn't counted."""
        if self._is_first:
            self._is_first = False
            self.clock.start()
        elif (report := self.clock.tick(self.step)) is not None:
            _tell_slow(report)
            if self.on_report is not None:
                self.on_report(report)

    def _begin(self) -> None:
        with collective("autopar.steps"):
            require_alike_extra("autopar.steps", self.extra)
            require_folder(f"autopar.steps in {self.folder}", self.folder)
        before = load(self.folder, self.model, sampler=self.sampler, missing_ok=True, **self.others)
        if before is not None:
            self.step = self._saved = before.step or 0
            self.extra = before.extra
        self.exchange = self._stale() or exchange_of(
            self.islands,
            self.model,
            self.folder,
            self.step,
            scaled=self.others["scaler"] is not None,
            scheduled=self.others["scheduler"] is not None,
        )
        note_step(self.step)

    def _stale(self) -> Exchange | None:
        """The exchange of a pipeline that isn't flushed."""
        stale = runner_of(self.model).stale if isinstance(self.model, ParallelModule) else None
        if stale is None:
            return None
        if self.others["scaler"] is not None:
            raise InputError(
                where=f"autopar.steps with updates={stale.rule}",
                found="a GradScaler, whose factor changes while a batch is under way",
                wanted="losses as they are",
                remedy="leave the scaler out, as in bfloat16",
            )
        exchange = StaleExchange(stale)
        if self.step:
            exchange.load(self.folder, self.step)
        return exchange

    def _border(self, request: LeaveRequest) -> None:
        """After a step: save where it is time to, and leave where any rank is asked to.

        Neither is done while gradients are pending.
        """
        leaves = self.exchange.leaves(self.step, _anybody_leaves(request, self.step))
        note_step(self.step)  # which all ranks have come to the end of
        self._report()
        finish_saves(wait=False)
        is_due = leaves or self.step % self.save_every == 0 or self._due is not None
        is_due = is_due and self.exchange.is_saved
        with self.clock.paused() if is_due else nullcontext():
            if not is_due or not self._may_save():
                return
            self._save(background=False if leaves else None)
        if leaves:
            if os.environ.get("RANK", "0") == "0":
                print(
                    f"autopar: saved after step {self.step}, and left as asked", file=sys.stderr, flush=True
                )
            leave_run()


def _never_taken(name: str, when: str) -> InputError:
    return InputError(
        where="a save of autopar.steps",
        found=f"a gradient of {name} {when} that no optimizer step has taken",
        wanted="the end of a loop's body without gradients that a save would lose",
        remedy="step the optimizer at the body's end, and zero_grad() there what it needn't take",
    )


def _tell_slow(report: StepReport) -> None:
    """Name ranks for which the others wait, on stderr of the first rank."""
    if report.slow and os.environ.get("RANK", "0") == "0":
        print(f"autopar: {report}", file=sys.stderr, flush=True)


def _anybody_leaves(request: LeaveRequest, step: int) -> bool:
    """Whether any rank is asked to leave; collective. Between machines not all steps ask."""
    with collective("border of a step", compares=True):
        if not meets(step):
            return request.signal is not None and _is_alone()
        mine = request.signal is not None
        return compare([StatementPart("leaving", "none", bytes([mine]))]) is not None or mine


def _is_alone() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def steps(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    folder: str | Path,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    epochs: int = 1,
    save_every: int = SAVE_EVERY,
    extra: Any = None,
    keep: int = KEPT_SAVES,
    background: bool = False,
    report_every: int = REPORT_EVERY,
    on_report: Callable[[StepReport], object] | None = None,
) -> Steps:
    """The batches of `epochs` over `loader`, from where the newest save in `folder` was, saved as they go.

        for x, y in autopar.steps(parallel, loader, folder="runs/a", optimizer=optimizer, epochs=10):
            optimizer.zero_grad()
            parallel(x, y).backward()
            optimizer.step()

    `loader` is a DataLoader whose `batch_sampler` is `parallel.sampler(dataset)`. What is passed is saved as
    by `autopar.save`, every `save_every` steps and at the end of the last epoch, but not while gradients are
    accumulated: then after the next step of the optimizer. `extra` is saved beside it, until a save gives
    another; with `background` a thread writes while steps go on. SIGTERM or SIGUSR1 on any rank has all save
    after the step under way, and the process end with exit code 75, by SystemExit: started again, under any
    plan and on any number of ranks, the run goes on with the next batch. Every `report_every` steps
    `on_report` is called, on all ranks, with their mean seconds beside the plan's, as by `on_report=print`; a
    rank for which the others wait is named on stderr. What is returned knows the `step` and the `epoch`.

    Of a module with `updates` the loop keeps the rule: islands exchange at the border of a step, save into
    folders of their own, and leave where they meet.

    Raises InputError for a loader whose place isn't known, and what `load` and `save` raise.
    """
    for name, between in (("save_every", save_every), ("report_every", report_every)):
        if between < 1:
            raise InputError(
                where="autopar.steps",
                found=f"{name}={between}",
                wanted="at least 1 step",
                remedy=f"leave it out, for {SAVE_EVERY} between saves and {REPORT_EVERY} between reports",
            )
    islands = runner_of(model).islands if isinstance(model, ParallelModule) else None
    folder = Path(folder).absolute()
    return Steps(
        model,
        loader,
        folder / f"island_{islands.mine}" if islands else folder,
        epochs,
        save_every,
        keep,
        _sampler_of(loader),
        {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler},
        StepClock(model, report_every),
        islands,
        background=background,
        on_report=on_report,
        extra=extra,
    )


def _sampler_of(loader: Iterable[Any]) -> BatchSampler:
    """The sampler of a loader, which knows its place."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, BatchSampler):
        return sampler
    raise InputError(
        where="autopar.steps",
        found=f"{type(loader).__name__} without a sampler of autopar's",
        wanted="a loader whose place can be saved, whatever the number of ranks",
        remedy="make it by DataLoader(dataset, batch_sampler=parallel.sampler(dataset))",
    )
