"""A plan in a notebook: its key figures as a short table."""

from __future__ import annotations

from html import escape

from autopar.results.files.text import html_of
from autopar.results.plan.plan import Plan
from autopar.results.report.figures import Figure, key_figures


@html_of.register
def plan_html(plan: Plan) -> str:
    """The key figures of a plan as a table of HTML."""
    lines = "".join(
        f"<tr><th style='text-align:left'>{escape(heading)}</th>"
        f"<td>{escape(found.text if isinstance(found, Figure) else found)}</td>"
        f"<td style='text-align:left'>{escape(meaning)}</td></tr>"
        for heading, found, meaning in key_figures(plan)
    )
    title = f"Plan for {escape(plan.cluster)}; mesh {escape(plan.mesh_name)}"
    return f"<table><caption style='text-align:left'>{title}</caption>{lines}</table>"
