"""The parallel module: the serial model's names and calls, this rank's part of its work.

    first call    compile the serial model -> place its parameters -> keep a copy without memory
    every call    key of the call -> program from the cache, or compile the copy -> run

Every rank makes the same calls in the same order: planning, forward, backward, `state_dict` and
`load_state_dict` are collective. Nothing here catches an exception: a rank that raises ends, and
the launcher, or the timeout of the process groups, ends the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sized
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.core.executable import Executable, InputPart, Pinned
from autopar.core.graph import InputKind
from autopar.core.mesh import Mesh
from autopar.core.part import Part
from autopar.core.placement import Layout, show
from autopar.errors import CheckError, InputError
from autopar.runtime import groups, serial
from autopar.runtime.bound import Bound, find_in, gradient_key
from autopar.runtime.gradient_sync import BUCKET_BYTES
from autopar.runtime.local_inputs import LocalInputs
from autopar.runtime.optimizers import refuse_whole_tensor, work_on_lists
from autopar.runtime.parameters import device_mesh, distribute, gather, sharding_key
from autopar.runtime.sampler import BatchSampler
from autopar.runtime.tree import Container, Stored
from autopar.signature import Arguments, flatten_arguments

TIMEOUT = timedelta(minutes=10)  # torch's own for NCCL: how long a rank waits for one that has died


class Compile(Protocol):
    """Plans and rewrites one kind of call of `model`, for this rank.

    `pinned` is what the program must keep to; None before parameters and buffers are placed. Must
    give the same plan on every rank.
    """

    def __call__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        pinned: Pinned | None,
    ) -> Executable: ...


class ParallelModule(Container):
    """Runs `model` in parallel by the programs that `compile` makes, one for each kind of call.

    A kind of call is: shapes, dtypes and constants of the arguments; train or eval mode of every
    module; which parameters need gradients; dtypes of parameters and buffers. Outputs and losses are
    the serial model's, on every rank the whole, or the part that the program leaves there. `state_dict`
    and `load_state_dict` speak serial names and full tensors.

    Every rank passes the global batch, or with `local_inputs` its own `samples` of it. The gradient
    of an input is then that of the rows that the rank passed.

    With `broadcast_parameters` all ranks start from rank 0's values. Values of a model on the meta
    device are NaN until `load_state_dict`. Raises InputError for a model whose hooks or wrappers a
    traced program would drop. `describe` is what printing the module shows of a program.
    """

    def __init__(
        self,
        model: nn.Module,
        compile: Compile,
        *,
        describe: Callable[[Executable], str],
        device: torch.device,
        timeout: timedelta = TIMEOUT,
        broadcast_parameters: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        local_inputs: bool = False,
    ) -> None:
        super().__init__()
        serial.check(model)
        self.mirror(model)
        self._compile, self._describe = compile, describe
        self._device, self._timeout = device, timeout
        self._broadcast, self._bucket_bytes = broadcast_parameters, bucket_bytes
        self._model = (model,)  # in a tuple, so that nn.Module does not take it for a child
        self._containers = tuple(cast(Container, module) for module in self.modules())
        self._mesh: tuple[Mesh, DeviceMesh] | None = None  # set when parameters are placed
        self._pinned: dict[str, InputPart] = {}
        self._programs: dict[tuple[Any, ...], Bound] = {}
        self._current: Bound | None = None  # the program that ran last, or the first one planned
        self._local = LocalInputs(dist.get_rank()) if local_inputs else None
        self._users: dict[str, Layout] = {}  # of user inputs, by path, in the first program with them
        self._batch: int | None = None  # samples of the first global batch

    # -- calls ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The serial model's output; every rank passes the global batch, or its samples of it."""
        if torch.is_autocast_enabled(self._device.type):
            raise InputError(
                where="call of the parallel module",
                found="autocast, which the plan does not know of",
                wanted="no autocast around it",
                remedy="convert the model's dtype instead",
            )
        call = flatten_arguments(args, kwargs)
        self._current = self._program(self._local.whole(call) if self._local else call)
        return self._current(call.tensors)

    @property
    def plan(self) -> Any:
        """The plan of the program that ran last; the first call's before that."""
        if self._current is None:
            self._require_placed()
        assert self._current is not None
        return self._current.executable.plan

    @property
    def output_parts(self) -> tuple[Part, ...]:
        """Which box of each global output this rank returns, by the program that ran last; the tensors
        of the output in their order."""
        self._require_placed()
        assert self._current is not None
        return self._current.executable.outputs

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Plan and compile for a call with such a global batch, without running it; the first time,
        place the parameters. With local inputs, calls are known by the batches that were prepared."""
        call = flatten_arguments(args, kwargs)
        self._current = self._program(call)
        if self._local:
            self._local.learn(call, self._current.samples)

    def _program(self, call: Arguments) -> Bound:
        """The program for the global `call`."""
        key = self._key(call)
        if key not in self._programs:
            if self._mesh is not None:
                self._update_copy()
            model = self._model[0]
            for ours, theirs in zip(self._containers, model.modules(), strict=True):
                theirs.training = ours.training
            args, kwargs = call.rebuild(call.tensors)
            made = self._compile(model, args, kwargs, pinned=self._keep())
            samples = self._local.settle(made.samples) if self._local and made.samples else None
            groups.setup(made.mesh, self._keys(made), timeout=self._timeout)
            mesh = self._place(made) if self._mesh is None else self._check(made)
            bound = Bound(
                made,
                lambda target: find_in(self, target),
                mesh=mesh,
                device=self._device,
                bucket_bytes=self._bucket_bytes,
                samples=samples,
            )
            self._programs[self._key(call)] = bound
            if self._local:
                self._users = {item.target: item.layout for item in bound.users} | self._users
            if self._batch is None and made.samples:
                self._batch = made.samples.size
            return bound
        return self._programs[key]

    def _keep(self) -> Pinned | None:
        """What the first program has settled."""
        if self._mesh is None:
            return None
        stored = {name: item.layout for name, item in self._pinned.items()}
        return Pinned(self._mesh[0], stored, self._users)

    def _key(self, call: Arguments) -> tuple[Any, ...]:
        if self._mesh is None:
            return ()
        held = itertools.chain.from_iterable(
            (*item._parameters.values(), *item._buffers.values()) for item in self._containers
        )
        return (
            call.key,
            tuple(tensor.requires_grad for tensor in call.tensors),
            tuple(container.training for container in self._containers),
            tuple((tensor.requires_grad, tensor.dtype) for tensor in held if tensor is not None),
        )

    def _update_copy(self) -> None:
        """Give the copy that is traced the parameters' present dtypes and need of gradients."""
        model = self._model[0]
        outer = itertools.chain(self.parameters(), self.buffers())
        traced = itertools.chain(model.parameters(), model.buffers())
        for ours, theirs in zip(outer, traced, strict=True):
            if theirs.dtype != ours.dtype:
                theirs.data = serial.without_memory(theirs.detach(), ours.dtype)
            theirs.requires_grad_(ours.requires_grad)

    # -- samples --------------------------------------------------------------------------------

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
        self._require_placed()
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

    def _keys(self, made: Executable) -> set[str]:
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

    def _place(self, made: Executable) -> DeviceMesh:
        """Cut the serial model's tensors to this rank's parts, and let go of the model."""
        mesh = device_mesh(made.mesh, self._device)
        self._pinned = {
            name: item
            for item in made.inputs
            if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)
            for name in (item.target, *item.aliases)
        }
        self._mesh = (made.mesh, mesh)
        model = self._model[0]
        self.fill(model, self._store)
        self._model = (serial.hollow(model),)
        refuse_whole_tensor(self, mesh)
        work_on_lists(self, mesh)
        return mesh

    def _store(self, name: str, full: Tensor) -> tuple[Tensor, Stored]:
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
        mine = part.part.take(self._values(full)).contiguous().to(self._device)
        if isinstance(full, nn.Parameter):
            outer = distribute(part, mine, self._mesh[1])
            return nn.Parameter(outer, requires_grad=full.requires_grad), Stored(part, key)
        return (mine if key is None else distribute(part, mine, self._mesh[1])), Stored(part, key)

    def _values(self, full: Tensor) -> Tensor:
        """A copy of the tensor's values, rank 0's if asked for."""
        if full.is_meta:
            values = torch.zeros(full.shape, dtype=full.dtype)
            return values.fill_(float("nan")) if full.is_floating_point() else values
        values = full.detach().clone(memory_format=torch.contiguous_format)
        if self._broadcast:
            values = values.to(self._device)
            dist.broadcast(values, src=0)
        return values

    def _check(self, made: Executable) -> DeviceMesh:
        """A later program must take the parameters as they lie."""
        assert self._mesh is not None
        moved = [
            f"{item.target} as {show(item.layout)}"
            for item in made.inputs
            if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)
            and item.part != self._pinned[item.target].part
        ]
        if moved or made.mesh != self._mesh[0]:
            raise CheckError(
                where="a second program of the parallel module",
                found=f"mesh {made.mesh}" + "".join(f", {name}" for name in moved),
                wanted=f"mesh {self._mesh[0]} and parameters where they are",
                remedy="the planner must keep to the layouts that are pinned",
            )
        return self._mesh[1]

    # -- what nn.Module does with tensors -------------------------------------------------------

    def _require_placed(self) -> None:
        if self._mesh is None:
            raise InputError(
                where="parameters of the parallel module",
                found="no plan yet",
                wanted="parameters that are placed by a plan",
                remedy="pass example_inputs to parallelize, or call the module once first",
            )

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[Any]:  # parameters() and buffers() too
        self._require_placed()
        yield from super()._named_members(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module's, with serial names and full tensors on all ranks; a collective."""
        self._require_placed()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As nn.Module's, from full tensors, of which every rank copies its part in place."""
        self._require_placed()
        return super().load_state_dict(state_dict, *args, **kwargs)

    def gather(self, name: str, tensor: Tensor) -> Tensor:
        """The full tensor, in serial order, of what lies as parameter or buffer `name` does: itself,
        its gradient, an optimizer's state; a collective."""
        path, _, last = name.rpartition(".")
        containers = dict(self.named_modules(remove_duplicate=False))
        stored = cast(Container, containers[path])._stored[last]
        return gather(tensor, stored.part, stored.key)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._require_placed()
        for program in self._programs.values():
            program.untie()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    # -- printing -------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """The plan, and this rank's program."""
        if self._current is None:
            return "ParallelModule(no plan yet: call it once, or pass example_inputs to parallelize)"
        return self._describe(self._current.executable)
