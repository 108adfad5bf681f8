"""A plan as text: layers, stages, where step, memory and bound come from, and other strategies beside it.

Equal blocks stand once; below the table a legend says what its words mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from autopar.core.placement import replicated, show
from autopar.results.files.text import TEXT_WIDTH, as_text, text_of
from autopar.results.plan.fold_blocks import RepeatedRows, TableRow, fold_rows
from autopar.results.plan.plan import ONE_DEVICE, Alternative, Layer, Plan, Stage
from autopar.results.plan.plan_words import (
    axis_heading,
    gap_of,
    how_it_ended,
    legend,
    operator_name,
    splits_of,
    what_gap_says,
)
from autopar.results.plan.render_step import step_lines, trust_lines
from autopar.results.progress.wrapped_names import WrappedName
from autopar.units import show_bytes, show_seconds

LIGHT = 2e-3  # layers below this share of the step, and without flops, are summed up in one line
LEAST_TOLD = 0.25  # of the step: a bound of less says nothing
MOST_NAMED_OFFLOADS = 6  # tensors, the largest
TAKEN = "this plan"
SAVED = ("saved", "bytes that a device keeps from forward to backward")


@text_of.register
def plan_text(plan: Plan, *, width: int = TEXT_WIDTH) -> str:
    """The plan as plain text."""
    return as_text(render(plan), width=width)


def render(plan: Plan) -> RenderableType:
    """The plan for a terminal."""
    return Group(
        *_layers(plan),
        *_stages(plan),
        *_totals(plan),
        *(f"advice    {line}" for line in advice(plan)),
        *_alternatives(plan),
        *_frontier(plan),
        *_remarks(plan),
    )


# -- layers and stages ----------------------------------------------------------------------------------


def _layers(plan: Plan) -> Iterator[RenderableType]:
    count = plan.pipeline.micro_batches
    part = f"; lines are for one of {count} micro-batches" if count > 1 else ""
    if plan.subject is not None:
        yield str(plan.subject)
    yield f"Plan for {plan.cluster}; mesh {plan.mesh_name}{part}"
    table = Table(box=None, pad_edge=False)
    table.add_column("layer")
    table.add_column("operator", no_wrap=True)
    for axis in plan.mesh.axes:
        table.add_column(axis_heading(plan.mesh.name(axis), plan.axis_size(axis)))
    for heading in ("compute", "communication", "saved"):
        table.add_column(heading, justify="right", no_wrap=True)
    heavy = heavy_layers(plan)
    light = [layer for layer in plan.layers if layer not in heavy]
    blocks = fold_rows([_row(layer) for layer in heavy])
    for name, *cells in _cells(blocks):
        table.add_row(WrappedName(name), *cells)
    for number, kind, layers in small_kinds(light, LIGHT * plan.step_seconds):
        empty = [""] * len(plan.mesh.shape)
        table.add_row(number, kind, *empty, *_sums(layers), style="dim")
    yield table
    yield _legend(heavy, any(isinstance(each, RepeatedRows) for each in blocks), bool(light))


def heavy_layers(plan: Plan) -> list[Layer]:
    """The layers that have a line of their own."""
    limit = LIGHT * plan.step_seconds
    return [layer for layer in plan.layers if layer.flops or _seconds(layer) > limit]


def small_kinds(light: Sequence[Layer], limit: float) -> Iterator[tuple[str, str, list[Layer]]]:
    """Small operators by kind, the dearest first, each with its number and name; those of kinds that come to
    no more than `limit` seconds in all are one row, the last."""
    kinds = dict[str, list[Layer]]()
    for layer in light:
        kinds.setdefault(operator_name(layer.op), []).append(layer)
    seconds = {kind: sum(map(_seconds, layers)) for kind, layers in kinds.items()}
    several = [kind for kind in sorted(kinds, key=lambda kind: -seconds[kind]) if seconds[kind] > limit]
    for kind in several:
        yield f"{len(kinds[kind])} small", kind, kinds[kind]
    others = [layer for kind, layers in kinds.items() if kind not in several for layer in layers]
    if others:
        noun = "operator" if len(others) == 1 else "operators"
        yield f"{len(others)} {'other ' if several else ''}small {noun}", "", others


def _seconds(layer: Layer) -> float:
    return layer.compute + layer.communication


def _row(layer: Layer) -> TableRow:
    cells = (operator_name(layer.op), *splits_of(layer), *_sums([layer]))
    return TableRow(layer.module or layer.name, cells)


def _cells(blocks: Sequence[TableRow | RepeatedRows]) -> Iterator[list[str]]:
    """The cells of each line: folded blocks get a line of their own above those of one of them."""
    for each in blocks:
        if isinstance(each, TableRow):
            yield [each.name, *each.cells]
            continue
        names = f"{each.first} … {each.last}"
        if len(each.rows) == 1:
            yield [f"{names}{each.rows[0].name}", *each.rows[0].cells]
            continue
        yield [f"{names}, each:"]
        for row in each.rows:
            yield [f"  {row.name or '(itself)'}", *row.cells]


def _legend(heavy: Sequence[Layer], folded: bool, light: bool) -> RenderableType:
    words = [*legend(heavy), SAVED]
    if folded:
        words.append(("a … b", "equal blocks, with the numbers of one of them"))
    if light:
        words.append(("small", f"no products, and less than {LIGHT:.1%} of the step each; summed up by kind"))
    return legend_table(words)


def legend_table(words: Sequence[tuple[str, str]]) -> RenderableType:
    """Words and what they mean, below a table."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for number, (word, meaning) in enumerate(words):
        table.add_row("" if number else "legend", word, meaning)
    return table


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
    table.add_column("layers")
    for heading in ("forward", "backward", "hop", "hop back", "gradient sums", "memory"):
        table.add_column(heading, justify="right")
    for number, stage in enumerate(plan.stages):
        layers, *cells = _stage(stage)
        table.add_row(str(number), str(stage.rank), WrappedName(layers), *cells)
    rank = "rank: the devices that hold a stage, by number"
    hop = "hop: seconds until a result is at the next stage, back: a gradient at the one before"
    return ["", table, rank, hop]


def _stage(stage: Stage) -> list[str]:
    seconds = (stage.forward, stage.backward, stage.send_output, stage.send_gradient, stage.sync)
    layers = stage.first if stage.first == stage.last else f"{stage.first} .. {stage.last}"
    shown = [show_seconds(each) if each else "none" for each in seconds]
    return [f"{layers} ({stage.operators})", *shown, show_bytes(stage.nbytes)]


# -- what it takes --------------------------------------------------------------------------------------


def _pipeline(plan: Plan) -> list[str]:
    pipeline = plan.pipeline
    if not pipeline.is_staged:
        return [f"pipeline  {pipeline.micro_batches} micro-batches"] if pipeline.micro_batches > 1 else []
    return [
        f"pipeline  {pipeline.ranks} ranks, {pipeline.num_stages} stages, {pipeline.micro_batches} "
        f"micro-batches, {pipeline.schedule.value}; a rank waits {plan.bubble:.1%} of the step"
    ]


def _totals(plan: Plan) -> list[RenderableType]:
    cap = f" of {show_bytes(plan.memory_cap)}" if plan.memory_cap is not None else ""
    return [
        "",
        *step_lines(plan),
        *_pipeline(plan),
        f"memory    {show_bytes(plan.peak_bytes)}{cap} per device at the peak, "
        f"{show_bytes(plan.state_bytes)} of it weights, gradients and optimizer state",
        *_offload(plan),
        *_on_host(plan),
        f"solver    {how_it_ended(plan.status, plan.gap)}gap {gap_of(plan.gap)}: "
        f"{what_gap_says(plan.gap, plan.scope, staged=plan.pipeline.is_staged)}",
        *_least(plan),
        f"          {plan.sharded_flops_share:.1%} of the {plan.split_unit} are split among devices",
        *trust_lines(plan),
    ]


def _least(plan: Plan) -> Iterator[str]:
    """What bounds plans of all meshes and stages, with as many micro-batches."""
    least = plan.shared_evenly
    if least is not None and LEAST_TOLD * plan.step_seconds <= least < plan.step_seconds:
        more = f"{1 - least / plan.step_seconds:.1%}"
        count = plan.pipeline.micro_batches
        parts = f" of {count} micro-batches" if count > 1 else ""
        yield (
            f"          whatever the mesh and stages, none{parts} is faster by more than {more}: one "
            f"device's operators, shared evenly, take {show_seconds(least)}"
        )


def _on_host(plan: Plan) -> list[str]:
    names = plan.program.on_host
    if not names:
        return []
    return [
        f"host      {show_bytes(plan.host_bytes)} per device of {len(names)} weights, their gradients and "
        f"optimizer state lie in host memory; the step waits {show_seconds(plan.offload_seconds)} for copies"
    ]


def _offload(plan: Plan) -> list[str]:
    if not plan.offloaded:
        return []
    largest = sorted(plan.offloaded, key=lambda item: -item.nbytes)[:MOST_NAMED_OFFLOADS]
    names = ", ".join(f"{item.name} ({show_bytes(item.nbytes)})" for item in largest)
    others = len(plan.offloaded) - len(largest)
    nbytes = sum(item.nbytes for item in plan.offloaded)
    where = "in all stages together" if plan.pipeline.is_staged else "per device"
    return [
        f"offload   {show_bytes(nbytes)} {where} wait for backward in host memory, which takes "
        f"{show_seconds(plan.offload_seconds)} of the step: {names}"
        + (f" and {others} more" if others else "")
    ]


# -- what is beside it ----------------------------------------------------------------------------------


def advice(plan: Plan) -> Iterator[str]:
    """Advice to use one device, if that is as fast."""
    alone = plan.alone
    if alone is not None and alone.step_seconds is not None:
        yield (
            f"use one device: it is predicted to take {show_seconds(alone.step_seconds)} a step, "
            f"no more than all {len(plan.parameter_bytes)} together"
        )


def _alternatives(plan: Plan) -> list[RenderableType]:
    rows = [*([plan.serial] if plan.serial else []), *plan.alternatives]
    if not rows:
        return []
    table = Table(box=None, pad_edge=False)
    for heading in ("strategy", "step", "against it", "peak memory", ""):
        table.add_column(heading, justify="left" if heading in ("strategy", "") else "right")
    table.add_row(TAKEN, show_seconds(plan.step_seconds), "", show_bytes(plan.peak_bytes), "")
    for item in rows:
        table.add_row(*_alternative(item, plan))
    return ["", table]


def _alternative(item: Alternative, plan: Plan) -> list[str]:
    if item.step_seconds is None or item.peak_bytes is None:
        return [item.name, "", "", "", reason_of(item, plan)]
    more = item.step_seconds / plan.step_seconds - 1 if plan.step_seconds else 0.0
    costs = show_seconds(item.step_seconds), f"{more:+.1%}", show_bytes(item.peak_bytes)
    return [item.name, *costs, reason_of(item, plan)]


def reason_of(item: Alternative, plan: Plan) -> str:
    """Why a strategy has no plan, doesn't fit, or isn't taken."""
    if item.step_seconds is None or item.peak_bytes is None:
        return "no plan" + (f": {item.reason}" if item.reason else "")
    reason = item.reason or ("" if item.feasible else "exceeds the memory cap")
    if not reason and item.name == ONE_DEVICE and item.step_seconds <= plan.step_seconds:
        return "the plan is for all devices, as asked"
    return reason


def _frontier(plan: Plan) -> list[RenderableType]:
    """The step's seconds with less memory."""
    frontier = plan.frontier
    if frontier is None or not frontier.points:
        return []
    table = Table(box=None, pad_edge=False)
    for heading in ("memory cap", "step", "against it", "peak memory", ""):
        table.add_column(heading, justify="left" if heading in ("memory cap", "") else "right")
    for point in frontier.points:
        more = point.step_seconds / plan.step_seconds - 1 if plan.step_seconds else 0.0
        costs = show_seconds(point.step_seconds), f"{more:+.1%}", show_bytes(point.peak_bytes)
        table.add_row(_cap(point.memory_cap), *costs, "")
    if frontier.infeasible is not None:
        table.add_row(_cap(frontier.infeasible), "", "", "", "no plan was found")
    caps = "1 lower cap" if frontier.untried == 1 else f"{frontier.untried} lower caps"
    return ["", table, *([f"time was over before {caps}"] if frontier.untried else [])]


def _cap(cap: int | None) -> str:
    return "none" if cap is None else show_bytes(cap)


def _remarks(plan: Plan) -> list[str]:
    found = [f"note      {note}" for note in plan.notes]
    if any(layout != replicated(len(layout)) for layout in plan.program.outputs.values()):
        rows = (f"{name} {show(layout)}" for name, layout in plan.program.outputs.items())
        found.append("outputs   " + ", ".join(rows))
    if plan.gathered_ops:
        found.append("gathered  " + ", ".join(plan.gathered_ops))
    return found
