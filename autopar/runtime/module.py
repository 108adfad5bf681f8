"""The parallel module: the serial model's names and calls, this rank's part of its work.

    first call    compile the serial model -> place its parameters -> keep a copy without memory
    every call    key of the call -> program from the cache, or compile the copy -> run

Every rank makes the same calls in the same order: planning, forward, backward, `state_dict` and
`load_state_dict` are collective. Nothing here catches an exception: a rank that raises ends, and
the launcher, or the timeout of the process groups, ends the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.core.executable import Executable, InputPart
from autopar.core.graph import InputKind
from autopar.core.mesh import Mesh
from autopar.core.placement import Layout, show
from autopar.errors import CheckError, InputError
from autopar.runtime import groups, serial
from autopar.runtime.bound import Bound, find_in
from autopar.runtime.gradient_sync import BUCKET_BYTES
from autopar.runtime.optimizers import refuse_whole_tensor, step_fast
from autopar.runtime.parameters import device_mesh, distribute, gather, sharding_key
from autopar.runtime.tree import Container, Stored
from autopar.signature import Arguments, flatten_arguments

TIMEOUT = timedelta(minutes=10)  # torch's own for NCCL: how long a rank waits for one that has died


class Compile(Protocol):
    """Plans and rewrites one kind of call of `model`, for this rank.

    `pinned` are the layouts that parameters and buffers already have, by their names in the model;
    None before they are placed. Must give the same plan on every rank.
    """

    def __call__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        training: bool,
        pinned: dict[str, Layout] | None,
    ) -> Executable: ...


class ParallelModule(Container):
    """Runs `model` in parallel by the programs that `compile` makes, one for each kind of call.

    A kind of call is: shapes, dtypes and constants of the arguments; train or eval mode of every
    module; which parameters need gradients; dtypes of parameters and buffers. Outputs and losses are
    the serial model's, global, on every rank. `state_dict` and `load_state_dict` speak serial names
    and full tensors.

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

    # -- calls ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The serial model's output; every rank passes the global batch."""
        if torch.is_autocast_enabled(self._device.type):
            raise InputError(
                where="call of the parallel module",
                found="autocast, which the plan does not know of",
                wanted="no autocast around it",
                remedy="convert the model's dtype instead",
            )
        call = flatten_arguments(args, kwargs)
        self._current = self._program(call, args, kwargs)
        return self._current(call.tensors)

    @property
    def plan(self) -> Any:
        """The plan of the program that ran last; the first call's before that."""
        if self._current is None:
            self._require_placed()
        assert self._current is not None
        return self._current.executable.plan

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Plan and compile for such a call, without running it; the first time, place the parameters."""
        self._current = self._program(flatten_arguments(args, kwargs), args, kwargs)

    def _program(self, call: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        key = self._key(call)
        if key not in self._programs:
            if self._mesh is not None:
                self._update_copy()
            model = self._model[0]
            for ours, theirs in zip(self._containers, model.modules(), strict=True):
                theirs.training = ours.training
            pinned = {name: item.layout for name, item in self._pinned.items()} if self._mesh else None
            made = self._compile(model, args, kwargs, training=self.training, pinned=pinned)
            groups.setup(made.mesh, self._keys(made), timeout=self._timeout)
            mesh = self._place(made) if self._mesh is None else self._check(made)
            bound = Bound(
                made,
                lambda target: find_in(self, target),
                mesh=mesh,
                device=self._device,
                bucket_bytes=self._bucket_bytes,
            )
            self._programs[self._key(call)] = bound
            return bound
        return self._programs[key]

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

    # -- placing --------------------------------------------------------------------------------

    def _keys(self, made: Executable) -> set[str]:
        """The program's groups, and those of every axis and of everything that is sharded."""
        stored = [item.layout for item in made.inputs if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
        joint = {key for layout in stored if (key := sharding_key(made.mesh, layout)) is not None}
        sums = {item.sync for item in made.inputs if item.sync is not None}
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
        step_fast(self, mesh)
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
