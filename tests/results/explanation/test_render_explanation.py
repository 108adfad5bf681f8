"""Explanations as they are printed."""

from __future__ import annotations

import json
from dataclasses import replace

from expecttest import assert_expected_inline

from autopar.results.explanation.explanation import Change, Choice, Explanation, LayerChoices, Outcome
from autopar.results.plan.step_parts import StepParts
from tests.results.plan.test_render_plan import BIG

BASE = Outcome(0.1, 0.01, 4 << 20, StepParts(compute=0.1), "2x2", measured_share=1.0)
CHOSEN = Choice(
    ("n", "o"), ("batch", "filter"), 0.02, 0.003, 1 << 20, BASE, all_compute=0.02, all_communication=0.003
)


def choice(seconds: float, *factors: str | None, communication: float = 0.003) -> Choice:
    kinds = tuple("batch" if factor == "n" else "channel" if factor else None for factor in factors)
    outcome = replace(BASE, step_seconds=seconds, gap=0.02, measured_share=0.5)
    own = Choice(factors, kinds, 0.02, communication, 1 << 19, outcome)
    return replace(own, all_compute=own.compute, all_communication=communication)


LAYER = LayerChoices(
    name="mlp.0",
    op="aten.linear.default",
    equal=(),
    chosen=CHOSEN,
    others=(
        choice(0.105, "n", "i", communication=0.006),
        choice(0.2, None, None),
        Choice(("h", None), ("domain", None), reason="few rows"),
    ),
    untried=2,
)
FOUND = Explanation(
    "net.py:net",
    "1 x 4 h100",
    replace(BIG, memory_cap=4 << 20),
    base=BASE,
    layers=(LAYER,),
    memory=(
        Change("without a memory cap", replace(BASE, step_seconds=0.09, peak_bytes=8 << 20)),
        Change("with 419 kB more a device", replace(BASE, step_seconds=0.096)),
    ),
    options=(Change("without --mesh 2x2", replace(BASE, step_seconds=0.095, mesh="4")),),
    data_parallel="Plain data parallelism is predicted to take 110 ms a step, 10 ms (10%) more.",
    what_if=(Change("devices=3", None, "no"), Change("batch=64", replace(BASE, step_seconds=0.18))),
)


def test_bounds_that_are_the_price_are_not_repeated() -> None:
    exact = replace(BASE, gap=0.0)
    runner = replace(LAYER.others[0], outcome=replace(exact, step_seconds=0.105))
    layer = replace(LAYER, chosen=replace(CHOSEN, outcome=exact), others=(runner,))
    found = str(replace(FOUND, base=exact, layers=(layer,)))
    assert "costs 5 ms:" in found and "by both gaps" not in found


def test_prices_are_differences_and_named_with_both_gaps() -> None:
    assert_expected_inline(
        str(FOUND),
        """\
The plan for 1 x 4 h100: mesh 2x2
100 ms a step (gap 1.00%), 4.19 MB a device
Every other way is pinned and solved again on this mesh; its price is the difference of the steps.

mlp.0 (linear)
split                compute  communication    saved    step    price    gap  peak memory
batch n x filter o     20 ms           3 ms  1.05 MB  100 ms           1.00%      4.19 MB  chosen
batch n x channel i    20 ms           6 ms   524 kB  105 ms    +5 ms  2.00%      4.19 MB  50% measured
whole x whole          20 ms           3 ms   524 kB  200 ms  +100 ms  2.00%      4.19 MB  50% measured
domain h x whole                                                                           no plan: few rows
2 more ways, dearer by themselves, were not solved
The runner-up, batch n x channel i, costs 5 ms (from +2.9 ms to +6 ms, by both gaps):
  +3 ms communication in it, +2 ms in the rest of the step.

legend  batch    each device of the axis has some of the samples
        domain   each device of the axis has a part of every sample (its space or sequence)
        filter   each device of the axis has some output channels, and their weights
        channel  each device of the axis has some input channels, and their weights; their results are summed
        whole    every device of the axis computes all of it
        along    n samples, o output channels, i input channels, h height, or heads
        saved    bytes that a device keeps from forward to backward
        step     of the whole model, with all else chosen anew
        gap      how much less, of that step, the best such plan may take

Memory binds: without a memory cap a step takes 90 ms (gap 1.00%) and 8.39 MB, which saves 10 ms.
With 419 kB more a device a step takes 96 ms (gap 1.00%) and 4.19 MB, which saves 4 ms.
Plain data parallelism is predicted to take 110 ms a step, 10 ms (10%) more.

option               step  against the plan    gap  peak memory
without --mesh 2x2  95 ms             -5 ms  1.00%      4.19 MB  mesh 4

what if      step  against the plan    gap  peak memory
devices=3                                                no plan: no
batch=64   180 ms            +80 ms  1.00%      4.19 MB  mesh 2x2""",
    )


def test_what_equal_layers_cost_is_part_of_the_price() -> None:
    runner = replace(LAYER.others[0], all_compute=0.021, all_communication=0.007)
    chosen = replace(CHOSEN, all_compute=0.02, all_communication=0.003)
    layer = replace(LAYER, equal=("mlp.1", "mlp.2"), chosen=chosen, others=(runner,))
    told = "  +1 ms compute, +4 ms communication in all 3.\n"
    assert told in str(replace(FOUND, layers=(layer,)))


def test_the_price_lies_between_what_both_bounds_allow() -> None:
    other = replace(BASE, step_seconds=0.105, gap=0.02)
    assert round(other.price(BASE), 9) == 0.005
    assert round(other.least(BASE), 9) == round(0.105 * 0.98 - 0.1, 9)
    assert round(other.most(BASE), 9) == round(0.105 - 0.1 * 0.99, 9)


def test_memory_binds_only_if_a_plan_beyond_the_cap_is_faster() -> None:
    for outcome in (replace(BASE, step_seconds=0.09), replace(BASE, peak_bytes=8 << 20)):
        found = replace(FOUND, memory=(Change("without a memory cap", outcome),))
        assert FOUND.memory_binds and not found.memory_binds
        assert "Memory doesn't bind: without the cap of 4.19 MB" in str(found)


def test_a_runner_up_within_rounding_is_as_good() -> None:
    alike = replace(LAYER, others=(choice(0.10001, "n", "i"),))
    assert "is as good:\n  about the same in it" in str(replace(FOUND, layers=(alike,)))
    late = replace(LAYER, others=(), untried=3, late=1)
    told = "1 more way was not solved: time was over, --seconds gives more\n2 more ways, dearer by themselves"
    assert told in str(replace(FOUND, layers=(late,)))
    assert "No other way was solved" in str(replace(FOUND, layers=(late,)))
    alone = replace(LAYER, others=(), untried=0)
    assert "no other way to split it" in str(replace(FOUND, layers=(alone,)))


def test_an_infeasible_plan_names_what_to_change_first() -> None:
    lean = Change("without --recompute none", BASE)
    found = Explanation("t", "1 x 4 h100", None, infeasible="2 MB; wanted at least 4 MB", remedies=(lean,))
    lines = str(found).splitlines()
    assert lines[0] == "No plan for 1 x 4 h100: 2 MB; wanted at least 4 MB."
    assert lines[1].startswith("Change first: without --recompute none.")
    assert "No change that was tried" in str(replace(found, remedies=()))


def test_json_holds_all_of_it() -> None:
    document = json.loads(json.dumps(FOUND.as_dict()))
    assert document["memory_binds"] is True and document["layers"][0]["others"][0]["outcome"]["gap"] == 0.02
    assert document["base"]["parts"]["compute"] == 0.1 and document["what_if"][0]["outcome"] is None


def test_a_single_way_is_told_as_one() -> None:
    found = replace(FOUND, layers=(replace(LAYER, untried=1),))
    assert "1 more way, dearer by itself, was not solved" in str(found)


def test_a_way_that_is_faster_than_the_plan_is_told_so() -> None:
    faster = replace(LAYER, others=(choice(0.0995, "n", "i"),))
    found = " ".join(str(replace(FOUND, layers=(faster,))).split())
    assert (
        "The runner-up, batch n x channel i, spares 500 us (from -2.49 ms to +500 us, by both gaps)" in found
    )
    assert "leaves room for" in found and "is as good" not in found


def test_a_gap_without_a_bound_is_unknown_and_explained() -> None:
    unbound = replace(LAYER.others[0], outcome=replace(BASE, gap=1.0))
    found = str(replace(FOUND, layers=(replace(LAYER, others=(unbound,)),)))
    assert "unknown  time was over before a bound was found" in found and "100.00%" not in found
    assert "unknown" not in str(FOUND)


def test_ways_that_force_leaves_out_are_counted() -> None:
    layer = replace(LAYER, others=(), untried=0, unforced=1)
    found = str(replace(FOUND, layers=(layer,)))
    assert "1 more way was left out by --force" in found
    assert "There is no other way to split it that keeps to --force." in found
