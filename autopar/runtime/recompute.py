"""A part of a program that is computed again in backward instead of being kept.

    forward     x -> [ conv  exchange  batch_norm  relu ] -> y       keeps x, y, and what ranks exchanged
    backward    x -> [ conv     kept   batch_norm  relu ]            then the gradients

Collectives and halos are kept, never repeated: their results are saved between forward and backward,
and random masks are drawn alike. Only weights that are to be gathered again in backward are so here.
Running statistics are written once: both times the part writes to copies of them, and only the first
one's are taken over.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from autopar.runtime.regather import is_again


class Recomputed(nn.Module):
    """Runs `body`, and again when backward needs what it made: `to_the_end`, or up to the last operator that
    keeps something. `mutated` are the places among its arguments of the buffers that it writes to."""

    def __init__(self, body: nn.Module, *, mutated: Sequence[int], to_the_end: bool = False) -> None:
        super().__init__()
        self.body = body
        self.mutated = tuple(mutated)
        self.to_the_end = to_the_end

    def forward(self, *tensors: Tensor) -> Any:
        """The tuple that `body` returns."""
        if not torch.is_grad_enabled():
            return self.body(*tensors)

        buffers = {place: tensors[place] for place in self.mutated}

        def run(*arguments: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            copies = {place: buffer.clone() for place, buffer in buffers.items()}
            rest = iter(arguments)
            values = [copies[place] if place in copies else next(rest) for place in range(len(tensors))]
            return list(self.body(*values)), list(copies.values())

        kept = [tensor for place, tensor in enumerate(tensors) if place not in buffers]
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        with set_checkpoint_early_stop(not self.to_the_end):
            results, written = checkpoint(run, *kept, use_reentrant=False, context_fn=contexts)
        with torch.no_grad():
            for buffer, value in zip(buffers.values(), written, strict=True):
                buffer.copy_(value)
        return tuple(results)


def stays(target: Any) -> bool:
    """Whether what `target` gives is kept when the part that calls it is computed again."""
    random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    ours = getattr(target, "namespace", "") == "autopar"
    return ours and not random and not is_again(target)


def _policy(_: Any, target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if stays(target) else CheckpointPolicy.PREFER_RECOMPUTE
