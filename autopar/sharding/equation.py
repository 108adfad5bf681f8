"""What an operator computes, as labels on dims: the rule from which every strategy follows.

    conv2d    "n c+ h~ w~, o c+ r. s. -> n o h~ w~"
    linear    "n s i+, o i+ -> n s o"
    bias      "..., ..., o&"      an additive operand: joins a partial sum once

    + contracted   ~ windowed   . whole   % statistic   > scanned   & additive   (none) free   _ no factor

A factor that is sharded on an axis makes every operand that has it `Shard`, every operand that
lacks it `Broadcast`, and every result `Shard` or, if the factor is contracted, `Partial`. A result
that lacks a statistic factor is made of all-reduced statistics: `Replicate`. Along a scanned factor ranks
hand a state on: rows lie as along a free one, but aren't apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from autopar.core.placement import B, P, Placement, R, Shard
from autopar.core.strategy import GATHERED, PARTIAL, UNSUMMED, Option
from autopar.sharding.window import RowMap


class Kind(Enum):
    """Kind of a factor: how an operator combines elements along it, with the mark in equations."""

    FREE = ""
    CONTRACTED = "+"
    WINDOWED = "~"
    WHOLE = "."
    STATISTIC = "%"
    SCANNED = ">"


Labels = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Equation:
    """Labels of every dim of every operand (each use) and result, and the kind of each factor.

    `linear` lists sets of operands in which the operator is jointly linear without a constant
    term: they may be Partial together. `windows` says which input rows a windowed factor needs.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    windows: Mapping[str, RowMap] = field(default_factory=dict)

    def kind(self, factor: str) -> Kind:
        return self.kinds.get(factor, Kind.FREE)

    def factors(self) -> tuple[str, ...]:
        """Every factor that can be sharded, in order of appearance."""
        seen = [label for labels in (*self.operands, *self.results) for label in labels if label]
        return tuple(label for label in dict.fromkeys(seen) if self.kind(label) is not Kind.WHOLE)


def parse(text: str, **rest: object) -> Equation:
    """Read an equation such as `"n i+, o i+, o& -> n o"`."""
    kinds: dict[str, Kind] = {}
    additive: set[int] = set()

    def labels(part: str, position: int | None) -> Labels:
        found: list[str | None] = []
        for word in part.split():
            name = word.rstrip("+~.%>&")
            if "&" in word and position is not None:
                additive.add(position)
            for mark in set(word[len(name) :]) - {"&"}:
                kinds[name] = Kind(mark)
            if not name:  # a lone &: an additive operand without dims
                continue
            found.append(None if name == "_" else name)
        return tuple(found)

    left, _, right = text.partition("->")
    operands = tuple(labels(part, index) for index, part in enumerate(left.split(",")))
    results = tuple(labels(part, None) for part in right.split(","))
    return Equation(operands, results, kinds, frozenset(additive), **rest)  # type: ignore[arg-type]


def unsharded_options(
    num_operands: int, num_results: int, linear: tuple[frozenset[int], ...]
) -> list[Option]:
    """The options that every operator has: gathered, unsummed, and partial where it is linear."""
    options = [
        Option(GATHERED, (R,) * num_operands, (R,) * num_results),
        Option(UNSUMMED, (B,) * num_operands, (B,) * num_results),
    ]
    for together in linear:
        operands = tuple(P if index in together else B for index in range(num_operands))
        options.append(Option(PARTIAL, operands, (P,) * num_results))
    return options


def sharded_option(equation: Equation, factor: str, atom: int) -> Option:
    """The option that shards atom `atom` of `factor`."""
    contracted = equation.kind(factor) is Kind.CONTRACTED
    made: dict[Kind, Placement] = {Kind.CONTRACTED: P, Kind.STATISTIC: R}
    lacking = made.get(equation.kind(factor), B)

    def place(labels: Labels, otherwise: Placement) -> Placement:
        return Shard(labels.index(factor), atom) if factor in labels else otherwise

    operands = tuple(
        place(labels, P if contracted and index in equation.additive else B)
        for index, labels in enumerate(equation.operands)
    )
    results = tuple(place(labels, lacking) for labels in equation.results)
    name = f"{factor}.{atom}" if atom else factor
    return Option(name, operands, results)
