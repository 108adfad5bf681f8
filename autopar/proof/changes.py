"""Whether changes of what forward reads take effect: each is made, and a step taken beside the eager model.

    self.tau: 0.7 -> 0.45      read         the guard must notice, and a new trace equal eager training
    self.use: False -> True    not read     eager training must be what it was
    model.eval()               a mode       a new trace must equal eager training

Of numbers that may be inputs of a program, the program for other values must be that of a new trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.cluster import ClusterSpec
from autopar.core.fingerprint import fingerprint_of
from autopar.errors import AutoparError
from autopar.planning.asked.request import Request
from autopar.planning.graphs.known_plans import kept, resized
from autopar.planning.search import search
from autopar.proof.precision import copy_model, raise_model, written_constants
from autopar.proof.verdict import Record, compare
from autopar.proof.verify import train_eagerly, verify_simulated
from autopar.results.plan.plan import Plan
from autopar.runtime.programs.guards import Guard, NumberSlot
from autopar.runtime.tree import serial_model
from autopar.torch_seams.modules import BatchNorm, DropoutNd
from autopar.trace.call.call_signature import Arguments
from autopar.trace.export import Traced, trace
from autopar.trace.forward.autocast import Autocast
from autopar.trace.reads.attribute_reads import recording
from autopar.trace.reads.numbers import NotFreeError, Numbers, as_before, freed, is_number
from autopar.trace.target import Target

MOST_CHANGES = 6  # changes that are made of what is read, and of what isn't
MODES = 3  # of modes and hooks, which often need another plan
_OWN = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class Changes:
    """Result of a proof by changes: how many of those there are were `tried`, which were `refused`, by name,
    and which are `wrong`: with these parallel training differs from eager training."""

    tried: int
    there: int
    refused: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.wrong

    def as_dict(self) -> dict[str, Any]:
        """The changes as the command line's JSON shows them."""
        return {
            "tried": self.tried,
            "there": self.there,
            "refused": list(self.refused),
            "wrong": list(self.wrong),
        }

    def __str__(self) -> str:
        count = f"changed     {self.tried} of {self.there} numbers, flags, modes and hooks, one by one: "
        refused = f", {len(self.refused)} refused ({', '.join(self.refused[:2])})" if self.refused else ""
        if self.wrong:
            return count + f"DIFFERS from eager training for {', '.join(self.wrong[:3])}" + refused
        return count + "each as in eager training" + refused


@dataclass(frozen=True, slots=True)
class _Change:
    name: str
    make: Callable[[], Callable[[], object]]  # makes it, and gives what takes it back
    slot: NumberSlot | None = None  # of a number
    old: Any = None
    new: Any = None
    is_noticed: bool = True  # by every call, whatever was read


def try_changes(
    target: Target, plan: Plan, cluster: ClusterSpec, request: Request, *, most: int = MOST_CHANGES
) -> Changes:
    """Change what the trace of `target` reads, and what it doesn't, and compare a step with eager training.

    At most so many changes of each are made; `plan` is kept where it can be. Leaves everything as it was.
    """
    trial = _Trial.of(target, plan, cluster, request)
    changes = trial.changes()
    limits = (most, most, min(most, MODES))
    chosen = [change for kind, limit in zip(changes, limits, strict=True) for change in _spread(kind, limit)]
    for change in chosen:
        trial.run(change)
    there = sum(map(len, changes))
    return Changes(trial.tried, there, tuple(trial.refused), tuple(trial.wrong))


@dataclass(slots=True)
class _Trial:
    target: Target
    plan: Plan
    cluster: ClusterSpec
    request: Request
    guard: Guard
    arguments: Arguments
    before: Record  # eager training without any change
    tried: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, target: Target, plan: Plan, cluster: ClusterSpec, request: Request) -> _Trial:
        with recording() as reads:
            traced = trace_whole(target, request, request.autocast(cluster))
        return cls(
            target,
            plan,
            cluster,
            request,
            Guard(reads, own=target.model.modules()),
            traced.arguments,
            _eagerly(target, traced.arguments),
        )

    def changes(self) -> tuple[list[_Change], ...]:
        """Changes of what is read, of other attributes of modules, of modes and hooks."""
        read = [_of_slot(name, slot) for name, slot in self.guard.places() if _other(slot.read()) is not None]
        known = {change.slot.name for change in read if change.slot is not None}
        unread = [
            _of_slot(f"{path}.{name}".lstrip("."), slot, is_read=False)
            for path, module in self.target.model.named_modules()
            for name, value in vars(module).items()
            if name not in _OWN and _other(value) is not None
            if (slot := NumberSlot(vars(module), name)).name not in known
        ]
        return read, unread, [*_modes(self.target.model), *_hooks(self.target.model)]

    def run(self, change: _Change) -> None:
        """Make a change, judge it, and take it back; one that eager training doesn't survive is none."""
        undo = change.make()
        try:
            noticed = change.is_noticed or not self.guard.holds()
            self.judge(change, noticed=noticed)
        finally:
            undo()

    def judge(self, change: _Change, *, noticed: bool) -> None:
        try:
            serial_model.check(self.target.model)
            traced = self.trace() if noticed else None
        except AutoparError:
            self.tried += 1
            self.refused.append(change.name)
            return
        theirs = None
        with suppress(Exception):  # a forward that doesn't take such a value raises anything
            theirs = _eagerly(self.target, self.arguments, traced)
        if theirs is None:
            return
        self.tried += 1
        if traced is None:
            if not _are_alike(self.before, theirs):
                self.wrong.append(f"{change.name}, which no guard notices")
        elif not self.follows(traced, theirs):
            self.wrong.append(change.name)
        elif change.slot is not None and is_number(change.new) and not self.is_free(change, traced):
            self.wrong.append(f"{change.name} as an input of the program")

    def trace(self) -> Traced:
        """The target's graph as things are."""
        return trace_whole(self.target, self.request, self.request.autocast(self.cluster))

    def follows(self, traced: Traced, theirs: Record) -> bool:
        """Whether a program for the changed model trains like the model, which trained to `theirs`."""
        plan = kept(traced.graph, [self.plan]) or resized(
            traced.graph, [self.plan], self.cluster, self.request
        )
        if plan is None:
            request = replace(self.request, alternatives=False, measure=False)
            plan = search(traced.graph, self.cluster, request).plan
        model, loss_fn = self.target.model, self.target.loss_fn
        verdict = verify_simulated(model, traced, plan.program, loss_fn=loss_fn, steps=1, theirs=theirs)
        return verdict.passed or verdict.is_rounding

    def is_free(self, change: _Change, traced: Traced) -> bool:
        """Whether the program with the number as an input computes what one made for the new value does.
        True, too, if no such program can be made."""
        assert change.slot is not None
        numbers = Numbers([change.old], [change.new])
        with suppress(AutoparError, NotFreeError), _replaced(change.slot, numbers.items[0]), freed(numbers):
            marked = as_before(self.trace().graph)
            decides = any(bool(formula([change.new])) is not answer for formula, answer in numbers.decisions)
            return decides or fingerprint_of(marked) == fingerprint_of(traced.graph)
        return True


def trace_whole(target: Target, request: Request, autocast: Autocast) -> Traced:
    """The target's graph; torch.export leaves copies of lists in modules, which are taken back."""
    states = [(vars(module), dict(vars(module))) for module in target.model.modules()]
    try:
        return trace(
            target.model,
            target.args,
            target.kwargs,
            loss_fn=target.loss_fn,
            loss_only=request.in_pieces,  # logits that leave are whole
            static=request.static,
            autocast=autocast,
            in_pieces=request.in_pieces,
        )
    finally:
        for state, before in states:
            state.update(before)


def _eagerly(target: Target, arguments: Arguments, traced: Traced | None = None) -> Record:
    """A step of the eager model; with the constants of its graph, if there is one."""
    model = raise_model(copy_model(target.model))
    constants = written_constants(traced.graph) if traced is not None else ()
    return train_eagerly(model, arguments, target.loss_fn, steps=1, constants=constants)


def _are_alike(before: Record, after: Record) -> bool:
    return max(compare(after, before).max_error.values()) == 0


def _spread(changes: Sequence[_Change], most: int) -> list[_Change]:
    """At most `most` of the changes, from everywhere."""
    if len(changes) <= most:
        return list(changes)
    return [changes[place * len(changes) // most] for place in range(most)]


def _other(value: object) -> Any:
    """Another value of its kind, that a chance or a rate may have, too; None for kinds that have none."""
    if type(value) is bool:
        return not value
    if type(value) is int:
        return value + 1
    if type(value) is float and abs(value) < 1e6:
        return value / 2 + (0.1 if value != 0.2 else 0.15)
    return None


@contextmanager
def _replaced(slot: NumberSlot, value: Any) -> Iterator[None]:
    before = slot.read()
    slot.write(value)
    try:
        yield
    finally:
        slot.write(before)


def _of_slot(name: str, slot: NumberSlot, *, is_read: bool = True) -> _Change:
    before = slot.read()
    new = _other(before)

    def make() -> Callable[[], object]:
        slot.write(new)
        return lambda: slot.write(before)

    return _Change(
        f"{name} {before!r} -> {new!r}", make, slot if is_read else None, before, new, is_noticed=False
    )


def _modes(model: nn.Module) -> Iterator[_Change]:
    """Changes of the mode of the whole model, and of every module alone whose forward is torch's."""
    modes = [(module, module.training) for module in model.modules()]

    def undo() -> None:
        for module, mode in modes:
            module.training = mode

    def whole() -> Callable[[], object]:
        model.train(not model.training)
        return undo

    yield _Change("the mode", whole)
    for path, module in model.named_modules():
        if isinstance(module, (BatchNorm, DropoutNd)):

            def single(module: nn.Module = module) -> Callable[[], object]:
                module.training = not module.training
                return undo

            yield _Change(f"the mode of {path}", single)


def _hooks(model: nn.Module) -> Iterator[_Change]:
    """One that doubles what a module gives."""
    for path, module in model.named_modules():
        if path and isinstance(module, nn.Linear):

            def make(module: nn.Module = module) -> Callable[[], object]:
                return module.register_forward_hook(_doubled).remove

            yield _Change(f"a hook on {path}", make)
            return


def _doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output
