"""The most bytes that the tensors of a step take at once: every storage counted once, while it lives.

    x  ================================          x        here already
    a      ==========                            a = 2 x  a new storage, dead when nothing holds it
    v      ==========                            v        a view of a: the same storage
    c            ====================            c = v + 1
                 ^ peak: x, a, c

A dispatch mode sees what every operator takes and gives, in backward too, and weak references tell when
a storage dies. That is exact for tensors; what kernels and collectives need inside is not seen, and
steps are slower: times are not to be taken meanwhile. On a GPU the allocator itself keeps the peak.

A compiled program's tensors come and go without a dispatch mode's knowing. `grown_bytes` asks the allocator,
as torch's profiler hears of it; what kernels need inside counts there.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime.collectives.started_fetches import begins_copy
from autopar.runtime.collectives.started_moves import under_way
from autopar.runtime.parameters.parameters import local
from autopar.runtime.saved.offload import HostStorage
from autopar.torch_seams import pytree
from autopar.torch_seams.modes import TorchDispatchMode
from autopar.torch_seams.tensors import storage_key
from autopar.trace.values.structure import parts_of

_COPY = torch.ops.aten.copy_.default  # the one operator that reads one memory and writes the other


def peak_bytes(step: Callable[[], object], alive: Iterable[Tensor], device: torch.device) -> int:
    """Bytes at the peak of `step()` on `device`, of `alive` tensors and of all that it makes.

    `alive` gives those that are there at the start, of DTensors this rank's parts; an iterator, where
    the step lets go of some. On a GPU other tensors must stay as they are meanwhile, and don't count.
    """
    gc.collect()
    tracker = StorageTracker(alive)
    if device.type != "cuda":
        with tracker:
            step()
        return tracker.peak
    others = torch.cuda.memory_allocated(device) - tracker.nbytes
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - others


def grown_bytes(step: Callable[[], object]) -> int:
    """Bytes by which `step()` on a CPU has more allocated at its peak than before it, compiled or not."""
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    results = profile.profiler.kineto_results if profile.profiler else None
    assert results is not None
    sizes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    return max(accumulate(sizes), default=0)


class StorageTracker(TorchDispatchMode):
    """While entered, counts the bytes of living storages: `nbytes` now, `peak` at most so far.

    It begins with the storages of `alive`. One that an operator takes and that was not seen before has
    been there all along, so it counts from the start. What was offloaded doesn't count, nor what operators
    make of weights that lie on the host, as optimizers do.
    """

    def __init__(self, alive: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._host = weakref.WeakValueDictionary[int, torch.UntypedStorage]()  # what operators there made
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in _tensors([local(each) for each in alive]):
            self._note(tensor)
        self.peak = self.nbytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it runs on its local parts, which come by here
        if func.namespace == "aten" and func is not _COPY and any(map(self._is_on_host, _tensors(args))):
            result = func(*args, **(kwargs or {}))
            for tensor in _tensors((args, kwargs, result)):
                self._host[storage_key(tensor.untyped_storage())] = tensor.untyped_storage()
            return result
        for tensor in _tensors((args, kwargs)):
            self.peak += self._note(tensor)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._note(tensor)
        if begins_copy(func):  # into memory that no operator gives before it is waited for
            self._note(under_way(result).target)  # type: ignore[attr-defined]
        self.peak = max(self.peak, self.nbytes)
        return result

    def _note(self, tensor: Tensor) -> int:
        """By how many bytes the tensor's storage is larger than known."""
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # of fake tensors too, by which DTensors find shapes
            return 0
        if self._is_on_host(tensor):
            return 0
        key, nbytes = id(storage), storage.nbytes()
        if key not in self._sizes:
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
        grown = nbytes - self._sizes.get(key, 0)
        self._sizes[key] = nbytes
        self.nbytes += grown
        return grown

    def _is_on_host(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        return isinstance(storage, HostStorage) or self._host.get(storage_key(storage)) is storage

    def _forget(self, key: int) -> None:
        del self._watched[key]
        self.nbytes -= self._sizes.pop(key)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """All dense ones: a sparse tensor is those that it consists of."""
    leaves = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return (part for leaf in leaves for part in parts_of(leaf))
