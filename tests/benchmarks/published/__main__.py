"""The command line.

python -m tests.benchmarks.published FILE.csv
python -m tests.benchmarks.published FILE.csv --links-from-rows
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autopar.errors import AutoparError
from tests.benchmarks.published import baselines
from tests.benchmarks.published.prediction import Predictor
from tests.benchmarks.published.runs import Run, read
from tests.benchmarks.published.score import memory, score

Guess = tuple[str, Sequence[float], Sequence[bool]]  # whose; seconds and whether it fits, for each run


def guesses(runs: Sequence[Run], *, measured_links: bool) -> Iterator[Guess]:
    """Those of autopar and of the baselines."""
    predictor = Predictor(measured_links=measured_links)
    found = predictor.predict(runs)
    yield "autopar", [each.seconds for each in found], [each.fits for each in found]
    static = [baselines.fits(run) for run in runs]
    yield "alpha-beta", [baselines.alpha_beta(run) for run in runs], static
    fitted = baselines.fitted(runs)
    yield "11 fitted", [fitted(run) for run in runs], static


def rows(runs: Sequence[Run], guess: Guess) -> Iterator[dict[str, Any]]:
    """The scores of one guesser, with the stack's engine mended and not; memory is that of all runs."""
    name, seconds, fits = guess
    for mended in (True, False):
        pairs = [
            pair for pair in zip(runs, seconds, strict=True) if pair[0].seconds and pair[0].mended is mended
        ]
        if pairs:
            found = score(*map(list, zip(*pairs, strict=True)))
            yield {"whose": name, "mended": mended, **asdict(found), **asdict(memory(runs, fits))}


def table(found: Sequence[dict[str, Any]]) -> Table:
    heads = (
        "",
        "engine",
        "runs",
        "groups",
        "rank",
        "regret",
        "error, median",
        "90 %",
        "memory right",
        "missed",
    )
    shown = Table(*heads, title="Published runs")
    for row in found:
        shown.add_row(
            row["whose"],
            "mended" if row["mended"] else "not mended",
            str(row["runs"]),
            str(row["groups"]),
            f"{row['rank']:.3f}",
            *(f"{row[name]:.1%}" for name in ("regret", "median_error", "high_error", "right", "missed")),
        )
    return shown


app = typer.Typer(add_completion=False)


@app.command()
def main(
    file: Annotated[Path, typer.Argument(help="a CSV file of runs")],
    links_from_rows: Annotated[
        bool, typer.Option("--links-from-rows", help="bandwidths as each row's own job measured them")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Predict published runs, and say how well."""
    try:
        runs = read(file)
    except AutoparError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    found = [row for guess in guesses(runs, measured_links=links_from_rows) for row in rows(runs, guess)]
    if as_json:
        print(json.dumps({"rows": found}))
    else:
        Console(width=120).print(table(found))


if __name__ == "__main__":
    app()
