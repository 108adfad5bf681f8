"""The frameworks' own classes know a parallel module: what is given one becomes the class for it.

    transformers.Trainer(model=parallel, ...)           autopar.integrations.transformers.Trainer
    accelerate.Accelerator().prepare(parallel, ...)     autopar.integrations.accelerate.Accelerator

Each has entries that look for a parallel module, once there is one in the process; frameworks that are
imported later get theirs then.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

from autopar.runtime.module.parallel_module import ParallelModule

_MARK = "_autopar_looks"


def recognise() -> None:
    """Make the classes of frameworks recognise parallel modules from now on."""
    for name in ENTRIES:
        if name in sys.modules:
            _look_into(sys.modules[name])
    if _later not in sys.meta_path:
        sys.meta_path.insert(0, _later)


class _Later(MetaPathFinder):
    """Looks into modules of frameworks right after their import, which others do."""

    _asks = False

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's spec as other finders give it; once the module has run, its classes are registered."""
        if name not in ENTRIES or self._asks:
            return None
        self._asks = True
        try:
            spec = find_spec(name)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), _look_into(module))  # type: ignore
        return spec


def _look_into(module: ModuleType) -> None:
    """Let the entry of the module's class look for a parallel module."""
    kind, entries, change = ENTRIES[module.__name__]
    for entry in entries:
        _look_at(getattr(module, kind), entry, change)


def _look_at(owner: type, entry: str, change: Callable[[Any], None]) -> None:
    """Let one entry look, which goes on in the class that the object has become, if that has its own."""
    function = getattr(owner, entry)
    if hasattr(function, _MARK):
        return

    @functools.wraps(function)
    def looking(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = any(isinstance(item, ParallelModule) for item in (*args, *kwargs.values()))
        if given and not hasattr(self, "knows_parallel"):
            known = type(self).__mro__
            change(self)
            added = [kind for kind in type(self).__mro__ if kind not in known and entry in vars(kind)]
            return vars(added[0])[entry](self, *args, **kwargs) if added else function(self, *args, **kwargs)
        return function(self, *args, **kwargs)

    setattr(looking, _MARK, True)
    setattr(owner, entry, looking)


def _to_trainer(trainer: Any) -> None:
    from autopar.integrations.transformers import parallel_trainer

    trainer.__class__ = parallel_trainer(cast(type, type(trainer)))


def _to_accelerator(accelerator: Any) -> None:
    from autopar.integrations.accelerate import become_parallel

    become_parallel(accelerator)


# By the module: a class, what is given its model first, and what changes an object of it. In
# `accelerator.prepare(autopar.parallelize(...))` Python takes the method before there is a parallel module.
ENTRIES: dict[str, tuple[str, tuple[str, ...], Callable[[Any], None]]] = {
    "transformers.trainer": ("Trainer", ("__init__",), _to_trainer),
    "accelerate.accelerator": ("Accelerator", ("prepare", "prepare_model"), _to_accelerator),
}
_later = _Later()
