"""Plans for other clusters, ahead of the fault that makes them needed.

    python -m autopar.planning.ahead ORDER PARENT     plans the order in that file; ends with its parent

Nothing is measured, as ranks compute meanwhile. What was measured for the ranks that are there stands in for
what wasn't for fewer: in a copy, so that no later plan takes it for a measurement.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import autopar.ops  # noqa: F401  (what is known of operators)
import autopar.runtime.collectives.placement_moves  # noqa: F401  (and what programs call)
from autopar.cluster import ClusterSpec
from autopar.cost.machine.model import busy_setting, network_of, setting_of
from autopar.errors import AutoparError
from autopar.planning.book.book import Book
from autopar.planning.book.orders import PlanOrder
from autopar.planning.planner import Planner
from autopar.runtime.launch.worker import die_with_parent
from costdb.database import Database


def main(path: Path, parent: int) -> None:
    """Plan an order, one cluster after the other, and write the plans into its book."""
    die_with_parent(parent)
    order = PlanOrder.read(path)
    for key, cluster in order.others:
        try:
            told = _made(order, key, cluster)
        except AutoparError as error:
            told = f"no plan for {cluster.devices} is made ahead: {error}"
        if told:
            print(f"autopar: {told}", file=sys.stderr, flush=True)


def _made(order: PlanOrder, key: str, cluster: ClusterSpec) -> str:
    """Make a plan for a cluster, and write it; words for what went wrong, or none."""
    request = replace(order.request, measure=False)
    with stand_in_costs(order, cluster) as costdb:
        plan = Planner(cluster, request, costdb=str(costdb)).find(order.graph, request)
    return Book(order.book, is_restart=True).write(key, plan, for_restarts=True)


@contextmanager
def stand_in_costs(order: PlanOrder, cluster: ClusterSpec) -> Iterator[Path]:
    """A database of what is known of a cluster's costs; else of those that the order's own has."""
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        path = Path(folder) / "costs.sqlite"
        with Database.open(order.costdb) as known, Database.open(path) as copy:
            for source in (order.cluster, cluster):  # the cluster's own replace those that stand in
                copy.write_operators(busy_setting(cluster), known.operators(busy_setting(source)).values())
                copy.write_collectives(network_of(cluster), known.collectives(network_of(source)))
                if (device := known.device(setting_of(source))) is not None:
                    copy.write_device(setting_of(cluster), device)
        yield path


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stderr.flush()
    os._exit(0)
