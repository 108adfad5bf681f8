"""The profiler: times operator calls forward and backward at their local shapes, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from autopar.core.graph import Call, TensorSpec
from autopar.core.operator_facts import facts_of
from autopar.errors import CostMissingError
from autopar.runtime.compiled.fused_kernel import FUSED
from autopar.runtime.launch.glibc_heap import keep_freed_memory
from costdb import operands
from costdb.footprint import observe, saved_bytes
from costdb.measurement import Measurement
from costdb.rounds import in_rounds
from costdb.timing import BUDGET_SECONDS, Mark, Times, between, moment, take_turns

SEED = 0  # of the operands' values: a measurement can be repeated
NOTHING = Call(torch.ops.aten.alias.default, (TensorSpec((1,), torch.float32, requires_grad=True),), {})
TOGETHER_BYTES = 256 << 20  # of what is held of calls that are measured together


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
    """Measure calls that take turns; without those that refuse to run."""
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
    device = subjects[0].device
    if device.type == "cpu":
        with operands.refused(subjects[0].call):  # for lack of memory: what else refuses has done so
            *times, alone = in_rounds([*subjects, _Subject(NOTHING, device)], budget)
        own = [_without_start(each.call, found, alone) for each, found in zip(subjects, times, strict=True)]
        return [each.measurement(found) for each, found in zip(subjects, own, strict=True)]
    times = take_turns([each.run for each in subjects], device, budget)
    return [each.measurement(found) for each, found in zip(subjects, times, strict=True)]


def _without_start(call: Call, found: Times, nothing: Times) -> Times:
    """Times without what each backward pass by itself takes to start, which a step's takes once. Of compiled
    functions more is taken off, when they are priced."""
    if call.target is FUSED:
        return found
    forward, backward = found.parts
    return replace(found, parts=(forward, max(backward / 2, backward - nothing.parts[1])))


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
            self.seeds = tuple(torch.ones_like(result) for result in operands.differentiable(self.forward()))
            self.trains = bool(self.wanted and self.seeds)
            start = moment(device)
            if call.target is FUSED or device.type == "cpu":  # compiles, or refuses, before anything is timed
                self.backward(operands.differentiable(self.forward()))
            self.first_seconds = between(start, moment(device)) if device.type == "cpu" else 0.0
        self.arriving = _arriving(call, self.inputs)
        self.results: Any = None
        self.roots: tuple[torch.Tensor, ...] = ()
        self.gradients: Sequence[torch.Tensor | None] = ()

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
            gradients = self.backward(operands.differentiable(results))
            end = mark()
        del results, gradients
        return start, middle, end

    # -- as in a step (costdb.rounds); what can be done before is not timed ----------------------------

    def arrive(self) -> None:
        """Write what the operator before gives: the first operand, if it isn't a table to look up in."""
        _write(self.arriving)

    def forward_pass(self) -> None:
        """Run forward; results stay until `let_go`."""
        self.results = self.call.target(*self.args, **self.kwargs)

    def arrive_back(self) -> None:
        """Write the results' gradients."""
        self.roots = operands.differentiable(self.results)
        _write(self.seeds if self.trains else ())

    def backward_pass(self) -> None:
        """Run backward, if it has one."""
        if self.trains:
            self.gradients = torch.autograd.grad(self.roots, self.wanted, self.seeds, allow_unused=True)

    def let_go(self) -> None:
        """Free results and gradients."""
        self.results, self.roots, self.gradients = None, (), ()

    # -- memory ------------------------------------------------------------------------------------------

    def scratch_bytes(self) -> int | None:
        """The largest memory in use at a time beyond what was there before and what stays after."""
        if self.device.type != "cuda":
            return None
        results, forward = _scratch(self.forward, self.device)
        gradients, backward = _scratch(lambda: self.backward(operands.differentiable(results)), self.device)
        return max(forward, backward)


def _arriving(call: Call, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return () if facts_of(call.target).gathers else inputs[:1]


def _write(tensors: Sequence[torch.Tensor]) -> None:
    """Lay tensors of numbers into the caches as who writes them does; their values stay."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.mul_(1)


def _scratch(run: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = run()
    kept = max(before, torch.cuda.memory_allocated(device))
    return results, torch.cuda.max_memory_allocated(device) - kept
