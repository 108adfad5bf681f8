"""Plans as they are printed."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from expecttest import assert_expected_inline
from torch import nn

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.core.placement import R, Shard
from autopar.core.program import Program
from autopar.core.schedule import ScheduleKind
from autopar.results.plan.frontier import Frontier, Point
from autopar.results.plan.plan import ONE_DEVICE, Alternative, Layer, Offloaded, Plan, Stage
from autopar.results.plan.plan_subject import subject_of
from autopar.results.plan.plan_words import operator_name
from autopar.results.plan.render_plan import plan_text, small_kinds
from autopar.results.plan.step_parts import StepParts

LAYER = Layer(
    name="linear",
    op="aten.linear.default",
    module="blocks.0.mlp",
    strategy=("n",),
    kinds=("batch",),
    compute=2e-3,
    communication=1e-4,
    nbytes=4096,
    flops=1000,
)


PARTS = StepParts(compute=0.008, communication=0.001, sums=0.0095, optimizer=0.0015)


def plan(pipeline: Pipeline, stages: tuple[Stage, ...] = (), bubble: float = 0.0) -> Plan:
    return Plan(
        program=Program(Mesh((2,)), {}, {}, {}, {}),
        cluster="1 x 4 h100",
        layers=(LAYER,),
        conversions=(),
        status="optimal",
        gap=0.012,
        step_seconds=0.02,
        compute_seconds=0.008,
        communication_seconds=0.001,
        peak_bytes=1 << 20,
        state_bytes=1 << 19,
        memory_cap=None,
        measured_share=0.0,
        sharded_flops_share=1.0,
        gathered_ops=(),
        alternatives=(),
        parameter_bytes=(1, 1),
        pipeline=pipeline,
        stages=stages,
        bubble=bubble,
        parts=PARTS,
    )


def stage(rank: int, first: str, last: str, **hops: float) -> Stage:
    given = {"send_output": 0.0, "send_gradient": 0.0, **hops}
    return Stage(
        rank=rank,
        first=first,
        last=last,
        operators=9,
        forward=1e-3,
        backward=2e-3,
        sync=5e-4,
        nbytes=1 << 20,
        **given,
    )


STAGED = plan(
    Pipeline(2, 8, ScheduleKind.ONE_F_ONE_B, (0, 9)),
    (
        stage(0, "token", "blocks.0.mlp", send_output=2e-5),
        stage(1, "blocks.1", "blocks.1", send_gradient=3e-5),
    ),
    bubble=0.111,
)


def test_stages_are_printed_with_their_layers_seconds_hops_and_bytes() -> None:
    assert_expected_inline(
        plan_text(STAGED),
        """\
Plan for 1 x 4 h100; mesh 2; lines are for one of 8 micro-batches
layer         operator  axis a (2)  compute  communication   saved
blocks.0.mlp  linear    batch n        2 ms         100 us  4.1 kB
legend  batch  each device of the axis has some of the samples
        along  n samples
        saved  bytes that a device keeps from forward to backward

stage  rank  layers                     forward  backward    hop  hop back  gradient sums   memory
    0     0  token .. blocks.0.mlp (9)     1 ms      2 ms  20 us      none         500 us  1.05 MB
    1     1  blocks.1 (9)                  1 ms      2 ms   none     30 us         500 us  1.05 MB
rank: the devices that hold a stage, by number
hop: seconds until a result is at the next stage, back: a gradient at the one before

step      20 ms predicted, on an average device the sum of
             8 ms   40.0%  operators, of which 0% are measured
             1 ms    5.0%  communication that forward and backward wait for
           9.5 ms   47.5%  sums of gradients, once a step
           1.5 ms    7.5%  the optimizer
pipeline  2 ranks, 2 stages, 8 micro-batches, 1f1b; a rank waits 11.1% of the step
memory    1.05 MB per device at the peak, 524 kB of it weights, gradients and optimizer state
solver    gap 1.20%: by these predictions no plan is faster by more (of those that a note names)
          100.0% of the flops are split among devices
trust     operator time is 100% estimated (± 10%)
          timed steps took 0.66 to 1.63 times what measured operators had promised;
          of estimates that isn't known: autopar compare --measure times strategies here""",
    )


def test_micro_batches_without_stages_are_printed() -> None:
    assert_expected_inline(
        plan_text(plan(Pipeline(micro_batches=4))),
        """\
Plan for 1 x 4 h100; mesh 2; lines are for one of 4 micro-batches
layer         operator  axis a (2)  compute  communication   saved
blocks.0.mlp  linear    batch n        2 ms         100 us  4.1 kB
legend  batch  each device of the axis has some of the samples
        along  n samples
        saved  bytes that a device keeps from forward to backward

step      20 ms predicted, on each device the sum of
             8 ms   40.0%  operators, of which 0% are measured
             1 ms    5.0%  communication that forward and backward wait for
           9.5 ms   47.5%  sums of gradients, once a step
           1.5 ms    7.5%  the optimizer
pipeline  4 micro-batches
memory    1.05 MB per device at the peak, 524 kB of it weights, gradients and optimizer state
solver    gap 1.20%: by these predictions no plan is faster by more
          100.0% of the flops are split among devices
trust     operator time is 100% estimated (± 10%); nothing is taken to overlap
          timed steps took 0.66 to 1.63 times what measured operators had promised;
          of estimates that isn't known: autopar compare --measure times strategies here""",
    )


def test_a_plan_without_either_says_nothing_of_them() -> None:
    text = plan_text(plan(Pipeline()))
    assert "pipeline" not in text and "micro-batch" not in text


def test_what_is_offloaded_is_named_with_its_bytes_and_what_it_costs() -> None:
    items = [Offloaded(f"relu_{place}", (Shard(0), R), (place + 1) * 1000) for place in range(8)]
    found = replace(plan(Pipeline()), offloaded=tuple(items), offload_seconds=2e-3)
    (line,) = (line for line in plan_text(found, width=300).splitlines() if line.startswith("offload"))
    assert line == (
        "offload   36 kB per device wait for backward in host memory, which takes 2 ms of the step: "
        "relu_7 (8 kB), relu_6 (7 kB), relu_5 (6 kB), relu_4 (5 kB), relu_3 (4 kB), relu_2 (3 kB) and 2 more"
    )
    staged = replace(STAGED, offloaded=tuple(items))
    assert "36 kB in all stages together wait" in plan_text(staged, width=300)
    assert replace(found, offloaded=tuple(items[:1])).as_dict()["offload"] == {
        "tensors": [{"name": "relu_0", "layout": "S(0)·R", "bytes": 1000}],
        "bytes": 1000,
        "seconds": 2e-3,
    }
    assert "offload" not in plan_text(plan(Pipeline()))


def test_json_has_the_pipeline() -> None:
    assert STAGED.as_dict()["pipeline"] == {
        "ranks": 2,
        "stages": 2,
        "micro_batches": 8,
        "schedule": "1f1b",
        "starts": [0, 9],
        "stage_seconds": [3e-3, 3e-3],
        "stage_bytes": [1 << 20, 1 << 20],
        "bubble": 0.111,
    }


def block(number: int, compute: float = 2e-3) -> list[Layer]:
    return [
        replace(LAYER, module=f"blocks.{number}.mlp", compute=compute),
        replace(
            LAYER, module=f"blocks.{number}", op="aten.add.Tensor", kinds=("filter",), strategy=("d1.0",)
        ),
    ]


BIG = replace(
    plan(Pipeline()),
    program=Program(Mesh((2, 2)), {}, {}, {}, {}),
    parameter_bytes=(1, 1, 1, 1),
    layers=tuple(
        replace(layer, strategy=(*layer.strategy, None), kinds=(*layer.kinds, None))
        for layer in (
            *block(0),
            *block(1),
            *block(2),
            *block(3, compute=3e-3),
            replace(LAYER, module="", name="softmax", compute=1e-6, communication=0.0, flops=0),
        )
    ),
    serial=Alternative(ONE_DEVICE, 0.018, 1 << 21, feasible=True),
    alternatives=(
        Alternative("batch", 0.03, 1 << 30, feasible=False, reason="exceeds the memory cap of 1 GB"),
        Alternative(
            "domain", None, None, feasible=False, reason="no domain factor; wanted an operator with one"
        ),
        Alternative("channel", 0.019, 1 << 20, feasible=True, reason="keeps to no pins"),
    ),
)


def test_a_plan_is_printed_in_words_that_are_explained_and_equal_blocks_stand_once() -> None:
    text = plan_text(BIG).replace("…", "...")  # expecttest takes ASCII alone
    assert_expected_inline(
        text,
        """\
Plan for 1 x 4 h100; mesh 2x2
layer                       operator  axis a (2)    axis b (2)  compute  communication   saved
blocks.0 ... blocks.2, each:
  .mlp                      linear    batch n       whole          2 ms         100 us  4.1 kB
  (itself)                  add       filter dim 1  whole          2 ms         100 us  4.1 kB
blocks.3.mlp                linear    batch n       whole          3 ms         100 us  4.1 kB
blocks.3                    add       filter dim 1  whole          2 ms         100 us  4.1 kB
1 small operator                                                   1 us           0 ns  4.1 kB
legend  batch   each device of the axis has some of the samples
        filter  each device of the axis has some output channels, and their weights
        whole   every device of the axis computes all of it
        along   n samples, dim k of the operator's tensors, from 0
        saved   bytes that a device keeps from forward to backward
        a ... b   equal blocks, with the numbers of one of them
        small   no products, and less than 0.2% of the step each; summed up by kind

step      20 ms predicted, on each device the sum of
             8 ms   40.0%  operators, of which 0% are measured
             1 ms    5.0%  communication that forward and backward wait for
           9.5 ms   47.5%  sums of gradients, once a step
           1.5 ms    7.5%  the optimizer
memory    1.05 MB per device at the peak, 524 kB of it weights, gradients and optimizer state
solver    gap 1.20%: by these predictions no plan is faster by more
          100.0% of the flops are split among devices
trust     operator time is 100% estimated (± 10%); nothing is taken to overlap
          timed steps took 0.66 to 1.63 times what measured operators had promised;
          of estimates that isn't known: autopar compare --measure times strategies here
advice    use one device: it is predicted to take 18 ms a step, no more than all 4 together

strategy     step  against it  peak memory
this plan   20 ms                  1.05 MB
one device  18 ms      -10.0%       2.1 MB  the plan is for all devices, as asked
batch       30 ms      +50.0%      1.07 GB  exceeds the memory cap of 1 GB
domain                                      no plan: no domain factor; wanted an operator with one
channel     19 ms       -5.0%      1.05 MB  keeps to no pins""",
    )


def test_only_what_is_shown_is_explained() -> None:
    words = {
        line.split()[0] for line in plan_text(plan(Pipeline())).splitlines() if line.startswith("        ")
    }
    assert {"domain", "filter", "channel", "whole", "dim", "a", "small"}.isdisjoint(words)


def test_one_device_is_advised_only_where_it_is_as_fast_and_fits() -> None:
    assert "use one device" in plan_text(BIG)
    slower = replace(BIG, serial=Alternative(ONE_DEVICE, 0.021, 1, feasible=True))
    too_large = replace(BIG, serial=Alternative(ONE_DEVICE, 0.018, 1, feasible=False))
    assert "use one device" not in plan_text(slower) + plan_text(too_large) + plan_text(plan(Pipeline()))


def test_the_printed_parts_add_up_to_the_step() -> None:
    found = re.findall(r"^ +([\d.]+) ms +([\d.]+)%", plan_text(BIG), re.MULTILINE)
    assert (
        sum(float(seconds) for seconds, _ in found) == 20 and sum(float(share) for _, share in found) == 100
    )


def test_what_less_memory_would_cost_stands_below_the_strategies() -> None:
    points = (Point(None, 0.02, 1 << 20, 0.0), Point(900_000, 0.025, 880_000, 0.0))
    found = replace(plan(Pipeline()), frontier=Frontier(points, infeasible=700_000, untried=1))
    assert_expected_inline(
        "\n".join(line.rstrip() for line in plan_text(found).split("\n\n")[-1].splitlines()),
        """\
memory cap   step  against it  peak memory
none        20 ms       +0.0%      1.05 MB
900 kB      25 ms      +25.0%       880 kB
700 kB                                      no plan was found
time was over before 1 lower cap""",
    )


def test_a_gap_without_a_bound_is_told_as_unknown() -> None:
    text = plan_text(replace(plan(Pipeline()), gap=1.0, status="time_limit"))
    assert "solver    stopped by the time limit, gap unknown: no bound was found" in text
    assert "no plan is faster by more" not in text and "100.00%" not in text


def test_only_a_plan_without_a_gap_is_called_optimal() -> None:
    assert "solver    optimal, gap 0.00%" in plan_text(replace(plan(Pipeline()), gap=0.0))
    assert "optimal" not in plan_text(replace(plan(Pipeline()), gap=0.01))


def test_operators_are_named_as_users_know_them() -> None:
    assert operator_name("aten.lstm.input") == "lstm" and operator_name("aten.add.Tensor") == "add"
    assert operator_name("mylib.product.default") == "mylib.product"
    assert operator_name("autopar_graphs.product.default") == "product"


def test_small_operators_are_summed_up_by_kind_the_dearest_first() -> None:
    small = [
        replace(LAYER, op=op, compute=1e-5, communication=0.0, flops=0)
        for op in ("aten.mul.Tensor", "aten.add.Tensor", "aten.mul.Tensor")
    ]
    rows = [(number, kind, len(layers)) for number, kind, layers in small_kinds(small, limit=1.5e-5)]
    assert rows == [("2 small", "mul", 2), ("1 other small operator", "", 1)]


def test_a_plan_says_what_it_is_of() -> None:
    kwargs = {"ids": torch.zeros(4, 8, dtype=torch.long), "scale": 2.0}
    subject = subject_of(nn.Linear(3, 4), (torch.zeros(4, 3),), kwargs, {"dtype": "bf16"})
    first = plan_text(replace(BIG, subject=subject)).splitlines()[0]
    assert first.startswith("Linear of 16 parameters; batch of 4x3 float32, ids 4x8 int64; dtype=bf16; 20")
