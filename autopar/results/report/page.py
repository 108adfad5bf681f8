"""A plan as one page of HTML: self-contained, without scripts, and so that nothing is asked of a network."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2

from autopar.core.timeline import Timeline
from autopar.core.version import VERSION
from autopar.errors import cut_text
from autopar.results.plan import Plan
from autopar.results.render_plan import advice
from autopar.results.render_step import trust_lines
from autopar.results.report.figures import LONGEST, Picture, key_figures
from autopar.results.report.model_picture import axes_table, model_picture
from autopar.results.report.step_picture import step_picture, strategies_picture
from autopar.results.report.time_picture import memory_picture, time_picture
from autopar.results.whole_file import write_whole

NOTES = 40  # that are shown, each of so many characters:
NOTE = 4 * LONGEST


def page(plan: Plan, timeline: Timeline | None = None) -> str:
    """The page of a plan; of one with stages, `timeline` is what `autopar.api.timeline` makes of it."""
    pictures: list[Picture | None] = [step_picture(plan), model_picture(plan)]
    if timeline is not None:
        pictures += [time_picture(plan, timeline), memory_picture(timeline)]
    pictures.append(strategies_picture(plan))
    return _template().render(
        plan=plan,
        cluster=cut_text(plan.cluster, NOTE),
        figures=key_figures(plan),
        pictures=[picture for picture in pictures if picture],
        axes=axes_table(plan),
        notes=[cut_text(note, NOTE) for note in (*advice(plan), *_trust(plan), *plan.notes)[:NOTES]],
        version=VERSION,
    )


def write_page(plan: Plan, path: Path, timeline: Timeline | None = None) -> int:
    """Write the page of a plan, and return its bytes; raises InputError where that cannot be done."""
    text = page(plan, timeline)
    write_whole(path, text, where=f"report {path}")
    return len(text.encode())


def _trust(plan: Plan) -> list[str]:
    """What may be trusted, in one sentence."""
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
