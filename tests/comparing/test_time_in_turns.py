"""Steps in turn: equal figures on all ranks, the slowest rank's time, and lone runners on rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from autopar.comparing.time_in_turns import TIMED_ROUNDS, WARM_UPS, StepRunner, time_in_turn
from tests.pool import Pool

PAUSE = 0.05


def raced() -> tuple[dict[str, float], dict[str, int]]:
    counts = {"uneven": 0, "alone": 0}

    def uneven() -> None:
        counts["uneven"] += 1
        time.sleep(PAUSE if dist.get_rank() == 1 else 0)

    def alone() -> None:
        counts["alone"] += 1

    runners = {"uneven": StepRunner(uneven), "alone": StepRunner(alone, alone=True)}
    return time_in_turn(runners, device=torch.device("cpu")), counts


def test_a_step_takes_as_long_as_its_slowest_rank_and_all_ranks_agree(pools: Callable[[int], Pool]) -> None:
    (first, of_first), (second, of_second) = pools(2).run(raced)
    assert first == second
    assert first["uneven"] >= PAUSE
    steps = WARM_UPS + TIMED_ROUNDS
    assert of_first == {"uneven": steps, "alone": steps}
    assert of_second == {"uneven": steps, "alone": 0}
