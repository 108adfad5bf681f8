"""Plans on more and more devices as text: a line for each number, then how many are worth it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from autopar.results.comparison.scaling import Scaled, Scaling
from autopar.results.plan.plan import Plan
from autopar.results.plan.plan_words import gap_of
from autopar.units import show_bytes, show_seconds

ABSENT = "-"


def render_scaling(found: Scaling) -> RenderableType:
    """The table for a terminal."""
    table = Table(title="The same batch on more devices", box=None, pad_edge=False)
    table.add_column("devices", justify="right")
    table.add_column("plan", no_wrap=True)
    for heading in ("step", "speed-up", "efficiency", "peak memory", "gap"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in found.rows:
        table.add_row(*_cells(found, row), style=None if row.plan else "dim")
    return Group(table, *_advice(found))


def _cells(found: Scaling, row: Scaled) -> list[str]:
    speed_up, efficiency = found.speed_up(row), found.efficiency(row)
    if row.plan is None or speed_up is None or efficiency is None:
        return [str(row.devices), *[ABSENT] * 6, row.reason or ""]
    return [
        str(row.devices),
        _placed(row.plan),
        show_seconds(row.plan.step_seconds),
        f"{speed_up:.2f}",
        f"{efficiency:.0%}",
        show_bytes(row.plan.peak_bytes),
        gap_of(row.plan.gap),
        "",
    ]


def _placed(plan: Plan) -> str:
    """The mesh, and the stages if there are any."""
    pipeline = plan.pipeline
    if not pipeline.is_staged:
        return f"mesh {plan.mesh}"
    return f"{pipeline.ranks} stages of mesh {plan.mesh_name}, {pipeline.micro_batches} micro-batches"


def _advice(found: Scaling) -> list[str]:
    worth, fastest = found.worth, found.fastest
    if worth is None or fastest is None:
        return ["no number of devices has a plan"]
    if worth is found.planned[0]:
        half = "no further device does half of its work"
    else:
        half = f"up to {worth.devices} each further device does at least half of its work"
    return [f"fastest on {fastest.devices}; {half}; as predicted, for the batch of TARGET"]
