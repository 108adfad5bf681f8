"""The programs of a parallel module: one for each kind of call, found again or compiled.

    call --> key: shapes, dtypes, modes, what needs gradients, autocast
         --> guards of what traces have read --> program
         --> none holds: free the number that has changed, or compile anew

Compiling is collective: every rank must come to the same plan.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import attrgetter, itemgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.core.pipeline import Pipeline
from autopar.core.placement import Layout
from autopar.errors import AutoparError, InputError
from autopar.results.plan.plan import Plan
from autopar.runtime.collectives import groups
from autopar.runtime.collectives.random import Stream, shared_stream
from autopar.runtime.collectives.roll_call import go_on
from autopar.runtime.executable import Executable, PinnedLayouts, StagedExecutable
from autopar.runtime.execute.bound_program import Bound, find_in
from autopar.runtime.execute.forward_relay import Relay
from autopar.runtime.execute.staged_program import StagedProgram
from autopar.runtime.programs.agreement import Agreement
from autopar.runtime.programs.free_numbers import bind, check_alike, trial
from autopar.runtime.programs.growing_calls import GrowingCalls, calling_method, inside
from autopar.runtime.programs.guards import Guard
from autopar.runtime.programs.local_inputs import LocalInputs
from autopar.runtime.programs.placed_tensors import PlacedTensors, group_keys
from autopar.runtime.programs.program_cache import STATES, Entry, ProgramCache
from autopar.runtime.programs.structure_guard import StructureGuard
from autopar.torch_seams.fakes import FakeTensorMode
from autopar.torch_seams.modes import without_subclass_functions
from autopar.trace.call.call_signature import Arguments
from autopar.trace.forward.autocast import Autocast
from autopar.trace.reads.attribute_reads import Reads, recording
from autopar.trace.reads.inside import Inside
from autopar.trace.reads.numbers import NotFreeError

Program = Bound | StagedProgram | Relay

COUNTS = 3  # programs that are made for an attribute that forward changes, before it is refused
GRAPHS = 12  # programs for calls that differ in their graph alone, before another graph is refused
NUMBER_TRIALS = 3  # to prove that a program is one for all values of its numbers
_TENSOR_STATE = attrgetter("dtype", "requires_grad")


class Compile(Protocol):
    """Plans and rewrites one kind of call of `model`, for this rank.

    `training` says whether gradients are wanted. `pinned` is what the program must keep to; None before
    parameters and buffers are placed. For a `step` the arguments are those of the whole batch, and the
    program is that of one micro-batch, the first or the one at `place`, or of this rank's stages. `known` are
    plans of such calls, made while numbers that the model reads were others. Must give the same plan on every
    rank.
    """

    def __call__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        training: bool,
        pinned: PinnedLayouts | None,
        step: bool = False,
        place: int = 0,
        known: Sequence[Plan] = (),
    ) -> Executable | StagedExecutable: ...


@dataclass(frozen=True, slots=True)
class Running:
    """Settings with which programs run on this rank: device, buckets of gradients, and the stream of random
    masks."""

    device: torch.device
    timeout: timedelta
    bucket_bytes: int | None
    exact_random: bool
    local_outputs: bool
    tells: bool


class CallPrograms:
    """Programs for calls of the module whose `tensors` these are, made by `compile`."""

    def __init__(
        self,
        tensors: PlacedTensors,
        compile: Compile,
        running: Running,
        agreement: Agreement,
        local: LocalInputs | None,
    ) -> None:
        self._tensors, self._compile, self._running = tensors, compile, running
        self._agreement, self._local = agreement, local
        self.cache: ProgramCache[Program] = ProgramCache()
        self._growing = GrowingCalls()
        self._counted, self._has_said = 0, set[bool]()
        self._failed: dict[Hashable, int] = {}  # trials of numbers to be free that have failed
        # Plans of the module that this one is a copy of, by their calls.
        self._inherited: list[tuple[tuple[Hashable, ...], Plan]] = []
        self._users: dict[str, Layout] = {}  # of user inputs, by path, in the first program with them
        self.stream: Stream | None = None  # where ranks draw masks; None: from the default generator
        self.batch: int | None = None  # samples of the first global batch
        self.compiles = False  # programs

    def __len__(self) -> int:
        return len(self.cache)

    def compile(self) -> None:
        """Compile programs from now on, each at its next call."""
        if not self.compiles:
            for program in self.cache.fixed():
                program.compile(tells=self._running.tells)
        self.compiles = True

    def untie(self) -> None:
        """Let go of the parameters' storage, which is about to be replaced."""
        for program in self.cache.programs():
            program.untie()

    def of(self, tensors: PlacedTensors, agreement: Agreement) -> CallPrograms:
        """The programs of a copy of the module: none yet, but the plans are known."""
        twin = copy.copy(self)
        twin.cache = ProgramCache()
        plans = [(key, program.executable.plan) for key, program in self.cache.plans()]
        vars(twin).update(_tensors=tensors, _agreement=agreement, _growing=GrowingCalls())
        vars(twin).update(_users=dict(self._users), _inherited=[*self._inherited, *plans])
        return twin

    def known(self, call: Arguments, *, step: bool = False) -> tuple[Entry[Program] | None, str]:
        """Find the program of the global `call` or step. Returns it, None if there is none, and a reason,
        "known" or "new", which ranks compare."""
        self._tensors.tree.check()
        key = self._key(call, step=step, place=0)
        if (entry := self.cache.find(key, call)) is not None:
            return entry, "known"
        last = next(iter(self.cache.of(key)), None)
        change = None if last is None else last.guard.change(call.tensors)
        return None, f"new, as {change} has changed" if change else "new"

    def find(self, call: Arguments, *, step: bool = False, place: int = 0) -> Entry[Program]:
        """The program for the global `call`, or of a step for the micro-batch at `place` of it."""
        self._tensors.tree.check()
        self._tensors.update_states()
        key = self._key(call, step=step, place=place)
        entry = self.cache.find(key, call)
        if entry is None:
            method = calling_method(self._tensors.tree.root, self._tensors.tree.serial_class)
            self._growing.see(call.tensors, method)
            try:
                entry = self._new_entry(call, key, step=step, place=place)
            except InputError as error:
                if method is not None:
                    error.add_remedy(inside(method.f_code.co_name))
                raise
            if self.cache.add(self._key(call, step=step, place=place), entry):
                FakeTensorMode.cache_clear()  # torch's own, which has what was traced of every shape so far
        return entry

    def _new_entry(
        self, call: Arguments, key: tuple[Hashable, ...], *, step: bool, place: int
    ) -> Entry[Program]:
        change, itself = self._change(key, call)
        if self._local and self._tensors.is_placed:
            _require_graph(call)
        if self._tensors.is_placed:
            go_on("by a new program" + ("" if change is None else f", as {change} has changed"))
            last = next(iter(self.cache.of(key)), None)
            self._agreement.check_change(change or "nothing", last.guard.now() if last else "")
        entry = None if itself else self._with_free_numbers(call, key, step=step, place=place)
        self._tell_change(change, free=entry is not None)
        if entry is not None:
            return entry
        made, reads = self._compiled(call, self._plans(key), step=step, place=place)
        pipeline = made.pipeline if isinstance(made, StagedExecutable) else Pipeline()
        if pipeline.meshes:
            groups.setup_unlike(pipeline.meshes, timeout=self._running.timeout)
        else:
            keys, copies = group_keys(made), pipeline.ranks
            groups.setup(made.mesh, keys, timeout=self._running.timeout, copies=copies)
        mesh = self._tensors.check(made) if self._tensors.is_placed else self._place(made)
        self._tensors.update_states()
        if torch.is_grad_enabled():
            self._tensors.note(made)
        program, structure = self._bind(made, mesh, step=step), self._structure(made, call)
        if self.batch is None:
            self.batch = _batch_of(call, made, step=step)
        if self.compiles:
            program.compile(tells=self._running.tells)
        guard = Guard(reads, own=self._tensors.tree.root.modules())
        return Entry(program, guard, reads.left, call.constants, structure=structure, inside=reads.inside)

    def _place(self, made: Executable | StagedExecutable) -> DeviceMesh:
        if dist.get_world_size() > 1 and not self._running.exact_random:
            self.stream = shared_stream()
        return self._tensors.place(made)

    def _compiled(
        self, call: Arguments, known: Sequence[Plan], *, step: bool, place: int
    ) -> tuple[Executable | StagedExecutable, Reads]:
        """The program of a call, and what its traces read."""
        args, kwargs = call.rebuild(call.tensors)
        states = self._tensors.states() if self._tensors.is_placed else None
        with recording() as reads, self._tensors.tree.serial(states) as model, _unseen():
            made = self._compile(
                model,
                args,
                kwargs,
                training=torch.is_grad_enabled(),
                pinned=self._tensors.pinned(self._users),
                step=step,
                place=place,
                known=known,
            )
        return made, reads

    def _with_free_numbers(
        self, call: Arguments, key: tuple[Hashable, ...], *, step: bool, place: int
    ) -> Entry[Program] | None:
        """A program for all values of the numbers in which the call differs from a known one. None where
        that can't be proved."""
        for entry in (*self.cache.of(key), *reversed(self.cache.like(key))):
            tried = trial(entry.guard, entry.constants, call.constants, entry.free)
            if tried is None or self._failed.get(tried.name, 0) >= NUMBER_TRIALS:
                continue
            known = entry.program.executable
            try:
                with tried.traced(call.constants) as (numbers, constants):
                    standing_in = replace(call, constants=constants)
                    made, reads = self._compiled(standing_in, [known.plan], step=step, place=place)
                check_alike(made, known, numbers)
                if not _leave_alike(reads.left, entry.left):
                    raise NotFreeError("another number that forward leaves")
            except (AutoparError, NotFreeError):  # the user's code, too, may not take what stands for numbers
                self._failed[tried.name] = self._failed.get(tried.name, 0) + 1
                return None
            program = self._bind(made, self._tensors.check(made), step=step)
            free = bind(made, numbers, tried.origins)
            guard = Guard(reads, free.slots, own=self._tensors.tree.root.modules())
            if not free.settle(call.constants):
                return None
            structure = self._structure(made, call)
            return Entry(program, guard, reads.left, call.constants, free, structure, reads.inside)
        return None

    def _structure(self, made: Executable | StagedExecutable, call: Arguments) -> StructureGuard | None:
        """The guard of the values that a program is made for."""
        if not made.structure:
            return None
        return StructureGuard(
            made.structure, call.tensors, call.paths, lambda name: find_in(self._tensors.tree.root, name)
        )

    def _change(self, key: tuple[Hashable, ...], call: Arguments) -> tuple[str | None, bool]:
        """Change since the last program, None for another kind of call, and whether forward itself does it.
        Raises InputError where it always does."""
        alike = self.cache.like(key)
        last = next(iter(self.cache.of(key)), None)
        change = "an argument without tensors" if last is None else last.guard.change(call.tensors)
        if change is None and last is not None and last.structure is not None:
            change = last.structure.change(call.tensors)
            self._check_structures(change, key)
        owners = {path: type(module).__name__ for path, module in self._tensors.tree.root.named_modules()}
        owners[""] = self._tensors.tree.serial_class.__name__
        left = last.left if last else ()
        own = [f"{path}.{name}".lstrip(".") for path, name in left if f"{owners.get(path)}.{name}" == change]
        self._counted = self._counted + 1 if own else 0
        if self._counted > COUNTS:
            raise InputError(
                where=f"attribute {own[0]}",
                found="a number that forward reads, and changes at each call",
                wanted=f"one program for all calls; {COUNTS} were made for its values",
                remedy="keep it by register_buffer(name, torch.tensor(0)), or count outside",
            )
        return (change if alike else None), bool(own)

    def _check_structures(self, change: str | None, key: tuple[Hashable, ...]) -> None:
        """Raise InputError for a structure that is another one at each call."""
        if change is not None and sum(entry.structure is not None for entry in self.cache.of(key)) >= GRAPHS:
            raise InputError(
                where=change,
                found=f"another graph than in {GRAPHS} programs that were made for calls like this one",
                wanted="a graph that stays, for which a plan is made",
                remedy="pass the same one at each call, or cut small graphs into batches by hand",
            )

    def _tell_change(self, change: str | None, *, free: bool) -> None:
        """Say once what a change costs."""
        if change is None or free in self._has_said:
            return
        self._has_said.add(free)
        if self._running.tells:
            then = (
                "from now on it is an input of the program" + ", which isn't compiled" * self.compiles
                if free
                else "the model is traced anew for each value, without a search where numbers alone differ; "
                f"the last {STATES} programs of a kind are kept"
            )
            print(
                f"autopar: {change} has changed, which the program depends on: {then} (said once)",
                file=sys.stderr,
                flush=True,
            )

    def _bind(self, made: Executable | StagedExecutable, mesh: DeviceMesh, *, step: bool) -> Program:
        def find(target: str) -> Callable[[], Any]:
            return find_in(self._tensors.tree.root, target)

        if isinstance(made, StagedExecutable) and not step:
            return Relay(
                made,
                find,
                mesh=mesh,
                device=self._running.device,
                timeout=self._running.timeout,
                stream=self.stream,
            )
        if isinstance(made, StagedExecutable):
            return StagedProgram(
                made,
                find,
                mesh=mesh,
                device=self._running.device,
                bucket_bytes=self._running.bucket_bytes,
                timeout=self._running.timeout,
                stream=self.stream,
            )
        samples = self._local.settle(made.samples) if self._local and made.samples else None
        bound = Bound(
            made,
            find,
            mesh=mesh,
            device=self._running.device,
            bucket_bytes=self._running.bucket_bytes,
            samples=samples,
            stream=self.stream,
            local_outputs=self._running.local_outputs,
            plain=self._tensors.are_plain,
        )
        if self._local:
            self._users = {item.target: item.layout for item in bound.users} | self._users
        return bound

    def _key(self, call: Arguments, *, step: bool, place: int) -> tuple[Any, ...]:
        if not self._tensors.is_placed:
            return ()
        with without_subclass_functions():  # a property of a DTensor takes thrice as long in it
            mine = tuple(map(_TENSOR_STATE, self._tensors.tree.held()))
        structure, constants, shapes = call.key
        return (
            constants,
            step,
            place,
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            self._tensors.tree.version,
            structure,
            shapes,
            tuple(tensor.requires_grad for tensor in call.tensors),
            self._tensors.tree.modes(),
            mine if (stages := self._tensors.states_of_stages) is None else stages,
            Autocast.now(self._running.device.type),
        )

    def _plans(self, key: tuple[Hashable, ...]) -> list[Plan]:
        """Plans of such calls, and of calls with other sizes: another graph of the same shape needs no
        search."""
        held = [(kind, program.executable.plan) for kind, program in self.cache.plans()]
        every = [(kind, plan) for kind, plan in (*held, *self._inherited) if _form(kind) == _form(key)]
        first = [plan for kind, plan in every if kind[1:] == key[1:]]
        rest = {id(plan.program): plan for kind, plan in every if kind[1:] != key[1:]}
        return [*first, *rest.values()]


def _require_graph(call: Arguments) -> None:
    """Raise InputError for a call that needs a program of its own and comes without its graph."""
    bad = [path for path, tensor in zip(call.paths, call.tensors, strict=True) if tensor.is_meta]
    if bad:
        raise InputError(
            where=f"input {bad[0]}",
            found="a graph on the meta device, in a kind of call (a mode, gradients) without a program",
            wanted="the graph itself, for which a program is made",
            remedy="call parallel.prepare(...) in that mode with the whole batch and its graph on every rank",
        )


def _form(key: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """A kind of call without its constants, sizes, and place among micro-batches."""
    return tuple(part for place, part in enumerate(key) if place not in (0, 2, 6))


def _leave_alike(ours: Mapping[tuple[str, str], Any], theirs: Mapping[tuple[str, str], Any]) -> bool:
    """Whether forward leaves the same numbers in modules; tensors stay inside of programs."""
    return ours.keys() == theirs.keys() and all(
        type(value) is type(theirs[place]) and (isinstance(value, Inside) or value == theirs[place])
        for place, value in ours.items()
    )


@contextmanager
def _unseen() -> Iterator[None]:
    """Context in which what autograd saves is nobody's: a checkpoint around the call would count it.

    In the end it is let go: of a result that its own backward saves, only torch would know otherwise.
    """
    saved: list[list[Tensor]] = []

    def pack(tensor: Tensor) -> list[Tensor]:
        saved.append([tensor])
        return saved[-1]

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, itemgetter(0)):
            yield
    finally:
        for held in saved:
            held.clear()


def _batch_of(call: Arguments, made: Executable | StagedExecutable, *, step: bool) -> int | None:
    """The number of samples of a call, whose program may be that of one of its micro-batches."""
    if isinstance(made, Executable) and not step:
        return made.samples.size if made.samples else None
    return next((len(tensor) for tensor in call.tensors if tensor.dim()), None)
