"""Plan every row of the zoo, two at a time.

python -m tests.benchmarks.zoo                            all 80, an hour or more
python -m tests.benchmarks.zoo llama "resnet-50 8 h100"   those whose name starts or ends so
python -m tests.benchmarks.zoo "64 h100" --output 64.csv  those on a cluster; the table into a file
python -m tests.benchmarks.zoo --table                    the table of what is there, nothing planned

Each row is a process of its own, which writes a file; a row that has one is not planned again, so what was
interrupted goes on where it was. Once all are there, or with --table, the table is written; with --output
after every row, of those that are chosen.
"""

from __future__ import annotations

import csv
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tests.benchmarks.zoo.answers import TIMES, RowAnswer, answer
from tests.benchmarks.zoo.rows import Row, rows

ROOT = Path(__file__).parents[3]
TABLE = Path(__file__).parent / "results.csv"
HEAD = (
    "row",
    "batch",
    "wall s",
    "CPU s",
    "limit s",
    "gap %",
    "less %",
    "cap binds",
    "step s",
    "peak GB",
    "plan",
)


def plan_apart(row: Row, folder: Path) -> RowAnswer:
    """Plan a row in a process of its own, or read what it came to; ended at `TIMES` its limit."""
    path = folder / row.file
    if not path.exists():
        _run(row, path)
    return RowAnswer(**json.loads(path.read_text()))


def _run(row: Row, path: Path) -> None:
    begun, limit = time.monotonic(), round(TIMES * row.machines.seconds)
    command = [sys.executable, "-m", "tests.benchmarks.zoo", row.name, "--alone", str(path)]
    places = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    late = partial(resource.setrlimit, resource.RLIMIT_CPU, (limit, limit))  # others may load the machine
    done = subprocess.run(
        command, cwd=ROOT, env=environment, preexec_fn=late, capture_output=True, text=True, check=False
    )
    if not path.exists():
        ended = done.returncode in (-signal.SIGKILL, -signal.SIGXCPU)
        word = (done.stderr.strip().splitlines() or ["no word"])[-1]
        failure = f"no plan in {limit} processor seconds" if ended else word
        wall, cpu = time.monotonic() - begun, float(limit) if ended else 0.0
        write(RowAnswer(row.name, row.batch, row.machines.seconds, wall, cpu, failure=failure), path)


def write(found: RowAnswer, path: Path) -> None:
    """Write it whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(found)))
    part.replace(path)


def as_line(found: RowAnswer) -> list[str]:
    return [
        found.name,
        str(found.batch),
        f"{found.wall:.1f}",
        f"{found.cpu:.1f}",
        f"{found.limit:.0f}",
        "" if found.gap is None else f"{100 * found.gap:.2f}",
        f"{100 * found.less:.1f}" if found.less else "",
        "yes" if found.binds else "no",
        "" if found.step is None else f"{found.step:.4g}",
        "" if found.peak_bytes is None else f"{found.peak_bytes / 1e9:.1f}",
        f"FAILED: {found.failure}" if found.failure else found.plan,
    ]


def write_table(answers: Sequence[RowAnswer], path: Path = TABLE) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEAD)
        writer.writerows(map(as_line, answers))


def summary(answers: Sequence[RowAnswer]) -> str:
    """The counts that the table comes to."""
    loose = [each for each in answers if each.gap is not None and not each.binds]
    tight = [each for each in answers if each.gap is not None and each.binds]
    return (
        f"{len(answers)} rows, {sum(bool(each.failure) for each in answers)} failures, "
        f"{sum(each.is_late for each in answers)} beyond their limit of processor seconds; "
        f"gap at most 3 % in {sum(each.distance <= 0.03 for each in loose)} of {len(loose)} whose cap "
        f"doesn't bind, at most 8 % in {sum(each.distance <= 0.08 for each in tight)} of {len(tight)} others"
    )


def select(names: Sequence[str] | None) -> list[Row]:
    """The rows whose names start or end with one of `names`; all if there are none."""
    return [
        row
        for row in rows()
        if not names or any(row.name.startswith(name) or row.name.endswith(f" {name}") for name in names)
    ]


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(help='rows whose names start or end so: llama, "64 h100", "vit-base 8 h100"'),
    ] = None,
    workers: Annotated[int, typer.Option(help="rows that are planned at a time")] = 2,
    results: Annotated[
        Path, typer.Option(help="folder of a file for each row; rows that have one aren't planned again")
    ] = ROOT / "build" / "zoo",
    output: Annotated[
        Path | None, typer.Option(help="write the table of chosen rows to this file, after each of them")
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="write the table of the rows that are there")
    ] = False,
    alone: Annotated[Path | None, typer.Option(help="plan one row here, and write this file")] = None,
) -> None:
    """Plan the zoo, or chosen rows of it, and write the table once all are there; goes on where it was
    interrupted."""
    chosen = select(names)
    if not chosen:
        raise typer.BadParameter(f"rows: {', '.join(row.name for row in rows())}")
    if alone:
        write(answer(next(row for row in chosen if names and row.name == names[0])), alone)
        return
    results.mkdir(parents=True, exist_ok=True)
    if table:
        chosen = [row for row in chosen if (results / row.file).exists()]
    with ThreadPoolExecutor(workers) as pool:
        found = []
        for each in pool.map(lambda row: plan_apart(row, results), chosen):
            print("  ".join(as_line(each)), flush=True)
            found.append(each)
            if output:
                write_table(found, output)
    if not output and (table and not names or len(found) == len(rows())):
        write_table(found)
    print(summary(found))


if __name__ == "__main__":
    typer.run(main)
