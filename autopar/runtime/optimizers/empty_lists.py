"""Optimizers of a filtered list of parameters, of which a pipeline rank may hold none.

    torch.optim.Muon([p for p in parallel.parameters() if p.ndim == 2])

    stage 0   linear.weight           stage 1   layer norms alone: torch refuses an empty list

There the optimizer gets a parameter that has no elements, and takes part in what all ranks do.
"""

from __future__ import annotations

import functools
import gc
import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.errors import InputError
from autopar.runtime.tree.user_tree import placed_trees

_MARK = "_autopar_empty_lists"


def take_empty_lists() -> None:
    """Make optimizers accept an empty list of parameters, as ranks of a staged model pass."""
    if hasattr(Optimizer, _MARK):
        return
    make = Optimizer.__init__

    @functools.wraps(make)
    def make_of(self: Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
        given = params if isinstance(params, list | Tensor) else list(params)
        make(self, [_stand_in(self)] if _is_empty(given) else given, *args, **kwargs)

    Optimizer.__init__ = make_of  # type: ignore[method-assign]
    setattr(Optimizer, _MARK, True)


def _is_empty(given: Any) -> bool:
    return isinstance(given, list) and not given and any(tree.nothing for tree in placed_trees())


def _stand_in(optimizer: Optimizer) -> nn.Parameter:
    """Find the parameter without elements of the one model in stages.

    It is told on stderr, where lines of all ranks show a list that is empty by mistake.
    """
    kind = type(optimizer).__name__
    if len(_stand_ins()) > 1:
        gc.collect()  # of models that nobody has any more
    if len(found := _stand_ins()) > 1:
        raise InputError(
            where=f"optimizer {kind}",
            found="an empty list of parameters on this pipeline rank, and several models in stages",
            wanted="a parameter, by which its model is known",
            remedy="give all parameters to one optimizer, in groups",
        )
    print(
        f"autopar: {kind} has no parameters on rank {dist.get_rank()}, where it stands by",
        file=sys.stderr,
        flush=True,
    )
    return found[0]


def _stand_ins() -> list[nn.Parameter]:
    return list({id(item): item for tree in placed_trees() for item in tree.nothing}.values())
