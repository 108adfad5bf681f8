"""The profiler: times operator calls forward and backward at their local shapes, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from autopar.core.graph import Call
from autopar.errors import CostMissingError
from autopar.runtime.compiled.fused_kernel import FUSED
from autopar.runtime.launch.glibc_heap import keep_freed_memory
from costdb import operands
from costdb.footprint import observe, saved_bytes
from costdb.measurement import Measurement
from costdb.timing import BUDGET_SECONDS, Mark, Times, take_turns

SEED = 0  # of the operands' values: a measurement can be repeated
TOGETHER_BYTES = 256 << 20  # of the operands of calls that take turns; results and gradients come on top


def measure(call: Call, device: torch.device | str = "cpu", *, budget: float = BUDGET_SECONDS) -> Measurement:
    """Run `call` on random operands for about `budget` seconds and report its times.

    Backward is the gradient of all differentiable results with respect to all operands that
    require one. Raises CostMissingError if the operator refuses to run, also for lack of memory.
    """
    with _measuring():
        return _measure([_Subject(call, torch.device(device))], budget)[0]


def measure_together(
    calls: Sequence[Call], device: torch.device | str = "cpu", *, budget: float = BUDGET_SECONDS
) -> list[Measurement]:
    """As `measure`, calls that take turns; without those that refuse to run."""
    device, subjects = torch.device(device), []
    with _measuring():
        for call in calls:
            with suppress(CostMissingError):
                subjects.append(_Subject(call, device))
        try:
            return _measure(subjects, budget)
        except CostMissingError:  # a backward refuses, or memory is too little for all of them
            subjects.clear()
    found = []
    for call in calls:
        with suppress(CostMissingError):
            found.append(measure(call, device, budget=budget))
    return found


def _measure(subjects: Sequence[_Subject], budget: float) -> list[Measurement]:
    if not subjects:
        return []
    times = take_turns([each.run for each in subjects], subjects[0].device, budget)
    return [each.measurement(found) for each, found in zip(subjects, times, strict=True)]


@contextmanager
def _measuring() -> Iterator[None]:
    keep_freed_memory()
    with torch.random.fork_rng(), torch.enable_grad():
        yield


class _Subject:
    """A call on real tensors whose forward has run, ready to run forward and backward again and again."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self.call, self.device = call, device
        torch.manual_seed(SEED)
        make = operands.random(call, device)
        with operands.refused(call):
            self.args, self.kwargs, self.inputs = operands.fill(call, device, make)
            self.found = observe(self.forward, self.inputs)
            self.wanted = tuple(tensor for tensor in self.inputs if tensor.requires_grad)
            self.seeds = tuple(torch.ones_like(result) for result in _differentiable(self.forward()))
            self.trains = bool(self.wanted and self.seeds)
            if call.target is FUSED:  # compiles before anything is timed
                self.backward(_differentiable(self.forward()))

    def measurement(self, times: Times) -> Measurement:
        forward, backward = times.parts
        with operands.refused(self.call):
            scratch = self.scratch_bytes()
        return Measurement(
            key=self.call.key(),
            forward_seconds=forward,
            backward_seconds=backward if self.trains else 0.0,
            saved=self.found.saved,
            saved_bytes=saved_bytes(self.call, self.found),
            scratch_bytes=scratch,
            runs=times.runs,
            spread=times.spread,
        )

    def forward(self) -> Any:
        return self.call.target(*self.args, **self.kwargs)

    def backward(self, results: tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor | None]:
        if not self.trains:
            return ()
        return torch.autograd.grad(results, self.wanted, self.seeds, allow_unused=True)

    def run(self, mark: Callable[[], Mark]) -> tuple[Mark, Mark, Mark]:
        """One forward and one backward; nothing is freed between the marks."""
        with operands.refused(self.call):
            start = mark()
            results = self.forward()
            middle = mark()
            gradients = self.backward(_differentiable(results))
            end = mark()
        del results, gradients
        return start, middle, end

    def scratch_bytes(self) -> int | None:
        """The largest memory in use at a time beyond what was there before and what stays after."""
        if self.device.type != "cuda":
            return None
        results, forward = _scratch(self.forward, self.device)
        gradients, backward = _scratch(lambda: self.backward(_differentiable(results)), self.device)
        return max(forward, backward)


def _scratch(run: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = run()
    kept = max(before, torch.cuda.memory_allocated(device))
    return results, torch.cuda.max_memory_allocated(device) - kept


def _differentiable(results: Any) -> tuple[torch.Tensor, ...]:
    found = operands.tensors(results)
    return tuple(tensor for tensor in found if tensor is not None and tensor.requires_grad)
