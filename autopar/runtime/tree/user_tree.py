"""The user's own modules under a parallel module: a rank's parts in the place of parameters, no other change.

user's code    modules, attributes, methods, hooks of the root       their own
               a call of a submodule by itself                       refused: its parameters are parts
a trace        the same modules, whole tensors without memory        put in for its time
every call     other children, classes or hooks than before          taken over, or refused by name
"""

from __future__ import annotations

import itertools
import operator
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autopar.core.graph import may_learn
from autopar.errors import InputError
from autopar.runtime.tree import old_parameters
from autopar.runtime.tree.module_contents import ModuleContents, replaced
from autopar.runtime.tree.serial_model import is_harmless, without_memory
from autopar.runtime.tree.stored import FullState, Stored
from autopar.torch_seams.modules import (
    HOOKS,
    HOOKS_EVERYWHERE,
    own_buffers,
    own_children,
    own_parameters,
    own_tensors,
)
from autopar.trace.call.user_source import is_library, shown_path
from autopar.trace.state.shared_memory import Memory, replacing


class PlacedTensor(NamedTuple):
    """A tensor of the serial model, this rank's part of it (None where it holds none), and how that lies."""

    whole: Tensor
    part: Tensor | None
    stored: Stored


class ParameterOwner(NamedTuple):
    """Whose a parameter is: a tree, the first name there of what is tied, and how it lies."""

    tree: UserTree
    name: str
    stored: Stored


_FORWARD = "forward"
_MODE = operator.attrgetter("training")
_VALUES = operator.methodcaller("values")
_numbers = itertools.count()
_trees: weakref.WeakSet[UserTree] = weakref.WeakSet()


class UserTree:
    """The modules below `root`, which is one of them, by their paths.

    `number` is the same on all ranks, which make their parallel modules in one order. `own` is a forward
    that the root itself has had, not its class. `nothing` are parameters without elements that
    stand for those of other stages.
    """

    def __init__(self, root: nn.Module, serial_class: type) -> None:
        self.root, self.serial_class = root, serial_class
        self.own = _taken(root, _FORWARD)  # what the user has put in the place of the class's
        self.number = next(_numbers)
        self.nothing: tuple[nn.Parameter, ...] = ()
        self.is_plain = False  # parameters are torch's own
        self.version = 0  # of which modules there are
        self.stored: dict[str, Stored] = {}
        self._order: tuple[str, ...] = ()  # of all names, also of modules that have several; once placed
        self._whole: dict[str, Tensor] = {}  # without memory, by every name; once placed
        self._whole_lists: list[
            tuple[str, str, Any]
        ] = []  # by path and name, attributes that hold some of them
        self.before: Memory = Memory(())  # parameters and buffers that were there before they were placed
        self._old: list[tuple[str, weakref.ref[nn.Parameter]]] = []
        self._handles: list[RemovableHandle] = []
        self._take()

    def _take(self) -> None:
        """Take over which modules there are."""
        named = dict(self.root.named_modules())
        self.modules = tuple(named.values())
        self._paths = tuple(named)
        self._children_of = [own_children(module) for module in self.modules]
        self._parameters_of = list(map(own_parameters, self.modules))
        self._buffers_of = list(map(own_buffers, self.modules))
        self._children = self._present_children()
        self._kinds = list(map(type, self.modules))
        self._hooks = [getattr(module, name) for module in self.modules[1:] for name in HOOKS]
        self._hook_counts = list(map(len, self._hooks))

    def _present_children(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(_VALUES, self._children_of)))

    # -- placing ------------------------------------------------------------------------------------

    def place(self, store: Callable[[str, Tensor], tuple[Tensor | None, Stored]]) -> list[PlacedTensor]:
        """Put what `store(name, tensor)` makes of every tensor in its place, each tensor once; None is what
        another stage holds."""
        full = dict(self.named_tensors())
        self._order = tuple(_all_names(self.root))
        self.before = Memory(full.items())
        self._whole = _without_memory(full)
        self._whole_lists = list(
            self._lists_with({id(full[name]): whole for name, whole in self._whole.items()})
        )
        placed: dict[int, PlacedTensor] = {}
        for name, tensor in full.items():
            if id(tensor) not in placed:
                placed[id(tensor)] = PlacedTensor(tensor, *store(name, tensor))
            self.stored[name] = placed[id(tensor)].stored
        self._put({key: item.part for key, item in placed.items()})
        _trees.add(self)
        self.install()
        self._old = [
            (name, weakref.ref(item)) for name, item in full.items() if isinstance(item, nn.Parameter)
        ]
        return list(placed.values())

    def retire(self) -> None:
        """Refuse uses of the parameters that were there before, from now on."""
        for name, reference in self._old:
            if (old := reference()) is not None:
                old_parameters.replaced(old, name)

    def old(self) -> list[nn.Parameter]:
        """Parameters that were there before and that somebody still holds."""
        return [old for _, reference in self._old if (old := reference()) is not None]

    def of(self, twin: nn.Module) -> UserTree:
        """Make the tree of a copy of the root."""
        tree = UserTree(twin, self.serial_class)
        tree.stored, tree._whole, tree._whole_lists = self.stored, self._whole, self._whole_lists
        tree.version, tree.nothing, tree._order = self.version, self.nothing, self._order
        tree.is_plain = self.is_plain
        tree.before, tree._old = self.before, self._old
        _trees.add(tree)
        return tree

    def owned(self) -> dict[int, ParameterOwner]:
        """The parameters of this rank, by id."""
        first: dict[int, str] = {}
        for name, stored in self.stored.items():
            first.setdefault(id(stored), name)
        return {
            id(tensor): ParameterOwner(self, first[id(self.stored[name])], self.stored[name])
            for name, tensor in self.named_tensors()
            if isinstance(tensor, nn.Parameter) and name in self.stored
        }

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank, tied ones several times."""
        held = chain.from_iterable(map(_VALUES, self._parameters_of))
        return (item for item in held if item is not None)

    def modes(self) -> tuple[bool, ...]:
        """Whether each module is in train mode."""
        return tuple(map(_MODE, self.modules))

    def held(self) -> list[Tensor]:
        """The parameters and buffers of this rank, tied ones several times."""
        held = chain.from_iterable(map(_VALUES, chain(self._parameters_of, self._buffers_of)))
        return [item for item in held if item is not None]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters and buffers by name, tied ones by each of theirs."""
        for path, module in zip(self._paths, self.modules, strict=True):
            for held in own_tensors(module):
                for name, tensor in held.items():
                    if tensor is not None:
                        yield _join(path, name), tensor

    def _put(self, places: Mapping[int, Tensor | None]) -> None:
        """Replace tensors, by id, wherever modules hold them, also in lists and the like."""
        for module in self.modules:
            for held in own_tensors(module):
                for name, tensor in held.items():
                    if id(tensor) in places:
                        held[name] = places[id(tensor)]
        self.set_attributes(list(self._lists_with(places)))

    def set_attributes(self, values: Sequence[tuple[str, str, Any]]) -> None:
        """Set attributes by path and name."""
        states = dict(zip(self._paths, map(vars, self.modules), strict=True))
        for path, name, value in values:
            if path in states:
                states[path][name] = value

    def is_parameter(self, name: str) -> bool:
        """Whether `name` is a parameter's; if not, it is a buffer's."""
        return isinstance(self._whole[name], nn.Parameter)

    def put_by_name(self, whole: Mapping[str, Tensor]) -> list[tuple[str, str, Any]]:
        """Let modules hold these tensors instead of their own; attributes of lists with them as they were."""
        stand_ins: dict[int, Tensor | None] = {
            id(self._whole[name]): tensor for name, tensor in whole.items()
        }
        places: dict[int, Tensor | None] = {id(tensor): whole[name] for name, tensor in self.named_tensors()}
        lists = [
            *self._lists_with(places),
            *((path, name, replaced(value, stand_ins)) for path, name, value in self._whole_lists),
        ]
        states = dict(zip(self._paths, map(vars, self.modules), strict=True))
        before = [(path, name, states[path][name]) for path, name, _ in lists if name in states.get(path, ())]
        for path, module in zip(self._paths, self.modules, strict=True):
            for held in own_tensors(module):
                for name in held:
                    held[name] = whole.get(_join(path, name), held[name])
        self.set_attributes(lists)
        return before

    def _lists_with(self, places: Mapping[int, Tensor | None]) -> Iterator[tuple[str, str, Any]]:
        """Attributes that hold some of these tensors, and their values with the others in their places."""
        for path, module in zip(self._paths, self.modules, strict=True):
            for name, value in vars(module).items():
                if name in ("_parameters", "_buffers", "_modules") or not isinstance(
                    value, (list, tuple, dict)
                ):
                    continue
                if (other := replaced(value, places)) is not value:
                    yield path, name, other

    # -- our own hooks ------------------------------------------------------------------------------

    def install(self) -> None:
        """Once tensors are placed, let state dicts speak full ones, and refuse calls of single modules."""
        for path, module in () if not self.stored else zip(self._paths, self.modules, strict=True):
            names = [*own_parameters(module), *own_buffers(module)]
            stored = {
                name: self.stored[_join(path, name)] for name in names if _join(path, name) in self.stored
            }
            if stored:
                self._handles += FullState(stored).install(module)
            if path and next(module.parameters(), next(module.buffers(), None)) is not None:
                self._handles.append(module.register_forward_pre_hook(_Refused(path)))
        self._hook_counts = list(map(len, self._hooks))

    def uninstall(self) -> None:
        """Take our own hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def in_order(self, state: Any, prefix: str) -> Any:
        """The state dict in the model's serial order; tensors that this rank doesn't hold take their places
        too."""
        places = {prefix + name: place for place, name in enumerate(self._order)}
        held = [places[name] for name in state if name in places]
        if held != sorted(held):
            for name in filter(state.__contains__, places):
                state[name] = state.pop(name)
        return state

    def leave(self, values: Mapping[tuple[str, str], Any]) -> None:
        """Leave in the modules what forward leaves there, by path and name."""
        if values:
            self.set_attributes([(path, name, value) for (path, name), value in values.items()])

    # -- calls --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Take over other modules without tensors; raises InputError for what no program can know of."""
        if self._is_as_before():
            return
        self._refuse_hooks()
        self.uninstall()
        self._take()
        self.version += 1
        if self.stored:
            self._check_tensors()
        self.install()

    def _refuse_hooks(self) -> None:
        hooks = [
            f"a hook on all modules{_defined(hook)}" for hooks in HOOKS_EVERYWHERE for hook in hooks.values()
        ]
        hooks += [
            f"a {HOOKS[name]} on {path}{_defined(hook)}"
            for path, module in self.root.named_modules()
            for name in HOOKS
            for hook in (getattr(module, name).values() if path else ())
            if not isinstance(hook, _Refused) and not is_harmless(hook)
        ]
        if hooks:
            raise InputError(
                where="call of the parallel module",
                found=_few(hooks),
                wanted="no hooks on modules below it: a program runs instead of their forward",
                remedy="remove them, hook the parallel module itself, or let forward return what they see",
            )

    def _is_as_before(self) -> bool:
        children = self._present_children()
        return (
            len(children) == len(self._children)
            and all(map(operator.is_, children, self._children))
            and all(map(operator.is_, map(type, self.modules), self._kinds))
            and list(map(len, self._hooks)) == self._hook_counts
            and not any(HOOKS_EVERYWHERE)
        )

    def _check_tensors(self) -> None:
        """Raise InputError for parameters and buffers that have no place in the plan."""
        new = [
            name
            for name, tensor in self.named_tensors()
            if name not in self.stored
            or (isinstance(tensor, nn.Parameter) and not (self.is_plain or isinstance(tensor, DTensor)))
        ]
        if new:
            raise came_later(new)

    @contextmanager
    def serial(self, states: Mapping[str, tuple[torch.dtype, bool]] | None) -> Iterator[nn.Module]:
        """The root as the serial model for the time of a trace, which leaves it as it was.

        Once parameters are placed, `states` says their dtypes and which learn; whole tensors without memory
        stand in for them.
        """
        with self.plain() as root, replacing(self.before), old_parameters.usable(self.old()):
            kept = ModuleContents(self.modules)
            for name in (*HOOKS, "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"):
                root.__dict__[name] = OrderedDict()
            try:
                if states is not None:
                    self._put_whole(states)
                yield root
            finally:
                kept.restore()

    @contextmanager
    def plain(self) -> Iterator[nn.Module]:
        """The root as an instance of the user's class, without anything of ours but its parameters."""
        root, parallel_class = self.root, type(self.root)
        self.uninstall()
        # A framework may have put a forward around ours (autocast): of the class, and of this object alone.
        ours = _taken(root, "_autopar", _FORWARD)
        root.__class__ = self.serial_class
        root.__dict__.update(self.own)
        try:
            yield root
        finally:
            _taken(root, _FORWARD)
            root.__class__ = parallel_class
            root.__dict__.update(ours)
            self.install()

    def _put_whole(self, states: Mapping[str, tuple[torch.dtype, bool]]) -> None:
        places: dict[int, Tensor | None] = {}
        for path, module in zip(self._paths, self.modules, strict=True):
            for held in own_tensors(module):
                for name, tensor in held.items():
                    whole = self._whole.get(_join(path, name))
                    if whole is None or _keeps_values(tensor):
                        continue
                    if _join(path, name) in states:
                        dtype, requires_grad = states[_join(path, name)]
                        if whole.dtype != dtype:
                            whole.data = without_memory(whole.detach(), dtype)
                        whole.requires_grad_(requires_grad)
                    held[name] = whole
                    if tensor is not None:
                        places[id(tensor)] = whole
        self._put(places)
        self.set_attributes(self._whole_lists)


def _taken(root: nn.Module, *names: str) -> dict[str, Any]:
    """Attributes of an object by these names, removed from it."""
    return {name: root.__dict__.pop(name) for name in names if name in root.__dict__}


def _keeps_values(tensor: Tensor | None) -> bool:
    """Whether a trace may see a tensor itself, since its values may be structure: integers that lie whole."""
    if type(tensor) is not Tensor or tensor is None:
        return False
    return tensor.layout is not torch.strided or (not may_learn(tensor.dtype) and tensor.dim() > 0)


def placed_parameters() -> set[int]:
    """The parameters of the trees alive, by id."""
    return {id(item) for tree in _trees for item in tree.parameters()}


def placed_trees() -> list[UserTree]:
    """The trees alive whose tensors are placed."""
    return sorted(_trees, key=operator.attrgetter("number"))


class _Refused:
    """Refuses calls of one module by itself: its parameters are parts, in a program of the whole model."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, module: nn.Module, args: Any) -> None:
        raise InputError(
            where=f"{_caller()}call of {self._path} ({type(module).__name__})",
            found="a module of a parallel model, called by itself",
            wanted="calls of the parallel module, whose program is of its whole forward",
            remedy=f"call it {inside(self._path)}, or let forward do it, told by a flag",
        )

    def __reduce__(self) -> Any:
        raise InputError(
            where=f"pickling {self._path}",
            found="a module of a parallel model",
            wanted="state dicts, which hold full tensors",
            remedy=f"save the state_dict() of the parallel module, or pickle it {inside(self._path)}",
        )


def inside(path: str = "") -> str:
    """Code that uses single modules and methods of the serial model."""
    return f"inside `with autopar.full(parallel) as model:` as {_join('model', path)}"


def _caller() -> str:
    """The user's line that is running, with a colon."""
    for frame in reversed(traceback.extract_stack()):
        if not is_library(frame.filename):
            return f"{shown_path(frame.filename)}:{frame.lineno}: "
    return ""


def _defined(hook: Any) -> str:
    """File and line of a hook's function, in brackets; empty for one without Python code."""
    code = getattr(hook, "__code__", None)
    return "" if code is None else f" ({shown_path(code.co_filename)}:{code.co_firstlineno})"


def _all_names(root: nn.Module) -> Iterator[str]:
    """Names of tensors as a state dict has them: of a module under several names, all."""
    for path, module in root.named_modules(remove_duplicate=False):
        yield from (_join(path, name) for name in (*own_parameters(module), *own_buffers(module)))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _few(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _without_memory(full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make tensors like these without memory, tied ones one."""
    made: dict[int, Tensor] = {}
    for tensor in full.values():
        if id(tensor) not in made:
            is_sparse = tensor.layout is not torch.strided
            empty = tensor.detach() if is_sparse else without_memory(tensor.detach())
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return {name: made[id(tensor)] for name, tensor in full.items()}


def came_later(names: list[str]) -> InputError:
    """The error of parameters and buffers that have no place in the plan."""
    return InputError(
        where="call of the parallel module",
        found=f"{_few(names)}, which came after parallelize",
        wanted="the parameters and buffers that were planned",
        remedy="change modules before parallelize, then load_state_dict(..., strict=False) into them",
    )
