"""A plan as text: a table of layers, one of stages, then totals, then the alternatives beside it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from autopar.core.placement import replicated, show
from autopar.results.plan import Alternative, Layer, Plan, Stage
from autopar.results.text import WIDTH, as_text, text_of
from autopar.units import show_bytes, show_seconds

LIGHT = 2e-3  # layers below this share of the step, and without flops, are summed up in one line
LARGEST = 6  # offloaded tensors that are named


@text_of.register
def plan_text(plan: Plan, *, width: int = WIDTH) -> str:
    """The plan as plain text."""
    return as_text(render(plan), width=width)


def render(plan: Plan) -> RenderableType:
    """The plan for a terminal."""
    return Group(_layers(plan), *_stages(plan), *_totals(plan), _alternatives(plan), *_remarks(plan))


def _layers(plan: Plan) -> Table:
    count = plan.pipeline.micro_batches
    part = f"; lines are for one of {count} micro-batches" if count > 1 else ""
    table = Table(title=f"Plan for {plan.cluster}, mesh {plan.mesh}{part}", box=None, pad_edge=False)
    table.add_column("layer", overflow="fold")
    table.add_column("operator")
    for axis in plan.mesh.axes:
        table.add_column(f"{plan.mesh.name(axis)} ({plan.mesh.shape[axis]})")
    for heading in ("compute", "communication", "kept"):
        table.add_column(heading, justify="right")
    limit = LIGHT * plan.step_seconds
    heavy = [layer for layer in plan.layers if layer.flops or layer.compute + layer.communication > limit]
    for layer in heavy:
        table.add_row(*_row(layer))
    light = [layer for layer in plan.layers if layer not in heavy]
    if light:
        empty = [""] * len(plan.mesh.shape)
        table.add_row(f"{len(light)} light operators", "", *empty, *_sums(light), style="dim")
    return table


def _row(layer: Layer) -> list[str]:
    op = layer.op.removeprefix("aten.").removesuffix(".default")
    axes = [
        f"{kind} {factor}" if factor else "-"
        for factor, kind in zip(layer.strategy, layer.kinds, strict=True)
    ]
    return [layer.module or layer.name, op, *axes, *_sums([layer])]


def _sums(layers: Sequence[Layer]) -> list[str]:
    return [
        show_seconds(sum(layer.compute for layer in layers)),
        show_seconds(sum(layer.communication for layer in layers)),
        show_bytes(sum(layer.nbytes for layer in layers)),
    ]


def _stages(plan: Plan) -> list[RenderableType]:
    if not plan.stages:
        return []
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", justify="right")
    table.add_column("rank", justify="right")
    table.add_column("layers", overflow="fold")
    for heading in ("forward", "backward", "hop", "hop back", "gradient sums", "memory"):
        table.add_column(heading, justify="right")
    for number, stage in enumerate(plan.stages):
        table.add_row(str(number), str(stage.rank), *_stage(stage))
    return ["", table]


def _stage(stage: Stage) -> list[str]:
    seconds = (stage.forward, stage.backward, stage.send_output, stage.send_gradient, stage.sync)
    layers = stage.first if stage.first == stage.last else f"{stage.first} .. {stage.last}"
    shown = [show_seconds(each) if each else "-" for each in seconds]
    return [f"{layers} ({stage.operators})", *shown, show_bytes(stage.nbytes)]


def _pipeline(plan: Plan) -> list[str]:
    pipeline = plan.pipeline
    if not pipeline.is_staged:
        return [f"pipeline  {pipeline.micro_batches} micro-batches"] if pipeline.micro_batches > 1 else []
    return [
        f"pipeline  {pipeline.ranks} ranks, {pipeline.num_stages} stages, {pipeline.micro_batches} "
        f"micro-batches, {pipeline.schedule.value}; a rank waits {plan.bubble:.1%} of the step"
    ]


def _totals(plan: Plan) -> list[str]:
    cap = f" of {show_bytes(plan.memory_cap)}" if plan.memory_cap is not None else ""
    error = f" ± {plan.error:.0%}" if plan.error else ""
    return [
        "",
        f"step      {show_seconds(plan.step_seconds)}{error} predicted: {show_seconds(plan.compute_seconds)} "
        f"compute, {show_seconds(plan.communication_seconds)} communication; "
        f"{plan.measured_share:.0%} of compute is measured",
        *_pipeline(plan),
        f"memory    {show_bytes(plan.peak_bytes)}{cap} per device at the peak, "
        f"{show_bytes(plan.state_bytes)} of it weights, gradients and optimizer state",
        *_offload(plan),
        f"solver    {plan.status}, gap {plan.gap:.2%}; "
        f"{plan.sharded_flops_share:.1%} of the flops are sharded",
    ]


def _offload(plan: Plan) -> list[str]:
    if not plan.offloaded:
        return []
    largest = sorted(plan.offloaded, key=lambda item: -item.nbytes)[:LARGEST]
    names = ", ".join(f"{item.name} ({show_bytes(item.nbytes)})" for item in largest)
    others = len(plan.offloaded) - len(largest)
    nbytes = sum(item.nbytes for item in plan.offloaded)
    where = "in all stages together" if plan.pipeline.is_staged else "per device"
    return [
        f"offload   {show_bytes(nbytes)} {where} wait for backward in host memory, which takes "
        f"{show_seconds(plan.offload_seconds)} of the step: {names}"
        + (f" and {others} more" if others else "")
    ]


def _alternatives(plan: Plan) -> RenderableType:
    if not plan.alternatives:
        return ""
    table = Table(box=None, pad_edge=False)
    for heading in ("beside it", "step", "peak memory", ""):
        table.add_column(heading, justify="left" if heading in ("beside it", "") else "right")
    for item in plan.alternatives:
        table.add_row(*_alternative(item))
    return table


def _alternative(item: Alternative) -> list[str]:
    if item.step_seconds is None or item.peak_bytes is None:
        return [item.name, "-", "-", "has no plan"]
    fits = "" if item.feasible else "exceeds the memory cap"
    return [item.name, show_seconds(item.step_seconds), show_bytes(item.peak_bytes), fits]


def _remarks(plan: Plan) -> list[str]:
    found = [f"note      {note}" for note in plan.notes]
    if any(layout != replicated(len(layout)) for layout in plan.program.outputs.values()):
        rows = (f"{name} {show(layout)}" for name, layout in plan.program.outputs.items())
        found.append("outputs   " + ", ".join(rows))
    if plan.gathered_ops:
        found.append("gathered  " + ", ".join(plan.gathered_ops))
    return found
