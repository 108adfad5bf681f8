"""Training on big graphs: two processes beside two halves of the work, and four hosts at 1 Gbit/s.

    python -m tests.benchmarks.graph_training halves            R-MAT, 2^18 vertices, 2^22 edges, two widths
    python -m tests.benchmarks.graph_training hosts             a clustered graph and R-MAT; as root
    python -m tests.benchmarks.graph_training halves --scale 14 --edges 18 --widths 64 --rounds 5

`halves` divides the seconds of two processes that each train on half the vertices and edges and exchange
nothing by those of the plan's step. `hosts`, in network namespaces, compares the plan with products that
gather all rows, and with those that exchange the rows that are needed, and counts what hosts send.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from autopar.cluster import ClusterSpec, Link
from autopar.runtime.launch.launch import run_function
from tests.benchmarks.allocators import ALLOCATORS, environment
from tests.benchmarks.graph_contest import GATHER, HALF, NEEDED, PLAN, Found, Shape, contest
from tests.benchmarks.namespaces import hosts as make_hosts
from tests.benchmarks.namespaces import run_on_hosts
from tests.benchmarks.statistics import ratio

HOSTS, RATE = 4, "1gbit"
LINK = Link(latency=200e-6, bandwidth=125e6)
Rounds = Annotated[int, typer.Option(min=5, help="in each of which every contender takes a step")]
Widths = Annotated[list[int] | None, typer.Option(help="of features; 64 and 256")]
Measure = Annotated[bool, typer.Option(help="operators and links before plans are made")]
Scale = Annotated[int, typer.Option(help="2 to this are the vertices")]
Edges = Annotated[int, typer.Option(help="2 to this are the edges")]
app = typer.Typer(help=__doc__)


def table(shape: Shape, found: Sequence[Found], pairs: Sequence[tuple[str, str]]) -> Table:
    """Seconds, bytes and the ratios of pairs: the first one's seconds by the second one's."""
    first = found[0]
    timed = first.timed
    ratios = [
        f"{one} / {other}: {paired.median:.3f} (95 %: {paired.low:.3f} to {paired.high:.3f}) of {unit}"
        for one, other in pairs
        for unit, laps in (("seconds", timed.seconds), ("processor seconds", timed.cpu_seconds))
        for paired in [ratio(laps[one], laps[other])]
    ]
    title = f"{shape.graph}, 2^{shape.scale} vertices, 2^{shape.edges} edges, width {shape.width}"
    resident = f"largest resident set: {max(each.resident for each in found) / 1e9:.2f} GB"
    columns = ("contender", "step", "predicted", "processor", "sent by a host", "made in", "split")
    made = Table(*columns, title=title, caption="\n".join([*ratios, resident]), box=None)
    for name, seconds in timed.seconds.items():
        predicted = timed.predicted[name]
        sent = sum(each.sent.get(name, 0) for each in found) / len(found)
        made.add_row(
            name,
            f"{1000 * median(seconds):,.0f} ms",
            "" if predicted is None else f"{1000 * predicted:,.0f} ms",
            f"{1000 * median(timed.cpu_seconds[name]):,.0f} ms",
            f"{sent / 1e6:.2f} MB" if sent else "",
            f"{first.planning[name]:.1f} s",
            first.splits.get(name, ""),
        )
    return made


@contextmanager
def _costs(measure: bool) -> Iterator[str | None]:
    """A database for what is measured, None where nothing is."""
    with tempfile.TemporaryDirectory(prefix="autopar-graphs-") as folder:
        yield str(Path(folder) / "costs.sqlite") if measure else None


def _load() -> str:
    return " ".join(f"{each:.1f}" for each in os.getloadavg())


@app.command()
def halves(
    scale: Scale = 18,
    edges: Edges = 22,
    widths: Widths = None,
    graph: Annotated[str, typer.Option(help="rmat or clustered")] = "rmat",
    rounds: Rounds = 10,
    *,
    measure: Measure = True,
) -> None:
    """Two processes of this machine: the plan beside two halves that exchange nothing."""
    before, console = _load(), Console(width=140)
    with _costs(measure) as costdb, environment(ALLOCATORS["tuned"]):
        for width in widths or [64, 256]:
            shape = Shape(graph, scale, edges, width)
            found = run_function(contest, 2, shape, (PLAN, HALF), rounds, ClusterSpec.local(2), costdb)
            console.print(table(shape, found, [(HALF, PLAN)]))
    console.print(f"load of {os.cpu_count()} cores before: {before}; after: {_load()}")


@app.command()
def hosts(
    scale: Scale = 14,
    edges: Edges = 18,
    widths: Widths = None,
    graphs: Annotated[list[str] | None, typer.Option(help="clustered and rmat")] = None,
    rounds: Rounds = 10,
    *,
    measure: Measure = True,
) -> None:
    """Four hosts at 1 Gbit/s: the plan beside gathered and needed rows."""
    before, console = _load(), Console(width=140)
    share = (os.cpu_count() or 1) / HOSTS
    cluster = ClusterSpec(nodes=HOSTS, devices_per_node=1, cores=share, inter=LINK)
    with (
        _costs(measure) as costdb,
        environment(ALLOCATORS["tuned"]),
        make_hosts(HOSTS, rate=RATE) as made,
    ):
        for graph in graphs or ["clustered", "rmat"]:
            for width in widths or [64, 256]:
                shape = Shape(graph, scale, edges, width)
                found = run_on_hosts(contest, made, shape, (PLAN, GATHER, NEEDED), rounds, cluster, costdb)
                console.print(table(shape, found, [(GATHER, PLAN), (GATHER, NEEDED)]))
    console.print(f"load of {os.cpu_count()} cores before: {before}; after: {_load()}")


if __name__ == "__main__":
    app()
