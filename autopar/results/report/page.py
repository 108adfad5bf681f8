"""A plan as one page of HTML: self-contained, without scripts, and so that nothing is asked of a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from autopar.core.timeline import Timeline
from autopar.core.version import VERSION
from autopar.errors import cut_text
from autopar.results.comparison.measured_steps import MeasuredSteps
from autopar.results.files.whole_file import write_whole
from autopar.results.plan.frontier import Frontier
from autopar.results.plan.plan import Plan
from autopar.results.plan.render_plan import advice
from autopar.results.plan.render_step import trust_lines
from autopar.results.report.figures import LONGEST_NAME, key_figures
from autopar.results.report.frontier_picture import frontier_picture
from autopar.results.report.measured_picture import measured_picture
from autopar.results.report.model_picture import axes_table, model_picture
from autopar.results.report.step_picture import step_picture, strategies_picture
from autopar.results.report.time_picture import memory_picture, time_picture

NOTES = 40  # that are shown, each of so many characters:
NOTE = 4 * LONGEST_NAME


@dataclass(frozen=True, slots=True)
class PageSupplements:
    """Sections of a page beside its plan: the step over time (`autopar.timeline`), the frontier of seconds
    and bytes, and steps that were measured; each as far as it is known."""

    timeline: Timeline | None = None
    frontier: Frontier | None = None
    measured: MeasuredSteps | None = None

    def as_dict(self) -> dict[str, Any]:
        """The frontier and the measured steps as the command line's JSON shows them."""
        return {
            "frontier": self.frontier.as_dict() if self.frontier else None,
            "measured": self.measured.as_dict() if self.measured else None,
        }


NOTHING = PageSupplements()


@dataclass(frozen=True, slots=True)
class WrittenPage:
    """A page that was written: its file and bytes, its plan, and what it shows beside that."""

    path: Path
    nbytes: int
    plan: Plan
    beside: PageSupplements

    def as_dict(self) -> dict[str, Any]:
        """The page as the command line's JSON shows it."""
        return {"report": str(self.path), "bytes": self.nbytes} | self.beside.as_dict()


def page(plan: Plan, beside: PageSupplements = NOTHING) -> str:
    """The page of a plan, with what is known beside it."""
    timeline, frontier, measured = beside.timeline, beside.frontier, beside.measured
    pictures = [
        step_picture(plan),
        measured_picture(plan, measured) if measured else None,
        model_picture(plan),
        time_picture(plan, timeline) if timeline else None,
        memory_picture(plan, timeline) if timeline else None,
        frontier_picture(plan, frontier) if frontier and frontier.points else None,
        strategies_picture(plan),
    ]
    return _template().render(
        plan=plan,
        cluster=cut_text(plan.cluster, NOTE),
        figures=key_figures(plan),
        pictures=[picture for picture in pictures if picture],
        axes=axes_table(plan),
        notes=[cut_text(note, NOTE) for note in (*advice(plan), *_trust(plan), *plan.notes)[:NOTES]],
        missing=list(_missing(plan, beside)),
        version=VERSION,
    )


def write_page(plan: Plan, path: Path, beside: PageSupplements = NOTHING) -> WrittenPage:
    """Write the page of a plan; raises InputError where that cannot be done."""
    text = page(plan, beside)
    write_whole(path, text, where=f"report {path}")
    return WrittenPage(path, len(text.encode()), plan, beside)


def _missing(plan: Plan, beside: PageSupplements) -> Iterator[str]:
    """Sections that the page lacks, and how to get them."""
    if beside.timeline is None:
        yield "Time and memory during the step: the plan's file is older than these; plan again."
    if beside.frontier is None or not beside.frontier.points:
        yield "What less memory would cost: plan by autopar plan TARGET --frontier 30, or report TARGET."
    if plan.serial is None and not plan.alternatives:
        yield "Other strategies: plan without --force."
    if beside.measured is None:
        yield (
            "Measured steps: run autopar compare TARGET --measure --json > measured.json, then "
            "autopar report with --measured measured.json."
        )


def _trust(plan: Plan) -> list[str]:
    """The plan's trust in one sentence."""
    lines = [line.removeprefix("trust").strip() for line in trust_lines(plan)]
    return ["; ".join(line.rstrip(";") for line in lines)]


@cache
def _template() -> jinja2.Template:
    """The template beside this file; it escapes every text that it is given."""
    source = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    settings = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return settings.from_string(source)
