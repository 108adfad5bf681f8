"""Plans as they are printed."""

from __future__ import annotations

from dataclasses import replace

from expecttest import assert_expected_inline

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.core.placement import R, Shard
from autopar.core.program import Program
from autopar.core.schedule import ScheduleKind
from autopar.results.plan import Layer, Offloaded, Plan, Stage
from autopar.results.render_plan import plan_text

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
      Plan for 1 x 4 h100, mesh 2; lines are for one of 8
                         micro-batches
layer         operator  a (2)    compute  communication    kept
blocks.0.mlp  linear    batch n     2 ms         100 us  4.1 kB

stage  rank  layers                     forward  backward    hop  hop back  gradient sums   memory
    0     0  token .. blocks.0.mlp (9)     1 ms      2 ms  20 us         -         500 us  1.05 MB
    1     1  blocks.1 (9)                  1 ms      2 ms      -     30 us         500 us  1.05 MB

step      20 ms predicted: 8 ms compute, 1 ms communication; 0% of compute is measured
pipeline  2 ranks, 2 stages, 8 micro-batches, 1f1b; a rank waits 11.1% of the step
memory    1.05 MB per device at the peak, 524 kB of it weights, gradients and optimizer state
solver    optimal, gap 1.20%; 100.0% of the flops are sharded
""",
    )


def test_micro_batches_without_stages_are_printed() -> None:
    assert_expected_inline(
        plan_text(plan(Pipeline(micro_batches=4))),
        """\
      Plan for 1 x 4 h100, mesh 2; lines are for one of 4
                         micro-batches
layer         operator  a (2)    compute  communication    kept
blocks.0.mlp  linear    batch n     2 ms         100 us  4.1 kB

step      20 ms predicted: 8 ms compute, 1 ms communication; 0% of compute is measured
pipeline  4 micro-batches
memory    1.05 MB per device at the peak, 524 kB of it weights, gradients and optimizer state
solver    optimal, gap 1.20%; 100.0% of the flops are sharded
""",
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
