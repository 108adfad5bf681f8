"""An examination as text: a line for each finding, below it what to do, and at the end a sum."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from autopar.results.explanation.examination import Examination, State
from autopar.results.files.text import as_text, text_of

STYLES = {State.OK: "green", State.WARN: "yellow", State.WRONG: "bold red"}


@text_of.register
def examination_text(found: Examination) -> str:
    """The examination as plain text."""
    return as_text(render_examination(found))


def render_examination(found: Examination) -> RenderableType:
    """The examination for a terminal."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found.findings:
        table.add_row(finding.state.value, finding.what, finding.found, style=None)
        table.rows[-1].style = STYLES[finding.state] if finding.state is not State.OK else None
        if finding.remedy:
            table.add_row("", "", f"-> {finding.remedy}")
    return Group(table, "", _sum(found))


def _sum(found: Examination) -> str:
    wrong, warned = found.count(State.WRONG), found.count(State.WARN)
    if not wrong and not warned:
        return "All is well."
    return f"{wrong} wrong, {warned} to look at, {found.count(State.OK)} well."
