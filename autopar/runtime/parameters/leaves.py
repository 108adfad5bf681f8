"""The plain tensors that a program reads, and the gradients that come to them in backward.

    outer parameter ----- one storage ----- leaf <-- autograd: adds to .grad
          .grad <-- sums over ranks <-- take, as a bucket's last gradient comes, or backward ends

A plain parameter whose gradient needs no sum is its own leaf.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.runtime.collectives.memory_format import settled
from autopar.runtime.dtensors.asked_gradients import is_read_by_a_program
from autopar.runtime.executable import InputPart
from autopar.runtime.parameters.parameters import (
    add_plainly,
    gather_once,
    local,
    placements_of,
    plainly,
    scatter_once,
)
from autopar.runtime.saved import regather
from autopar.torch_seams.tensors import HOOKS_OF_TENSOR, has_hooks

_SHAPE = attrgetter("shape")
_STATE = attrgetter("shape", "dtype", "requires_grad")
_LEAVES = "_autopar_leaves"  # the attribute of a leaf that keeps what hears its gradient


class Leaves:
    """The plain local tensors that one program reads, tied to the outer parameters' storage.

    `find[i]()` is the outer parameter of `parts[i]`; `receive(i, gradient)` is called inside backward
    with the local gradient of that leaf, which no longer holds it then. Those of leaves that aren't
    `heard`, by their numbers, add up in the leaves until `take`.

    A part that is gathered once a step has a leaf of its own: the full copy, made by the first `read` after
    `release`, which is collective then.

    Gradients of leaves that are `silent`, those of buckets, stay in them until `take`. As that of a bucket's
    `last` leaf comes, `filled` is called with the bucket's number.

    With `plain` parameters are torch's own. Those of the parts in `direct`, by their numbers, are read
    themselves: autograd adds to their `.grad`, and nothing of ours is there.
    """

    def __init__(
        self,
        parts: Sequence[InputPart],
        find: Sequence[Callable[[], nn.Parameter]],
        receive: Callable[[int, Tensor], None],
        mesh: DeviceMesh,
        *,
        plain: bool = False,
        direct: Collection[int] = (),
        silent: Collection[int] = (),
        last: Mapping[int, int] = MappingProxyType({}),
        filled: Callable[[int], None] | None = None,
    ) -> None:
        self._parts, self._find, self._receive, self._mesh = tuple(parts), tuple(find), receive, mesh
        self._plain, self._direct = plain, sorted(direct)
        self._silent, self._last, self.filled = silent, last, filled
        self._shapes = [torch.Size(self._parts[index].part.shape) for index in self._direct]
        self._tied_here = [index for index in range(len(self._parts)) if index not in direct]
        self._before: tuple[list[Tensor], list[nn.Parameter], list[Any], list[Any]] = [], [], [], []
        self._tied: list[tuple[nn.Parameter, Tensor, Tensor] | None] = [None] * len(self._parts)
        self._full: dict[int, Tensor] = {}  # the leaves of parts that are gathered once
        self.heard: Collection[int] = range(len(self._parts))

    def read(self) -> list[Tensor]:
        """One leaf for each part, tied anew where the outer parameter's storage has changed."""
        outers = [find() for find in self._find]
        if list(map(_SHAPE, map(outers.__getitem__, self._direct))) != self._shapes:
            for index in self._direct:
                self._check(self._parts[index], outers[index])
        if len(self._direct) == len(outers):
            return list(outers)
        if self._plain and self._are_as_before(outers):
            return self._before[0]
        with plainly():
            leaves = [
                outer if index in self._direct else self._read(index, outer)
                for index, outer in enumerate(outers)
            ]
        if self._plain:
            self._before = leaves, list(outers), list(map(_STATE, outers)), _places(outers)
        return leaves

    def _are_as_before(self, outers: Sequence[nn.Parameter]) -> bool:
        """Whether plain parameters are what they were when their leaves were tied, in the same memory."""
        leaves, held, states, places = self._before
        return (
            len(leaves) == len(outers)
            and all(map(operator.is_, outers, held))
            and list(map(_STATE, outers)) == states
            and _places(outers) == places
            and not any(chain.from_iterable(map(HOOKS_OF_TENSOR, map(outers.__getitem__, self._tied_here))))
        )

    def require_no_hooks(self) -> None:
        """Raise InputError for hooks on parameters that are read themselves."""
        for index in self._direct:
            if has_hooks(self._find[index]()):
                raise _hooked(self._parts[index].target)

    def _read(self, index: int, outer: nn.Parameter) -> Tensor:
        tied = self._tied[index]
        if tied is None or tied[0] is not outer or _moved(outer, *tied[1:]):
            self._let_speak(index)
            tied = self._tied[index] = self._tie(index, outer)
        if has_hooks(outer):
            raise _hooked(self._parts[index].target)
        return self._gathered(index, outer, tied[2]) if self._parts[index].gathers else tied[2]

    def release(self) -> None:
        """Let go of full copies: the step is over, or autograd holds what it needs of them."""
        self._full.clear()

    def untie(self) -> None:
        """Forget the leaves, which keep storage alive."""
        for index in self._silent:
            self._let_speak(index)
        self._tied = [None] * len(self._parts)
        self._before = [], [], [], []
        self.release()

    def has_gradient(self, index: int) -> bool:
        """Whether the outer parameter of a leaf has a `.grad`."""
        return self._find[index]().grad is not None

    def deliver(self, totals: Mapping[int, Tensor]) -> None:
        """Add final local gradients of leaves to their outer parameters' `.grad`; within `plainly`."""
        for index, total in totals.items():
            outer = self._find[index]()
            if self._plain and outer.grad is None:
                outer.grad = total
            else:
                add_plainly(outer, total)

    def _tie(self, index: int, outer: nn.Parameter) -> tuple[nn.Parameter, Tensor, Tensor]:
        self._check(self._parts[index], outer)
        if outer.grad_fn is not None and torch.is_grad_enabled():
            raise _exchanged(self._parts[index].target)
        values = local(outer)
        leaf = values.detach().requires_grad_(outer.requires_grad)
        regather.is_read_for(leaf, self._find[index])
        if leaf.requires_grad and not self._parts[index].gathers:
            self._know(leaf, outer)
            if index not in self._silent:
                self._listen(index, leaf, outer)
            elif index in self._last:
                self._tell(self._last[index], leaf)
        return outer, values, leaf

    def _let_speak(self, index: int) -> None:
        """Hear a silent leaf that another one takes the place of: a backward may still come to it."""
        tied = self._tied[index]
        if tied is not None and index in self._silent and tied[2].requires_grad:
            self._listen(index, tied[2], tied[0])

    def _gathered(self, index: int, outer: nn.Parameter, shard: Tensor) -> Tensor:
        """The full copy of a part that is gathered once."""
        if index not in self._full:
            full = gather_once(self._parts[index], shard).requires_grad_(shard.requires_grad)
            if full.requires_grad:
                self._know(full, outer)
                self._listen(index, full, outer)
            self._full[index] = full
        return self._full[index]

    def _know(self, leaf: Tensor, outer: nn.Parameter) -> None:
        """Let a leaf hold these leaves: Python's collector sees what a tensor's attributes hold, but not what
        its hooks do, by which they would stay for ever."""
        is_read_by_a_program(leaf, outer)
        setattr(leaf, _LEAVES, self)

    def _listen(self, index: int, leaf: Tensor, outer: nn.Parameter) -> None:
        mine = weakref.ref(self)  # not of the parameter: torch moves none that has such a reference

        def accumulated(leaf: Tensor) -> None:
            leaves = mine()
            assert leaves is not None
            leaves.accumulated(index, leaf, outer)

        leaf.register_post_accumulate_grad_hook(accumulated)

    def _tell(self, bucket: int, leaf: Tensor) -> None:
        mine = weakref.ref(self)

        def filled(_: Tensor) -> None:
            leaves = mine()
            assert leaves is not None and leaves.filled is not None
            leaves.filled(bucket)

        leaf.register_post_accumulate_grad_hook(filled)

    def accumulated(self, index: int, leaf: Tensor, read: nn.Parameter) -> None:
        if self._find[index]() is not read:
            raise _exchanged(self._parts[index].target)
        if index not in self.heard:
            return
        with plainly():
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:  # of a weight that came with others this backward may not reach
                self._receive(index, detached(gradient))

    def take(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """The gradients that have added up in these leaves, which no longer hold them then; those of full
        copies scattered, which is collective."""
        gradients: dict[int, Tensor] = {}
        for index in indices:
            leaf, tied = self._leaf(index), self._tied[index]
            if leaf is None or (gradient := leaf.grad) is None:
                continue
            leaf.grad = None
            if tied is not None and self._find[index]() is not tied[0]:
                raise _exchanged(self._parts[index].target)
            gradients[index] = detached(gradient)
            if self._parts[index].gathers:
                gradients[index] = scatter_once(self._parts[index], gradients[index])
        return gradients

    def have_all(self, indices: Iterable[int]) -> bool:
        """Whether each of these leaves has a gradient."""
        leaves = [tied[2] for index in indices if (tied := self._tied[index]) is not None]
        return all(leaf.grad is not None for leaf in leaves)

    def forget(self) -> None:
        """Drop the gradients that have added up in the leaves."""
        for index in range(len(self._parts)):
            leaf = self._leaf(index)
            if leaf is not None:
                leaf.grad = None

    def _leaf(self, index: int) -> Tensor | None:
        """The leaf of a part, as far as there is one."""
        if index in self._full:
            return self._full[index]
        tied = self._tied[index]
        return None if tied is None else tied[2]

    def _check(self, part: InputPart, outer: Tensor) -> None:
        laid = f"as {placements_of(part.layout)} with local shape"
        kind = "cpu" if part.on_host else self._mesh.device_type
        if isinstance(outer, DTensor) == self._plain:
            found = f"a {type(outer).__name__} of shape {tuple(outer.shape)}"
        elif isinstance(outer, DTensor) and (
            outer.device_mesh != self._mesh or outer.placements != placements_of(part.layout)
        ):
            found = f"a DTensor as {outer.placements} on {outer.device_mesh}"
        elif tuple(local(outer).shape) != part.part.shape:
            found = f"a local part of shape {tuple(local(outer).shape)}"
        elif local(outer).device.type != kind:
            found = f"a tensor on {local(outer).device}"
        else:
            return
        raise InputError(
            where=f"parameter {part.target}",
            found=found,
            wanted=f"a {'tensor of shape' if self._plain else f'DTensor {laid}'} {part.part.shape} on {kind}",
            remedy="change values in place or with load_state_dict, and parallelize again for another device",
        )


def _places(outers: Sequence[nn.Parameter]) -> list[Any]:
    """Where parameters lie, and in which order: another view of the same memory is another parameter."""
    return [*map(Tensor.data_ptr, outers), *map(_strides, outers)]


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


def detached(gradient: Tensor) -> Tensor:
    """A gradient with its own values in memory, and no graph behind it."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    return settled(gradient) if gradient.is_conj() or gradient.is_neg() else gradient


def _moved(outer: nn.Parameter, values: Tensor, leaf: Tensor) -> bool:
    """Whether the outer parameter's storage, dtype or need of a gradient differs from the leaf's."""
    now = local(outer)
    return (
        ((now is outer or now is not values) and now.data_ptr() != leaf.data_ptr())
        or now.shape != leaf.shape
        or _strides(now) != _strides(leaf)
        or now.dtype != leaf.dtype
        or outer.requires_grad != leaf.requires_grad
    )


def _exchanged(name: str) -> InputError:
    return InputError(
        where=f"parameter {name}",
        found="another tensor in its place for this call alone, as by torch.func.functional_call",
        wanted="the module's own parameter from forward to backward: gradients come into its .grad",
        remedy="set values by parameter.data = ..., compute with the tensors inside forward, or call "
        "under no_grad",
    )


def _hooked(name: str) -> InputError:
    return InputError(
        where=f"parameter {name}",
        found="a hook on its gradient",
        wanted="none: gradients arrive from this rank's program, past hooks on the parameter",
        remedy="change .grad after backward",
    )
