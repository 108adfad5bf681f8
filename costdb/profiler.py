"""The profiler: times an operator call forward and backward at its local shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.core.graph import Call
from costdb import operands
from costdb.footprint import observe, saved_bytes
from costdb.measurement import Measurement
from costdb.timing import BUDGET_SECONDS, Mark, repeat

SEED = 0  # of the operands' values: a measurement can be repeated


def measure(call: Call, device: torch.device | str = "cpu", *, budget: float = BUDGET_SECONDS) -> Measurement:
    """Run `call` on random operands for about `budget` seconds and report medians.

    Backward is the gradient of all differentiable results with respect to all operands that
    require one. Raises CostMissingError if the operator refuses to run, also for lack of memory.
    """
    device = torch.device(device)
    with torch.random.fork_rng(), operands.refused(call), torch.enable_grad():
        torch.manual_seed(SEED)
        subject = _Subject(call, device)
        found = observe(subject.forward, subject.inputs)
        times = repeat(subject.run, device, budget)
        scratch = subject.scratch_bytes()
    forward, backward = times.parts
    return Measurement(
        key=call.key(),
        forward_seconds=forward,
        backward_seconds=backward if subject.trains else 0.0,
        saved=found.saved,
        saved_bytes=saved_bytes(call, found),
        scratch_bytes=scratch,
        runs=times.runs,
        spread=times.spread,
    )


class _Subject:
    """A call on real tensors, ready to run forward and backward again and again."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self.target, self.device = call.target, device
        make = operands.random(call, device)
        self.args, self.kwargs, self.inputs = operands.fill(call, device, make)
        self.wanted = tuple(tensor for tensor in self.inputs if tensor.requires_grad)
        self.seeds = tuple(torch.ones_like(result) for result in _differentiable(self.forward()))
        self.trains = bool(self.wanted and self.seeds)

    def forward(self) -> Any:
        return self.target(*self.args, **self.kwargs)

    def backward(self, results: tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor | None]:
        if not self.trains:
            return ()
        return torch.autograd.grad(results, self.wanted, self.seeds, allow_unused=True)

    def run(self, mark: Callable[[], Mark]) -> tuple[Mark, Mark, Mark]:
        """One forward and one backward; nothing is freed between the marks."""
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
