"""Plans whose pages are looked at: one with hostile words, a large one, and one with stages."""

from __future__ import annotations

from dataclasses import replace

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.core.program import Program
from autopar.core.schedule import ScheduleKind
from autopar.core.timeline import Moment, Phase, StageCost
from autopar.results.comparison.measured_steps import MeasuredStep, MeasuredSteps
from autopar.results.plan.frontier import Frontier, Point
from autopar.results.plan.plan import ONE_DEVICE, Alternative, Layer, Plan, Stage
from autopar.results.plan.step_parts import StepParts

HOSTILE = '</title><script>alert(\'1\')</script>" onload="x" {{ 7 * 7 }} &amp; ' + "w" * 300


def layer(name: str, seconds: float, kinds: tuple[str | None, ...] = ("batch", "filter")) -> Layer:
    return Layer(
        name=name,
        op="aten.linear.default",
        module=name,
        strategy=tuple({"batch": "n", "filter": "o"}.get(kind or "") for kind in kinds),
        kinds=kinds,
        compute=seconds,
        communication=seconds / 3,
        nbytes=4096,
        flops=1000,
    )


def plain() -> Plan:
    """A plan with two axes, equal blocks, small operators and strategies of every kind."""
    blocks = tuple(
        layer(f"h.{block}.{part}", 1e-3 * (1 + (block > 2))) for block in range(5) for part in ("attn", "mlp")
    )
    small = replace(layer("last.add", 1e-7, (None, None)), flops=0)
    return Plan(
        program=Program(Mesh((2, 4)), {}, {}, {}, {}),
        cluster="1 x 8 h100",
        layers=(*blocks, small),
        conversions=(),
        status="gap_limit",
        gap=0.0123,
        step_seconds=0.02,
        compute_seconds=0.008,
        communication_seconds=0.001,
        peak_bytes=1 << 30,
        state_bytes=1 << 29,
        memory_cap=80 * 10**9,
        measured_share=0.25,
        sharded_flops_share=0.75,
        gathered_ops=(),
        alternatives=(
            Alternative("batch", 0.0301, 3 << 30, True),
            Alternative("domain", None, None, False, "no dim is long enough"),
            Alternative("filter", 0.05, 90 * 10**9, False),
        ),
        parameter_bytes=(4096,) * 8,
        notes=("a note",),
        parts=StepParts(compute=0.008, communication=0.001, sums=0.0095, optimizer=0.0015, hidden=0.002),
        serial=Alternative(ONE_DEVICE, 0.04, 2 << 30, True),
    )


def hostile() -> Plan:
    """A plan all of whose words are markup."""
    words = replace(layer(HOSTILE, 0.01), op=HOSTILE, module="", strategy=(HOSTILE, None))
    return replace(
        plain(),
        cluster=HOSTILE,
        status=HOSTILE,
        layers=(words,),
        notes=(HOSTILE,),
        alternatives=(Alternative(HOSTILE, 0.03, 5, True, HOSTILE),),
    )


def large() -> Plan:
    """A plan of 20,000 different operators with long names."""
    name = "model.encoder.transformer.blocks.{}.attention.query_projection"
    every = tuple(layer(name.format(number), 1e-3 * (1 + number % 97)) for number in range(20_000))
    return replace(plain(), layers=every, notes=tuple(HOSTILE * 20 for _ in range(1000)))


def staged(micro_batches: int = 8, ranks: int = 4) -> Plan:
    """A plan with as many stages as ranks."""
    costs = tuple(
        StageCost(1e-3, 1e-3, 1e-3, 1e-4, 1e-4, sync=2e-3, update=1e-3, state=1000 * (n + 1), kept=300)
        for n in range(ranks)
    )
    stages = tuple(
        Stage(n, f"h.{n}", f"h.{n}", 1, 1e-3, 2e-3, 1e-4, 1e-4, 2e-3, 5000 + n) for n in range(ranks)
    )
    pipeline = Pipeline(ranks, micro_batches, ScheduleKind.ONE_F_ONE_B, tuple(range(ranks)))
    return replace(plain(), pipeline=pipeline, stages=stages, stage_costs=costs, bubble=0.2)


def timed(micro_batches: int = 2) -> Plan:
    """A plan without stages that says what happens when."""
    made, count = plain(), len(plain().layers)
    forward = [Moment(Phase.FORWARD, place, 1e-4, 10**6 * (10 + place)) for place in range(count)]
    backward = [Moment(Phase.BACKWARD, place, 2e-4, 10**6 * (10 + place)) for place in reversed(range(count))]
    again = Moment(Phase.RECOMPUTE, 0, 1e-4, 10**6 * 12)
    ends = Moment(Phase.SUMS, None, 9.5e-3, 10**7), Moment(Phase.OPTIMIZER, None, 1.5e-3, 10**7)
    moments = (*forward, again, *backward, Moment(Phase.COPIES, None, 1e-5, 10**7), *ends)
    return replace(made, moments=moments, pipeline=Pipeline(micro_batches=micro_batches))


def long() -> Plan:
    """A plan without stages of 5,000 moments and two micro-batches."""
    made = replace(large(), layers=large().layers[:5000])
    moments = tuple(Moment(Phase.FORWARD, place, 1e-6, place) for place in range(len(made.layers)))
    return replace(made, moments=moments, pipeline=Pipeline(micro_batches=2))


def frontier(plan: Plan) -> Frontier:
    """The plan and two leaner ones."""
    return Frontier(
        (
            Point.of(plan),
            Point(10**9, plan.step_seconds * 1.25, 9 * 10**8, 0.0),
            Point(8 * 10**8, plan.step_seconds * 1.5, 7 * 10**8, 0.01),
        ),
        infeasible=5 * 10**8,
        untried=1,
    )


def measured(plan: Plan) -> MeasuredSteps:
    """The plan's own step, and that of data parallelism under a hostile name."""
    own = MeasuredStep("hybrid", plan.step_seconds, plan.step_seconds * 1.1, 1 << 30, 1 << 29)
    return MeasuredSteps((own, MeasuredStep(HOSTILE[:80], 0.03, 0.025, 3 << 30, 3 << 30)), "hybrid")
