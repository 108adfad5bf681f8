"""Plans whose pages are looked at: one with hostile words, a large one, and one with stages."""

from __future__ import annotations

from dataclasses import replace

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.core.program import Program
from autopar.core.schedule import ScheduleKind
from autopar.core.timeline import StageCost
from autopar.results.plan import ONE_DEVICE, Alternative, Layer, Plan, Stage
from autopar.results.step_parts import StepParts

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
