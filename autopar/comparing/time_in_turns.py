"""Times steps of several programs in turn, on all ranks in step.

    rank 0   | a ======   | b =====      | c ===   | a ======   | b ====
    rank 1   | a ======== | b =======    |         | a =======  | b =======
             barrier      barrier        barrier (c runs on one device: rank 0)

Each step starts at a barrier and takes as long as its slowest rank. In turn, so that what the machine
does elsewhere meets all of them alike.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

WARM_UPS = 2  # memory is mapped, gradients and the optimizer's state are made
TIMED_ROUNDS = 5  # of one step of each


@dataclass(frozen=True, slots=True)
class StepRunner:
    """`step` takes one training step; `alone` has it run on rank 0 only."""

    step: Callable[[], None]
    alone: bool = False

    @property
    def is_mine(self) -> bool:
        return not self.alone or dist.get_rank() == 0


def time_in_turn(
    runners: Mapping[str, StepRunner], *, device: torch.device, rounds: int = TIMED_ROUNDS
) -> dict[str, float]:
    """The median seconds of a warm step of each; equal on all ranks. Collective."""
    for runner in runners.values():
        for _ in range(WARM_UPS):
            _lap(runner, device)
    laps: dict[str, list[float]] = {name: [] for name in runners}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, runner in runners.items():
                laps[name].append(_lap(runner, device))
    finally:
        gc.enable()
    return {name: median(seconds) for name, seconds in laps.items()}


def largest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values; collective."""
    box = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def _lap(runner: StepRunner, device: torch.device) -> float:
    dist.barrier()
    start = time.perf_counter()
    if runner.is_mine:
        runner.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return largest(time.perf_counter() - start, device)
