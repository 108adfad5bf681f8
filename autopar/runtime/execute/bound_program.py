"""One program tied to the tensors of a parallel module: what happens in a forward call.

user tensors --check, cut--.
leaves of parameters -------+--> the rank's program --> outputs, new values of buffers
local parts of buffers -----'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.core.graph import InputKind
from autopar.core.mesh import Mesh
from autopar.core.placement import R
from autopar.core.samples import Samples
from autopar.errors import InputError
from autopar.runtime.collectives import groups
from autopar.runtime.collectives.memory_format import dense
from autopar.runtime.collectives.random import Stream, drawing_from, draws
from autopar.runtime.collectives.roll_call import backward_begins, last_call
from autopar.runtime.compiled.program import compiled
from autopar.runtime.dtensors.global_scalars import plain_gradient
from autopar.runtime.executable import Executable, InputPart
from autopar.runtime.execute.failed_forward import run_and_write
from autopar.runtime.execute.unread_output import unread
from autopar.runtime.parameters.gradient_buckets import BucketMember, GradientSync, assign
from autopar.runtime.parameters.leaves import Leaves
from autopar.runtime.parameters.parameters import local_buffer, scatter_once
from autopar.runtime.saved.regather import freeing
from autopar.torch_seams.autograd import graph_task
from autopar.torch_seams.modules import own_buffers, own_children, own_parameters


class Bound:
    """An executable, its own leaves and its own gradient synchroniser.

    `find(target)()` is the outer parameter or buffer of that name. With `samples` every rank passes its own
    rows of the batched inputs, else the whole of them. With `local_outputs` outputs are the rank's parts;
    else those that lie in parts are made whole where they are read. Random operators draw from `stream`, or
    from the default generator if there is none. `plain` parameters are torch's own.
    """

    def __init__(
        self,
        executable: Executable,
        find: Callable[[str], Callable[[], Any]],
        *,
        mesh: DeviceMesh,
        device: torch.device,
        bucket_bytes: int | None,
        samples: Samples | None = None,
        stream: Stream | None = None,
        local_outputs: bool = False,
        plain: bool = False,
    ) -> None:
        self.executable, self.samples, self._local_outputs = executable, samples, local_outputs
        self._run: Callable[..., Any] = freeing(executable.module)
        self._stream = stream if stream is not None and draws(executable.module) else None
        self._rank = dist.get_rank()
        self._device = device
        self.users = [item for item in executable.inputs if item.kind is InputKind.USER]
        self._buffers = {
            item.name: (item, find(item.target))
            for item in executable.inputs
            if item.kind is InputKind.BUFFER
        }
        self._constants = {
            item.name: cut_input(executable.constants[item.target], item, executable).to(device)
            for item in executable.inputs
            if item.kind is InputKind.CONSTANT
        }
        self._parameters = parameters = by_first_use(executable)
        self._names = [item.name for item in parameters]
        self._unsynced = {index for index, item in enumerate(parameters) if sync_key(item) is None}
        members = summed(parameters)
        self._silent = [item.index for item in members if not parameters[item.index].gathers]
        buckets = assign(members, device.type, bucket_bytes)
        self._together = [
            [item.index for item in bucket.members if item.index in self._silent] for bucket in buckets
        ]
        self._leaves = Leaves(
            parameters,
            [find(item.target) for item in parameters],
            self._receive,
            mesh,
            plain=plain,
            direct=self._unsynced if plain else (),
            silent=frozenset(self._silent),
            last={indices[-1]: number for number, indices in enumerate(self._together) if indices},
            filled=self._filled,
        )
        self._sync = GradientSync(
            members,
            self._leaves.deliver,
            device=device.type,
            bucket_bytes=bucket_bytes,
            rest=self._rest,
        )
        self._meets = not plain or dist.get_world_size() > 1  # where backward begins
        self._adding = self._stepping = False
        self._held: dict[int, Tensor] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output for the `tensors` of one call."""
        if graph_task() == -1:  # not a checkpoint that recomputes inside backward
            self._forget_raised()
        values: dict[str, Tensor] = dict(zip(self._names, self._leaves.read(), strict=True))
        values |= self._constants
        values |= {name: local_buffer(item, find()) for name, (item, find) in self._buffers.items()}
        values |= {item.name: self._take(item, tensors) for item in self.users}
        if not self._stepping:
            self._leaves.release()
        with drawing_from(self._stream.next(), self._device) if self._stream else nullcontext():
            outputs = run_and_write(self.executable, self._run, values)
        if self._meets:
            outputs = self._hear_gradients(outputs)
        return self.executable.rebuild(
            outputs if self._local_outputs else unread(outputs, self.executable.outputs)
        )

    def _forget_raised(self) -> None:
        """Drop what a backward that raised has left behind."""
        if self._sync.forget():
            self._leaves.forget()

    def _hear_gradients(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Have ranks meet where backward begins, and gradients be summed as it ends.

        A loss to which a penalty on parameters, a DTensor, is added gets a DTensor as its gradient. A leaf
        that is an output becomes a view, which can be heard.
        """
        number = last_call()

        def hear(gradient: Tensor) -> Tensor | None:
            backward_begins(number)
            self._sync.begin()
            return plain_gradient(gradient)

        heard = tuple(item.view_as(item) if item.requires_grad and item.is_leaf else item for item in outputs)
        for output in heard:
            if output.grad_fn is not None:
                output.register_hook(hear)
        return heard

    def compile(self, *, tells: bool) -> None:
        """Compile the program, at its next call."""
        self._run = compiled(self.executable.module, tells=tells)

    def untie(self) -> None:
        """Let go of the parameters' storage."""
        self._leaves.untie()

    def require_no_hooks(self) -> None:
        """Raise InputError for hooks on parameters, which would be called once a micro-batch."""
        self._leaves.require_no_hooks()

    @contextmanager
    def adding_up(self, *, last: bool) -> Iterator[None]:
        """Context in which gradients that ranks sum only add up here, unless it is the `last` backward.

        Those of the last one take them along: one sum a step, however many micro-batches. Weights that are
        gathered once are so by the first."""
        self._adding, self._stepping = not last, True
        if last:  # what has added up, so that leaves show which gradients of this backward have come
            self._held |= self._leaves.take(self._silent)
        try:
            yield
        except BaseException:
            self._held.clear()
            self._leaves.forget()
            last = True
            raise
        finally:
            self._adding = False
            if last:
                self._stepping = False
                self._leaves.release()

    def _filled(self, number: int) -> None:
        """Called inside backward as a bucket's last gradient has come: its sum may begin, if all have, and
        sums of buckets before it that had to wait for others."""
        for place in () if self._adding else range(self._sync.next, number + 1):
            if self._leaves.have_all(self._together[place]):
                gradients = self._leaves.take(self._together[place])
                self._sync.fill(place, self._with_held(gradients), fresh=place == number)

    def _rest(self) -> Iterator[tuple[int, dict[int, Tensor]]]:
        """Gradients, by buckets, that are in their leaves as backward ends; none while they add up there."""
        for number, indices in enumerate(() if self._adding else self._together):
            gradients = self._with_held(self._leaves.take(indices))
            yield (
                number,
                gradients | {index: self._held.pop(index) for index in indices if index in self._held},
            )

    def _with_held(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        for index in self._held.keys() & gradients.keys():
            gradients[index] = self._held.pop(index) + gradients[index]
        return gradients

    def _receive(self, index: int, gradient: Tensor) -> None:
        part = self._parameters[index]
        if index in self._unsynced and not part.gathers:
            self._hand_over(index, gradient)
            return
        if index in self._held:
            gradient = self._held.pop(index) + gradient  # no in-place sum: gradients may share memory
        if self._adding:
            self._held[index] = gradient
            return
        if part.gathers:
            gradient = scatter_once(part, gradient)
        if index in self._unsynced:
            self._hand_over(index, gradient)
        else:
            self._sync.add(index, gradient)

    def _hand_over(self, index: int, gradient: Tensor) -> None:
        """A gradient that is not summed over ranks: added at once to one that is there, so that not both stay
        till the end of backward, else delivered then."""
        if self._leaves.has_gradient(index):
            self._leaves.deliver({index: gradient})
        else:
            self._sync.keep(index, gradient)

    def _take(self, item: InputPart, tensors: Sequence[Tensor]) -> Tensor:
        given = tensors[item.position]
        shape = self.samples.shape(item.target, item.spec.shape, self._rank) if self.samples else None
        wanted = item.spec.shape if shape is None else shape
        if tuple(given.shape) != wanted or given.dtype != item.spec.dtype:
            raise InputError(
                where=f"input {item.target}",
                found=f"{given.dtype} of shape {tuple(given.shape)}",
                wanted=f"{item.spec.dtype} of shape {wanted}, "
                + ("the global batch" if shape is None else "this rank's samples"),
                remedy="pass every rank " + ("the whole batch" if shape is None else "its own samples"),
            )
        if self.samples is not None and item.target in self.samples.inputs:
            mine = _cut_rows(given, item, self.executable, self.samples, self._rank)
        else:
            mine = cut_input(given, item, self.executable)
        return mine.to(self._device, non_blocking=True)


def cut_input(full: Tensor, item: InputPart, executable: Executable) -> Tensor:
    """The rank's part in the memory format of the whole, a view where it has no gaps.

    The gradient of an input is summed over the axes that hold different parts of it.
    """
    key = gradient_key(item, executable.mesh)
    if full.requires_grad and key is not None:
        full = torch.ops.autopar.r_to_b(full, key)
    return dense(item.part.take(full))


def _cut_rows(given: Tensor, item: InputPart, executable: Executable, samples: Samples, rank: int) -> Tensor:
    """The rank's part, cut from the rows that the rank loads.

    A gradient that other ranks hold a part of, of the same rows or of others that the rank loads, is
    summed as that of the whole: around the rows are zeros.
    """
    rows = samples.rows[rank]
    part = item.part.within(rows)
    if part is not None and (not given.requires_grad or item.target in samples.exact):
        return dense(part.take(given))
    around = (0, 0) * (given.dim() - 1) + (rows.start, samples.size - rows.stop)
    return cut_input(nn.functional.pad(given, around), item, executable)


def gradient_key(item: InputPart, mesh: Mesh) -> str | None:
    """Over which ranks the gradient of an input is summed; None if every rank takes the whole."""
    axes = [axis for axis, placement in enumerate(item.layout) if placement != R]
    return mesh.key(axes) if axes else None


def sync_key(item: InputPart) -> str | None:
    """Key of the group over which a gradient is summed; None for a group of one rank."""
    return item.sync if item.sync is not None and groups.size(item.sync) > 1 else None


def summed(parameters: Sequence[InputPart]) -> list[BucketMember]:
    """The members whose gradients are summed over ranks, in the order of backward.

    `parameters` are in the order of their first use, and their places there are the members' indices.
    """
    return [
        BucketMember(
            index,
            item.target,
            key,
            item.spec.dtype,
            math.prod(item.part.shape) * (item.reduce or item.spec.dtype).itemsize,
            item.reduce,
        )
        for index, item in reversed(list(enumerate(parameters)))
        if (key := sync_key(item)) is not None
    ]


def by_first_use(executable: Executable) -> list[InputPart]:
    """The program's parameters in the order in which it uses them."""
    order = {node: place for place, node in enumerate(executable.module.graph.nodes)}
    first = {
        str(node.target): min((order[user] for user in node.users), default=len(order))
        for node in order
        if node.op == "placeholder"
    }
    parameters = [item for item in executable.inputs if item.kind is InputKind.PARAMETER]
    return sorted(parameters, key=lambda item: first[item.name])


def find_in(root: nn.Module, target: str) -> Callable[[], Any]:
    """A function that looks up the parameter or buffer `target`, as it is at that time."""
    *path, name = target.split(".")
    module = root
    for child in path:  # not by attribute, which a method of the same name would hide
        module = cast(nn.Module, own_children(module)[child])
    held = own_parameters(module) if name in own_parameters(module) else own_buffers(module)
    return lambda: held[name]
