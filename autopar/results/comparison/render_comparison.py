"""A comparison as text: a line for each strategy, then how well predictions and measurements agree."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from autopar.results.comparison.comparison import Comparison, Row
from autopar.results.files.text import as_text, text_of
from autopar.results.plan.plan import Plan
from autopar.results.plan.render_step import parts_of
from autopar.units import show_bytes, show_seconds

ABSENT = "-"
LEGEND = (
    "step: beside compute and communication the optimizer, and where there are stages their waits",
    "devices: the most on which every layer is still split",
)


@text_of.register
def comparison_text(found: Comparison) -> str:
    """The comparison as plain text."""
    return as_text(render_comparison(found))


def render_comparison(found: Comparison) -> RenderableType:
    """The comparison for a terminal."""
    return Group(_rows(found), *LEGEND, *_figures(found))


def _rows(found: Comparison) -> Table:
    table = Table(title=f"Strategies on {found.cluster}", box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("mesh", no_wrap=True)
    measured = ("measured", "its peak") if found.is_measured else ()
    for heading in ("step", "compute", "communication", "memory", *measured, "devices"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in found.rows:
        style = None if row.feasible else "dim"
        remark = "chosen" if row.name == found.chosen else row.reason or ""
        table.add_row(*_cells(row, measured=found.is_measured), remark, style=style)
    return table


def _cells(row: Row, *, measured: bool) -> list[str]:
    limit = ABSENT if row.device_limit is None else f"<= {row.device_limit}"
    ran = [ABSENT, ABSENT]
    if row.measured:
        ran = [show_seconds(row.measured.seconds), show_bytes(row.measured.nbytes)]
    return [row.name, *_predicted(row.plan), *(ran if measured else []), limit]


def _predicted(plan: Plan | None) -> list[str]:
    if plan is None:
        return [ABSENT] * 5
    parts = parts_of(plan)
    compute, exchanged = parts.compute + parts.recompute, parts.communication + parts.hops + parts.sums
    seconds = map(show_seconds, (plan.step_seconds, compute, exchanged))
    return [_mesh(plan), *seconds, show_bytes(plan.peak_bytes)]


def _mesh(plan: Plan) -> str:
    """The mesh, or the stages with how many micro-batches follow each other in which schedule."""
    pipeline = plan.pipeline
    if not pipeline.is_staged:
        return str(plan.mesh)
    return f"{pipeline.num_stages} stages, {pipeline.micro_batches} x {pipeline.schedule.value}"


def _figures(found: Comparison) -> list[str]:
    if not found.is_measured:
        return []
    accuracy, order, regret = found.accuracy, found.rank_correlation, found.regret
    return [
        "",
        f"accuracy  {ABSENT if accuracy is None else f'{accuracy:.1%}'} of predicted step times",
        f"order     {ABSENT if order is None else f'{order:.2f}'} rank correlation",
        f"regret    {ABSENT if regret is None else f'{regret:.1%}'} of the chosen plan over the fastest row",
    ]
