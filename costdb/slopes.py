"""What a call and its backward make on the way, exactly, without running them.

    y = a + b          both gradients are that of y           alias 0, 0
    y = x.view(s)      a view of that of y                    alias 0
    y = linear(x, w)   new                                    bytes of x, bytes of w
    y = x.sum()        that of y, expanded to x's shape       alias 0

Beside what they give, calls that torch composes of several have storages of their own in between: the
gradient of the log-probabilities inside a cross-entropy.

An operator whose backward torch can't run without data (multi_margin_loss) is taken to make gradients of its
operands' sizes there, and nothing else: an estimate.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.core.costs import Passes, Slope
from autopar.core.graph import Call
from autopar.ops.recurrent import has_workspace, steps_of
from costdb import operands
from costdb.footprint import on_zeros, storage_of, without_data
from costdb.recurrence import passes_in_runs, passes_of_steps

_KNOWN: dict[tuple[str, str], Passes] = {}
_RUN: dict[str, Passes] = {}


def passes(call: Call, kind: str = "cpu") -> Passes:
    """Both passes of the call on a device of `kind`; remembered by key.

    Raises CostMissingError if the operator refuses the operands.
    """
    known = kind, call.key()
    if known not in _KNOWN:
        if kind == "cpu" and has_workspace(call):
            _KNOWN[known] = passes_in_runs(call, _run)
        elif steps := steps_of(call):
            _KNOWN[known] = passes_of_steps(call, steps, partial(passes, kind=kind))
        else:
            _KNOWN[known] = _observe(call, kind)
    return _KNOWN[known]


def _observe(call: Call, kind: str) -> Passes:
    with without_data(call, kind) as (run, inputs):
        return _seen(run, inputs)


def _run(call: Call) -> Passes:
    if call.key() not in _RUN:
        with on_zeros(call) as (run, inputs):
            _RUN[call.key()] = _seen(run, inputs)
    return _RUN[call.key()]


def _seen(run: Callable[[], Any], inputs: tuple[torch.Tensor, ...]) -> Passes:
    with torch.enable_grad():
        forward = _NewBytes(item.untyped_storage() for item in inputs)
        with forward:
            results = [item for item in operands.tensors(run()) if item is not None]
        roots = [place for place, item in enumerate(results) if item.requires_grad]
        learning = [item for item in inputs if item.requires_grad]
        if not roots or not learning:
            return Passes(forward.most, 0, (None,) * len(inputs))
        seeds = [torch.empty_like(results[place]) for place in roots]
        before = (item.untyped_storage() for item in (*inputs, *seeds))
        backward = _NewBytes((*before, *forward.living()))
        try:
            with backward:
                found = torch.autograd.grad(
                    [results[place] for place in roots], learning, seeds, allow_unused=True
                )
        except NotImplementedError:  # without a kernel for shapes
            sizes = [_size(item) if item.requires_grad else None for item in inputs]
            own = tuple(None if size is None else Slope(size) for size in sizes)
            return Passes(forward.most, sum(size or 0 for size in sizes), own)
    given = {storage_of(seed): place for seed, place in zip(seeds, roots, strict=True)}
    left = iter(found)
    slopes = (_slope(next(left), given) if item.requires_grad else None for item in inputs)
    return Passes(forward.most, backward.most, tuple(slopes))


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _slope(gradient: torch.Tensor | None, given: dict[int, int]) -> Slope | None:
    if gradient is None:
        return None
    alias = given.get(storage_of(gradient))
    return Slope(0 if alias is not None else gradient.untyped_storage().nbytes(), alias)


class _NewBytes(TorchDispatchMode):
    """While entered, the most bytes of living storages that operators made; `old` ones don't count.

    They are held, not only known by address: what backward lets go of would leave its address to a new one.
    """

    def __init__(self, old: Iterable[torch.UntypedStorage]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.old = {storage._cdata: storage for storage in old}
        self.alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in operands.tensors(result):
            if tensor is not None and storage_of(tensor) not in self.old:
                self.note(tensor.untyped_storage())
        self.most = max(self.most, self.now)
        return result

    def living(self) -> Iterator[torch.UntypedStorage]:
        """The storages that are there now: results, and what is saved for backward."""
        for known, _ in self.alive.values():
            storage = known()
            if storage is not None:
                yield storage

    def note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self.alive:
            self.alive[key] = weakref.ref(storage, lambda _: self.forget(key)), storage.nbytes()
            self.now += storage.nbytes()

    def forget(self, key: int) -> None:
        self.now -= self.alive.pop(key)[1]
