"""A better plan from a good one, a window of operators at a time.

    operators      embed  [ln  qkv  attn  proj]  add  ln  fc ...
    may run as      few           any            few             a small program: no plan in it is lost

Inside the window every strategy is allowed, and every layout of the inputs used there; outside it only
what a first guess left over, and what the plan has. So no answer is slower than the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.core.graph import Graph
from autopar.core.plan import Program
from autopar.errors import InfeasibleError, SolverError
from autopar.ilp.choose import Solution
from autopar.ilp.fold import Folding
from autopar.ilp.placement import Space

WINDOW = 16  # classes of operators, half of which are in the next window as well

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Improver:
    """All plans are in `space`; `few` is what is left of it outside of windows."""

    graph: Graph
    space: Space
    few: Space
    folding: Folding
    ask: Callable[..., Solution]  # the best plan of a space; see `choose`

    def improve(self, found: Solution, *, enough: float, time_limit: float | None) -> Solution:
        """The plan after one pass, or as soon as it takes no longer than `enough` seconds."""
        deadline = None if time_limit is None else time.monotonic() + time_limit
        for window in windows(list(self.space.strategies)):
            left = None if deadline is None else deadline - time.monotonic()
            if found.seconds <= enough or (left is not None and left <= 0):
                break
            try:
                better = self.ask(self.opened(window, found.program), bounded=False, time_limit=left)
            except (InfeasibleError, SolverError):
                continue  # not for want of a plan, there is one: for want of time
            found = min(found, better, key=lambda each: each.seconds)
        return found

    def opened(self, window: Set[str], program: Program) -> Space:
        """The space of one window."""
        touched = {
            name
            for item in self.graph.operators
            if self.folding.class_of[item.name] in window
            for name in item.operands
        }
        return replace(
            self.space,
            strategies=_opened(self.space.strategies, self.few.strategies, program.strategies, window),
            inputs=_opened(self.space.inputs, self.few.inputs, program.inputs, touched),
            outputs=_opened(self.space.outputs, self.few.outputs, program.outputs, frozenset()),
        )


def windows(names: Sequence[str], size: int = WINDOW) -> Iterator[frozenset[str]]:
    """Runs of `size` names, each of which begins in the middle of the one before."""
    for first in range(0, max(1, len(names) - size // 2), size // 2):
        yield frozenset(names[first : first + size])


def _opened(
    whole: Mapping[str, Sequence[Item]],
    few: Mapping[str, Sequence[Item]],
    chosen: Mapping[str, Item],
    window: Set[str],
) -> dict[str, Sequence[Item]]:
    return {
        name: items if name in window else _among(items, (*few[name], chosen[name]))
        for name, items in whole.items()
    }


def _among(items: Sequence[Item], kept: Iterable[Item]) -> list[Item]:
    """Those that are kept, in the order of all."""
    wanted = set(kept)
    return [item for item in items if item in wanted]
