"""Gathered weights that don't stay: freed after their use in forward, regathered in backward.

    forward     shard --> all-gather --> full --> linear         full dies with its last use in forward
                  '-- how it was gathered <-- pack --'           what autograd keeps in its place
    backward    all-gather --> full --> gradients                ... and dies again

The operators `s_to_b_regather` and `s_to_r_regather` note what they have made. Of every tensor that autograd
saves, views of what they made are known by their storage, and replaced by the way to make them anew. The
shards are those of the forward pass: a weight that has changed since is refused, as autograd itself does.

Where a program starts its gathers early, so does backward: with each tensor that it gathers anew it starts
the one that came next in the last backward.

Weights that were gathered together are so again, those of them that backward reads. Every other saved tensor
is gathered anew by itself: to share one gathered copy among several uses would make the number of collectives
depend on when memory is freed, which ranks need not agree on.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from autopar.errors import InputError
from autopar.runtime import registry
from autopar.runtime.saved.offload import Offloading, PackedTensor, moves, offloading
from autopar.runtime.saved.split_backward import Between, Box, halved
from autopar.torch_seams.autograd import graph_task
from autopar.torch_seams.schemas import short_name
from autopar.torch_seams.tensors import storage_key, version_of

Version = tuple[int, int, int]  # of a weight, as `_version` gives it
REGATHER = "_regather"  # ends the names of the operators whose results don't stay
FETCH = "fetch"  # the operator by which a weight comes from the host
_WAIT_FETCH = f"wait_{FETCH}{REGATHER}"


def is_regather(target: Any) -> bool:
    """Whether `target` is a registered operator whose result is regathered in backward."""
    return getattr(target, "namespace", "") == registry.NAMESPACE and short_name(target).endswith(REGATHER)


def freeing(program: fx.GraphModule, between: Between | None = None) -> Callable[..., Any]:
    """A function that runs `program`, with autograd keeping less of what it saves where there is something to
    free. Of gathered weights it keeps shards, offloaded tensors in host memory, and all of it, if backward is
    split, in boxes that are emptied `between` the halves. torch.fx's own `__call__` is left out: it prints
    what raises, and takes its traceback away."""
    graphs = [module.graph for module in program.modules() if isinstance(module, fx.GraphModule)]
    regathers = any(is_regather(node.target) for graph in graphs for node in graph.nodes)
    offloads = moves(program.graph)
    ahead = {short_name(node.target) for node in program.graph.nodes if is_regather(node.target)}
    gathers = any(name.startswith("wait_") and name != _WAIT_FETCH for name in ahead)
    order = dict[int, int]() if gathers or _WAIT_FETCH in ahead else None

    def run(*tensors: Tensor) -> Any:
        return program.forward(*tensors)  # which is another function once code is written anew

    def run_freeing(*tensors: Tensor) -> Any:
        early = None if order is None else EarlyGathers(order, gathers=gathers)
        with _freeing(between, offloads=offloads, early=early):
            return program.forward(*tensors)

    return run_freeing if regathers or offloads or between is not None else run


def note(
    full: Tensor,
    operator: str,
    source: Tensor,
    arguments: tuple[Any, ...],
    *,
    is_ahead: bool | None = None,
) -> None:
    """Remember how `full` was made: by `operator`, which keeps what it makes, of `source`; and whether it may
    come ahead of its use, unless that is as with all gathers."""
    notes = _notes.get()
    if notes is not None:
        storage, source_of = full.untyped_storage(), _find(notes, source) or source
        made = _GatherSource(operator, source_of, _version(source), arguments, full, is_ahead=is_ahead)
        notes[storage_key(storage)] = weakref.ref(storage), made


def note_together(
    fulls: Sequence[Tensor], operator: str, sources: Sequence[Tensor], arguments: tuple[Any, ...]
) -> None:
    """Remember how `fulls` were made: all at once, each of one of the `sources`."""
    notes = _notes.get()
    if notes is None:
        return
    made = _GatherGroup(operator, sources, arguments)
    for index, full in enumerate(fulls):
        storage = full.untyped_storage()
        notes[storage_key(storage)] = weakref.ref(storage), _GroupMember(made, index, full)


def is_read_for(leaf: Tensor, outer: Callable[[], Tensor]) -> None:
    """Know the parameter that a leaf is read for: writes to a DTensor don't count as writes to its part."""
    setattr(leaf, _OUTER, outer)


def _version(source: Tensor) -> Version:
    """How often a weight was written, itself and by its parameter, and where it lies: `.data =` moves it."""
    outer = getattr(source, _OUTER, None)
    return version_of(source), 0 if outer is None else version_of(outer()), source.data_ptr()


class _GatherSource:
    """How a tensor was gathered: of `source`, which may have been gathered itself."""

    def __init__(
        self,
        operator: str,
        source: Tensor | _GatherSource,
        version: Version,
        arguments: tuple[Any, ...],
        full: Tensor,
        *,
        is_ahead: bool | None = None,
    ) -> None:
        self.operator, self.source, self.version = operator, source, version
        self.arguments, self.dtype, self.is_ahead = arguments, full.dtype, is_ahead

    def restore(self) -> Tensor:
        """The full tensor, anew: a collective."""
        source = self.source
        if isinstance(source, _GatherSource):
            return self.made_of(source.restore())
        self.check()
        return self.made_of(source)

    def made_of(self, source: Tensor) -> Tensor:
        """The full tensor of its source."""
        with torch.no_grad():
            full: Tensor = registry.operator(self.operator)(source, *self.arguments)
        return full

    def check(self) -> None:
        """Raise InputError if the weight that it was made of has changed since."""
        if isinstance(self.source, _GatherSource):
            self.source.check()
        else:
            _check(self.source, self.version)

    def start(self, *, gathers: bool) -> Callable[[], Tensor] | None:
        """Begin to `restore`, by one collective if `gathers` come ahead, or with a source that does; None
        where that can't be."""
        source = self.source
        if isinstance(source, _GatherSource):
            begun = source.start(gathers=False)
            return None if begun is None else lambda: self.made_of(begun())
        if not (gathers if self.is_ahead is None else self.is_ahead):
            return None
        _check(source, self.version)
        with torch.no_grad():
            handle = registry.operator(f"start_{self.operator}")(source, *self.arguments)

        def wait() -> Tensor:
            with torch.no_grad():
                full: Tensor = registry.operator(f"wait_{self.operator}")(handle, source, *self.arguments)
            return full

        return wait


def _check(source: Tensor, version: Version) -> None:
    """Raise InputError for a weight that has changed since it was gathered."""
    if _version(source) != version:
        raise InputError(
            where="backward of the parallel module",
            found=f"a weight, a shard of shape {tuple(source.shape)}, that has changed since forward",
            wanted="the values of the forward pass, which are gathered again",
            remedy="step the optimizer after backward, not between forward and backward",
        )


class _GatherGroup:
    """Tensors that were gathered by one exchange, and are so again.

    The first that backward wants brings all that it saved of them; each lasts until it has been wanted as
    often as it was saved. So how often ranks meet depends on what was saved alone.
    """

    def __init__(self, operator: str, sources: Sequence[Tensor], arguments: tuple[Any, ...]) -> None:
        self.operator, self.sources, self.arguments = operator, sources, arguments
        self.versions = list(map(_version, sources))
        self.saved = Counter[int]()
        self.wanted = Counter[int]()
        self.fulls: dict[int, Tensor] = {}
        self.begun: Callable[[], None] | None = None

    def restore(self, index: int) -> Tensor:
        """One of the tensors, with the others if it isn't there: a collective then."""
        if index not in self.fulls:
            _check(self.sources[index], self.versions[index])
            if self.begun is None:
                self._gather(sorted({*self._unchanged(), index}))
            else:
                self.begun()
        full = self.fulls[index]
        self.wanted[index] -= 1
        if self.wanted[index] <= 0:
            del self.fulls[index]
        return full

    def begin(self, index: int) -> None:
        """Begin to bring the tensor, with the others."""
        _check(self.sources[index], self.versions[index])
        indices = sorted({*self._unchanged(), index})
        sources, arguments = [self.sources[each] for each in indices], arguments_of(self.arguments, indices)
        with torch.no_grad():
            handle = registry.eager(f"start_{self.operator}")(sources, *arguments)

        def wait() -> None:
            with torch.no_grad():
                fulls = registry.eager(f"wait_{self.operator}")([*handle, *sources], *arguments)
            self._come(indices, fulls)

        self.begun = wait

    def _unchanged(self) -> Iterator[int]:
        return (each for each in self.saved if _version(self.sources[each]) == self.versions[each])

    def _gather(self, indices: Sequence[int]) -> None:
        with torch.no_grad():
            fulls = registry.eager(self.operator)(
                [self.sources[index] for index in indices], *arguments_of(self.arguments, indices)
            )
        self._come(indices, fulls)

    def _come(self, indices: Sequence[int], fulls: Sequence[Tensor]) -> None:
        self.fulls, self.begun = dict(zip(indices, fulls, strict=True)), None
        self.wanted = Counter(self.saved)


def arguments_of(arguments: tuple[Any, ...], indices: Collection[int]) -> tuple[Any, ...]:
    """Arguments of a move of a list of tensors, for some of them."""
    group, dims, blocks, sizes = arguments
    ranks = len(sizes) // len(dims)
    own = [size for index in indices for size in sizes[index * ranks :][:ranks]]
    return group, [dims[index] for index in indices], [blocks[index] for index in indices], own


class _GroupMember(_GatherSource):
    """How a tensor was gathered, with others of its `group`."""

    def __init__(self, group: _GatherGroup, index: int, full: Tensor) -> None:
        super().__init__(group.operator, group.sources[index], group.versions[index], group.arguments, full)
        self.group, self.index = group, index

    def restore(self) -> Tensor:
        """The full tensor, anew: a collective, unless another of the group has brought it."""
        return self.group.restore(self.index)

    def start(self, *, gathers: bool) -> Callable[[], Tensor] | None:
        """Begin to restore the group; None where it is there, or none comes ahead."""
        if not gathers or self.index in self.group.fulls:
            return None
        if self.group.begun is None:
            self.group.begin(self.index)
        return self.restore


@dataclass(frozen=True, slots=True)
class Anew:
    """A saved tensor, as a view of a gathered one."""

    whole: _GatherSource
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    early: EarlyGathers | None = None  # what starts such gathers ahead, and this one's number there
    number: int = -1

    def restore(self) -> Tensor:
        """The tensor: its collective is repeated."""
        whole = self.whole.restore() if self.early is None else self.early.full(self.number)
        return whole.as_strided(self.size, self.stride, self.offset)


class EarlyGathers:
    """The gathers of one backward, each started when the one before it is waited for.

    `order` says which number came after which in the last backward: the same on all ranks, as are backwards.
    Of those that ranks meet in none is started but where `gathers` come ahead.
    """

    def __init__(self, order: dict[int, int], *, gathers: bool) -> None:
        self._order, self._gathers = order, gathers
        self._items: list[_GatherSource] = []
        self._started: dict[int, Callable[[], Tensor]] = {}
        self._last, self._task = -1, -1

    def pack(self, item: Anew) -> Anew:
        """Number an item."""
        self._items.append(item.whole)
        return replace(item, early=self, number=len(self._items) - 1)

    def full(self, number: int) -> Tensor:
        """Get the tensor with this number; the next one begins to come."""
        wait = self._started.pop(number, None)
        while self._started:  # backward took another way: these are over, and of no use
            self._started.popitem()[1]()
        if wait:
            self._items[number].check()  # it may have changed between two backwards, and be refused then
        full = wait() if wait else self._items[number].restore()
        task = graph_task()
        if task == self._task:
            self._order[self._last] = number
        self._last, self._task = number, task
        after = self._order.get(number)
        if (
            after is not None
            and after < len(self._items)
            and (begun := self._items[after].start(gathers=self._gathers))
        ):
            self._started[after] = begun
        return full


Notes = dict[int, tuple[weakref.ref[torch.UntypedStorage], _GatherSource]]  # by the storage's address
_OUTER = "_autopar_outer"  # the attribute of a leaf that finds its parameter
_notes: ContextVar[Notes | None] = ContextVar("gathered weights", default=None)


@contextmanager
def noting() -> Iterator[None]:
    """Note within how weights are gathered."""
    before = _notes.set({})
    try:
        yield
    finally:
        _notes.reset(before)


def anew(tensor: Tensor) -> Anew | None:
    """The way to gather `tensor` again; None if it was not gathered, or nobody has noted how."""
    notes = _notes.get()
    made = _find(notes, tensor) if notes and tensor.layout == torch.strided else None
    if made is None or tensor.dtype != made.dtype or tensor.is_conj() or tensor.is_neg():
        return None
    if isinstance(made, _GroupMember):
        made.group.saved[made.index] += 1
    return Anew(made, tensor.size(), tensor.stride(), tensor.storage_offset())


def _find(notes: Notes, tensor: Tensor) -> _GatherSource | None:
    """How the storage of `tensor` was gathered; None if it was not."""
    storage = tensor.untyped_storage()
    known, made = notes.get(storage_key(storage), (None, None))
    return made if known is not None and known() is storage else None


_Packed = Tensor | Anew | PackedTensor


def _unbound(tensor: Tensor) -> Tensor:
    """The tensor without what made it, which may be who saves it: the two would keep each other alive where
    no backward comes. Autograd binds it again."""
    return tensor if tensor.grad_fn is None else tensor.detach()


@dataclass(frozen=True, slots=True)
class _Packing:
    """Hooks on the tensors that autograd saves."""

    between: Between | None
    moving: Offloading | None
    early: EarlyGathers | None

    def pack(self, tensor: Tensor) -> _Packed | Box[_Packed]:
        found = anew(tensor)
        if found is not None and self.early is not None:
            found = self.early.pack(found)
        saved: _Packed = found or (self.moving.pack(tensor) if self.moving is not None else _unbound(tensor))
        return saved if self.between is None else Box(saved)

    def unpack(self, found: _Packed | Box[_Packed]) -> Tensor:
        saved = self.between.open(found) if self.between is not None and isinstance(found, Box) else found
        assert not isinstance(saved, Box)
        return saved if isinstance(saved, Tensor) else saved.restore()


@contextmanager
def _freeing(between: Between | None, *, offloads: bool, early: EarlyGathers | None) -> Iterator[None]:
    before = halved.set(between)
    try:
        with noting(), offloading() if offloads else nullcontext() as moving:
            packing = _Packing(between, moving, early)
            with saved_tensors_hooks(packing.pack, packing.unpack):
                yield
    finally:
        halved.reset(before)
