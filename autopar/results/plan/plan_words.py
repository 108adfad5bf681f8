"""The words of a printed plan: how an operator is split, in a reader's terms, and what each term means.

A cell of the table says how one axis splits an operator:

    batch n           each device of the axis computes some of the samples
    domain h          each has a part of every image, here some of its rows
    filter dim 1      each makes some output channels, here of dim 1 of what the operator gives
    experts own       each has some experts of a mixture
    whole             all devices of the axis compute the same
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

WHOLE = "whole"
KINDS = {
    "batch": "some of the samples",
    "domain": "a part of every sample (its space or sequence)",
    "filter": "some output channels, and their weights",
    "channel": "some input channels, and their weights; their results are summed",
    "experts": "some experts of a mixture, and their weights",
}
FACTORS = {
    "n": "samples",
    "o": "output channels",
    "c": "channels",
    "i": "input channels",
    "d": "depth",
    "h": "height, or heads",
    "w": "width",
    "q": "queries, which all keys meet",
    "k": "keys, of which each device has some for all queries; results are merged",
    "ring": "queries and keys: keys travel between the devices of the axis",
    "r": "rows, of which only those that are read are exchanged",
    "experts": "experts, to whose devices rows travel and from which results come back",
    "own": "experts, each device's own on the rows that all have; results are summed",
    "hidden": "channels inside of experts; results are summed",
}
DIM = re.compile(r"([a-z])(\d+)((?:\.\d+)?)")  # d1, or d1.0: the first of the sizes that make up dim 1
SPACE = 2  # the dim at which s0, space behind samples and channels, begins
UNKNOWN = "unknown"
NO_BOUND = 0.995  # from this gap on nothing was proved that says more than a step of 0 s


class AxisSplit(Protocol):
    """An operator's split on each axis: a factor and its kind, or none."""

    @property
    def strategy(self) -> tuple[str | None, ...]: ...

    @property
    def kinds(self) -> tuple[str | None, ...]: ...


def split_of(kind: str | None, factor: str | None) -> str:
    """An operator's split on one axis, in words."""
    return f"{kind} {factor_name(factor)}" if kind and factor else WHOLE


def factor_name(factor: str) -> str:
    """A factor as it is printed: those that are numbered dims as such; size 0 isn't named."""
    name = factor.removesuffix(".0")
    dim = DIM.fullmatch(name)
    if dim is None:
        return name
    letter, number, size = dim.groups()
    if letter == "h":
        return f"normalized dim {number}{size}"
    return f"dim {int(number) + (SPACE if letter == 's' else 0)}{size}"


def splits_of(layer: AxisSplit) -> list[str]:
    """An operator's split on each axis, in words."""
    return [split_of(kind, factor) for kind, factor in zip(layer.kinds, layer.strategy, strict=True)]


def legend(layers: Iterable[AxisSplit]) -> list[tuple[str, str]]:
    """The words of the table, of those that are in it, and what they mean."""
    own = list(layers)
    kinds = {kind for layer in own for kind in layer.kinds if kind}
    factors = {factor_name(factor) for layer in own for factor in layer.strategy if factor}
    found = [(kind, f"each device of the axis has {KINDS[kind]}") for kind in KINDS if kind in kinds]
    if any(None in layer.strategy for layer in own):
        found.append((WHOLE, "every device of the axis computes all of it"))
    letters = {factor.partition(".")[0] for factor in factors}
    along = [f"{letter} {meaning}" for letter, meaning in FACTORS.items() if letter in letters]
    if any(factor.startswith("dim ") for factor in factors):
        along.append("dim k of the operator's tensors, from 0")
    if any("." in factor for factor in factors):
        along.append(
            "x.k size k, from 0, of those whose product x is, as 3 x heads x head size of a projection"
        )
    return [*found, ("along", ", ".join(along))] if along else found


def axis_heading(name: str, size: int | str) -> str:
    """The heading of a mesh axis."""
    return f"axis {name} ({size})"


def operator_name(op: str) -> str:
    """An operator of torch or autopar by its name alone; one of others without the default overload."""
    if op.startswith(("aten.", "autopar")):
        return op.split(".")[1]
    return op.removesuffix(".default")


def gap_of(gap: float) -> str:
    """A gap as it is printed."""
    return UNKNOWN if gap >= NO_BOUND else f"{gap:.2%}"


def how_it_ended(status: str, gap: float) -> str:
    """The end of the search in words, with a comma; "" where the gap says it all."""
    if status == "time_limit":
        return "stopped by the time limit, "
    return "optimal, " if status == "optimal" and gap_of(gap) == gap_of(0.0) else ""


def what_gap_says(gap: float, scope: str = "", *, staged: bool) -> str:
    """The promise that a plan's gap makes, in words."""
    if gap >= NO_BOUND:
        return "no bound was found, so how much faster a plan may be isn't known"
    covered = " (of those that a note names)" if staged else ""
    return f"by these predictions no plan {scope and scope + ' '}is faster by more{covered}"
