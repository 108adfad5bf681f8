"""What runs a parallel module: its programs, and how its tensors are placed.

    first call    compile the serial model -> put DTensors in the place of its parameters
    every call    key of the call, guards of what was read -> program from the cache, or compile anew -> run

Every rank makes the same calls in the same order: planning, forward, backward, `state_dict` and
`load_state_dict` are collective. Nothing here catches an exception: a rank that raises ends, and
the launcher, or the timeout of the process groups, ends the others.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import Any, Protocol, TypedDict, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.core.graph import InputKind, may_learn
from autopar.core.mesh import Mesh
from autopar.core.part import Part, whole
from autopar.core.pipeline import Pipeline
from autopar.core.placement import Layout, Shard, show
from autopar.errors import AutoparError, CheckError, InputError
from autopar.results.plan import Plan
from autopar.runtime.collectives import groups
from autopar.runtime.collectives.random import Stream, shared_stream
from autopar.runtime.collectives.roll_call import collective, go_on
from autopar.runtime.compiled.compiler import check_compiler
from autopar.runtime.execute.bound_program import Bound, find_in, gradient_key
from autopar.runtime.execute.executable import Executable, InputPart, Pinned, StagedExecutable
from autopar.runtime.execute.forward_relay import Relay
from autopar.runtime.execute.staged_program import StagedProgram
from autopar.runtime.launch.glibc_heap import keep_freed_memory
from autopar.runtime.module import serial_model
from autopar.runtime.module.agreement import Agreement
from autopar.runtime.module.clipping import norm_dtype, refuse_torch_clipping, scale, total_norm
from autopar.runtime.module.free_numbers import bind, check_alike, trial
from autopar.runtime.module.growing_calls import GrowingCalls, calling_method, inside
from autopar.runtime.module.guards import Guard
from autopar.runtime.module.local_inputs import LocalInputs
from autopar.runtime.module.loss_scaling import factor_of, share_infinities
from autopar.runtime.module.named_states import speak_by_names
from autopar.runtime.module.optimizer_states import speak_serial_order
from autopar.runtime.module.optimizers import refuse_together, step_fast, take_over
from autopar.runtime.module.program_cache import STATES, Entry, ProgramCache
from autopar.runtime.module.rank_states import Held, State
from autopar.runtime.module.sampler import BatchSampler
from autopar.runtime.module.stored import SerialOrder, Stored, chunk_of, out_of_order
from autopar.runtime.module.structure_guard import StructureGuard
from autopar.runtime.module.user_tree import UserTree
from autopar.runtime.module.whole_steps import step_whole
from autopar.runtime.parameters.beside_plain_tensors import take_plain_tensors
from autopar.runtime.parameters.global_scalars import read_whole_scalars
from autopar.runtime.parameters.parameters import (
    device_mesh,
    distribute,
    local,
    nothing,
    sharding_key,
    twin_of,
)
from autopar.trace.attribute_reads import Reads, recording
from autopar.trace.autocast import Autocast, without_autocast
from autopar.trace.call_signature import Arguments, find_loss, flatten_arguments
from autopar.trace.micro_batches import MicroBatch, mask_seed, split_batch
from autopar.trace.module_state import Inside
from autopar.trace.numbers import NotFreeError
from autopar.trace.simplify import no_loss
from autopar.trace.structure import parts_of

COUNTS = 3  # programs that are made for an attribute that forward changes, before it is refused
GRAPHS = 12  # programs for calls that differ in their graph alone, before another graph is refused
TRIALS = 3  # to prove that a program is one for all values of its numbers
_TENSOR_STATE = attrgetter("dtype", "requires_grad")
_MODE = attrgetter("training")
TIMEOUT = timedelta(minutes=10)  # torch's own for NCCL: how long a rank waits for one that has died


class SamplerOptions(TypedDict, total=False):
    """What `sampler` takes beside the dataset."""

    seed: int
    shuffle: bool
    drop_last: bool
    batch_size: int | None


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
        pinned: Pinned | None,
        step: bool = False,
        place: int = 0,
        known: Sequence[Plan] = (),
    ) -> Executable | StagedExecutable: ...


class Runner:
    """Runs `root` in parallel by the programs that `compile` makes, one for each kind of call.

    A kind of call is: shapes, dtypes and constants of the arguments; train or eval mode of every
    module; which parameters need gradients; dtypes of parameters and buffers; the state of autocast; and
    whatever else of the modules and the loss a trace has read. Outputs and losses are the serial model's,
    on every rank the whole, or the part that the program leaves there.
    """

    def __init__(
        self,
        root: nn.Module,
        serial_class: type,
        compile: Compile,
        *,
        describe: Callable[[Executable | StagedExecutable], str],
        device: torch.device,
        timeout: timedelta,
        broadcast_parameters: bool,
        bucket_bytes: int,
        by_steps: bool,
        exact_random: bool,
        local_inputs: bool,
        local_outputs: bool,
        quiet: bool,
    ) -> None:
        keep_freed_memory()
        self.tree = UserTree(root, serial_class)
        self._compile, self._describe = compile, describe
        self._device, self._timeout = device, timeout
        self._broadcast, self._bucket_bytes = broadcast_parameters, bucket_bytes
        self._by_steps, self._exact_random = by_steps, exact_random
        self._mesh: tuple[Mesh, DeviceMesh] | None = None  # set when parameters are placed
        self._pinned: dict[str, InputPart] = {}
        self._serial: dict[str, SerialOrder] = {}
        self._holders: Mapping[str, tuple[int, ...]] = {}  # pipeline ranks of each tensor, with stages
        self._stages_of_uses: Mapping[str, tuple[int, ...]] = {}  # with stages
        self._pipeline = Pipeline()
        self._held: Held | None = None  # with stages
        self.nothing: tuple[nn.Parameter, ...] = ()  # with stages
        self._programs: ProgramCache[Bound | StagedProgram | Relay] = ProgramCache()
        self._left: Mapping[tuple[str, str], Any] = {}  # what the program in hand leaves in modules
        self._counted, self._has_said = 0, set[bool]()
        self._failed: dict[Hashable, int] = {}  # trials of numbers to be free that have failed
        self._tells = dist.get_rank() == 0 and not quiet
        self.compiles = False  # programs
        # Plans of the module that this one is a copy of, by their calls.
        self._inherited: list[tuple[tuple[Hashable, ...], Plan]] = []
        self._growing = GrowingCalls()
        self._current: Bound | StagedProgram | Relay | None = None  # that ran last, or was planned first
        self._local = LocalInputs(dist.get_rank()) if local_inputs else None
        self._local_outputs = local_outputs
        self._agreement = Agreement(device, local_inputs=local_inputs)
        self._scaler: torch.amp.GradScaler | None = None  # of the losses of steps
        self._users: dict[str, Layout] = {}  # of user inputs, by path, in the first program with them
        self._stream: Stream | None = None  # where ranks draw masks; None: from the default generator
        self._batch: int | None = None  # samples of the first global batch

    # -- calls ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The serial model's output; every rank passes the global batch, or its samples of it.

        With pipeline stages it is without gradients, and backward from it raises: `train_step` trains.
        """
        with collective("forward"):
            return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._by_steps and self._mesh is None:
            with torch.enable_grad():
                self.prepare(*args, **kwargs)  # parameters lie where steps want them
        call = flatten_arguments(args, kwargs)
        self._agree(call)
        if self._pipeline.is_staged:
            self._require_global("call of the parallel module")
            with torch.no_grad():
                program = self._program(call)
        else:
            program = self._program(self._local.whole(call) if self._local else call)
        assert not isinstance(program, StagedProgram)
        self._current = program
        with without_autocast(self._device.type):
            output = program(call.tensors)
        self.tree.leave(self._left)
        return output

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one global batch, micro-batch by micro-batch; returns its loss.

        Gradients are added to the parameters' `.grad`, and the optimizer's step stays the user's. The
        loss is that of the batch, on every rank: micro-batches count in it by their share of what it is a
        mean of (samples, labels that are kept, a mask), and as they are in a sum. Every rank passes the
        global batch.
        """
        with collective("train_step"):
            return self._step(args, kwargs, learn=True)

    @contextmanager
    def scaled_by(self, scaler: torch.amp.GradScaler) -> Iterator[None]:
        """Within, backward of each step starts from the loss times the scaler's factor; the loss that
        `train_step` returns is the loss itself."""
        before, self._scaler = self._scaler, scaler
        try:
            yield
        finally:
            self._scaler = before

    def eval_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of one global batch on every rank, as `train_step` returns it, without gradients."""
        with collective("eval_step"):
            return self._step(args, kwargs, learn=False)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, learn: bool) -> Tensor:
        call = flatten_arguments(args, kwargs)
        self._require_global("train_step")
        scale = factor_of(self._scaler, self._device) if self._scaler and learn else None
        with torch.set_grad_enabled(learn):
            self._agree(call)
            program = self._current = self._program(call, step=self._by_steps)
            count = program.executable.plan.pipeline.micro_batches
            batch = split_batch(program.executable.cutting, call.tensors, count, find=self._buffer)
            if isinstance(program, StagedProgram):
                _refuse_input_gradients(call)
                with without_autocast(self._device.type):
                    loss = program.train(batch, scale) if learn else program.evaluate(batch)
            else:
                assert isinstance(program, Bound)
                loss = self._accumulate(call, batch, program, scale, learn=learn)
        self.tree.leave(self._left)
        return loss

    def compile(self) -> None:
        """From now on programs are compiled, each at its next call."""
        check_compiler(self._device.type)
        if not self.compiles:
            for program in self._programs.fixed():
                program.compile(tells=self._tells)
        self.compiles = True

    def _buffer(self, name: str) -> Tensor:
        """The whole of a buffer, on every rank; a collective."""
        held: Mapping[str, Tensor] = dict(self.tree.root.named_buffers())
        return self.gather(name, held.get(name))

    def _agree(self, call: Arguments) -> None:
        """Raise InputError where ranks differ in what they must share; not where checkpoints repeat it."""
        if torch._C._current_graph_task_id() == -1:
            modes = (module.training for module in self.tree.modules)
            self._agreement.check(call, modes, self._whole_tensors(), random=self._random_state())

    def _random_state(self) -> bytes:
        """What exact masks follow from: with stages the seed, which each micro-batch goes back to."""
        if not self._exact_random:
            return b""
        if self._pipeline.is_staged:
            return str(torch.initial_seed()).encode()
        return torch.get_rng_state().numpy().tobytes()

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters and buffers that every rank of the world has, whole."""
        if self._mesh is None or self._pipeline.is_staged:
            return
        for name, tensor in self._named_tensors():
            if not isinstance(tensor, DTensor) or not any(item.is_shard() for item in tensor.placements):
                yield f"parameter or buffer {name}", local(tensor)

    def _require_global(self, where: str) -> None:
        if self._local:
            raise InputError(
                where=where,
                found="local inputs",
                wanted="the whole batch on every rank, of which each stage and micro-batch takes its part",
                remedy='parallelize with inputs="global"',
            )

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients in place so that their norm, over all ranks and stages, is at most
        `max_norm`; returns the norm before. As torch.nn.utils.clip_grad_norm_; a collective."""
        self.require_placed()
        held = {name: item for name, item in self.tree.root.named_parameters() if item.grad is not None}
        mine = [item.grad for name, item in held.items() if item.grad is not None and self._counts(name)]
        group = None if isinstance(self._current, Bound | None) else self._current.group
        dtype = norm_dtype(dtype for dtype, requires_grad in self._states().values() if requires_grad)
        with collective("clip_grad_norm_"):
            norm = total_norm(mine, float(norm_type), dtype=dtype, group=group, device=self._device)
        if error_if_nonfinite and not norm.isfinite():
            raise InputError(
                where="clip_grad_norm_",
                found=f"a gradient norm of {float(norm)}",
                wanted="a finite norm",
                remedy="lower the rate, or leave out error_if_nonfinite",
            )
        scale((item.grad for item in held.values() if item.grad is not None), norm, max_norm)
        return norm

    def _counts(self, name: str) -> bool:
        """Whether this pipeline rank is the one that counts the parameter, of several that hold it."""
        if not self._holders or self._mesh is None:
            return True
        return self._holders[name][0] == dist.get_rank() // self._mesh[0].num_devices

    def _accumulate(
        self,
        call: Arguments,
        batch: Sequence[MicroBatch],
        first: Bound,
        scale: Tensor | None,
        *,
        learn: bool,
    ) -> Tensor:
        """One micro-batch after the other; a longer one's program may not fit the shorter. With exact
        masks each is drawn from the step's seed and its number, as in stages."""
        seed = torch.initial_seed()
        shorter = first
        if batch[-1].share < batch[0].share:
            shorter = cast(Bound, self._program(call, step=True, place=-1))
        programs = [first if micro.share == batch[0].share else shorter for micro in batch]
        losses = []
        for number, (micro, program) in enumerate(zip(batch, programs, strict=True)):
            if self._exact_random:
                torch.manual_seed(mask_seed(seed, number))
            last = program not in programs[number + 1 :]
            with program.adding_up(last=last), without_autocast(self._device.type):
                loss = find_loss(program(micro.tensors))
                if loss is None:
                    raise no_loss()
                loss = loss * micro.weight
                if learn:
                    (loss if scale is None else loss * scale).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum(0)

    @property
    def plan(self) -> Plan:
        """The plan of the program that ran last; the first call's before that."""
        if self._current is None:
            self.require_placed()
        assert self._current is not None
        return self._current.executable.plan

    @property
    def output_parts(self) -> tuple[Part, ...]:
        """Which box of each global output this rank returns, by the program that ran last; the tensors
        of the output in their order."""
        self.require_placed()
        if not isinstance(self._current, Bound):
            raise InputError(
                where="output_parts of the parallel module",
                found="a plan with pipeline stages, whose outputs are global on every rank",
                wanted="a plan without stages",
                remedy="use the outputs as they are",
            )
        outputs = self._current.executable.outputs
        return tuple(item.part if self._local_outputs else whole(item.spec.shape) for item in outputs)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Plan and compile for a call with such a global batch, without running it; the first time,
        place the parameters. With local inputs, calls are known by the batches that were prepared."""
        call = flatten_arguments(args, kwargs)
        with collective("prepare"):
            self._agreement.check_shapes(call)
            program = self._current = self._program(call, step=self._by_steps)
        if self._local and isinstance(program, Bound):
            self._local.learn(call, program.samples)

    def _program(
        self, call: Arguments, *, step: bool = False, place: int = 0
    ) -> Bound | StagedProgram | Relay:
        """The program for the global `call`, or of a step for the micro-batch at `place` of it."""
        self.tree.check()
        self._update_held()
        key = self._key(call, step=step, place=place)
        entry = self._programs.find(key, call)
        if entry is None:
            method = calling_method(self.tree.root, self.tree.serial_class)
            self._growing.see(call.tensors, method)
            try:
                entry = self._new_entry(call, key, step=step, place=place)
            except InputError as error:
                if method is not None:
                    error.add_remedy(inside(method.f_code.co_name))
                raise
            self._programs.add(self._key(call, step=step, place=place), entry)
        self._left = entry.left
        return entry.program

    def _new_entry(
        self, call: Arguments, key: tuple[Hashable, ...], *, step: bool, place: int
    ) -> Entry[Bound | StagedProgram | Relay]:
        change, itself = self._change(key, call)
        if self._mesh is not None:
            go_on("by a new program" + ("" if change is None else f", as {change} has changed"))
            last = next(iter(self._programs.of(key)), None)
            self._agreement.check_change(change or "nothing", last.guard.now() if last else "")
        entry = None if itself else self._with_free_numbers(call, key, step=step, place=place)
        self._tell_change(change, free=entry is not None)
        if entry is not None:
            return entry
        made, reads = self._compiled(call, self._plans(key), step=step, place=place)
        copies = made.pipeline.ranks if isinstance(made, StagedExecutable) else 1
        groups.setup(made.mesh, self._keys(made), timeout=self._timeout, copies=copies)
        mesh = self._place(made) if self._mesh is None else self._check(made)
        self._update_held()
        program, structure = self._bind(made, mesh, step=step), self._structure(made, call)
        if self.compiles:
            program.compile(tells=self._tells)
        return Entry(program, Guard(reads), reads.left, call.constants, structure=structure)

    def _compiled(
        self, call: Arguments, known: Sequence[Plan], *, step: bool, place: int
    ) -> tuple[Executable | StagedExecutable, Reads]:
        """The program of a call, and what its traces read."""
        args, kwargs = call.rebuild(call.tensors)
        states = None if self._mesh is None else self._states()
        with recording() as reads, self.tree.serial(states) as model, _unseen():
            made = self._compile(
                model,
                args,
                kwargs,
                training=torch.is_grad_enabled(),
                pinned=self._keep(),
                step=step,
                place=place,
                known=known,
            )
        return made, reads

    def _with_free_numbers(
        self, call: Arguments, key: tuple[Hashable, ...], *, step: bool, place: int
    ) -> Entry[Bound | StagedProgram | Relay] | None:
        """A program for all values of the numbers in which the call differs from one that has its program,
        None where that can't be proved."""
        for entry in (*self._programs.of(key), *reversed(self._programs.like(key))):
            tried = trial(entry.guard, entry.constants, call.constants, entry.free)
            if tried is None or self._failed.get(tried.name, 0) >= TRIALS:
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
            program = self._bind(made, self._check(made), step=step)
            free = bind(made, numbers, tried.origins)
            guard = Guard(reads, free.slots)
            if not free.settle(call.constants):
                return None
            structure = self._structure(made, call)
            return Entry(program, guard, reads.left, call.constants, free, structure)
        return None

    def _structure(self, made: Executable | StagedExecutable, call: Arguments) -> StructureGuard | None:
        """The guard of the values that a program is made for."""
        if not made.structure:
            return None
        return StructureGuard(
            made.structure, call.tensors, call.paths, lambda name: find_in(self.tree.root, name)
        )

    def _change(self, key: tuple[Hashable, ...], call: Arguments) -> tuple[str | None, bool]:
        """What was read and has changed, None for another kind of call, and whether forward itself does that;
        raises InputError where it always does."""
        alike = self._programs.like(key)
        last = next(iter(self._programs.of(key)), None)
        change = "an argument without tensors" if last is None else last.guard.change(call.tensors)
        if change is None and last is not None and last.structure is not None:
            change = last.structure.change(call.tensors)
            self._check_structures(change, key)
        owners = {path: type(module).__name__ for path, module in self.tree.root.named_modules()}
        owners[""] = self.tree.serial_class.__name__
        left = last.left if last else ()
        own = [f"{path}.{name}".lstrip(".") for path, name in left if f"{owners.get(path)}.{name}" == change]
        self._counted = self._counted + 1 if own else 0
        if self._counted > COUNTS:
            raise InputError(
                where=f"attribute {own[0]}",
                found="a number that forward reads, and changes at each call",
                wanted=f"one program for all calls; {COUNTS} were made for its values",
                remedy="register_buffer(name, torch.tensor(0)) it, or count outside",
            )
        return (change if alike else None), bool(own)

    def _check_structures(self, change: str | None, key: tuple[Hashable, ...]) -> None:
        """Raise InputError for a structure that is another one at each call."""
        if (
            change is not None
            and sum(entry.structure is not None for entry in self._programs.of(key)) >= GRAPHS
        ):
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
        if self._tells:
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

    def _bind(
        self, made: Executable | StagedExecutable, mesh: DeviceMesh, *, step: bool
    ) -> Bound | StagedProgram | Relay:
        def find(target: str) -> Callable[[], Any]:
            return find_in(self.tree.root, target)

        if isinstance(made, StagedExecutable) and not step:
            return Relay(
                made,
                find,
                mesh=mesh,
                device=self._device,
                timeout=self._timeout,
                stream=self._stream,
            )
        if isinstance(made, StagedExecutable):
            return StagedProgram(
                made,
                find,
                mesh=mesh,
                device=self._device,
                bucket_bytes=self._bucket_bytes,
                timeout=self._timeout,
                stream=self._stream,
            )
        samples = self._local.settle(made.samples) if self._local and made.samples else None
        bound = Bound(
            made,
            find,
            mesh=mesh,
            device=self._device,
            bucket_bytes=self._bucket_bytes,
            samples=samples,
            stream=self._stream,
            local_outputs=self._local_outputs,
        )
        if self._local:
            self._users = {item.target: item.layout for item in bound.users} | self._users
        if self._batch is None and made.samples:
            self._batch = made.samples.size
        return bound

    def _keep(self) -> Pinned | None:
        """What the first program has settled."""
        if self._mesh is None:
            return None
        stored = {name: item.layout for name, item in self._pinned.items()}
        return Pinned(self._mesh[0], stored, self._users, self._stages_of_uses, self._pipeline)

    def _key(self, call: Arguments, *, step: bool, place: int) -> tuple[Any, ...]:
        if self._mesh is None:
            return ()
        held = [tensor for item in self.tree.modules for tensor in item._parameters.values()]
        held += [tensor for item in self.tree.modules for tensor in item._buffers.values()]
        with torch._C.DisableTorchFunctionSubclass():  # a property of a DTensor takes thrice as long in it
            mine = tuple(map(_TENSOR_STATE, (tensor for tensor in held if tensor is not None)))
        structure, constants, shapes = call.key
        return (
            constants,
            step,
            place,
            torch.is_grad_enabled(),
            self.tree.version,
            structure,
            shapes,
            tuple(tensor.requires_grad for tensor in call.tensors),
            tuple(map(_MODE, self.tree.modules)),
            tuple(self._held.states.items()) if self._held else mine,
            Autocast.now(self._device.type),
        )

    def _update_held(self) -> None:
        """With stages, learn what other ranks hold; a collective."""
        if self._held is not None:
            self._held.update(self._named_tensors())

    def _states(self) -> Mapping[str, State]:
        """Dtypes and need of gradients of all parameters and buffers, also of other stages."""
        if self._held is not None:
            return self._held.states
        return {name: (tensor.dtype, tensor.requires_grad) for name, tensor in self._named_tensors()}

    def whole_states(self) -> Mapping[str, State]:
        """The states of all parameters and buffers as they are now; collective with stages."""
        self.tree.check()
        self._update_held()
        return self._states()

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return itertools.chain(self.tree.root.named_parameters(), self.tree.root.named_buffers())

    # -- samples --------------------------------------------------------------------------------

    @property
    def has_local_inputs(self) -> bool:
        """Whether each rank passes samples of its own."""
        return self._local is not None

    @property
    def takes_steps(self) -> bool:
        """Whether training goes by `train_step`."""
        return self._by_steps

    @property
    def samples(self) -> range:
        """The rows of the global batch that this rank passes; of the batch that was planned first."""
        return self._loads(None)[1]

    def sampler(
        self,
        dataset: Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        batch_size: int | None = None,
    ) -> BatchSampler:
        """For `DataLoader(dataset, batch_sampler=...)`: this rank's rows of each global batch.

        All ranks draw one order from `seed` and the epoch (`set_epoch`). `batch_size` is the global
        batch's, one that is prepared; that of the first plan by default. See `BatchSampler`.
        """
        size, rows = self._loads(batch_size)
        return BatchSampler(
            dataset,
            batch_size=size,
            rows=rows,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )

    def _loads(self, size: int | None) -> tuple[int, range]:
        """The number of samples of a global batch, and the rows that this rank loads of it."""
        self.require_placed()
        if self._batch is None:
            raise InputError(
                where="samples of the parallel module",
                found="a call without tensors that have dims",
                wanted="a batch, dim 0 of the first tensor of a call",
                remedy="cut the work between ranks by hand",
            )
        size = self._batch if size is None else size
        return size, self._local.rows(size) if self._local else range(size)

    # -- placing --------------------------------------------------------------------------------

    def _keys(self, made: Executable | StagedExecutable) -> set[str]:
        """The program's groups, and those of every axis and of everything that is sharded."""
        stored = [item.layout for item in made.inputs if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
        joint = {key for layout in stored if (key := sharding_key(made.mesh, layout)) is not None}
        sums = {item.sync for item in made.inputs if item.sync is not None}
        sums |= {
            key
            for item in made.inputs
            if item.kind is InputKind.USER and item.spec.requires_grad
            if (key := gradient_key(item, made.mesh)) is not None
        }
        return {*made.groups, *joint, *sums, *(made.mesh.key((axis,)) for axis in made.mesh.axes)}

    def _place(self, made: Executable | StagedExecutable) -> DeviceMesh:
        """Cut the serial model's tensors to this rank's parts, and let go of the model."""
        mesh = device_mesh(made.mesh, self._device)
        self._pinned = {
            name: item
            for item in made.inputs
            if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)
            for name in (item.target, *item.aliases)
        }
        self._mesh = (made.mesh, mesh)
        serial_mesh = device_mesh(made.mesh, self._device, prefix="serial_")
        apart = out_of_order(self._pinned, mesh, self._device)
        self._serial = {
            name: SerialOrder(chunk_of(part, mesh), serial_mesh, name in apart)
            for name, part in self._pinned.items()
        }
        if isinstance(made, StagedExecutable):
            self._holders = dict.fromkeys(self._pinned, (0,)) | dict(made.holders)
            self._stages_of_uses, self._pipeline = made.stages_of_uses, made.pipeline
            self._held, self.nothing = Held(self._device), (nothing(mesh),)
            self.tree.nothing = self.nothing
            refuse_torch_clipping(mesh)
            share_infinities(mesh)
        if dist.get_world_size() > 1 and not self._exact_random:
            self._stream = shared_stream()
        serial_model.check_plain(self.tree.root)
        placed = self.tree.place(self._store)
        parameters = [item for item in placed if isinstance(item.whole, nn.Parameter)]
        take_over(self, parameters, mesh, self.nothing, tell=self._tells)
        self.tree.retire()
        numbers = any(not item.spec.shape for item in self._pinned.values())
        read_whole_scalars(mesh, staged=isinstance(made, StagedExecutable), with_numbers=numbers)
        take_plain_tensors(self, mesh, self._obstacle())
        self._look_at_steps(mesh)
        speak_serial_order()
        speak_by_names()
        return mesh

    def _look_at_steps(self, mesh: DeviceMesh) -> None:
        """Let optimizers step these parameters in the way that is right and fast, or be refused."""
        refuse_together(self, mesh, staged=self._pipeline.is_staged)
        step_whole(self, mesh, staged=self._pipeline.is_staged)
        step_fast(self, mesh)

    def _obstacle(self) -> str:
        """Why plain tensors outside the program don't lie as parameters do; empty where they do."""
        if self._local:
            return "of this rank's samples"
        layouts = [placement for item in self._pinned.values() for placement in item.layout]
        blocks = any(isinstance(placement, Shard) and placement.atom for placement in layouts)
        return "whose rows lie in another order than that of weights in blocks" if blocks else ""

    def copied(self, memo: dict[int, Any]) -> nn.Module:
        """A deep copy of the root that runs by itself: own parameters, programs that are still to be made."""
        for _, tensor in self._named_tensors():
            # Torch's own copy of a DTensor takes its gradient along, and fails.
            memo.setdefault(id(tensor), twin_of(tensor))
        memo.update((id(old), old) for old in self.tree.old())
        with self.tree.plain() as root:
            twin = copy.deepcopy(root, memo)
        twin.__class__ = type(self.tree.root)
        runner = twin.__dict__["_autopar"] = copy.copy(self)
        runner.tree = self.tree.of(twin)
        runner.tree.install()
        runner._programs, runner._growing = ProgramCache(), GrowingCalls()
        runner._users = dict(self._users)
        runner._agreement = Agreement(self._device, local_inputs=self._local is not None)
        runner._inherited = [
            *self._inherited,
            *((key, program.executable.plan) for key, program in self._programs.plans()),
        ]
        if self._held is not None:
            runner._held = Held(self._device)
        if self._mesh is not None:
            take_plain_tensors(runner, self._mesh[1], self._obstacle())
            runner._look_at_steps(self._mesh[1])
        return twin

    def _plans(self, key: tuple[Hashable, ...]) -> list[Plan]:
        """Plans of such calls, and of calls with other sizes: another graph of the same shape needs no
        search."""
        held = [(kind, program.executable.plan) for kind, program in self._programs.plans()]
        every = [(kind, plan) for kind, plan in (*held, *self._inherited) if _form(kind) == _form(key)]
        first = [plan for kind, plan in every if kind[1:] == key[1:]]
        rest = {id(plan.program): plan for kind, plan in every if kind[1:] != key[1:]}
        return [*first, *rest.values()]

    def _store(self, name: str, full: Tensor) -> tuple[Tensor | None, Stored]:
        assert self._mesh is not None
        part = self._pinned.get(name)
        if part is None:
            raise CheckError(
                where=f"{name} of the model",
                found="no input of the program",
                wanted="every parameter and buffer among the program's inputs",
                remedy="report this model",
            )
        key = sharding_key(self._mesh[0], part.layout)
        devices = self._mesh[0].num_devices
        holders = self._holders.get(part.target, ())
        holder = holders[0] * devices if holders else None
        stored = Stored(part, key, self._device, self._serial[name], holder)
        values = self._values(full)
        if holders and dist.get_rank() // devices not in holders:
            return None, stored
        mine = part.part.take(values).to(self._device)
        if mine.layout is not torch.strided:
            return mine, stored
        mine = mine.clone(memory_format=torch.contiguous_format)  # a view would keep the whole
        if isinstance(full, nn.Parameter):
            outer = distribute(part, mine, self._mesh[1])
            return nn.Parameter(outer, requires_grad=full.requires_grad), stored
        return (mine if key is None else distribute(part, mine, self._mesh[1])), stored

    def _values(self, full: Tensor) -> Tensor:
        """A copy of the tensor's values, rank 0's if asked for."""
        if full.is_meta:
            values = torch.zeros(full.shape, dtype=full.dtype)
            return values.fill_(float("nan")) if may_learn(full.dtype) else values
        dense = {"memory_format": torch.contiguous_format} if full.layout is torch.strided else {}
        values = full.detach().clone(**dense)
        if self._broadcast:
            values = values.to(self._device)
            for part in parts_of(values):
                dist.broadcast(part, src=0)
        return values

    def _check(self, made: Executable | StagedExecutable) -> DeviceMesh:
        """A later program must take the parameters as they lie."""
        assert self._mesh is not None
        moved = [
            f"{item.target} as {show(item.layout)}"
            for item in made.inputs
            if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)
            and not _lie_alike(item.part, self._pinned[item.target].part)
        ]
        if isinstance(made, StagedExecutable):
            moved += [
                f"{name} on {ranks}"
                for name, ranks in made.holders.items()
                if not set(ranks) <= set(self._holders[name])  # copies that learn are used or none is
                or (torch.is_grad_enabled() and ranks != self._holders[name])
            ]
        if moved or made.mesh != self._mesh[0]:
            raise CheckError(
                where="a second program of the parallel module",
                found=f"mesh {made.mesh}" + "".join(f", {name}" for name in moved),
                wanted=f"mesh {self._mesh[0]} and parameters where they are",
                remedy="the planner must keep to the layouts that are pinned",
            )
        return self._mesh[1]

    def require_placed(self) -> None:
        """Raise InputError before a plan has said where parameters lie."""
        if self._mesh is None:
            raise InputError(
                where="parameters of the parallel module",
                found="no plan yet",
                wanted="parameters that are placed by a plan",
                remedy="pass example_inputs to parallelize, or call the module once first",
            )

    def gather(self, name: str, tensor: Tensor | None) -> Tensor:
        """The full tensor of what lies as parameter or buffer `name` does; a collective."""
        stored = self.tree.stored[name]
        with collective("gather") if stored.is_shared else nullcontext():
            return stored.gather(tensor)

    def gathering(self, what: str) -> AbstractContextManager[None]:
        """Within, all parameters and buffers are gathered, which is collective where any is shared."""
        return (
            collective(what) if any(item.is_shared for item in self.tree.stored.values()) else nullcontext()
        )

    def untie(self) -> None:
        """Let go of the parameters' storage, which is about to be replaced."""
        for program in self._programs.programs():
            program.untie()

    def describe(self) -> str:
        """The plan, and this rank's program."""
        if self._current is None:
            return "ParallelModule(no plan yet: call it once, or pass example_inputs to parallelize)"
        return self._describe(self._current.executable)


def _form(key: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """A kind of call without its constants, sizes, and place among micro-batches."""
    return tuple(part for place, part in enumerate(key) if place not in (0, 2, 6))


def _leave_alike(ours: Mapping[tuple[str, str], Any], theirs: Mapping[tuple[str, str], Any]) -> bool:
    """Whether forward leaves the same numbers in modules; tensors stay inside of programs."""
    return ours.keys() == theirs.keys() and all(
        type(value) is type(theirs[place]) and (isinstance(value, Inside) or value == theirs[place])
        for place, value in ours.items()
    )


def _lie_alike(part: Part, other: Part) -> bool:
    """Whether two parts are the same rows; whole ones are, whatever their dims are products of."""
    return part == other or (part.is_whole and other.is_whole)


def _unseen() -> AbstractContextManager[None]:
    """Within, what autograd saves is nobody's: a checkpoint around the call would count it."""
    return cast("AbstractContextManager[None]", torch.autograd.graph.saved_tensors_hooks(_itself, _itself))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _refuse_input_gradients(call: Arguments) -> None:
    asked = [path for path, tensor in zip(call.paths, call.tensors, strict=True) if tensor.requires_grad]
    if asked:
        raise InputError(
            where="train_step",
            found=f"{', '.join(asked)} with requires_grad",
            wanted="inputs without: their gradient would exist on the ranks of single stages only",
            remedy="pass .detach(), or plan without pipeline stages",
        )
