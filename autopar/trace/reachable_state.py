"""State that forward may read by name: what its code names, in everything that it can reach.

    import config                          forward's globals    F, config, Cfg
    def forward(self, x):                  its names            gelu, SCALE, tau, scaled
        y = F.gelu(x) * config.SCALE       in module F: gelu    in module config: SCALE, scaled
        c = Cfg                            in class Cfg: tau    by whatever name the code calls it
        return config.scaled(y) * c.tau    code of scaled       its names join, and all is looked at again

The least fixed point: which holders are reached, and which names any code among them has. It sees every
alias, and some names too many. Objects of Python classes aren't looked at by name: what is read of them is
recorded one by one (attribute_reads.py), as soon as they are reached.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from autopar.trace.code_names import names_in

_IMMUTABLE, _HEAP = 1 << 8, 1 << 9  # Py_TPFLAGS_IMMUTABLETYPE and _HEAPTYPE
_STATELESS = frozenset(  # whose objects hold none of the user's state
    (
        *("torch", "builtins", "typing", "math", "functools", "itertools", "einops", "numpy"),
        *("logging", "warnings", "autopar"),
    )
)
_LIBRARIES = _STATELESS | sys.stdlib_module_names | {"sympy"}
_CONSTRUCTION = frozenset(("__init__", "__new__", "__post_init__"))
_ENVIRONMENT = frozenset(("environ", "getenv"))
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Tensor)


@dataclass(slots=True, eq=False)
class Namespace:
    """A dictionary in which code looks up some of the `names`, that of a class if it has an `owner`.

    What is read of it is `recorded` elsewhere, or not; of a library's, functions may be replaced.
    """

    owner: type | None
    table: Mapping[str, Any]
    names: dict[str, None]
    shown: str
    recorded: bool = False
    is_library: bool = False
    looked_up: int = 0  # how many of the names

    def held(self) -> list[str]:
        """The names that it has now, of state or of code that can be replaced."""
        return [
            name
            for name, value in self.table.items()
            if name in self.names and not (self.is_library and not callable(value))
        ]

    def path(self, name: str) -> str:
        """A name as people write it."""
        return f"{self.shown}.{name}" if self.shown else name

    def put(self, name: str, value: Any) -> None:
        """Put another value under a name."""
        if self.owner is not None:
            setattr(self.owner, name, value)
        elif isinstance(self.table, dict):
            self.table[name] = value

    def drop(self, name: str) -> None:
        """Take a name away."""
        if self.owner is not None:
            delattr(self.owner, name)
        elif isinstance(self.table, dict):
            del self.table[name]

    def found(self) -> list[Any]:
        """What it has under names that weren't looked up yet."""
        new = list(islice(self.names, self.looked_up, None))
        self.looked_up = len(self.names)
        if len(self.table) < len(new):
            wanted = set(new)
            new = [name for name in self.table if name in wanted]
        values = [self.table[name] for name in new if name in self.table]
        return [item for item in values if type(item) is types.ModuleType] if self.is_library else values


class Reachable:
    """What code can reach from what is seen; `watch` is told the classes of objects."""

    def __init__(self, watch: Callable[[type], None]) -> None:
        self.names: dict[str, None] = {"forward": None}  # in any code; torch names that one
        self.namespaces: dict[int, Namespace] = {}  # by what they are the dictionary of
        self.functions: dict[int, types.FunctionType] = {}
        self.containers: dict[int, Any] = {}
        self.caches: dict[int, Any] = {}  # of functools.lru_cache
        self._watch = watch
        self._classes: set[type] = set()
        self._visited: dict[int, Any] = {}
        self._todo: list[Any] = []
        self._known = 0, 0  # names and namespaces that were looked at

    @property
    def reads_environment(self) -> bool:
        """Whether any code asks for environment variables."""
        return not _ENVIRONMENT.isdisjoint(self.names)

    def see(self, *values: Any) -> None:
        """Take in values, and all that code can reach from them."""
        self._todo += values
        while self._todo:
            self._visit(self._todo.pop())
            if not self._todo:
                self._look_up()

    def let_go(self) -> None:
        """Hold values no longer that nobody else holds."""
        self._visited.clear()

    def _look_up(self) -> None:
        """Put on the list what namespaces have under names that are new."""
        now = len(self.names), len(self.namespaces)
        if now != self._known:
            self._known = now
            for space in self.namespaces.values():
                self._todo += space.found()

    # -- one value ----------------------------------------------------------------------------------

    def _visit(self, value: Any) -> None:
        if isinstance(value, _ATOMS) or id(value) in self._visited:
            return
        self._visited[id(value)] = value
        match value:
            case types.FunctionType():
                self._function(value)
            case dict():
                self.containers[id(value)] = value
                self._todo += dict.values(value)
            case list() | tuple() | set() | frozenset() | deque():
                self.containers[id(value)] = value
                self._todo += value
            case types.ModuleType():
                self._module(value)
            case type():
                self._class(value)
                self._todo += _constructors(value)
                if is_settings(value):
                    self._watch(value)
            case _ if (held := _HOLDS.get(type(value))) is not None:
                self._todo += held(value)
            case _:
                self._object(value)
        if isinstance(value, functools._lru_cache_wrapper):
            self.caches[id(value)] = value

    def _function(self, function: types.FunctionType) -> None:
        if is_library(function.__module__):
            return
        self.functions[id(function)] = function
        names = names_in(function.__code__)
        self.names.update(dict.fromkeys(names.every))
        self._globals_of(function).names.update(dict.fromkeys(names.globals))
        self._todo += (function.__defaults__, function.__kwdefaults__)
        self._todo += (cell.cell_contents for cell in filled_cells(function))
        self._todo += _imported(names.imports, str(function.__globals__.get("__package__") or ""))
        if vars(function):
            self._space(function, vars(function), self.names, function.__qualname__)

    def _globals_of(self, function: types.FunctionType) -> Namespace:
        """The globals of one module's code, whose names are those that it looks up there."""
        table = function.__globals__
        if id(table) not in self.namespaces:
            name = str(table.get("__name__", ""))
            self._space(table, table, {}, "" if name == "__main__" else name)
        return self.namespaces[id(table)]

    def _module(self, module: types.ModuleType) -> None:
        table = vars(module)
        if (own := self.namespaces.get(id(table))) is not None:  # globals, any of which are attributes now
            own.names, own.looked_up = self.names, 0
        else:
            self._space(table, table, self.names, module.__name__, is_library=is_library(module.__name__))

    def _class(self, kind: type) -> None:
        if kind in self._classes:
            return
        for base in kind.__mro__:
            if base not in self._classes and is_python_class(base) and not is_library(base.__module__):
                self._space(base, vars(base), self.names, base.__qualname__)
                self._todo += (item for name, item in vars(base).items() if _runs_unnamed(name))
        self._classes.update(kind.__mro__)
        if type(kind) is not type:
            self._todo.append(type(kind))

    def _object(self, value: Any) -> None:
        kind = type(value)
        self._class(kind)
        recorded = isinstance(value, nn.Module) or is_settings(kind)
        if recorded:
            self._watch(kind)
        table = _own_dict(value)
        if table is not None:
            self._todo += table.get("_modules", {}).values() if isinstance(value, nn.Module) else ()
            self._space(value, table, self.names, kind.__name__, recorded=recorded)
        self._todo += _in_slots(value)

    def _space(
        self,
        holder: Any,
        table: Mapping[str, Any],
        names: dict[str, None],
        shown: str,
        *,
        recorded: bool = False,
        is_library: bool = False,
    ) -> None:
        owner = holder if isinstance(holder, type) else None
        self.namespaces[id(holder)] = Namespace(owner, table, names, shown, recorded, is_library)


_HOLDS: dict[type, Callable[[Any], Iterable[Any]]] = {
    types.MethodType: lambda value: (value.__func__, value.__self__),
    functools.partial: lambda value: (value.func, value.args, value.keywords),
    property: lambda value: (value.fget,),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    functools.partialmethod: lambda value: (value.func,),
    functools.cached_property: lambda value: (value.func,),
    functools._lru_cache_wrapper: lambda value: (value.__wrapped__,),
    weakref.ReferenceType: lambda value: (value(),),
    contextvars.ContextVar: lambda value: (value.get(None),),
}


def _constructors(kind: type) -> Iterator[Any]:
    """What may run where code makes an object of a class."""
    for base in kind.__mro__:
        if not is_library(base.__module__):
            yield from (vars(base)[name] for name in _CONSTRUCTION & vars(base).keys())


def _imported(names: Iterable[str], package: str) -> Iterator[Any]:
    """The modules that code imports while it runs, also relative ones."""
    for name in names:
        for full in (name, f"{package}.{name}"):
            if full in sys.modules:
                yield sys.modules[full]


def _runs_unnamed(name: str) -> bool:
    """Whether Python calls a method that no code names, as by `x[i]` or `with x`."""
    return name.startswith("__") and name.endswith("__") and name not in _CONSTRUCTION


def _own_dict(value: Any) -> dict[str, Any] | None:
    """What an object holds by name; of `threading.local`, in this thread."""
    get = object.__getattribute__ if is_python_class(type(value)) else getattr
    try:
        table = get(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return table if isinstance(table, dict) else None


def _in_slots(value: Any) -> Iterator[Any]:
    """What an object holds in slots."""
    for base in type(value).__mro__:
        for name, item in vars(base).items():
            if isinstance(item, types.MemberDescriptorType) and is_python_class(base):
                yield getattr(value, name, None)


def is_python_class(kind: type) -> bool:
    """Whether Python code has made a class, whose attributes can be set."""
    return kind.__flags__ & (_HEAP | _IMMUTABLE) == _HEAP


def is_settings(kind: type) -> bool:
    """Whether it is a class of Python code, other than torch's."""
    return is_python_class(kind) and not is_torch(kind.__module__)


def is_torch(module: str | None) -> bool:
    """Whether a module is torch's or a part of Python that holds no state of the user's: what a logger has
    told, and to whom, is none of the graph."""
    return _first(module) in _STATELESS


def is_library(module: str | None) -> bool:
    """Whether a module's code reads no state of the user's by itself."""
    return _first(module) in _LIBRARIES


def _first(module: str | None) -> str:
    return (module or "").partition(".")[0]


def filled_cells(function: types.FunctionType) -> list[types.CellType]:
    """What the function closes over, as far as it is there yet."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:
            continue
        cells.append(cell)
    return cells
