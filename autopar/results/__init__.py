"""Tells people what autopar found; importing the package registers how each result prints.

plan                a plan as data
plan_laws           what holds of every plan
step_parts          where the seconds of its step go
render_plan         a plan as text
render_step         the seconds of its step as text
plan_words          the words of a printed plan, and what they mean
wrapped_names       where names of layers break
fold_blocks         equal blocks of a table, printed once
comparison          strategies side by side, as data
render_comparison   as text
frontier            plans under memory caps, as data
measured_steps      what a comparison measured, read from its JSON
scaling             plans on more and more devices, as data
render_scaling      as text
difference          two plans beside each other, as data
render_difference   as text
explanation         why a plan is as it is, as data
render_explanation   as text
examination         what the doctor found, as data
render_examination   as text
draw_timeline       a timeline, as text and for a trace viewer
report              a plan as one page of HTML
announce            what a plan notes, on stderr
notebook_bar        how far it is, in a notebook
progress_bar        how far a long search is, on stderr
codec               plans as files of JSON, and back
schema              the JSON Schema of such files
whole_file          files that are written whole or not at all
text                results print by the renderer of their type
"""

from autopar.results import (
    render_comparison,
    render_difference,
    render_examination,
    render_explanation,
    render_plan,
)
from autopar.results.report import notebook

__all__ = [
    "notebook",
    "render_comparison",
    "render_difference",
    "render_examination",
    "render_explanation",
    "render_plan",
]
