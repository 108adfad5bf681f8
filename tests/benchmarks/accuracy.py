"""How near predictions of `compare --measure` come to timed steps, for the nets of small_nets.py.

python -m tests.benchmarks.accuracy                   all ten on two local processes, some 20 minutes
python -m tests.benchmarks.accuracy llama vit         those alone
python -m tests.benchmarks.accuracy --memory          nothing is timed: predicted beside measured peaks

For each net a line for each row that ran: predicted by measured seconds, and predicted by measured peak
bytes, beside the accuracy that `compare` prints. Each net has a new database, so that nothing is known
before. Let the machine do nothing else meanwhile.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

import autopar
from autopar.cluster import ClusterSpec
from autopar.results.comparison.comparison import Comparison
from tests.benchmarks import small_nets

PROCESSES = 2
FILE = Path(small_nets.__file__)


def compare(name: str, folder: Path, *, measure: bool) -> Comparison:
    """The comparison of one net, whose rows run."""
    target, cluster = f"{FILE}:{name}", ClusterSpec.local(PROCESSES)
    costdb = str(folder / f"{name}.sqlite")
    return autopar.compare(target, cluster, run=True, measure=measure, costdb=costdb)


def lines(found: Comparison, *, timed: bool) -> list[str]:
    """Predicted by measured, for each row that ran."""
    shown = []
    for row in found.rows:
        if row.plan and row.measured:
            memory = row.plan.peak_bytes / row.measured.nbytes
            seconds = f"{row.plan.step_seconds / row.measured.seconds:5.2f} of its step, " if timed else ""
            shown.append(f"  {row.name:14}{seconds}{memory:5.3f} of its peak")
    return shown


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Nets; all if none is named.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Compare peaks alone, by estimates.")] = False,
) -> None:
    """Compare predictions with steps, net by net."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names or [net.__name__ for net in small_nets.NETS]:
            found = compare(name, Path(folder), measure=not memory)
            accuracy = found.accuracy or 0.0
            figures.append(accuracy)
            print(
                name if memory else f"{name}: accuracy {accuracy:.1%}",
                *lines(found, timed=not memory),
                sep="\n",
            )
    if not memory:
        print(f"mean accuracy {mean(figures):.1%}, least {min(figures):.1%}, of {len(figures)} nets")


if __name__ == "__main__":
    typer.run(main)
