"""What a stage holds in and between the halves of a split backward, in tables over pairs of cuts.

    first half    gradients of inputs        saved up to an operator, behind it what gradients of weights need
    between                                  what they need: taken values, and gradients of results
    second half   gradients of weights

Of a stage that doesn't split cleanly the first half is all of backward (runtime/execute/stage.py), and so it
is of the first stage, which has no gradients of inputs to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.core.graph import Graph, InputKind
from autopar.cost.interval_table import Rectangles, Row, Table
from autopar.cost.program.storages import Footing
from autopar.cost.program.values import Values


@dataclass(frozen=True, slots=True)
class Halves:
    """Bytes of the stage from `places[p]` to `places[q]`: `held` by each micro-batch between the halves, with
    what it received and sent; needed by a first half beside what is saved, `working` and `early` as those of
    `Intervals`. Where it makes gradients of weights, other actions need `made` from the start instead of
    what is early. A forward or a second half alone needs `apart` and `apart_early`."""

    held: Table
    working: Table
    early: Table
    made: Table
    apart: Table
    apart_early: Table


@dataclass(frozen=True, slots=True)
class WholeBackward:
    """Bytes where backward isn't split: `saved` by a micro-batch in flight, needed beside it (`working`, and
    `early` at the first backward), of `gradients`, and of the `largest` where others are there before. At
    each place `most` are needed beside what is saved, `ahead` in forward."""

    saved: Table
    working: Table
    early: Table
    gradients: Table
    largest: Table
    most: Row
    ahead: Row

    @property
    def none(self) -> Table:
        return np.zeros_like(self.saved)


def halves(
    graph: Graph, values: Values, found: Footing, places: Sequence[int], backward: WholeBackward
) -> Halves:
    """Split backward in every stage in which weights and inputs part."""
    saved, working, early = backward.saved, backward.working, backward.early
    gradients, most = backward.gradients, backward.most
    between = Rectangles(places)
    for place, (own, held) in enumerate(zip(found.own_for_weights, found.held, strict=True)):
        between.add(-1, place, float(own + held))
    for storage in found.saved:
        between.add_each(storage.for_weights, float(storage.nbytes))
    total, whole = between.total(), ~splits_cleanly(graph, values, places)
    later = whole.copy()
    later[0] = False  # there the halves follow each other
    apart = np.maximum(beside(saved, backward.ahead, backward.none), backward.largest)
    return Halves(
        held=np.where(whole, 0.0, total),
        working=np.where(whole, working, beside(saved, most, total)),
        early=np.where(whole, early, beside(saved, most, total)),
        made=np.where(later, np.maximum(early, working + gradients), early),
        apart=apart,
        apart_early=np.where(later, apart + gradients, np.maximum(apart, gradients)),
    )


def splits_cleanly(graph: Graph, values: Values, places: Sequence[int]) -> NDArray[np.bool_]:
    """Whether `runtime/execute/stage.py` splits the backward of a stage [p, q]: each of its weights meets
    what it received, in one operator."""
    faults, since = Rectangles(places), _since(graph, values)
    for item in graph.inputs:
        if item.kind is InputKind.PARAMETER and item.spec.requires_grad:
            users = values.source(item.name).carriers
            for user in users:
                faults.add_first(since[user], user, 1.0)
            for one, other in pairwise(users):
                faults.add_first(one, other, 1.0)
    clean: NDArray[np.bool_] = faults.total() == 0
    clean[0] = False
    return clean


def _since(graph: Graph, values: Values) -> list[int]:
    """For each operator the last place where a stage may begin that makes what its operands depend on. Only
    what learns counts."""
    found: list[int] = []
    for place, item in enumerate(graph.operators):
        makers = (
            values.source(name).maker
            for name in item.operands
            if graph.specs[name].requires_grad and name not in values.free
        )
        found.append(min((found[maker] for maker in makers if maker >= 0), default=place))
    return found


def beside(saved: Table, working: Row, behind: Table) -> Table:
    """The most that a stage [p, q] needs beyond what it saved while operators [j, j + 1] run.

    For j in [p, q): what those up to there keep, `working` [j], and what is there of those `behind`."""
    most = np.zeros_like(saved)
    for j, bytes_here in enumerate(working):
        moments = (saved[: j + 1, j + 1] + bytes_here)[:, None] + behind[j + 1, j + 1 :][None, :]
        np.maximum(most[: j + 1, j + 1 :], moments, out=most[: j + 1, j + 1 :])
    return np.triu((most - saved).clip(min=0.0), 1)
