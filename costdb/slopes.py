"""What a call and its backward make on the way, exactly, without running them.

    y = a + b          both gradients are that of y           alias 0, 0
    y = x.view(s)      a view of that of y                    alias 0
    y = linear(x, w)   new                                    bytes of x, bytes of w
    y = x.sum()        that of y, expanded to x's shape       alias 0

Beside what they give, calls that torch composes of several have storages of their own in between: the
gradient of the log-probabilities inside a cross-entropy. What is made and let go of, in order, is the same
for calls that differ by sizes alone (size_patterns.py), and the most that is there at once follows from it.

An operator whose backward torch can't run without data (multi_margin_loss) is taken to make gradients of its
operands' sizes there, and nothing else: an estimate.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from autopar.core.costs import Passes, Slope
from autopar.core.graph import Call
from autopar.core.operator_facts import facts_of
from autopar.core.size_patterns import ResultShapes, Shape, SizePattern, pattern_of, result_shapes
from autopar.errors import CostMissingError
from autopar.ops.recurrent import has_workspace, steps_of
from autopar.torch_seams.modes import TorchDispatchMode
from autopar.torch_seams.tensors import storage_key
from costdb import operands
from costdb.footprint import on_zeros, storage_of, without_data
from costdb.recurrence import passes_in_runs, passes_of_steps


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of a storage, as those of a tensor that fills it."""

    shape: Shape
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


LOOK = None  # at the bytes that are there, when an operator has ended
Event: TypeAlias = Extent | int | None  # a new storage, the number of one that is gone, or a look


@dataclass(frozen=True, slots=True)
class History:
    """What both passes of a call make and let go of; for each operand that learns its gradient's storage, new
    or that of the gradient of result `alias`."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    gradients: tuple[tuple[Extent, int | None] | None, ...]

    @property
    def passes(self) -> Passes:
        """The most bytes that are there at once, and the gradients."""
        slopes = (
            None if each is None else Slope(0 if each[1] is not None else each[0].nbytes, each[1])
            for each in self.gradients
        )
        return Passes(_most(self.forward), _most(self.backward), tuple(slopes))

    def extents(self) -> Iterator[Extent]:
        """All extents in order."""
        yield from (each for each in (*self.forward, *self.backward) if isinstance(each, Extent))
        yield from (each[0] for each in self.gradients if each is not None)

    def of_shapes(self, shapes: Sequence[Shape]) -> History:
        """The history of a call of other sizes, with these shapes of its extents."""
        left = iter(shapes)

        def event(each: Event) -> Event:
            return replace(each, shape=next(left)) if isinstance(each, Extent) else each

        forward, backward = (tuple(map(event, each)) for each in (self.forward, self.backward))
        gradients = tuple(
            None if each is None else (replace(each[0], shape=next(left)), each[1]) for each in self.gradients
        )
        return History(forward, backward, gradients)


_KNOWN: dict[tuple[str, str], Passes] = {}
_RUN: dict[str, Passes] = {}
_PATTERNS: dict[tuple[str, str], tuple[History, ResultShapes] | None] = {}  # None: sizes matter


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
            _KNOWN[known] = _by_pattern(call, kind) or _observe(call, kind)
    return _KNOWN[known]


def _observe(call: Call, kind: str) -> Passes:
    return _watch(call, kind).passes


def _by_pattern(call: Call, kind: str) -> Passes | None:
    """Both passes as they follow from calls of other sizes; None if they must be observed."""
    pattern = None if facts_of(call.target).chooses_by_device else pattern_of(call)
    if pattern is None:
        return None
    known = kind, pattern.key
    if known not in _PATTERNS:
        _PATTERNS[known] = _learned(pattern, kind)
    learned = _PATTERNS[known]
    if learned is None:
        return None
    found, shapes = learned
    return found.of_shapes(shapes.at(pattern.sizes)).passes


def _learned(pattern: SizePattern, kind: str) -> tuple[History, ResultShapes] | None:
    """What calls of a pattern make, if it is alike at small and large sizes but for shapes."""
    try:
        small, large = (_watch(call, kind) for call in pattern.probes())
    except CostMissingError:  # sizes depend on each other
        return None
    extents = [list(each.extents()) for each in (small, large)]
    shapes = result_shapes(*([extent.shape for extent in each] for each in extents))
    alike = [each.of_shapes([()] * len(own)) for each, own in zip((small, large), extents, strict=True)]
    return (small, shapes) if shapes and alike[0] == alike[1] else None


def _watch(call: Call, kind: str) -> History:
    """What is made and let go of while the call runs on tensors without data, forward and backward."""
    with without_data(call, kind) as (run, inputs):
        return _seen(run, inputs)


def _run(call: Call) -> Passes:
    if call.key() not in _RUN:
        with on_zeros(call) as (run, inputs):
            _RUN[call.key()] = _seen(run, inputs).passes
    return _RUN[call.key()]


def _seen(run: Callable[[], Any], inputs: tuple[torch.Tensor, ...]) -> History:
    with torch.enable_grad():
        forward = _NewBytes(item.untyped_storage() for item in inputs)
        with forward:
            results = [item for item in operands.tensors(run()) if item is not None]
        begins = set(map(id, operands.differentiable(results)))
        roots = [place for place, item in enumerate(results) if id(item) in begins]
        learning = [item for item in inputs if item.requires_grad]
        if not roots or not learning:
            return History(tuple(forward.events), (), (None,) * len(inputs))
        seeds = [torch.empty_like(results[place]) for place in roots]
        before = (item.untyped_storage() for item in (*inputs, *seeds))
        backward = _NewBytes((*before, *forward.living()))
        try:
            with backward:
                found = torch.autograd.grad(
                    [results[place] for place in roots], learning, seeds, allow_unused=True
                )
        except NotImplementedError:  # without a kernel for shapes
            sizes = [Extent(tuple(item.shape), item.element_size()) for item in inputs]
            learns = [item.requires_grad for item in inputs]
            made = tuple((size, None) if one else None for size, one in zip(sizes, learns, strict=True))
            return History(tuple(forward.events), (*(each[0] for each in made if each), LOOK), made)
    given = {storage_of(seed): place for seed, place in zip(seeds, roots, strict=True)}
    left = iter(found)
    gradients = (_gradient(next(left), given) if item.requires_grad else None for item in inputs)
    return History(tuple(forward.events), tuple(backward.events), tuple(gradients))


def _gradient(gradient: torch.Tensor | None, given: dict[int, int]) -> tuple[Extent, int | None] | None:
    return None if gradient is None else (_extent(gradient), given.get(storage_of(gradient)))


def _extent(tensor: torch.Tensor) -> Extent:
    """The extent of a tensor's storage; a number of bytes where the tensor doesn't fill it."""
    nbytes = tensor.untyped_storage().nbytes()
    own = Extent(tuple(tensor.shape), tensor.element_size())
    return own if own.nbytes == nbytes else Extent((nbytes,), 1)


def _most(events: Iterable[Event]) -> int:
    """The most bytes at a look."""
    made, now, most = list[int](), 0, 0
    for event in events:
        match event:
            case Extent():
                made.append(event.nbytes)
                now += made[-1]
            case int():
                now -= made[event]
            case _:
                most = max(most, now)
    return most


class _NewBytes(TorchDispatchMode):
    """While entered, the storages that operators make and let go of; `old` ones don't count.

    They are held, not only known by address: what backward lets go of would leave its address to a new one.
    """

    def __init__(self, old: Iterable[torch.UntypedStorage]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.count = 0
        self.old = {storage_key(storage): storage for storage in old}
        self.alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # and its number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in operands.tensors(result):
            if tensor is not None and storage_of(tensor) not in self.old:
                self.note(tensor)
        self.events.append(LOOK)
        return result

    def living(self) -> Iterator[torch.UntypedStorage]:
        """The storages that are there now: results, and what is saved for backward."""
        for known, _ in self.alive.values():
            storage = known()
            if storage is not None:
                yield storage

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.alive:
            self.alive[key] = weakref.ref(storage, lambda _: self.forget(key)), self.count
            self.events.append(_extent(tensor))
            self.count += 1

    def forget(self, key: int) -> None:
        self.events.append(self.alive.pop(key)[1])
