"""Tells people what autopar found; importing the package registers how each result prints.

plan          a plan: its data, its laws in words, and its text
comparison    strategies and scales side by side, as data and text
difference    two plans beside each other, as data and text
explanation   why a plan is as it is, and what the doctor found, as data and text
files         results as files: JSON, its schema, and text
progress      how far a search is
report        a plan as one page of HTML
"""

from autopar.results.comparison import render_comparison
from autopar.results.difference import render_difference
from autopar.results.explanation import render_examination, render_explanation
from autopar.results.plan import render_plan
from autopar.results.report import notebook

__all__ = [
    "notebook",
    "render_comparison",
    "render_difference",
    "render_examination",
    "render_explanation",
    "render_plan",
]
