"""A parallel module is not to be wrapped: what shards or replicates a model a second time refuses it by name.

    DistributedDataParallel(parallel)    would average gradients that are sums already
    fully_shard(parallel)                would shard what lies in shards

The check stands in the wrappers themselves, from the first parallel module on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from autopar.errors import InputError
from autopar.torch_seams.replaced import Wrap
from autopar.trace.call.user_source import calling_line

_REMEDY = (
    "use the parallel module as it is, in your own loop or in the frameworks' classes of "
    "autopar.integrations (transformers, accelerate, lightning)"
)


def refuse_wrappers(is_parallel: Callable[[nn.Module], bool]) -> None:
    """Make wrapping a module raise InputError with a remedy from now on, if the module or a part
    `is_parallel`."""
    from autopar.torch_seams.wrappers import sharded_modules, wrapped_modules

    for made in wrapped_modules:
        made.wrap(_guarding(1, made.owner.__name__, is_parallel))
    sharded_modules.wrap(_guarding(0, "fully_shard", is_parallel))


def _guarding(place: int, name: str, is_parallel: Callable[[nn.Module], bool]) -> Wrap:
    """Check the module, which is the argument at `place`, before torch's function."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            given = args[place] if len(args) > place else kwargs.get("module")
            modules = given if isinstance(given, (list, tuple)) else [given]
            for module in modules:
                if isinstance(module, nn.Module) and any(map(is_parallel, module.modules())):
                    raise InputError(
                        where=f"{name}, {calling_line()}",
                        found="a parallel module, which is already parallel",
                        wanted="a serial model, or no wrapper",
                        remedy=_REMEDY,
                    )
            return function(*args, **kwargs)

        return guarded

    return wrap
