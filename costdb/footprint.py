"""What a call gives and saves for backward, exactly, without running it.

The call runs on tensors without data: real operators, real autograd formulas, shapes and storages.
Hooks on saved tensors see every tensor that backward will want; a storage that is an operand's or
a result's is named as such, any other is the call's own.

    y, mask = dropout(x)        saved: mask                 -> extra_bytes
    y = relu(x)                 saved: y                    -> results (0,)
    y = linear(x, w, b)         saved: x, w                 -> operands (0, 1)

The meta device does for most operators; for the few that choose their kernel by device, fake CPU
tensors do, about ten times slower. Of an LSTM on a CPU a few steps are run (recurrence.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from autopar.core.costs import Footprint, SavedByCall
from autopar.core.graph import Call, TensorSpec
from autopar.core.operator_facts import facts_of
from autopar.core.size_patterns import ResultShapes, SizePattern, pattern_of, result_shapes
from autopar.errors import CostMissingError
from autopar.ops.recurrent import has_workspace, steps_of
from autopar.torch_seams.fakes import FakeTensorMode
from autopar.torch_seams.tensors import storage_key
from costdb import operands
from costdb.recurrence import footprint_of_steps, saved_in_runs

CPU, META = torch.device("cpu"), torch.device("meta")

_KNOWN: dict[tuple[str, str], Footprint] = {}
_RUN: dict[str, SavedByCall] = {}
_PATTERNS: dict[tuple[str, str], tuple[Footprint, ResultShapes] | None] = {}  # None: sizes matter


@cache
def _fake() -> FakeTensorMode:
    """One for all calls: it remembers what it has seen, and takes a second to make."""
    return FakeTensorMode()


def footprint(call: Call, kind: str = "cpu") -> Footprint:
    """The footprint of `call` on a device of `kind` ("cpu" or "cuda"); remembered by key.

    Raises CostMissingError if the operator refuses the operands.
    """
    known = kind, call.key()
    if known not in _KNOWN:
        found = _found(call, kind)
        runs = kind == "cpu" and has_workspace(call)
        _KNOWN[known] = replace(found, saved=saved_in_runs(call, _run)) if runs else found
    return _KNOWN[known]


def _found(call: Call, kind: str) -> Footprint:
    if steps := steps_of(call):
        return footprint_of_steps(call, steps, partial(_found, kind=kind))
    return _by_pattern(call, kind) or _observe_without_data(call, kind)


def saved(call: Call, kind: str = "cpu") -> SavedByCall:
    """What `call` keeps for its backward on a device of `kind`."""
    return footprint(call, kind).saved


def saved_bytes(call: Call, found: Footprint) -> int:
    """Bytes of every storage saved for backward, operands and results included, each once."""
    given = operands.specs(call)
    own = [result.nbytes for i in found.saved.results if (result := found.results[i]) is not None]
    return sum(given[i].nbytes for i in found.saved.operands) + sum(own) + found.saved.extra_bytes


def observe(run: Callable[[], Any], inputs: tuple[torch.Tensor, ...]) -> Footprint:
    """Run once and see what the results are and which storages autograd keeps."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = tuple(operands.tensors(run()))
    by_storage = _positions(inputs)
    aliases = tuple(None if result is None else by_storage.get(storage_of(result)) for result in results)
    return Footprint(tuple(map(_spec, results)), aliases, _saved(kept, by_storage, _positions(results)))


def _saved(kept: list[torch.Tensor], operand: dict[int, int], result: dict[int, int]) -> SavedByCall:
    storages = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in kept}
    return SavedByCall(
        operands=tuple(sorted(operand[storage] for storage in storages if storage in operand)),
        results=tuple(sorted(result[s] for s in storages if s in result and s not in operand)),
        extra_bytes=sum(
            nbytes for storage, nbytes in storages.items() if storage not in operand and storage not in result
        ),
    )


def _observe_without_data(call: Call, kind: str) -> Footprint:
    with without_data(call, kind) as (run, inputs):
        return observe(run, inputs)


def _by_pattern(call: Call, kind: str) -> Footprint | None:
    """The footprint that follows from calls of other sizes; None if it must be observed."""
    pattern = None if facts_of(call.target).chooses_by_device else pattern_of(call)
    if pattern is None:
        return None
    known = kind, pattern.key
    if known not in _PATTERNS:
        _PATTERNS[known] = _learned(pattern, kind)
    learned = _PATTERNS[known]
    if learned is None:
        return None
    found, shapes = learned
    given = iter(shapes.at(pattern.sizes))
    results = tuple(spec and replace(spec, shape=next(given)) for spec in found.results)
    return replace(found, results=results)


def _learned(pattern: SizePattern, kind: str) -> tuple[Footprint, ResultShapes] | None:
    """What calls of a pattern give and save, if it is alike at small and large sizes but for shapes."""
    try:
        small, large = (_observe_without_data(call, kind) for call in pattern.probes())
    except CostMissingError:  # sizes depend on each other
        return None
    shapes = result_shapes(*([spec.shape for spec in each.results if spec] for each in (small, large)))
    return (small, shapes) if shapes and _without_shapes(small) == _without_shapes(large) else None


def _without_shapes(found: Footprint) -> Footprint:
    return replace(found, results=tuple(spec and replace(spec, shape=()) for spec in found.results))


def _run(call: Call) -> SavedByCall:
    if call.key() not in _RUN:
        with on_zeros(call) as (run, inputs):
            _RUN[call.key()] = observe(run, inputs).saved
    return _RUN[call.key()]


@contextmanager
def on_zeros(call: Call) -> Iterator[tuple[Callable[[], Any], tuple[torch.Tensor, ...]]]:
    """Within, the call as a function that really runs on this CPU, with its operands.

    Raises CostMissingError if the operator refuses the operands.
    """

    def zeros(spec: TensorSpec) -> torch.Tensor:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=CPU, requires_grad=spec.requires_grad)

    with torch.random.fork_rng(devices=()), operands.refused(call):  # dropout between layers draws
        args, kwargs, inputs = operands.fill(call, CPU, zeros)
        yield lambda: call.target(*args, **kwargs), inputs


@contextmanager
def without_data(call: Call, kind: str) -> Iterator[tuple[Callable[[], Any], tuple[torch.Tensor, ...]]]:
    """Within, the call as a function, with its operands, on tensors that have no memory.

    Raises CostMissingError if the operator refuses the operands.
    """
    facts = facts_of(call.target)
    run = facts.on_gpu if facts.on_gpu and kind != "cpu" else call.target
    fake = facts.chooses_by_device
    device = CPU if fake else META
    with _fake() if fake else nullcontext(), operands.refused(call):
        args, kwargs, inputs = operands.fill(call, device, operands.empty(device))
        yield lambda: run(*args, **kwargs), inputs


def _positions(tensors: tuple[torch.Tensor | None, ...]) -> dict[int, int]:
    """The first position that holds each storage."""
    found: dict[int, int] = {}
    for position, tensor in enumerate(tensors):
        if tensor is not None:
            found.setdefault(storage_of(tensor), position)
    return found


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, also where it has no address (fake tensors)."""
    return int(storage_key(tensor.untyped_storage()))


def _spec(tensor: torch.Tensor | None) -> TensorSpec | None:
    return None if tensor is None else TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
