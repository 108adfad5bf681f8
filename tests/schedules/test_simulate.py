"""Simulation: closed forms where there are any, a longest path where there are none, and laws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.core.schedule import Action, ActionKind, Overlap, Schedule, ScheduleKind
from autopar.core.timeline import Event, RankActivity, RankPeak, StageCost, Timeline
from autopar.errors import CheckError, InputError
from autopar.schedules.orders import build_schedule
from autopar.schedules.simulate import Receives, simulate
from tests.core.test_schedule import schedule as written
from tests.schedules.random_schedules import schedules
from tests.schedules.torch_schedules import multi_programs, rendezvous_seconds, single_programs

K = ScheduleKind
F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT  # noqa: E741
EQUAL = (1.0, 1.0, 1.0)  # seconds of F, I and W
Times = tuple[float, float, float]


def build(kind: ScheduleKind, p: int, v: int, m: int) -> Schedule:
    return build_schedule(kind, ranks=p, stages_per_rank=v, micro_batches=m)


def alike(schedule: Schedule, times: Times = EQUAL, send: float = 0.0, **more: int) -> list[StageCost]:
    """The same cost for all stages."""
    return [StageCost(*times, send_output=send, send_gradient=send, **more)] * schedule.stages


def bubble(kind: ScheduleKind, p: int, v: int, m: int, times: Times = EQUAL, send: float = 0.0) -> float:
    """Seconds beyond the work of one rank."""
    schedule = build(kind, p, v, m)
    return simulate(schedule, alike(schedule, times, send)).seconds - m * v * sum(times)


def in_flight(kind: ScheduleKind, p: int, v: int, m: int, *, pending: bool = False) -> list[int]:
    """The most (stage, micro-batch) pairs that each rank keeps at once, with those that wait for W or not."""
    schedule = build(kind, p, v, m)
    timeline = simulate(schedule, alike(schedule, kept=1, kept_for_weight=int(pending)))
    return [timeline.peak_of(rank).nbytes for rank in range(p)]


def events_of(timeline: Timeline, *kinds: object) -> list[Event]:
    return [event for event in timeline.events if event.kind in kinds]


# -- closed forms --------------------------------------------------------------------------------------------
# p ranks, v stages per rank, m micro-batches, times of one *stage*: a rank's tF is v of them.


@pytest.mark.parametrize("times", [EQUAL, (1, 1.5, 0.5), (3, 1, 2)])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 4), (4, 16), (5, 9)])
def test_gpipe_and_1f1b_wait_alike_and_keep_differently(p: int, m: int, times: Times) -> None:
    for kind in (K.GPIPE, K.ONE_F_ONE_B):
        assert bubble(kind, p, 1, m, times) == (p - 1) * sum(times)
    assert in_flight(K.GPIPE, p, 1, m) == [m] * p
    assert in_flight(K.ONE_F_ONE_B, p, 1, m) == [min(m, p - rank) for rank in range(p)]


@pytest.mark.parametrize("times", [EQUAL, (1, 1.5, 0.5)])
@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (3, 2, 6), (4, 3, 8), (4, 2, 4), (4, 1, 8), (4, 4, 16)])
def test_interleaved_divides_the_bubble_by_v(p: int, v: int, m: int, times: Times) -> None:
    assert bubble(K.INTERLEAVED, p, v, m, times) == (p - 1) * sum(times)
    expected = [min(m * v, (v - 1) * p + 2 * (p - 1 - rank) + 1) for rank in range(p)]
    assert in_flight(K.INTERLEAVED, p, v, m) == expected


def test_interleaved_with_longer_or_fewer_rounds_than_the_closed_form_knows() -> None:
    """Rounds of 5 for m = 10, p = 4: one more in flight. m = 3 < p: the last stage starves, 12 for 9."""
    assert bubble(K.INTERLEAVED, 4, 2, 10) == 9
    assert in_flight(K.INTERLEAVED, 4, 2, 10) == [12, 10, 8, 6]
    assert bubble(K.INTERLEAVED, 4, 2, 3) == 12
    assert in_flight(K.INTERLEAVED, 4, 2, 3) == [6, 6, 6, 4]


@pytest.mark.parametrize("times", [EQUAL, (1, 1, 0.5), (2, 3, 1)])
@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 4), (3, 1, 6), (4, 1, 4), (4, 2, 8), (4, 3, 12)])
def test_zb1p_fills_the_bubble_with_w(p: int, v: int, m: int, times: Times) -> None:
    forward, inputs, weights = times
    assert bubble(K.ZB1P, p, v, m, times) == (p - 1) * (forward + inputs - weights)
    assert in_flight(K.ZB1P, p, v, m) == [v * p - rank for rank in range(p)]
    assert in_flight(K.ZB1P, p, v, m, pending=True) == [v * p] * p


def test_zb1p_gains_no_more_from_a_w_longer_than_f_and_i() -> None:
    """The closed form would give 0 at tF = tI = 1, tW = 2: torch's order stays at p - 1."""
    assert bubble(K.ZB1P, 4, 1, 8, (1, 1, 2)) == 3


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (3, 6), (4, 7), (4, 16)])
def test_zbv_waits_at_the_ends_only(p: int, m: int) -> None:
    """(p - 1) tF / 2 of a rank's tF, at equal times; as much kept as 1F1B's first rank."""
    assert bubble(K.ZBV, p, 2, m) == p - 1
    assert in_flight(K.ZBV, p, 2, m) == in_flight(K.ZBV, p, 2, m, pending=True) == [2 * p] * p


def test_zbv_at_other_times_and_with_few_micro_batches() -> None:
    """Where the closed form doesn't hold: tW longer (5 for 3), tI longer (12 for 6), m < 2p - 1 (8 for 3)."""
    assert bubble(K.ZBV, 4, 2, 16, (1, 1, 2)) == 5
    assert bubble(K.ZBV, 4, 2, 16, (2, 3, 1)) == 12
    assert bubble(K.ZBV, 4, 2, 3) == 8


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (3, 6), (4, 8), (4, 16), (6, 12)])
def test_dualpipev_waits_for_a_ranks_forwards(p: int, m: int) -> None:
    """(p - 1) tF of a rank's tF, at equal times and without overlap within a pair; (p + 1/2) A kept."""
    assert bubble(K.DUALPIPEV, p, 2, m) == (p - 1) * 2
    assert in_flight(K.DUALPIPEV, p, 2, m) == [2 * p + 1] * p


def test_dualpipev_at_other_times() -> None:
    """Where the closed form doesn't hold: tW shorter (7.5 for 6), tI longer (19 for 12)."""
    assert bubble(K.DUALPIPEV, 4, 2, 16, (1, 1, 0.5)) == 7.5
    assert bubble(K.DUALPIPEV, 4, 2, 16, (2, 3, 1)) == 19


def test_a_hop_costs_1f1b_more_than_gpipe() -> None:
    """p = 4, m = 16, tB = 2 tF, hop 0.2 tF: bubble / ideal rises from 0.188 to 0.304, GPipe's to 0.213.

    That is with receives posted early; as torch posts them for the two it is 0.333 and 0.338.
    """
    hops = {
        (K.ONE_F_ONE_B, Receives.EARLY): 28,
        (K.GPIPE, Receives.EARLY): 6,
        (K.ONE_F_ONE_B, Receives.LATE): 35,
        (K.GPIPE, Receives.LATE): 36,
    }
    for (kind, receives), number in hops.items():
        schedule = build(kind, 4, 1, 16)
        seconds = simulate(schedule, alike(schedule, send=0.2), receives=receives).seconds
        assert bubble(kind, 4, 1, 16) == 9
        assert seconds - 48 == pytest.approx(9 + number * 0.2)
        assert (simulate(schedule, alike(schedule, send=0.2)).seconds == seconds) == (
            receives is Receives.LATE
        )


# -- hops, the end of a step, memory -------------------------------------------------------------------------


def test_a_link_carries_one_hop_at_a_time() -> None:
    """F takes 1 s, its hop 3 s: rank 1 gets results at 4, 7 and 10 s, and gradients return likewise."""
    timeline = simulate(
        written("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2", micro_batches=3),
        [StageCost(1, 1, 0, send_output=3, send_gradient=5)] * 2,
        receives=Receives.EARLY,
    )
    forwards = [event.start for event in events_of(timeline, F) if event.rank == 1]
    assert forwards == [4, 7, 10]
    sends = [(event.rank, event.start, event.stop) for event in events_of(timeline, RankActivity.SEND)]
    assert sends == [(0, 1, 4), (0, 4, 7), (0, 7, 10), (1, 12, 17), (1, 17, 22), (1, 22, 27)]
    assert timeline.seconds == 28


def test_late_receives_pay_every_hop() -> None:
    """Rank 1 begins to receive when it has nothing else to do: the drawing in `autopar.simulate`."""
    schedule = build(K.GPIPE, 2, 1, 3)
    costs = alike(schedule, send=0.5)
    starts = {
        receives: [
            event.start
            for event in events_of(simulate(schedule, costs, receives=receives), F)
            if event.rank == 1
        ]
        for receives in Receives
    }
    assert starts == {Receives.EARLY: [1.5, 2.5, 3.5], Receives.LATE: [1.5, 3, 4.5]}


def test_stages_of_one_rank_need_no_hop() -> None:
    schedule = build(K.ZBV, 3, 2, 6)
    sends = events_of(simulate(schedule, alike(schedule, send=0.5)), RankActivity.SEND)
    assert {(event.stage, event.to_stage) for event in sends} == {
        (stage, stage + step) for stage in range(6) for step in (1, -1) if 0 <= stage + step < 6
    } - {(2, 3), (3, 2)}


def test_a_pair_sends_when_both_are_computed() -> None:
    schedule = build(K.DUALPIPEV, 2, 2, 4)
    timeline = simulate(schedule, alike(schedule, send=0.5))
    backward = next(event for event in timeline.events if str(event) == "3B1")
    assert next(event for event in timeline.events if str(event) == "0F3").stop == backward.start
    assert next(event for event in timeline.events if str(event) == "0SEND_F3").start == backward.stop


def test_gradients_are_summed_beside_what_is_left_and_updates_come_last() -> None:
    """p = 1, v = 2, m = 1: F F B B of 1, 1, 2, 2 s. Stage 1 sums from 4 s, stage 0 from 9 s for 5 s each."""
    schedule = build(K.INTERLEAVED, 1, 2, 1)
    timeline = simulate(schedule, [StageCost(1, 1, 1, sync=5, update=0.5)] * 2)
    found = [(str(event), event.start, event.stop) for event in timeline.events if event.micro_batch is None]
    assert found == [
        ("sync 1", 4, 9),
        ("sync 0", 9, 14),
        ("update 0", 14, 14.5),
        ("update 1", 14.5, 15),
    ]
    assert timeline.seconds == 15
    assert timeline.busy_seconds(0) == 7
    assert timeline.bubble(0) == pytest.approx(8 / 15)


def test_a_rank_updates_when_its_sends_are_through() -> None:
    timeline = simulate(
        written("0F0 0B0", "1F0 1B0"), [StageCost(1, 1, 0, send_output=1, send_gradient=3, update=1)] * 2
    )
    updates = [(event.rank, event.start) for event in events_of(timeline, RankActivity.UPDATE)]
    assert updates == [(1, 7), (0, 8)]


def test_memory_is_followed_moment_by_moment() -> None:
    """State 100, the batch 10; F keeps 8, of which 3 stay from I to W; 20 while anything runs, 24 for I; 5 at
    the end for the sums of gradients."""
    timeline = simulate(
        written("0F0 0F1 0I0 0W0 0B1", micro_batches=2),
        [
            StageCost(
                *(1, 1, 1),
                state=100,
                lasting=10,
                kept=8,
                kept_for_weight=3,
                working=20,
                early=20,
                halving_early=24,
                summing=5,
            )
        ],
    )
    assert [(held.seconds, held.nbytes) for held in timeline.held[0]] == [
        (0, 110),
        *((0, 138), (1, 118)),  # 0F0
        *((1, 146), (2, 126)),  # 0F1
        *((2, 150), (3, 121)),  # 0I0
        *((3, 141), (4, 118)),  # 0W0
        *((4, 138), (6, 115), (6, 110)),  # 0B1
    ]
    assert timeline.peak == timeline.peak_of(0) == RankPeak(rank=0, seconds=2, nbytes=150)


def test_the_peak_names_its_rank() -> None:
    schedule = build(K.ONE_F_ONE_B, 3, 1, 6)
    costs = [StageCost(*EQUAL, state=state, kept=10) for state in (0, 15, 0)]
    assert simulate(schedule, costs).peak == RankPeak(rank=1, seconds=2, nbytes=35)


# -- what torch posts and waits for --------------------------------------------------------------------------
# On links where a transfer begins when both sides have posted it, and lasts `hop` seconds.


@settings(max_examples=100)
@given(
    st.sampled_from([K.GPIPE, K.ONE_F_ONE_B]),
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(0, 5),
    st.lists(st.builds(StageCost, *[st.integers(0, 4)] * 3), min_size=5, max_size=5),
)
def test_gpipe_and_1f1b_take_as_long_as_torchs_loops(
    kind: ScheduleKind, p: int, more: int, hop: int, costs: list[StageCost]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        programs = single_programs((kind, p, 1, p + more), patch)
    sending = [replace(cost, send_output=hop, send_gradient=hop) for cost in costs[:p]]
    timeline = simulate(build(kind, p, 1, p + more), sending)
    assert timeline.seconds == rendezvous_seconds(programs, sending, hop)


@pytest.mark.parametrize("hop", [0, 0.25, 1])
@pytest.mark.parametrize(
    ("shape", "later"),
    [
        ((K.INTERLEAVED, 4, 2, 8), 0.0),
        ((K.INTERLEAVED, 4, 1, 8), 0.0),
        ((K.ZB1P, 4, 1, 8), 0.0),
        ((K.ZBV, 4, 2, 12), 0.0),
        ((K.ZB1P, 4, 2, 8), 4.0),  # seconds at hop = tF, by receives that torch posts late
        ((K.DUALPIPEV, 4, 2, 12), 1.0),
    ],
)
def test_other_schedules_take_as_long_as_torchs_runtime(
    shape: tuple[ScheduleKind, int, int, int], later: float, hop: float
) -> None:
    schedule = build(*shape)
    costs = alike(schedule, send=hop)
    excess = rendezvous_seconds(multi_programs(shape), costs, hop) - simulate(schedule, costs).seconds
    assert excess == later * hop


# -- what is refused -----------------------------------------------------------------------------------------


def test_ranks_that_wait_for_each_other_are_named() -> None:
    stuck = written("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", micro_batches=2)
    with pytest.raises(CheckError, match="found ranks that wait for each other: 0B0 for 1I0; 1F1 for 0F1,"):
        simulate(stuck, alike(stuck))


def test_a_backward_before_its_forward_is_refused() -> None:
    with pytest.raises(CheckError, match="0B0 for 0F0"):
        simulate(written("0B0 0F0"), [StageCost(1, 1, 1)])


def test_a_weight_gradient_before_its_input_gradient_is_refused() -> None:
    with pytest.raises(CheckError, match="0W0 for 0I0"):
        simulate(written("0F0 0W0 0I0"), [StageCost(1, 1, 1)])


def test_every_stage_has_one_cost() -> None:
    schedule = build(K.GPIPE, 2, 1, 2)
    with pytest.raises(InputError, match="found costs of 1 stages, wanted costs of 2 stages"):
        simulate(schedule, alike(schedule)[:1])


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_bad_costs_are_refused(bad: float) -> None:
    with pytest.raises(InputError, match="stage cost: found forward = "):
        StageCost(bad, 1, 1)


# -- laws, for any schedule and any costs --------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, list[StageCost], Receives]:
    """Whole seconds, so that sums are exact."""
    schedule = draw(schedules())
    names = ("forward", "input_gradient", "weight_gradient", "send_output", "send_gradient", "sync", "update")
    cost = st.builds(StageCost, **{name: st.integers(0, 4) for name in names})
    costs = draw(st.lists(cost, min_size=schedule.stages, max_size=schedule.stages))
    return schedule, costs, draw(st.sampled_from(Receives))


def longest_path(schedule: Schedule, costs: Sequence[StageCost]) -> float:
    """The critical path over all actions, hops included as if no two met on a link."""
    graph = nx.DiGraph()
    last = schedule.stages - 1

    def edge(before: str, after: Action, hop: float = 0) -> None:
        graph.add_edge(before, str(after), weight=hop + costs[after.stage].seconds(after.kind))

    for rank in range(schedule.ranks):
        actions = list(schedule.actions(rank))
        edge("start", actions[0])
        for before, after in pairwise(actions):
            edge(str(before), after)
    whole = {str(action) for rank in range(schedule.ranks) for action in schedule.actions(rank)}
    slots = [slot for order in schedule.orders for slot in order]
    sent_by = {str(slot.forward): str(slot.backward) for slot in slots if isinstance(slot, Overlap)}
    for rank in range(schedule.ranks):
        for action in schedule.actions(rank):
            s, n = action.stage, action.micro_batch
            if action.kind is F and s > 0:
                away = schedule.rank_of(s - 1) != rank
                giver = f"{s - 1}F{n}"
                edge(sent_by.get(giver, giver), action, costs[s - 1].send_output * away)
            if action.kind in (B, I) and s < last:
                away = schedule.rank_of(s + 1) != rank
                giver = f"{s + 1}B{n}" if f"{s + 1}B{n}" in whole else f"{s + 1}I{n}"
                edge(giver, action, costs[s + 1].send_gradient * away)
    return float(nx.dag_longest_path_length(graph))


@settings(max_examples=150)
@given(cases())
def test_no_step_is_shorter_than_its_critical_path(
    case: tuple[Schedule, list[StageCost], Receives],
) -> None:
    schedule, costs, receives = case
    assert simulate(schedule, costs, receives=receives).seconds >= longest_path(schedule, costs)


@settings(max_examples=150)
@given(cases())
def test_without_hops_sums_and_updates_a_step_is_its_critical_path(
    case: tuple[Schedule, list[StageCost], Receives],
) -> None:
    schedule, costs, receives = case
    bare = [StageCost(cost.forward, cost.input_gradient, cost.weight_gradient) for cost in costs]
    assert simulate(schedule, bare, receives=receives).seconds == longest_path(schedule, bare)


@settings(max_examples=150)
@given(cases())
def test_everything_runs_once_in_order_and_after_what_it_needs(
    case: tuple[Schedule, list[StageCost], Receives],
) -> None:
    schedule, costs, receives = case
    timeline = simulate(schedule, costs, receives=receives)
    actions = [event for event in timeline.events if isinstance(event.kind, ActionKind)]
    for rank in range(schedule.ranks):
        own = sorted((event for event in actions if event.rank == rank), key=lambda e: (e.start, e.stop))
        assert sorted(map(str, own)) == sorted(map(str, schedule.actions(rank)))
        assert all(before.stop <= after.start for before, after in pairwise(own))
    assert all(event.rank == schedule.rank_of(event.stage) for event in timeline.events)
    at = {
        (event.stage, "I" if event.kind is B else event.kind.value, event.micro_batch): event
        for event in actions
    }
    for (stage, kind, n), event in at.items():
        if kind == "F" and stage:
            assert at[stage - 1, "F", n].stop <= event.start
        if kind == "I":
            assert at[stage, "F", n].stop <= event.start
            if stage < schedule.stages - 1:
                assert at[stage + 1, "I", n].stop <= event.start
        if kind == "W":
            assert at[stage, "I", n].stop <= event.start
    for event in events_of(timeline, RankActivity.UPDATE):
        assert all(other.stop <= event.start for other in actions if other.rank == event.rank)


@settings(max_examples=150)
@given(cases(), st.data())
def test_no_cost_that_rises_shortens_a_step(
    case: tuple[Schedule, list[StageCost], Receives], data: st.DataObject
) -> None:
    schedule, costs, receives = case
    stage = data.draw(st.integers(0, schedule.stages - 1))
    names = ("forward", "input_gradient", "weight_gradient", "send_output", "send_gradient", "sync", "update")
    name = data.draw(st.sampled_from(names))
    raised = list(costs)
    raised[stage] = replace(costs[stage], **{name: getattr(costs[stage], name) + 3})
    before = simulate(schedule, costs, receives=receives).seconds
    assert simulate(schedule, raised, receives=receives).seconds >= before


@settings(max_examples=100)
@given(cases())
def test_all_that_was_kept_is_given_back(case: tuple[Schedule, list[StageCost], Receives]) -> None:
    schedule, costs, receives = case
    sized = [replace(cost, state=100, kept=7, kept_for_weight=stage) for stage, cost in enumerate(costs)]
    timeline = simulate(schedule, sized, receives=receives)
    for held in timeline.held:
        assert held[0].nbytes == held[-1].nbytes == 100 * schedule.stages_per_rank
        assert all(before.seconds <= after.seconds for before, after in pairwise(held))


@settings(max_examples=100)
@given(st.integers(1, 5), st.integers(0, 6), st.lists(st.integers(1, 5), min_size=5, max_size=5))
def test_1f1b_keeps_as_many_in_flight_as_ranks_are_left_whatever_the_times(
    p: int, more: int, seconds: list[int]
) -> None:
    schedule = build(K.ONE_F_ONE_B, p, 1, p + more)
    timeline = simulate(schedule, [StageCost(time, time, 1, kept=1) for time in seconds[:p]])
    assert [timeline.peak_of(rank).nbytes for rank in range(p)] == [p - rank for rank in range(p)]
