"""What differs between two plans is told, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from expecttest import assert_expected_inline

from autopar.core.fingerprint import Fingerprint
from autopar.core.pipeline import Pipeline
from autopar.core.schedule import ScheduleKind
from autopar.results.difference.difference import Changed, difference
from autopar.results.difference.render_difference import difference_text
from autopar.results.plan.plan import Plan
from autopar.results.plan.step_parts import StepParts
from tests.results.plan.test_render_plan import BIG, LAYER, PARTS, STAGED, plan

FIRST = replace(BIG, graph=Fingerprint(operators=("mm", "relu")))


def second() -> Plan:
    """The first with its blocks' products split by filters, and slower sums of gradients."""
    layers = [
        replace(
            layer, strategy=(None, "o"), kinds=(None, "filter"), compute=layer.compute + 1e-3, nbytes=8192
        )
        if layer.op == "aten.linear.default" and layer.module
        else layer
        for layer in FIRST.layers
    ]
    named = [replace(layer, name=f"{layer.name}_{place}") for place, layer in enumerate(layers)]
    parts = replace(PARTS, sums=PARTS.sums + 4e-3, compute=PARTS.compute - 1e-3)
    return replace(FIRST, layers=tuple(named), parts=parts, step_seconds=0.023, peak_bytes=1 << 21)


def first() -> Plan:
    named = [replace(layer, name=f"{layer.name}_{place}") for place, layer in enumerate(FIRST.layers)]
    return replace(FIRST, layers=tuple(named))


def test_a_plan_does_not_differ_from_itself() -> None:
    found = difference(first(), first())
    assert found.is_none and difference_text(found) == "The plans are the same."
    assert found.same_layers == len(FIRST.layers) and found.parts == StepParts()


def test_seconds_bytes_and_placements_that_differ_are_told() -> None:
    found = difference(first(), second(), names=("a.json", "b.json"))
    assert found.seconds == 0.023 - 0.02 and found.peak_bytes == 1 << 20
    assert [layer.name for layer in found.layers] == [f"blocks.{number}.mlp" for number in range(4)]
    text = difference_text(found).replace("…", "...")
    assert_expected_inline(
        text,
        """\
a.json: 20 ms a step (gap 1.20%), 1.05 MB a device
b.json: 23 ms a step (gap 1.20%), 2.1 MB a device
b.json is 3 ms (15.0%) slower: +4 ms sums of gradients, -1 ms computing
b.json takes 1.05 MB more memory a device than a.json

layer                       operator  a.json           b.json            compute  communication    saved
blocks.0 ... blocks.3, each:
  .mlp                      linear    batch n x whole  whole x filter o    +1 ms          +0 ns  +4.1 kB
5 operators are split alike""",
    )


def test_a_difference_within_the_gap_is_called_so() -> None:
    near = replace(first(), step_seconds=0.0201)
    assert "no more than a gap" in difference_text(difference(first(), near))
    assert "no more than a gap" not in difference_text(difference(first(), second()))


def test_stages_and_schedules_that_differ_are_told() -> None:
    found = difference(plan(Pipeline()), STAGED)
    assert Changed("pipeline ranks", "1", "2") in found.settings
    assert Changed("schedule", "none", ScheduleKind.ONE_F_ONE_B.value) in found.settings
    assert Changed("stages begin at", "the whole is one stage", "token, blocks.1") in found.settings


def test_plans_of_other_programs_name_the_first_difference() -> None:
    other = replace(first(), graph=Fingerprint(operators=("mm", "gelu")))
    found = difference(first(), other)
    assert found.graph == "operator 1: relu and gelu" and not found.is_none
    assert found.graph in difference_text(found)


def test_operators_of_one_plan_alone_are_left_out() -> None:
    found = difference(first(), replace(first(), layers=(replace(LAYER, name="new"),)))
    assert not found.layers and found.same_layers == 0


def test_micro_batches_of_other_sizes_are_no_other_program() -> None:
    def cut(count: int, *lines: str) -> Plan:
        return replace(plan(Pipeline(micro_batches=count)), graph=Fingerprint(("w: weight [8,3]*", *lines)))

    halves = cut(2, "x: user x [4,3]", "y: user y [4]")
    assert difference(cut(1, "x: user x [8,3]", "y: user y [8]"), halves).graph == ""
    assert difference(cut(1, "x: user x [16,3]", "y: user y [16]"), halves).graph.startswith("input 1")
    assert difference(cut(1, "x: user x [8,3]", "z: user z [8]"), halves).graph.startswith("input 1")
    assert difference(cut(2, "x: user x [8,3]", "y: user y [8]"), halves).graph.startswith("input 1")
