"""One program tied to the tensors of a parallel module: what happens in a forward call.

user tensors --check, cut--.
leaves of parameters -------+--> the rank's program --> outputs, new values of buffers
local parts of buffers -----'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.core.executable import Executable, InputPart
from autopar.core.graph import InputKind
from autopar.core.placement import R
from autopar.errors import InputError
from autopar.runtime import groups
from autopar.runtime.gradient_sync import GradientSync, Member
from autopar.runtime.memory import dense
from autopar.runtime.parameters import Leaves, local


class Bound:
    """An executable, its own leaves and its own gradient synchroniser.

    `find(target)()` is the outer parameter or buffer of that name.
    """

    def __init__(
        self,
        executable: Executable,
        find: Callable[[str], Callable[[], Any]],
        *,
        mesh: Any,
        device: torch.device,
        bucket_bytes: int,
    ) -> None:
        self.executable = executable
        self._device = device
        self._users = [item for item in executable.inputs if item.kind is InputKind.USER]
        self._buffers = {
            item.name: find(item.target) for item in executable.inputs if item.kind is InputKind.BUFFER
        }
        self._constants = {
            item.name: cut_input(executable.constants[item.target], item, executable).to(device)
            for item in executable.inputs
            if item.kind is InputKind.CONSTANT
        }
        parameters = by_first_use(executable)
        self._names = [item.name for item in parameters]
        self._unsynced = {index for index, item in enumerate(parameters) if sync_key(item) is None}
        self._leaves = Leaves(parameters, [find(item.target) for item in parameters], self._receive, mesh)
        self._sync = GradientSync(
            [
                Member(
                    index,
                    item.target,
                    key,
                    item.spec.dtype,
                    math.prod(item.part.shape) * item.spec.dtype.itemsize,
                )
                for index, item in reversed(list(enumerate(parameters)))
                if (key := sync_key(item)) is not None
            ],
            self._leaves.deliver,
            bucket_bytes=bucket_bytes,
        )

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output for the global `tensors` of one call."""
        if torch._C._current_graph_task_id() == -1:  # not a checkpoint that recomputes inside backward
            self._sync.forget()
        values: dict[str, Tensor] = dict(zip(self._names, self._leaves.read(), strict=True))
        values |= self._constants
        values |= {name: local(find()) for name, find in self._buffers.items()}
        values |= {item.name: self._take(item, tensors) for item in self._users}
        results = self.executable.module(*(values[item.name] for item in self.executable.inputs))
        count = self.executable.num_outputs
        with torch.no_grad():
            for name, value in zip(self.executable.writes, results[count:], strict=True):
                values[name].copy_(value)
        return self.executable.rebuild(tuple(results[:count]))

    def untie(self) -> None:
        """Let go of the parameters' storage."""
        self._leaves.untie()

    def _receive(self, index: int, gradient: Tensor) -> None:
        if index in self._unsynced:
            self._leaves.deliver(index, gradient)
        else:
            self._sync.add(index, gradient)

    def _take(self, item: InputPart, tensors: Sequence[Tensor]) -> Tensor:
        full = tensors[item.position]
        if tuple(full.shape) != item.spec.shape or full.dtype != item.spec.dtype:
            raise InputError(
                where=f"input {item.target}",
                found=f"{full.dtype} of shape {tuple(full.shape)}",
                wanted=f"{item.spec.dtype} of shape {item.spec.shape}, the global batch",
                remedy="pass every rank the whole batch",
            )
        return cut_input(full, item, self.executable).to(self._device, non_blocking=True)


def cut_input(full: Tensor, item: InputPart, executable: Executable) -> Tensor:
    """The rank's part in the memory format of the whole, a view where it has no gaps.

    The gradient of an input is summed over the axes that hold different parts of it.
    """
    axes = [axis for axis, placement in enumerate(item.layout) if placement != R]
    if full.requires_grad and axes:
        full = torch.ops.autopar.r_to_b(full, executable.mesh.key(axes))
    return dense(item.part.take(full))


def sync_key(item: InputPart) -> str | None:
    """Where a gradient is summed; a group of one rank has nothing to sum."""
    return item.sync if item.sync is not None and groups.size(item.sync) > 1 else None


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
        module = cast(nn.Module, module._modules[child])
    held = module._parameters if name in module._parameters else module._buffers
    return lambda: held[name]
