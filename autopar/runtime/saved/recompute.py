"""A part of a program that is recomputed in backward instead of being saved.

    forward     x -> [ conv  exchange  batch_norm  relu ] -> y       keeps x, y, and what ranks exchanged
    backward    x -> [ conv    saved   batch_norm  relu ]            then the gradients

Collectives and halos are never repeated: their results are saved between forward and backward,
and random masks are drawn alike. Only weights that are to be regathered in backward are so here.
Running statistics are written once: both times the part writes to copies of them, and only the first
one's are taken over.

Where backward is split in two (between.py), both halves need what a part makes again, and torch's checkpoint
would run it anew for each pass over autograd's graph. There the first tensor that is wanted fills the boxes
of all, and each lasts as long as others of the stage do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_checkpoint_early_stop,
    set_device_states,
)

from autopar.core.operator_facts import is_random
from autopar.runtime.saved.regather import Anew, anew, is_regather, noting
from autopar.runtime.saved.split_backward import Between, Box, halved

Body: TypeAlias = Callable[..., tuple[list[Tensor], list[Tensor]]]


class Recomputed(nn.Module):
    """Runs `body`, and again when backward needs what it made: `to_the_end`, or up to the last operator that
    keeps something. `mutated` are the places among its arguments of the buffers that it writes to."""

    def __init__(self, body: nn.Module, *, mutated: Sequence[int], to_the_end: bool = False) -> None:
        super().__init__()
        self.body = body
        self.mutated = tuple(mutated)
        self.to_the_end = to_the_end
        self.numbers: tuple[str, ...] = ()  # attributes of `body` that are others at each call

    def forward(self, *tensors: Tensor) -> Any:
        """The tuple that `body` returns."""
        if not torch.is_grad_enabled():
            return self.body.forward(*tensors)

        buffers, count = {place: tensors[place] for place in self.mutated}, len(tensors)
        state = self.body.__dict__
        numbers = {name: state[name] for name in self.numbers}
        begun: list[list[Tensor]] = []  # copies of the buffers, of the run in forward also where it raises

        def run(*arguments: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            state.update(numbers)  # those of this call, also in backward
            copies = {place: buffer.clone() for place, buffer in buffers.items()}
            begun.append(list(copies.values()))
            rest = iter(arguments)
            values = [copies[place] if place in copies else next(rest) for place in range(count)]
            return list(self.body.forward(*values)), list(copies.values())

        arguments = [tensor for place, tensor in enumerate(tensors) if place not in buffers]
        try:
            if between := halved.get():
                once = _Once(run, arguments, between, to_the_end=self.to_the_end)
                results, _ = once.forward(*arguments)
            else:
                contexts = partial(create_selective_checkpoint_contexts, _policy)
                with set_checkpoint_early_stop(not self.to_the_end):
                    results, _ = checkpoint(run, *arguments, use_reentrant=False, context_fn=contexts)
        finally:
            with torch.no_grad():
                for copies in begun:
                    for buffer, value in zip(buffers.values(), copies, strict=True):
                        buffer.copy_(value)
            begun.clear()
        return tuple(results)


class _RemadeValues(Exception):
    """Ends a recomputation early: every saved tensor has been made again."""


class _Once:
    """A call of `body` that is recomputed once, by the first that wants what it saved."""

    def __init__(
        self, body: Body, arguments: Sequence[Tensor], between: Between, *, to_the_end: bool
    ) -> None:
        self._body, self._between, self._to_the_end = body, between, to_the_end
        self._arguments: Sequence[Tensor | Anew] | None = [anew(each) or each.detach() for each in arguments]
        self._requires_grad = [each.requires_grad for each in arguments]
        self._boxes: list[weakref.ref[_WeakBox]] = []
        self._first, self._second = create_selective_checkpoint_contexts(_policy)
        self._random = torch.get_rng_state(), *get_device_states(*arguments)

    def forward(self, *arguments: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Results of `body`, with hooks on the tensors that it saves."""
        with saved_tensors_hooks(self._pack, self._unpack), self._first:
            return self._body(*arguments)

    def _pack(self, tensor: Tensor) -> _WeakBox:
        box = _WeakBox()
        self._boxes.append(weakref.ref(box))
        return box

    def _unpack(self, box: _WeakBox) -> Tensor:
        if self._arguments is not None:
            arguments = [each.restore() if isinstance(each, Anew) else each for each in self._arguments]
            self._arguments = None
            self._fill(arguments)
        saved = self._between.open(box)
        return saved.restore() if isinstance(saved, Anew) else saved

    def _fill(self, arguments: Sequence[Tensor]) -> None:
        """Recompute the saved tensors of the boxes that autograd still holds."""
        waiting = list(reversed(self._boxes))

        def fill(tensor: Tensor) -> Tensor:
            box, tensor = (
                waiting.pop()(),
                tensor.detach(),
            )  # else a result would keep what made it, and that it
            if box is not None:
                box.saved, box.then = tensor, anew(tensor)
            if not waiting and not self._to_the_end:
                raise _RemadeValues
            return tensor

        cpu, devices, states = self._random
        learning = [
            each.detach().requires_grad_(requires_grad)
            for each, requires_grad in zip(arguments, self._requires_grad, strict=True)
        ]
        with torch.random.fork_rng(devices), noting(), torch.enable_grad(), suppress(_RemadeValues):
            torch.set_rng_state(cpu)
            set_device_states(devices, states)
            with saved_tensors_hooks(fill, _itself), self._second:
                self._body(*learning)


class _WeakBox(Box[Tensor | Anew]):
    """A box that can be referred to weakly; empty until its part is recomputed."""

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        super().__init__(None)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def stays(target: Any) -> bool:
    """Whether a result of `target` stays saved when the part that calls it is recomputed."""
    ours = getattr(target, "namespace", "") == "autopar"
    return ours and not is_random(target) and not is_regather(target)


def _policy(_: Any, target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if stays(target) else CheckpointPolicy.PREFER_RECOMPUTE
