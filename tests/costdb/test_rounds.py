"""Calls are timed as a step meets them: all forward, then all backward, round after round.

What a pass gets from its neighbour is written just before it. The clock here moves by the work done alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from autopar.core.graph import Call, TensorSpec
from costdb import rounds, timing
from costdb.profiler import measure, measure_together
from costdb.rounds import LONG_ROUNDS, ROUNDS, SURELY, in_rounds
from costdb.timing import VISITS, WARM_UPS
from tests.costdb.test_timing import Clock

ATEN = torch.ops.aten
WARM, COLD = 0.001, 0.003


class Recorded:
    """A call that writes down what is done, and takes longer where its `memory` isn't what was used last."""

    def __init__(
        self, name: str, clock: Clock, done: list[str], seconds: float = 0.0, first: float = 0.0
    ) -> None:
        self.name, self.clock, self.done, self.seconds, self.first_seconds = name, clock, done, seconds, first

    def arrive(self) -> None:
        self.done.append(f"{self.name} arrives")

    def forward_pass(self) -> None:
        self.run(">")

    def arrive_back(self) -> None:
        self.done.append(f"{self.name} arrives back")

    def backward_pass(self) -> None:
        self.run("<")

    def let_go(self) -> None:
        self.done.append(f"{self.name} goes")

    def run(self, way: str) -> None:
        last = next((each[0] for each in reversed(self.done) if each[1] in "<>"), "")
        self.clock.work(self.seconds or (WARM if last == self.name else COLD))
        self.done.append(self.name + way)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def passes(done: list[str]) -> str:
    return "".join(each for each in done if each[1] in "<>")


def test_all_go_forward_and_then_all_back_in_every_round(clock: Clock) -> None:
    done: list[str] = []
    in_rounds([Recorded(name, clock, done) for name in "abc"], budget=1.0)
    warm = "a>a<b>b<c>c<" * WARM_UPS
    assert passes(done) == warm + "a>b>c>a<b<c<" * ROUNDS


def test_between_two_passes_of_a_call_come_those_of_others(clock: Clock) -> None:
    together = in_rounds([Recorded(name, clock, []) for name in "ab"], budget=1.0)
    done: list[str] = []
    cold = in_rounds([Recorded(name, clock, done) for name in "ab"], budget=1.0)
    alone = in_rounds([Recorded("a", clock, [])], budget=1.0)
    assert [each.parts for each in cold] == [pytest.approx((COLD, COLD))] * 2
    assert alone[0].parts == pytest.approx((WARM, WARM)) and together[0].runs == ROUNDS


def test_what_arrives_is_written_just_before_each_pass_and_is_not_timed(clock: Clock) -> None:
    done: list[str] = []
    in_rounds([Recorded(name, clock, done) for name in "ab"], budget=1.0)
    before = {after: first for first, after in pairwise(done[-12:]) if after[1] in "<>"}
    assert before["b>"] == "b arrives" and before["b<"] == "b arrives back"


def test_what_takes_long_takes_part_in_fewer_rounds_spread_over_all(clock: Clock) -> None:
    done: list[str] = []
    lengths = {"a": 0.001, "b": 0.01, "c": 1.0}  # seconds of a pass
    calls = [Recorded(name, clock, done, seconds) for name, seconds in lengths.items()]
    short, long, longer = in_rounds(calls, budget=0.06)
    assert (short.runs, long.runs, longer.runs) == (ROUNDS, VISITS, LONG_ROUNDS)
    assert longer.parts == pytest.approx((1.0, 1.0))
    between = passes(done).split("b>")[2 + WARM_UPS - 1 : -1]
    assert all(part.count("a>") == ROUNDS // VISITS for part in between)


def test_what_surely_takes_long_is_warm_and_what_was_slow_for_once_is_not_long(clock: Clock) -> None:
    done: list[str] = []
    budget = 0.06
    calls = [
        Recorded("a", clock, done, seconds=1.0, first=2.0),
        Recorded("b", clock, done, seconds=0.001, first=SURELY * budget),
    ]
    long, short = in_rounds(calls, budget)
    assert passes(done).startswith("b>b<" * WARM_UPS)
    assert (long.runs, short.runs) == (LONG_ROUNDS, ROUNDS)


def test_values_of_operands_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec((64,), torch.float32, requires_grad=True)
    call, seen = Call(ATEN.sin.default, (spec,), {}), list[torch.Tensor]()
    original = rounds.in_rounds

    def watched(calls, budget):  # type: ignore[no-untyped-def]
        before = calls[0].inputs[0].detach().clone()
        times = original(calls, budget)
        seen.extend((before, calls[0].inputs[0].detach()))
        return times

    monkeypatch.setattr("costdb.profiler.in_rounds", watched)
    measure(call, budget=0.01)
    assert torch.equal(*seen)


def test_what_starts_a_backward_pass_by_itself_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = []

    def timed(calls, budget):  # type: ignore[no-untyped-def]
        starting.append(calls[-1].call.target)
        return [timing.Times((1.0, seconds), 3, 0.0, 1.0) for seconds in (5.0, 1.5, 1.0)]

    monkeypatch.setattr("costdb.profiler.in_rounds", timed)
    spec = TensorSpec((8,), torch.float32, requires_grad=True)
    found = measure_together([Call(ATEN.sin.default, (spec,), {}), Call(ATEN.cos.default, (spec,), {})])
    assert [each.backward_seconds for each in found] == [4.0, 0.75]  # half of what was timed at least
    assert starting == [ATEN.alias.default]
