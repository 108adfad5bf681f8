"""What a page shows, as data: figures that name their place in the plan's JSON, tables, and bars.

    seconds of a bar     |=====batch=====|..communication..|        0 to WHOLE from left to right

A bar is drawn as wide as the page allows. Its pieces have a class, which is a colour of the template, and a
title; so what a colour says is said in words as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.errors import cut_text
from autopar.results.plan.plan import Plan
from autopar.results.plan.plan_words import how_it_ended, what_gap_says
from autopar.units import show_bytes, show_seconds

WHOLE = 1000  # units of a bar's length
LONGEST_NAME = 160  # characters of a name


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of the plan: `key` is its path in `Plan.as_dict()`, such as `layers.3.compute_seconds`."""

    key: str
    value: float
    text: str


Cell: TypeAlias = str | Figure


@dataclass(frozen=True, slots=True)
class FigureTable:
    """The table behind a picture; columns of figures are flush right."""

    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    rest: str = ""  # says what is left out


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a bar: from `start`, `length` long, of WHOLE; from `top`, `height` high, of 1."""

    colour: str
    start: float
    length: float
    title: str = ""
    top: float = 0.0
    height: float = 1.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A line of a picture: its name, words beside it, pieces, and what they come to.

    `curve` are points of an area that is filled, from 0 to WHOLE each."""

    name: str
    pieces: tuple[Piece, ...] = ()
    words: str = ""
    figures: tuple[Cell, ...] = ()
    inner: bool = False  # part of the block whose name stands above
    curve: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Spot:
    """A point of a plot: in per cent of its width from the left, and of its height from the top."""

    left: float
    top: float
    colour: str
    title: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Points of two scales, joined by steps; each scale with its name and its ends, and marks between them:
    where, in per cent, and what they say."""

    spots: tuple[Spot, ...]
    across: str
    upwards: str
    marks_across: tuple[tuple[float, str], ...]
    marks_upwards: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """Bars of one scale, or a plot, what their colours mean, and the table behind them."""

    title: str
    about: str
    bars: tuple[Bar, ...]
    colours: tuple[tuple[str, str], ...]  # class and meaning
    table: FigureTable
    rest: str = ""  # says what is left out
    plot: Plot | None = None
    whole: bool = False  # one bar alone, which needs no name, with its table beneath


def seconds(key: str, value: float) -> Figure:
    """A figure of so many seconds."""
    return Figure(key, value, show_seconds(value))


def nbytes(key: str, value: float) -> Figure:
    """A figure of so many bytes."""
    return Figure(key, value, show_bytes(value))


def share(key: str, value: float, digits: int = 0) -> Figure:
    """A figure that is a share, in per cent."""
    return Figure(key, value, f"{value:.{digits}%}")


def named(name: str) -> str:
    """A name as it is shown: whole, unless it would fill the page."""
    return cut_text(name, LONGEST_NAME)


def scale(values: Sequence[float]) -> float:
    """Units of a bar for each of what is drawn, so that the largest value fills it."""
    largest = max(values, default=0.0)
    return WHOLE / largest if largest > 0 else 0.0


def key_figures(plan: Plan) -> list[tuple[str, Cell, str]]:
    """The figures at the head of a page: heading, figure, and what it means."""
    cap = f"of {show_bytes(plan.memory_cap)} " if plan.memory_cap is not None else ""
    error = f" ± {plan.error:.0%}" if plan.error else ""
    return [
        ("Step", seconds("step_seconds", plan.step_seconds), f"predicted{error}: the sum of its parts below"),
        ("Memory", nbytes("peak_bytes", plan.peak_bytes), f"{cap}on the fullest device, at the peak"),
        (
            "State",
            nbytes("state_bytes", plan.state_bytes),
            "of it: weights, gradients and optimizer state",
        ),
        (
            "Gap",
            share("gap", plan.gap, 2),
            how_it_ended(plan.status, plan.gap)
            + what_gap_says(plan.gap, plan.scope, staged=plan.pipeline.is_staged),
        ),
        (
            "Measured",
            share("measured_share", plan.measured_share),
            "of predicted operator time; the rest is estimated",
        ),
        (
            "Split",
            share("sharded_flops_share", plan.sharded_flops_share, 1),
            f"of the {plan.split_unit}, among devices",
        ),
    ]
