"""What runs a parallel module: each call finds its program (call_programs.py) and runs it.

    first call    compile the serial model -> put a rank's parameters in their places (placed_tensors.py)
    every call    key of the call, guards of what was read -> program from the cache, or compile anew -> run

Every rank makes the same calls in the same order: planning, forward, backward, `state_dict` and
`load_state_dict` are collective. Nothing here catches an exception: a rank that raises ends, and
the launcher, or the timeout of the process groups, ends the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.core.part import Part, whole
from autopar.errors import InputError
from autopar.results.plan.plan import Plan
from autopar.runtime.collectives.random import ExactDraws, Stream
from autopar.runtime.collectives.roll_call import collective, wait_at_most
from autopar.runtime.compiled.compiler import check_compiler
from autopar.runtime.executable import Executable, StagedExecutable
from autopar.runtime.execute.bound_program import Bound
from autopar.runtime.execute.staged_program import StagedProgram
from autopar.runtime.islands.joining import Islands
from autopar.runtime.launch.glibc_heap import keep_freed_memory
from autopar.runtime.module.regions import region_of
from autopar.runtime.module.sampler import BatchSampler
from autopar.runtime.module.stale_steps import StaleSteps
from autopar.runtime.optimizers.clipping import norm_dtype, norm_over_meshes, scale, total_norm
from autopar.runtime.optimizers.loss_scaling import factor_of
from autopar.runtime.parameters.parameters import (
    twin_of,
)
from autopar.runtime.programs.agreement import Agreement, Copy
from autopar.runtime.programs.call_programs import CallPrograms, Compile, Program, Running
from autopar.runtime.programs.local_inputs import LocalInputs
from autopar.runtime.programs.placed_tensors import PlacedTensors
from autopar.runtime.programs.program_cache import Entry
from autopar.runtime.tree.user_tree import UserTree
from autopar.schedules.unflushed import unflushed_seconds
from autopar.torch_seams.autograd import graph_task
from autopar.trace.call.call_signature import Arguments, find_loss, flatten_arguments, require_values
from autopar.trace.forms.simplify import no_loss
from autopar.trace.forward.autocast import without_autocast
from autopar.trace.micro_batches import MicroBatch, split_batch
from autopar.trace.reads.inside import LeftInside
from autopar.trace.values.structure import digest_of

TIMEOUT = timedelta(minutes=10)  # torch's own for NCCL: how long a rank waits for one that has died


class SamplerOptions(TypedDict, total=False):
    """Options that `sampler` takes beside the dataset."""

    seed: int
    shuffle: bool
    drop_last: bool
    batch_size: int | None
    shards: int
    exchange_every: int | None


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
        bucket_bytes: int | None,
        by_steps: bool,
        exact_random: bool,
        local_inputs: bool,
        local_outputs: bool,
        quiet: bool,
    ) -> None:
        keep_freed_memory()
        wait_at_most(timeout)
        rank = dist.get_rank()
        running = Running(
            device,
            timeout,
            bucket_bytes,
            exact_random=exact_random,
            local_outputs=local_outputs,
            tells=rank == 0 and not quiet,
        )
        self.tree = UserTree(root, serial_class)
        self.tensors = PlacedTensors(
            self.tree,
            device,
            from_rank_0=broadcast_parameters,
            of_samples=local_inputs,
            tells=running.tells,
        )
        self._running, self._describe, self._by_steps = running, describe, by_steps
        self._local = LocalInputs(rank) if local_inputs else None
        self._agreement = Agreement(device, local_inputs=local_inputs)
        self._programs = CallPrograms(self.tensors, compile, running, self._agreement, self._local)
        self._current: Program | None = None  # that ran last, or was planned first
        self._left: Mapping[tuple[str, str], Any] = {}  # what the program in hand leaves in modules
        self._inside: tuple[LeftInside, ...] = ()  # and in other objects
        self._scaler: torch.amp.GradScaler | None = None  # of the losses of steps
        self.islands: Islands | None = None  # of which this world is one
        self.stale: StaleSteps | None = None  # of pipelines that aren't flushed

    # -- calls ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The serial model's output; every rank passes the global batch, or its samples of it.

        With pipeline stages it is without gradients, and backward from it raises: `train_step` trains.
        """
        with collective("forward", compares=True):
            return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.islands and torch.is_grad_enabled() and self.tree.root.training:
            self.islands.require_loop()
        if self._by_steps and not self.tensors.is_placed:
            with torch.enable_grad():
                self.prepare(*args, **kwargs)  # parameters lie where steps want them
        call = flatten_arguments(args, kwargs)
        known = self._agree(call)
        if self.tensors.pipeline.is_staged:
            self._require_global("call of the parallel module")
            with torch.no_grad():
                program = self._program(call)
        else:
            program = self._program(self._local.whole(call) if self._local else call, known=known)
        assert not isinstance(program, StagedProgram)
        self._current = program
        self.tensors.require_values()
        with without_autocast(self._running.device.type):
            output = program(call.tensors)
        self._leave()
        return output

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one global batch, micro-batch by micro-batch; returns its loss.

        Gradients are added to the parameters' `.grad`, and the optimizer's step stays the user's. The
        loss is that of the batch, on every rank: micro-batches count in it by their share of what it is a
        mean of (samples, labels that are kept, a mask), and as they are in a sum. Every rank passes the
        global batch.
        """
        with collective("train_step", compares=True):
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
        with collective("eval_step", compares=True):
            return self._step(args, kwargs, learn=False)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, learn: bool) -> Tensor:
        call = flatten_arguments(args, kwargs)
        self._require_global("train_step")
        if self.islands and learn:
            self.islands.require_loop()
        scale = factor_of(self._scaler, self._running.device) if self._scaler and learn else None
        with torch.set_grad_enabled(learn):
            known = self._agree(call, step=self._by_steps)
            if self.stale and self.stale.under_way is not None and learn:
                known = self.stale.same(*self._programs.known(call, step=True))
            program = self._current = self._program(call, step=self._by_steps, known=known)
            self.tensors.require_values()
            count = program.executable.plan.pipeline.micro_batches
            cutting = program.executable.cutting

            def split(call: Arguments) -> Sequence[MicroBatch]:
                return split_batch(cutting, call.tensors, count, find=self._buffer)

            if isinstance(program, StagedProgram):
                _refuse_input_gradients(call)
                with without_autocast(self._running.device.type):
                    if self.stale and learn:
                        loss = self.stale.train(program, call, split)
                    else:
                        batch = split(call)
                        loss = program.train(batch, scale) if learn else program.evaluate(batch)
            else:
                assert isinstance(program, Bound)
                loss = self._accumulate(call, split(call), program, scale, learn=learn)
        self._leave()
        return loss

    def compile(self) -> None:
        """Compile programs from now on, each at its next call."""
        check_compiler(self._running.device.type)
        self._programs.compile()

    @property
    def stream(self) -> Stream | None:
        """Where masks are drawn from; None: from the default generator, as in the serial model."""
        return self._programs.stream

    @property
    def draws_alike(self) -> bool:
        """Whether masks follow from the default generators, which then must be alike on all ranks."""
        return self._running.exact_random

    @property
    def compiles(self) -> bool:
        """Whether programs are compiled."""
        return self._programs.compiles

    def _program(
        self,
        call: Arguments,
        *,
        step: bool = False,
        place: int = 0,
        known: Entry[Program] | None = None,
    ) -> Program:
        entry = known or self._programs.find(call, step=step, place=place)
        self._left, self._inside = entry.left, entry.inside
        return entry.program

    def _leave(self) -> None:
        """Leave what forward leaves in modules and objects, and in parameters that it writes."""
        self.tensors.end_call()
        self.tree.leave(self._left)
        for item in self._inside:
            item.leave()

    def _buffer(self, name: str) -> Tensor:
        """Gather the whole of a buffer, on every rank; a collective."""
        held: Mapping[str, Tensor] = dict(self.tree.root.named_buffers())
        return self.tensors.gather(name, held.get(name))

    def _agree(self, call: Arguments, *, step: bool = False) -> Entry[Program] | None:
        """Raise InputError where ranks differ in what they must share; not where checkpoints repeat it.

        The program of the call, where it is there and this rank can tell without the others.
        """
        known, program = None, ""
        if self._local is None and self.tensors.is_placed and not self.tensors.pipeline.is_staged:
            known, program = self._programs.known(call, step=step)
        if graph_task() == -1:
            if self._local is None:
                require_values(call)
            structure = self._local.structure(call) if self._local else ()
            whole, random = self.tensors.whole(), self._random_state()
            self._agreement.check(
                call,
                self.tree.modes(),
                whole,
                random=random,
                structure=structure,
                changes=self.tensors.changes,
                program=program,
                copies=self._copies(),
            )
        return known

    def _copies(self) -> Iterator[Copy] | None:
        """Tensors of which some ranks have copies; None if no rank has any."""
        return self.tensors.copies() if self.tensors.is_placed and self.tensors.has_copies else None

    @contextmanager
    def saving(self, what: str) -> Iterator[None]:
        """Within, all is gathered, once ranks have found it alike; collective where any is shared."""
        self.tensors.require_placed()
        with self.tensors.gathering(what):
            if self.tensors.is_gathered:
                self._agreement.check_state(self.tensors.whole(), self.tensors.changes, self._copies())
            yield

    def _random_state(self) -> bytes:
        """State from which exact masks follow."""
        if not self._running.exact_random:
            return b""
        return torch.get_rng_state().numpy().tobytes()

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
        self.tensors.require_placed()
        held = {name: item for name, item in self.tree.root.named_parameters() if item.grad is not None}
        mine = [
            item.grad for name, item in held.items() if item.grad is not None and self.tensors.counts(name)
        ]
        group = None if isinstance(self._current, Bound | None) else self._current.group
        dtype = norm_dtype(dtype for dtype, requires_grad in self.tensors.states().values() if requires_grad)
        with collective("clip_grad_norm_"):
            norm = self._norm(mine, float(norm_type), dtype, group)
        if error_if_nonfinite and not norm.isfinite():
            raise InputError(
                where="clip_grad_norm_",
                found=f"a gradient norm of {float(norm)}",
                wanted="a finite norm",
                remedy="lower the rate, or leave out error_if_nonfinite",
            )
        scale((item.grad for item in held.values() if item.grad is not None), norm, max_norm)
        return norm

    def _norm(
        self, mine: Sequence[Tensor], norm_type: float, dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> Tensor:
        pipeline, device = self.tensors.pipeline, self._running.device
        if pipeline.meshes:
            leads = pipeline.placed(dist.get_rank(), 0)[1] == 0
            return norm_over_meshes(mine, norm_type, dtype=dtype, device=device, leads=leads)
        return total_norm(mine, norm_type, dtype=dtype, group=group, device=device)

    def _accumulate(
        self,
        call: Arguments,
        batch: Sequence[MicroBatch],
        first: Bound,
        scale: Tensor | None,
        *,
        learn: bool,
    ) -> Tensor:
        """Run one micro-batch after the other; a longer one's program may not fit the shorter.

        Exact masks are drawn as in stages.
        """
        draws = ExactDraws(self._running.device) if self._running.exact_random else None
        shorter = first
        if batch[-1].share < batch[0].share:
            shorter = cast(Bound, self._program(call, step=True, place=-1))
        programs = [first if micro.share == batch[0].share else shorter for micro in batch]
        losses = []
        if learn and len(batch) > 1:
            first.require_no_hooks()
        for number, (micro, program) in enumerate(zip(batch, programs, strict=True)):
            last = program not in programs[number + 1 :]
            with program.adding_up(last=last), without_autocast(self._running.device.type):
                with draws.drawing(number) if draws else nullcontext():
                    loss = find_loss(program(micro.tensors))
                if loss is None:
                    raise no_loss()
                loss = loss * micro.weight
                if learn:
                    (loss if scale is None else loss * scale).backward()
            losses.append(loss.detach())
        if draws:
            draws.end()
        return torch.stack(losses).sum(0)

    @property
    def plan(self) -> Plan:
        """The plan of the program that ran last; the first call's before that."""
        if self._current is None:
            self.tensors.require_placed()
        assert self._current is not None
        return self._current.executable.plan

    @property
    def output_parts(self) -> tuple[Part, ...]:
        """Parts of the global outputs that this rank returns, by the program that ran last; the tensors of
        the output in their order."""
        self.tensors.require_placed()
        if not isinstance(self._current, Bound):
            raise InputError(
                where="output_parts of the parallel module",
                found="a plan with pipeline stages, whose outputs are global on every rank",
                wanted="a plan without stages",
                remedy="use the outputs as they are",
            )
        outputs = self._current.executable.outputs
        return tuple(item.part if self._running.local_outputs else whole(item.spec.shape) for item in outputs)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Plan and compile for a call with such a global batch, without running it; the first time,
        place the parameters. With local inputs, calls are known by the batches that were prepared."""
        call = flatten_arguments(args, kwargs)
        with collective("prepare", compares=True):
            self._agreement.check_shapes(call)
            program = self._current = self._program(call, step=self._by_steps)
        if self._local and isinstance(program, Bound):
            structure = program.executable.structure.users
            self._local.learn(call, program.samples, structure)
            if structure:
                self._agreement.check_structure(
                    (f"input {call.paths[place]}", digest_of(call.tensors[place]).encode())
                    for place in sorted(structure)
                )

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors lie."""
        return self._running.device

    # -- samples --------------------------------------------------------------------------------

    @property
    def has_local_inputs(self) -> bool:
        """Whether each rank passes its own samples, not the whole batch."""
        return self._local is not None

    @property
    def takes_steps(self) -> bool:
        """Whether the program trains through `train_step`, not by calls and `backward`."""
        return self._by_steps

    @property
    def samples(self) -> range:
        """The rows of the global batch that this rank passes; of the batch that was planned first.

        With islands that is all their batches, one after the other."""
        return self._loads(None)[1]

    def region(self, name: str) -> tuple[slice, ...]:
        """The box of the input `name` that this rank reads, by the program that ran last."""
        self.tensors.require_placed()
        assert self._current is not None
        made = self._current.executable
        return region_of(name, made, batch=self._programs.batch, takes_steps=self._by_steps)

    def sampler(
        self,
        dataset: Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        batch_size: int | None = None,
        shards: int = 1,
        exchange_every: int | None = None,
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
            shards=shards,
            exchange_every=exchange_every,
        )

    def _loads(self, size: int | None) -> tuple[int, range]:
        """The number of samples of a global batch, and the rows that this rank loads of it."""
        self.tensors.require_placed()
        size = self._programs.batch if size is None else size
        if size is None:
            raise InputError(
                where="samples of the parallel module",
                found="a call without tensors that have dims",
                wanted="a batch, dim 0 of the first tensor of a call",
                remedy="cut the work between ranks by hand",
            )
        rows = self._local.rows(size) if self._local else range(size)
        if self.islands is None:
            return size, rows
        begin = size * self.islands.share
        return size * len(self.islands.learners), range(begin + rows.start, begin + rows.stop)

    # -- the module as a whole --------------------------------------------------------------------

    def copied(self, memo: dict[int, Any]) -> nn.Module:
        """A deep copy of the root that runs by itself: own parameters, programs that are still to be made."""
        for _, tensor in self.tensors.named():
            # Torch's own copy of a DTensor takes its gradient along, and fails.
            memo.setdefault(id(tensor), twin_of(tensor))
        memo.update((id(old), old) for old in self.tree.old())
        with self.tree.plain() as root:
            twin = copy.deepcopy(root, memo)
        twin.__class__ = type(self.tree.root)
        runner = twin.__dict__["_autopar"] = copy.copy(self)
        runner.tree = self.tree.of(twin)
        runner.tree.install()
        runner.tensors = self.tensors.of(runner.tree)
        runner.stale = StaleSteps(self.stale.rule) if self.stale else None
        agreement = Agreement(self._running.device, local_inputs=self._local is not None)
        vars(runner).update(_agreement=agreement, _programs=self._programs.of(runner.tensors, agreement))
        return twin

    def untie(self) -> None:
        """Let go of the parameters' storage, which is about to be replaced."""
        self._programs.untie()

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step; of pipelines that aren't flushed, in steady state."""
        if self.stale is None or not self.plan.stage_costs:
            return self.plan.step_seconds
        return unflushed_seconds(self.plan.pipeline, self.plan.stage_costs)

    def describe(self) -> str:
        """Describe the plan, and this rank's program."""
        if self._current is None:
            return "ParallelModule(no plan yet: call it once, or pass example_inputs to parallelize)"
        told = "" if self.stale is None else f"{self.stale.describe(self.plan, self.step_seconds)}\n\n"
        return told + self._describe(self._current.executable)


def _refuse_input_gradients(call: Arguments) -> None:
    asked = [path for path, tensor in zip(call.paths, call.tensors, strict=True) if tensor.requires_grad]
    if asked:
        raise InputError(
            where="train_step",
            found=f"{', '.join(asked)} with requires_grad",
            wanted="inputs without: their gradient would exist on the ranks of single stages only",
            remedy="pass .detach(), or plan without pipeline stages",
        )
