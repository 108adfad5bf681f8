"""A parallel module is not to be wrapped: what shards or replicates a model a second time refuses it by name.

    DistributedDataParallel(parallel)    would average gradients that are sums already
    fully_shard(parallel)                would shard what lies in shards

The check stands in the wrappers themselves, from the first parallel module on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autopar.errors import InputError
from autopar.trace.call.user_source import calling_line

_SHARDING = "torch.distributed.fsdp._fully_shard._fully_shard"  # where torch's fully_shard checks its module
_REMEDY = (
    "use the parallel module as it is, in your own loop or in the frameworks' classes of "
    "autopar.integrations (transformers, accelerate, lightning)"
)


def refuse_wrappers(is_parallel: Callable[[nn.Module], bool]) -> None:
    """Make wrapping a module raise InputError with a remedy from now on, if the module or a part
    `is_parallel`."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for kind in (DistributedDataParallel, DataParallel, FullyShardedDataParallel):
        _guard(kind, "__init__", place=1, name=kind.__name__, is_parallel=is_parallel)
    _guard(import_module(_SHARDING), "_validate_module", place=0, name="fully_shard", is_parallel=is_parallel)


def _guard(
    owner: Any, attribute: str, *, place: int, name: str, is_parallel: Callable[[nn.Module], bool]
) -> None:
    """Check the module, which is the argument at `place`, before `owner`'s function."""
    function = getattr(owner, attribute, None)
    if function is None or hasattr(function, "_guarded"):
        return

    @functools.wraps(function)
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

    guarded._guarded = True  # type: ignore[attr-defined]
    setattr(owner, attribute, guarded)
