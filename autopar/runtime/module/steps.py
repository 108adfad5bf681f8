"""A training loop that goes on: from the newest save, with the next sample, and leaves when it is asked to.

load ──> batch ──> the loop's body ──> border ──> batch ...
                                         ├── every `save_every` steps: save
                                         └── a signal on any rank: save, exit code 75
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.collectives.roll_call import collective, compare, meets
from autopar.runtime.collectives.statements import StatementPart
from autopar.runtime.launch.flight_record import note_step
from autopar.runtime.launch.leaving import LeaveRequest, leave_run
from autopar.runtime.module.sampler import BatchSampler
from autopar.runtime.module.saves import KEPT_SAVES, finish_saves, load, save
from autopar.runtime.module.step_reports import StepClock, StepReport

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
    background: bool = False
    on_report: Callable[[StepReport], object] | None = None
    extra: Any = None
    step: int = 0
    epoch: int = 0
    _saved: int | None = field(default=None, repr=False)
    _is_first: bool = field(default=True, repr=False)

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        with LeaveRequest() as request:
            for epoch in range(self.sampler.epoch, self.epochs):
                self.epoch = epoch
                self.sampler.set_epoch(epoch)
                for batch in self.sampler.count(self.loader):
                    yield batch
                    self.step += 1
                    self._border(request)
        if self._saved != self.step:
            self.save(background=False)
        finish_saves()

    def save(self, *, background: bool | None = None) -> Path:
        """Save the run now; on all ranks, between steps."""
        path = save(
            self.folder,
            self.model,
            sampler=self.sampler,
            step=self.step,
            extra=self.extra,
            keep=self.keep,
            background=self.background if background is None else background,
            **self.others,
        )
        self._saved = self.step
        return path

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
        before = load(self.folder, self.model, sampler=self.sampler, missing_ok=True, **self.others)
        if before is not None:
            self.step = self._saved = before.step or 0
            self.extra = before.extra
        note_step(self.step)

    def _border(self, request: LeaveRequest) -> None:
        """After a step: save where it is time to, and leave where any rank is asked to."""
        leaves = _anybody_leaves(request, self.step)
        note_step(self.step)  # which all ranks have come to the end of
        self._report()
        finish_saves(wait=False)
        if leaves or self.step % self.save_every == 0:
            with self.clock.paused():
                self.save(background=False if leaves else None)
        if leaves:
            if os.environ.get("RANK", "0") == "0":
                print(
                    f"autopar: saved after step {self.step}, and left as asked", file=sys.stderr, flush=True
                )
            leave_run()


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
    by `autopar.save`, every `save_every` steps and at the end; `extra` is saved beside it, until a save gives
    another; with `background` a thread writes while steps go on. SIGTERM or SIGUSR1 on any rank has all save
    after the step under way, and the process end with exit code 75, by SystemExit: started again, under any
    plan and on any number of ranks, the run goes on with the next batch. Every `report_every` steps
    `on_report` is called, on all ranks, with their mean seconds beside the plan's, as by `on_report=print`; a
    rank for which the others wait is named on stderr. What is returned knows the `step` and the `epoch`.

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
    return Steps(
        model,
        loader,
        Path(folder).absolute(),
        epochs,
        save_every,
        keep,
        _sampler_of(loader),
        {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler},
        StepClock(model, report_every),
        background,
        on_report,
        extra,
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
