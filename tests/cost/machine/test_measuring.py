"""A budget of seconds, on a clock that moves by what is measured alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from autopar.core.costs import SavedByCall
from autopar.core.graph import Call, TensorSpec
from autopar.cost.machine import measuring
from autopar.cost.machine.measuring import PART, YARDSTICKS, Budget, Measuring
from costdb.measurement import Measurement

SECONDS = 1.0  # that timing a call takes here


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def portions(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is timed together, by key; calls of 13 elements refuse to run."""
    clock, found = Clock(), list[list[str]]()

    def timed(calls: Sequence[Call], device: str, *, budget: float) -> list[Measurement]:
        own = [call for call in calls if call not in YARDSTICKS]
        found.append([call.key() for call in own])
        clock.now += SECONDS * len(own)
        runs = [call for call in calls if "[13]" not in call.key()]
        return [Measurement(call.key(), 2.0, 3.0, SavedByCall(), 0, None, 5, 0.0) for call in runs]

    monkeypatch.setattr(measuring, "measure_together", timed)
    monkeypatch.setattr(measuring, "time", clock)
    return found


def relu(length: int) -> Call:
    return Call(torch.ops.aten.relu.default, (TensorSpec((length,), torch.float32),), {})


def run(
    calls: Sequence[tuple[Call, float]],
    budget: Budget,
    keep: Callable[[object], None] = lambda _: None,
    told: list[list[str]] | None = None,
) -> tuple[set[str], set[str]]:
    co_runners = None if told is None else (lambda calls: told.append([call.key() for call in calls]))
    found, refused = Measuring(calls, "cpu", 1, {}, budget, keep, co_runners=co_runners).run()
    return found.keys() - {each.key() for each in YARDSTICKS}, refused


def test_the_first_are_measured_for_as_long_as_the_budget_lasts(portions: list[list[str]]) -> None:
    calls = [relu(length) for length in range(100, 180)]
    budget = Budget(left=60.0)
    found, refused = run([(call, SECONDS / measuring.LONG_RUNS) for call in calls], budget)
    assert found == {call.key() for call in calls[: len(found)]}  # no later one before an earlier one
    assert 20 <= len(found) <= PART * 60 and not refused
    assert budget.left == 60 - SECONDS * len(found)


def test_what_is_left_goes_to_the_next_round(portions: list[list[str]]) -> None:
    budget, calls = Budget(left=60.0), [(relu(length), 0.3) for length in range(100, 180)]
    first, _ = run(calls, budget)
    second, _ = run([each for each in calls if each[0].key() not in first], budget)
    assert second and budget.left > 0


def test_a_call_that_is_too_long_is_left_out_and_shorter_ones_are_not(portions: list[list[str]]) -> None:
    found, refused = run([(relu(1), 100.0), (relu(2), 0.1)], Budget(left=20.0))
    assert (found, refused) == ({relu(2).key()}, set())


def test_without_a_limit_all_is_measured_and_what_can_not_run_is_named(portions: list[list[str]]) -> None:
    found, refused = run([(relu(13), 0.1), (relu(2), 1e6)], Budget())
    assert (found, refused) == ({relu(2).key()}, {relu(13).key()})


def test_without_seconds_nothing_is_measured(portions: list[list[str]]) -> None:
    assert run([(relu(2), 0.1)], Budget(left=0.0)) == (set(), set())
    assert not portions


def test_co_runners_get_what_is_timed_and_each_portion_is_kept_at_once(portions: list[list[str]]) -> None:
    told, kept = list[list[str]](), list[int]()
    run([(relu(length), 1.0) for length in range(1, 6)], Budget(), lambda _: kept.append(len(portions)), told)
    assert told == portions and len(portions) > 1
    assert kept == [*range(1, len(portions) + 1)]


def test_a_machine_that_takes_longer_than_thought_gets_fewer_calls(portions: list[list[str]]) -> None:
    """Each is thought to take 0.15 s with its warm-up, and takes 1 s."""
    budget = Budget(left=200.0)
    run([(relu(length), 1e-6) for length in range(1, 300)], budget)
    assert budget.left > 0 and len(portions[0]) > len(portions[-1])


def test_slow_memory_takes_nothing_off_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a second portion, in which memory takes three times as long."""
    slow = 1.0

    def timed(calls: Sequence[Call], device: str, *, budget: float) -> list[Measurement]:
        paces = [1.0 if call.target is torch.ops.aten.mm.default else slow for call in calls]
        pairs = zip(calls, paces, strict=True)
        return [
            Measurement(call.key(), 2 * pace, pace, SavedByCall(), 0, None, 5, 0.0) for call, pace in pairs
        ]

    monkeypatch.setattr(measuring, "measure_together", timed)
    first, _ = Measuring([(relu(1), 0.1)], "cpu", 1, {}, Budget(), lambda _: None).run()
    slow = 3.0
    product = Call(torch.ops.aten.mm.default, (TensorSpec((8, 8), torch.float32),) * 2, {})
    found, _ = Measuring([(relu(2), 0.1), (product, 0.1)], "cpu", 1, first, Budget(), lambda _: None).run()
    assert [found[call.key()].forward_seconds for call in (relu(2), product)] == [2.0, 2.0]
