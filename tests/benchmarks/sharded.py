"""Four hosts at 1 Gbit/s, most of a step communication: exchanges that start early, and exchanges that don't.

python -m tests.benchmarks.sharded                      as root; some minutes
python -m tests.benchmarks.sharded weights --rounds 20  one part: weights, sums or tensor

In network namespaces, with the parts and contenders of `tests.benchmarks.sharded_contest`. Each contender
first trains a few steps, and the run fails unless the loss of each is the serial model's; then all are timed
in turn. Hosts share this machine's cores with whatever else runs there: the load is printed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.benchmarks import host_contest
from tests.benchmarks.allocators import ALLOCATORS, environment
from tests.benchmarks.namespaces import hosts, run_on_hosts
from tests.benchmarks.sharded_contest import PARTS, RATIOS, PartFigures, contest
from tests.benchmarks.statistics import ratio

RATE = "1gbit"
ROUNDS = 10


def table(part: str, found: PartFigures) -> Table:
    shape, timed = PARTS[part], found.timed
    about = f"{shape.blocks} blocks of width {shape.hidden}, {shape.count} x {shape.sequence} characters"
    cap = f", at most {found.cap / 1e6:.1f} MB" if found.cap else ""
    ratios = [
        f"{one} / {other}: {paired.median:.3f} (95 %: {paired.low:.3f} to {paired.high:.3f})"
        for one, other in RATIOS[part]
        for paired in [ratio(timed.seconds[one], timed.seconds[other])]
    ]
    columns = ("contender", "step", "predicted", "of it communication", "processor", "peak")
    made = Table(*columns, title=f"{part}: {about}{cap}", caption="\n".join(ratios))
    for name, peak in found.peaks.items():
        if name not in timed.seconds:
            made.add_row(name, "doesn't fit", "", "", "", f"{peak / 1e6:.1f} MB")
            continue
        made.add_row(
            name,
            _milliseconds(median(timed.seconds[name])),
            _milliseconds(timed.predicted[name]),
            f"{found.exchanged[name]:.0%}" if name in found.exchanged else "",
            _milliseconds(median(timed.cpu_seconds[name])),
            f"{peak / 1e6:.1f} MB",
        )
    return made


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.0f} ms"


def _load() -> str:
    return " ".join(f"{each:.1f}" for each in os.getloadavg())


def main(
    parts: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(PARTS)}; all")] = None,
    *,
    rounds: Annotated[
        int, typer.Option(min=5, help="in each of which every contender takes a step")
    ] = ROUNDS,
) -> None:
    """Time training on four hosts, with exchanges that start early and without."""
    names = tuple(parts or PARTS)
    if unknown := set(names) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; wanted some of {', '.join(PARTS)}")
    before, console = _load(), Console(width=110)
    with (
        tempfile.TemporaryDirectory(prefix="autopar-sharded-") as folder,
        environment(ALLOCATORS["tuned"]),
        hosts(host_contest.HOSTS, rate=RATE) as made,
    ):
        for part in names:
            found = run_on_hosts(contest, made, part, rounds, str(Path(folder) / "costs.sqlite"))[0]
            console.print(table(part, found))
    console.print(f"load of {os.cpu_count()} cores before: {before}; after: {_load()}")


if __name__ == "__main__":
    typer.run(main)
