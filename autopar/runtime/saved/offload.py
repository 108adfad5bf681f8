"""Activations that wait for backward in the host's memory.

    forward    a = relu(x)     offload(a, 0)    b = ...    offload(b, 1)    c = ...    offload(c, 2)
    copies                       a --------->                b --------->                c -------->
                                                                                  a's memory is free here
    backward   needs                                 c                b                a
    copies                             <- c  <- b    <- a

A program calls `offload` on the tensors that its plan moves, in the order in which it makes them; their
numbers are the order in which backward needs them, the last one first. A storage leaves when AHEAD more have
been made, or forward ends. Backward fetches the last AHEAD when it reads the first saved tensor, and with
each that was offloaded the AHEAD before it. Copies run on a stream of their own: the stream that computes
waits for those that it depends on, and no memory is given back before. On CPUs they are made at once, into
storages that are known as the host's.

Every saved tensor is a view of a storage: it is offloaded once, however many views of it are saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, UntypedStorage, fx
from torch.autograd.graph import saved_tensors_hooks

from autopar.errors import InputError
from autopar.runtime.saved.copies import begin_copy, wait
from autopar.torch_seams.tensors import storage_key, version_of

AHEAD = 2  # storages that leave, or come, while another one is worked with


class HostStorage(UntypedStorage):
    """Memory that stands for the host's where the device is the CPU itself; copies lie in plain memory."""

    def __deepcopy__(self, memo: dict[object, Any]) -> UntypedStorage:
        copies = memo.setdefault(HostStorage, {})  # by address: tensors of one storage share its copy, too
        if self.data_ptr() not in copies:
            copies[self.data_ptr()] = UntypedStorage(self.nbytes()).copy_(self)
        copy: UntypedStorage = copies[self.data_ptr()]
        return copy


def offload(x: Tensor, number: int) -> Tensor:
    """`x`, whose storage waits in the host's memory from now on if autograd saves it; `number` is its place
    in the order in which backward needs such tensors, from behind."""
    moving = _moving.get()
    if moving is not None and torch.is_grad_enabled():
        moving.move(x, number)
    return x


def moves(program: fx.Graph) -> bool:
    """Whether the program offloads any tensor."""
    return any(node.target is offload for node in program.nodes)


@contextmanager
def offloading() -> Iterator[Offloading]:
    """Let `offload` move storages that the yielded object has packed for autograd, or will pack."""
    moving = Offloading()
    before = _moving.set(moving)
    try:
        yield moving
    finally:
        _moving.reset(before)
        moving.finish()


@contextmanager
def saving_there() -> Iterator[None]:
    """Pack the tensors that autograd saves for offloading, in place of other saved-tensor hooks."""
    with offloading() as moving, saved_tensors_hooks(moving.pack, _unpack):
        yield


def _unpack(saved: Tensor | PackedTensor) -> Tensor:
    return saved.restore() if isinstance(saved, PackedTensor) else saved


@dataclass(slots=True, eq=False, weakref_slot=True)
class _SavedStorage:
    """A storage that autograd saves: `here` on its device, or its copy in `host` memory, or both. While it
    has not been offloaded, one of its tensors is `watched`, which must not change."""

    origin: ref[UntypedStorage]
    device: torch.device
    here: UntypedStorage | None
    watched: Tensor | None
    host: UntypedStorage | None = None
    number: int = -1  # of those that are offloaded
    coming: torch.cuda.Event | None = None  # until somebody waits for the copy that fetches it

    def __del__(self) -> None:
        wait(self.coming, self.device)  # it was fetched, and nobody came for it


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A saved tensor, as a view of a storage."""

    moving: Offloading
    saved: _SavedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    version: int  # of the tensor that is watched

    def restore(self) -> Tensor:
        """The tensor, there for the stream that computes. Raises InputError if it has changed since forward,
        as autograd itself does where nothing is packed."""
        watched = self.saved.watched
        if watched is not None and version_of(watched) != self.version:
            raise InputError(
                where="backward of the parallel module",
                found=f"a tensor of shape {tuple(self.size)} that has changed in place since forward",
                wanted="the values of the forward pass",
                remedy="step the optimizer after backward, not between forward and backward",
            )
        storage = self.moving.read(self.saved)
        whole = torch.empty(0, dtype=self.dtype, device=storage.device)
        return whole.set_(storage, self.offset, self.size, self.stride)


@dataclass(slots=True)
class Offloading:
    """Saved storages of one forward pass, which its backward reads."""

    known: WeakValueDictionary[int, _SavedStorage] = field(default_factory=WeakValueDictionary)  # by address
    offloaded: list[_SavedStorage] = field(default_factory=list)  # kept alive until forward ends
    leaving: list[tuple[_SavedStorage, torch.cuda.Event | None]] = field(default_factory=list)
    numbered: dict[int, list[ref[_SavedStorage]]] = field(
        default_factory=dict
    )  # one each, or one of each simulated rank
    begun: bool = False  # backward

    def pack(self, tensor: Tensor) -> Tensor | PackedTensor:
        """Pack a tensor that autograd saves: its storage may go to the host."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor
        saved = self.saved_storage(tensor)
        version = -1 if saved.watched is None else version_of(saved.watched)
        return PackedTensor(
            self, saved, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset(), version
        )

    def move(self, tensor: Tensor, number: int) -> None:
        """Begin to copy the storage of a tensor to the host; that of the one AHEAD before it has left."""
        saved = self.saved_storage(tensor)
        if saved.number >= 0:  # simulated ranks may share what one of them has offloaded already
            return
        assert saved.here is not None
        saved.number, saved.watched = number, None
        saved.host, copied = _to_host(saved.here)
        self.offloaded.append(saved)
        self.numbered.setdefault(number, []).append(ref(saved))
        self.leaving.append((saved, copied))
        if len(self.leaving) > AHEAD:
            self.let_go()

    def finish(self) -> None:
        """Wait at the end of forward until all that was to leave has left."""
        while self.leaving:
            self.let_go()
        self.offloaded.clear()

    def saved_storage(self, tensor: Tensor) -> _SavedStorage:
        storage = tensor.untyped_storage()
        found = self.known.get(storage_key(storage))
        if found is None or found.origin() is not storage:
            found = _SavedStorage(ref(storage), storage.device, storage, tensor.detach())
            self.known[storage_key(storage)] = found
        return found

    def let_go(self) -> None:
        saved, copied = self.leaving.pop(0)
        wait(copied, saved.device)
        saved.here = None

    def read(self, saved: _SavedStorage) -> UntypedStorage:
        """The storage, there for the stream that computes; the next ones begin to come."""
        if not self.begun:
            self.begun = True
            self.fetch_before(max(self.numbered, default=-1) + 1)
        if saved.here is None:
            self.fetch(saved)
        if saved.coming is not None:
            wait(saved.coming, saved.device)
            saved.coming = None
        if saved.number >= 0:
            self.fetch_before(saved.number)
        assert saved.here is not None
        return saved.here

    def fetch_before(self, number: int) -> None:
        """Begin to fetch the AHEAD that backward needs next."""
        for each in range(number - 1, number - 1 - AHEAD, -1):
            for one in self.numbered.get(each, ()):
                saved = one()
                if saved is not None and saved.here is None:
                    self.fetch(saved)

    def fetch(self, saved: _SavedStorage) -> None:
        assert saved.host is not None
        saved.here, saved.coming = _to_device(saved.host, saved.device)


_moving: ContextVar[Offloading | None] = ContextVar("what is offloaded", default=None)


def _bytes(storage: UntypedStorage) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def _to_host(storage: UntypedStorage) -> tuple[UntypedStorage, torch.cuda.Event | None]:
    """A copy in host memory, and when it is complete; None if it is."""
    device, nbytes = storage.device, storage.nbytes()
    with torch.no_grad():
        if device.type == "cpu":
            host: UntypedStorage = HostStorage(nbytes)  # type: ignore[no-untyped-call]
            _bytes(host).copy_(_bytes(storage))
            return host, None
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return pinned.untyped_storage(), begin_copy(pinned, _bytes(storage), device)


def _to_device(host: UntypedStorage, device: torch.device) -> tuple[UntypedStorage, torch.cuda.Event | None]:
    """A copy on the device, in memory of the stream that computes, and when it is complete; None if it is."""
    with torch.no_grad():
        fresh = torch.empty(host.nbytes(), dtype=torch.uint8, device=device)
        if device.type == "cpu":
            fresh.copy_(_bytes(host))
            return fresh.untyped_storage(), None
        return fresh.untyped_storage(), begin_copy(fresh, _bytes(host), device)
