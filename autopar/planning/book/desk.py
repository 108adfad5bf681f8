"""Where one search is spared: rank 0 looks into the book first, and has it written on.

    take ── a plan fits ───────────────────────────────┬── order plans for other worlds
      └──── none, or a damaged one ── search ── write ─┘

A run that is started again waits for its plan: without one in the book its search is short.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from autopar.cluster import ClusterSpec
from autopar.errors import SolverError
from autopar.planning.asked.request import Auto, Request
from autopar.planning.book.book import Book, key_of
from autopar.planning.book.orders import ORDERS, PlanOrder
from autopar.planning.book.other_worlds import other_worlds
from autopar.planning.graphs.fitting import check_fits
from autopar.results.plan.plan import Plan
from autopar.trace.export import Traced
from autopar.units import show_seconds

RESTART_SECONDS = 30.0  # of a search at a restart, where nobody gives a time limit


@dataclass(frozen=True, slots=True)
class Desk:
    """One search, and the book beside it, None without one; `notes` are what to say of both, on rank 0.

    `trace` gives the graph, each time the same. With `auto` the plan is one for parts of it, whose number is
    to be chosen.
    """

    book: Book | None
    trace: Callable[[], Traced]
    request: Request
    cluster: ClusterSpec
    costdb: str | None
    auto: Auto | None = None
    notes: list[str] = field(default_factory=list)

    def take(self) -> Plan | None:
        """The plan of the book, if there is one."""
        assert self.book is not None
        fits = partial(check_fits, traced=self.trace()) if self.auto is None else None
        taken = self.book.take(self._key(self.cluster), self.cluster, fits)
        self.notes.extend(taken.notes)
        if taken.plan is not None:
            self._order(self.book)
            return self._noted(taken.plan)
        return None

    def search(self, find: Callable[[Request], Plan]) -> Plan:
        """What is found for the request, which is written into the book."""
        if self.book is None:
            return find(self.request)
        in_haste = self.book.is_restart and self.request.time_limit is None
        plan = self._in_time(find) if in_haste else find(self.request)
        self._say(self.book.write(self._key(self.cluster), plan, for_restarts=in_haste))
        self._order(self.book)
        return self._noted(plan)

    def _in_time(self, find: Callable[[Request], Plan]) -> Plan:
        """What is found in the time that a restart has, or else in as much as it takes."""
        self._say(
            f"book: no plan for {self.cluster.devices} was there; it was searched now, for at most "
            f"{show_seconds(RESTART_SECONDS)}, as the run waits: --time-limit says otherwise"
        )
        try:
            return find(replace(self.request, time_limit=RESTART_SECONDS))
        except SolverError:
            return find(self.request)

    def _order(self, book: Book) -> None:
        """Order plans for other worlds, of a first call: where later ones find tensors differs in each."""
        folder = os.environ.get(ORDERS, "")
        lies = self.request.stored is not None or self.request.user_layouts is not None
        if not folder or lies or self.request.meshes or self.auto:
            return
        keys = ((self._key(other), other) for other in other_worlds(self.cluster, os.environ))
        missing = tuple(pair for pair in keys if not book.has(pair[0]))
        if not missing:
            return
        order = PlanOrder(self.trace().graph, self.request, self.cluster, missing, self.costdb, book.folder)
        try:
            order.write(Path(folder))
        except (OSError, pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            self._say(f"book: no plans are made ahead for other numbers of ranks: {error}")

    def _key(self, cluster: ClusterSpec) -> str:
        return key_of(self.trace().graph, (self.request, self.auto), cluster)

    def _say(self, note: str) -> None:
        if note:
            self.notes.append(note)

    def _noted(self, plan: Plan) -> Plan:
        return replace(plan, notes=(*plan.notes, *self.notes))
