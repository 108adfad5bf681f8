"""The command line of the benchmarks.

python -m tests.benchmarks                      all of them, some 30 minutes
python -m tests.benchmarks data-parallel        those whose name starts so
python -m tests.benchmarks --json --rounds 50
python -m tests.benchmarks ablation             no steps: plans of ways that are simpler (ablation.py)
python -m tests.benchmarks published FILE.csv   predictions beside published runs
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autopar.runtime.launch.launch import run_function
from tests.benchmarks import ablation
from tests.benchmarks.allocators import ALLOCATORS, environment
from tests.benchmarks.cases import BENCHMARKS, Benchmark, run
from tests.benchmarks.contest import Timed
from tests.benchmarks.published.__main__ import app as published
from tests.benchmarks.statistics import Ratio, ratio

ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One benchmark under one allocator setting; `theirs` is the fastest of those it competed with."""

    name: str
    allocator: str
    ours: str
    theirs: str
    ratio: Ratio
    cpu_ratio: Ratio
    target: float
    rounds: int
    seconds: dict[str, float]
    predicted: dict[str, float | None]
    left_out: dict[str, float]
    same: dict[str, str]  # which of them run the program of another, and were timed as that


def measure(benchmark: Benchmark, allocator: str, rounds: int, folder: str) -> Row:
    costdb = str(Path(folder) / f"{allocator}.sqlite")  # measurements depend on the allocator
    with environment(ALLOCATORS[allocator]):
        timed = run_function(run, benchmark.processes, benchmark.name, rounds, costdb)[0]
    return evaluate(benchmark, allocator, timed)


def evaluate(benchmark: Benchmark, allocator: str, timed: Timed) -> Row:
    medians = {name: median(seconds) for name, seconds in timed.seconds.items()}
    others = [name for name in benchmark.theirs if name in medians]
    theirs = min(others, key=lambda name: medians[name])
    seconds = timed.seconds
    return Row(
        name=benchmark.name,
        allocator=allocator,
        ours=benchmark.ours,
        theirs=theirs,
        ratio=ratio(seconds[benchmark.ours], seconds[theirs]),
        cpu_ratio=ratio(timed.cpu_seconds[benchmark.ours], timed.cpu_seconds[theirs]),
        target=benchmark.target,
        rounds=len(seconds[theirs]),
        seconds=medians,
        predicted=timed.predicted,
        left_out=timed.left_out,
        same=timed.same,
    )


def table(rows: list[Row]) -> Table:
    found = Table(
        "benchmark",
        "malloc",
        "ratio of steps (95 % interval)",
        "target",
        "",
        "ms measured / predicted",
        title="Times of training steps, medians of paired runs",
    )
    for row in rows:
        figure = f"{row.ratio.median:.3f} ({row.ratio.low:.3f} to {row.ratio.high:.3f})"
        met = "met" if row.ratio.median <= row.target else "missed"
        steps = "\n".join(_step(name, row) for name in row.seconds)
        slow = "".join(f"\n{name} {1000 * each:.0f} (warm-up only)" for name, each in row.left_out.items())
        found.add_row(
            row.name,
            row.allocator,
            f"{figure}\nprocessor time {row.cpu_ratio.median:.3f}\n{row.ours} / {row.theirs}",
            f"{row.target:.3f}",
            met,
            steps + slow,
        )
    return found


def _step(name: str, row: Row) -> str:
    predicted = row.predicted[name]
    figures = f"{name} {1000 * row.seconds[name]:.1f} / " + (f"{1000 * predicted:.1f}" if predicted else "-")
    return figures + (f" (the program of {row.same[name]})" if name in row.same else "")


def main(
    names: Annotated[list[str] | None, typer.Argument(help="benchmarks whose names start so")] = None,
    rounds: Annotated[int, typer.Option(min=5, help="paired runs of each, at least")] = ROUNDS,
    allocator: Annotated[str, typer.Option(help="default, tuned or both")] = "both",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
    costdb: Annotated[str | None, typer.Option(help="folder of cost databases to go on with")] = None,
) -> None:
    """Time autopar's programs beside eager, DistributedDataParallel and each other."""
    if names and names[0] == "ablation":
        ablation.main(names[1:])
        return
    chosen = [item for item in BENCHMARKS if not names or any(item.name.startswith(name) for name in names)]
    if not chosen or allocator not in (*ALLOCATORS, "both"):
        raise typer.BadParameter(
            f"benchmarks: {', '.join(item.name for item in BENCHMARKS)}; allocators: default, tuned, both"
        )
    log = Console(stderr=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="autopar-bench-") as temporary:
        for each in list(ALLOCATORS) if allocator == "both" else [allocator]:
            for benchmark in chosen:
                log.print(f"{benchmark.name}, {each} allocator ...")
                rows.append(measure(benchmark, each, rounds, costdb or temporary))
                log.print(table(rows[-1:]))
    if as_json:
        print(json.dumps({"rows": [_as_dict(row) for row in rows]}))
    else:
        Console().print(table(rows))


def _as_dict(row: Row) -> dict[str, Any]:
    return asdict(row) | {"met": row.ratio.median <= row.target}


if __name__ == "__main__":
    if sys.argv[1:2] == ["published"]:
        published(sys.argv[2:])
    typer.run(main)
