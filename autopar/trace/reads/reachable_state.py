"""State that forward may read by name: what its code names, in everything that it can reach.

    import config                          forward's globals    F, config, Cfg
    def forward(self, x):                  its names            gelu, SCALE, tau, scaled
        y = F.gelu(x) * config.SCALE       in module F: gelu    in module config: SCALE, scaled
        c = Cfg                            in class Cfg: tau    by whatever name the code calls it
        return config.scaled(y) * c.tau    code of scaled       its names join, and all is looked at again

The least fixed point over what is reached and what code names that ran. It sees every alias, and some names
too many. Objects of Python classes aren't looked at by name: what is read of them is recorded one by one
(attribute_reads.py), as soon as they are reached.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import os
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.trace.reads.code_names import CodeNames, names_in

_IMMUTABLE, _HEAP = 1 << 8, 1 << 9  # Py_TPFLAGS_IMMUTABLETYPE and _HEAPTYPE
_STATELESS = frozenset(  # whose objects hold none of the user's state
    (
        *("torch", "builtins", "typing", "math", "functools", "itertools", "einops", "numpy"),
        *("logging", "warnings", "autopar"),
    )
)
_LIBRARIES = _STATELESS | sys.stdlib_module_names | {"sympy"}
_Cached: Any = type(functools.cache(lambda: None))
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
    is_modules: bool = False
    looked_up: int = 0  # how many of the names

    def held(self) -> list[str]:
        """Watched names that the object has now; of a library only functions."""
        return [
            name
            for name, value in [*self.table.items()]  # to which another thread may add
            if name in self.names and not (self.is_library and not callable(value))
        ]

    def looked_at(self) -> list[str]:
        """Names whose values forward may change: all of a recorded object, else the watched ones."""
        return [*self.table] if self.recorded else self.held()

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
        """Values under names that weren't looked up yet."""
        new = list(islice(self.names, self.looked_up, None))
        self.looked_up = len(self.names)
        if len(self.table) < len(new):
            wanted = set(new)
            new = [name for name in self.table if name in wanted]
        values = [self.table[name] for name in new if name in self.table]
        return [item for item in values if type(item) is types.ModuleType] if self.is_library else values


class Reachable:
    """Objects that code can reach from those that are seen.

    With the code that `ran`, every name in it is looked up in every holder: what a guard must know. Without,
    before anything runs, names are looked up in those modules and classes alone that the function names, too:
    what is worth a look. `watch` is told the classes of objects.
    """

    def __init__(
        self, watch: Callable[[type], None] | None = None, *, ran: Collection[types.CodeType] | None = None
    ) -> None:
        self.names: dict[str, None] = {"forward": None}  # in any code of modules; torch names that one
        self.namespaces: dict[int, Namespace] = {}  # by what they are the dictionary of
        self.functions: dict[int, types.FunctionType] = {}
        self.containers: dict[int, Any] = {}
        self.caches: dict[int, Any] = {}  # of functools.lru_cache
        self.reads_environment = False
        self._watch, self._ran = watch, ran
        self._classes: set[type] = set()
        self._visited: dict[int, Any] = {}
        self._todo: list[Any] = []
        self._grown = True  # names or namespaces, since they were looked up
        for code in filter(is_users, ran or ()):
            names = names_in(code).every
            self.names.update(dict.fromkeys(names))
            self.reads_environment |= not _ENVIRONMENT.isdisjoint(names)
        called = self.names.copy()
        for code in filter(is_torchs_nn, ran or ()):
            called.update(dict.fromkeys(names_in(code).every))
        self._space(vars(F), vars(F), called, F.__name__, is_library=True)

    def see(self, *values: Any) -> None:
        """Take in values, and all that code can reach from them."""
        self._todo += values
        while self._todo:
            self._visit(self._todo.pop())
            if not self._todo:
                self._look_up()

    def knows(self, value: Any) -> bool:
        """Whether a value was visited already, or is a plain value that holds no others."""
        return type(value) in _ATOMS or id(value) in self._visited

    def let_go(self) -> None:
        """Hold values no longer that nobody else holds."""
        self._visited.clear()

    def _look_up(self) -> None:
        """Put on the list what namespaces have under names that are new."""
        if self._grown:
            self._grown = False
            for space in self.namespaces.values():
                if space.looked_up != len(space.names):
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
                self._todo += members(value)
            case types.ModuleType():
                self._module(value)
            case type():
                self._class(value)
                self._todo += _constructors(value)
                if is_settings(value) and self._watch is not None:
                    self._watch(value)
            case _ if (held := _HOLDS.get(type(value))) is not None:
                self._todo += held(value)
            case _:
                self._object(value)
        if isinstance(value, _Cached):
            self.caches[id(value)] = value
        elif id(value) in self.containers and is_settings(type(value)):  # with attributes of its own
            self._object(value)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        if is_library(function.__module__) or (self._ran is not None and code not in self._ran):
            return
        self.functions[id(function)] = function
        self._grown = True
        names = names_in(code)
        table = function.__globals__
        space = self._space(table, table, {}, _shown(table))
        space.names.update(dict.fromkeys(names.globals))
        imported = _imported(names.imports, str(table.get("__package__") or ""))
        if self._ran is None:
            self._near(names, [*(table.get(name) for name in names.globals), *imported])
        self._todo += (function.__defaults__, function.__kwdefaults__, *imported)
        self._todo += (cell.cell_contents for cell in filled_cells(function))
        if vars(function):
            self._space(function, vars(function), self.names, function.__qualname__)

    def _near(self, names: CodeNames, values: Iterable[Any]) -> None:
        """Look up a function's names in the modules and classes that it names."""
        self.names.update(dict.fromkeys(names.every))
        for value in values:
            if isinstance(value, types.ModuleType | type) and not is_library(_module_of(value)):
                self._todo += (vars(value)[name] for name in names.every & vars(value).keys())

    def _module(self, module: types.ModuleType) -> None:
        table = vars(module)
        library = is_library(module.__name__)
        if self._ran is None:
            if not library:
                self._space(table, table, {}, module.__name__)
        elif (own := self.namespaces.get(id(table))) is not None:  # globals, any of which are attributes now
            own.names, own.looked_up, self._grown = self.names, 0, True
        else:
            self._space(table, table, self.names, module.__name__, is_library=library)

    def _class(self, kind: type) -> None:
        if kind in self._classes:
            return
        by_name = self._ran is not None or issubclass(kind, nn.Module)
        for base in kind.__mro__:
            if base not in self._classes and is_python_class(base) and not is_library(base.__module__):
                self._space(base, vars(base), self.names if by_name else {}, base.__qualname__)
                self._todo += (item for name, item in vars(base).items() if _runs_unnamed(name))
        self._classes.update(kind.__mro__)
        if type(kind) is not type:
            self._todo.append(type(kind))

    def _object(self, value: Any) -> None:
        kind = type(value)
        self._class(kind)
        recorded = isinstance(value, nn.Module) or is_settings(kind)
        if recorded and self._watch is not None:
            self._watch(kind)
        table = _own_dict(value)
        if table is not None:
            self._todo += table.get("_modules", {}).values() if isinstance(value, nn.Module) else ()
            near = self._ran is not None or isinstance(value, nn.Module) or not recorded
            space = self._space(value, table, self.names if near else {}, kind.__name__, recorded=recorded)
            space.is_modules = isinstance(value, nn.Module)
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
    ) -> Namespace:
        owner = holder if isinstance(holder, type) else None
        made = Namespace(owner, table, names, shown, recorded, is_library)
        self._grown |= id(holder) not in self.namespaces
        return self.namespaces.setdefault(id(holder), made)


def _module_of(value: types.ModuleType | type) -> str:
    return value.__name__ if isinstance(value, types.ModuleType) else value.__module__


def _shown(table: dict[str, Any]) -> str:
    name = str(table.get("__name__", ""))
    return "" if name == "__main__" else name


_HOLDS: dict[type, Callable[[Any], Iterable[Any]]] = {
    types.MethodType: lambda value: (value.__func__, value.__self__),
    functools.partial: lambda value: (value.func, value.args, value.keywords),
    types.MappingProxyType: lambda value: tuple(value.values()),
    property: lambda value: (value.fget,),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    functools.partialmethod: lambda value: (value.func,),
    functools.cached_property: lambda value: (value.func,),
    _Cached: lambda value: (value.__wrapped__,),
    weakref.ReferenceType: lambda value: (value(),),
    contextvars.ContextVar: lambda value: (value.get(None),),
}


def _constructors(kind: type) -> Iterator[Any]:
    """Code that may run when an object of a class is made."""
    for base in kind.__mro__:
        if not is_library(base.__module__):
            yield from (vars(base)[name] for name in _CONSTRUCTION & vars(base).keys())


def _imported(names: Iterable[str], package: str) -> list[types.ModuleType]:
    """The modules that code imports while it runs, also relative ones."""
    full = (path for name in names for path in (name, f"{package}.{name}"))
    return [sys.modules[path] for path in full if path in sys.modules]


def is_users(code: types.CodeType) -> bool:
    """Whether code may read the user's state: it is in no known library, nor in Python's own."""
    path = code.co_filename
    if path.startswith(_library_folders()) or path.startswith("<frozen"):
        return False
    stdlib = sysconfig.get_path("stdlib")
    return not path.startswith(stdlib) or "-packages" in path[len(stdlib) :]


def is_torchs_nn(code: types.CodeType) -> bool:
    """Whether code is torch.nn's, which calls functions that others may replace."""
    return code.co_filename.startswith(os.path.dirname(str(nn.__file__)))


@functools.cache
def _library_folders() -> tuple[str, ...]:
    loaded = (sys.modules.get(name) for name in ("torch", "numpy", "autopar", "sympy", "einops"))
    return tuple(os.path.dirname(str(module.__file__)) + os.sep for module in loaded if module is not None)


def _runs_unnamed(name: str) -> bool:
    """Whether Python calls a method that no code names, as by `x[i]` or `with x`."""
    return name.startswith("__") and name.endswith("__") and name not in _CONSTRUCTION


def _own_dict(value: Any) -> dict[str, Any] | None:
    """Attributes of an object by name; of `threading.local`, in this thread."""
    get = object.__getattribute__ if is_python_class(type(value)) else getattr
    try:
        table = get(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return table if isinstance(table, dict) else None


def _in_slots(value: Any) -> Iterator[Any]:
    """Values that an object holds in slots."""
    for base in type(value).__mro__:
        for name, item in vars(base).items():
            if isinstance(item, types.MemberDescriptorType) and is_python_class(base):
                yield getattr(value, name, None)


def is_python_class(kind: type) -> bool:
    """Whether Python code made a class, so that its attributes can be set."""
    return kind.__flags__ & (_HEAP | _IMMUTABLE) == _HEAP


def is_settings(kind: type) -> bool:
    """Whether a class is made by Python code outside of torch, and is no abstract one of Python's own.

    Of those, such as `collections.abc.Mapping`, others inherit, which count by themselves.
    """
    is_base = inspect.isabstract(kind) and is_library(kind.__module__)
    return is_python_class(kind) and not is_torch(kind.__module__) and not is_base


def is_torch(module: str | None) -> bool:
    """Whether a module is torch's, or a part of Python without the user's state. A logger's messages and
    their readers are no part of the graph."""
    return _first(module) in _STATELESS


def is_library(module: str | None) -> bool:
    """Whether a module's code reads no state of the user's by itself."""
    return _first(module) in _LIBRARIES


def _first(module: object) -> str:
    """The package of a module; of a class that calls a property so, none."""
    return module.partition(".")[0] if isinstance(module, str) else ""


def members(value: Any) -> Iterator[Any]:
    """Elements of a container, even if its class overrides iteration."""
    base = next(kind for kind in (tuple, list, set, frozenset, deque) if isinstance(value, kind))
    held: Iterator[Any] = base.__iter__(value)
    return held


def filled_cells(function: types.FunctionType) -> list[types.CellType]:
    """Cells of the function's closure that are filled already."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:
            continue
        cells.append(cell)
    return cells
