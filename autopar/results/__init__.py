"""What autopar tells people; importing the package registers how each result prints."""

from autopar.results import render_comparison, render_plan

__all__ = ["render_comparison", "render_plan"]
