"""What of a model `torch.utils.checkpoint` recomputes: found while it is traced.

    checkpoint(block, x)  ->  block(x), its nodes marked with the number of the region

Run as it is, a checkpoint hides its region from a tracer: the reentrant kind computes it without
gradients, so that a traced model would never learn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta

_MARK = "autopar_checkpoint"


@contextmanager
def inlined() -> Iterator[None]:
    """Within, checkpointed regions run like any other code, and what is traced of them is marked.

    Gradients are those of the checkpoint: none where a reentrant one takes no tensor that has one.
    """
    numbers = itertools.count(1)

    class Reentrant:
        """In place of torch's autograd function."""

        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            requires_grad = any(isinstance(item, torch.Tensor) and item.requires_grad for item in args)
            with _region(next(numbers)), nullcontext() if requires_grad else torch.no_grad():
                return function(*args)

    def around(*_: Any, **__: Any) -> Iterator[None]:
        """In place of what the other kind does before and after the region."""
        with _region(next(numbers)):
            yield

    other_kind = "_checkpoint_without_reentrant_generator"
    if hasattr(torch.utils.checkpoint, other_kind + "_impl"):  # torch 2.14 and later
        other_kind += "_impl"
    where = "torch.utils.checkpoint."
    with (
        preserve_node_meta(),
        patch(where + "CheckpointFunction", Reentrant),
        patch(where + other_kind, around),
    ):
        yield


def region_of(node: fx.Node) -> int:
    """The number of the outermost region that the node was traced in; 0 if in none."""
    return int(node.meta.get("custom", {}).get(_MARK, 0))


@contextmanager
def _region(number: int) -> Iterator[None]:
    outer = fx.traceback.current_meta.get("custom", {}).get(_MARK, number)
    with annotate({_MARK: outer}):
        yield
