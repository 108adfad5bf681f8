"""The command line.

python -m tests.benchmarks.published FILE.csv
python -m tests.benchmarks.published FILE.csv --links-from-rows
python -m tests.benchmarks.published FILE.csv --cross-validate

With --cross-validate the stack's constants are fitted anew for each model of the file, to runs of the others
alone, and its runs are predicted with these; so are the eleven parameters of the baseline, in a row of their
own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autopar.errors import AutoparError, InputError
from tests.benchmarks.published import baselines
from tests.benchmarks.published.fitting import fit
from tests.benchmarks.published.prediction import Prediction, Predictor
from tests.benchmarks.published.runs import GIGA, Run, read
from tests.benchmarks.published.score import memory, score

Guess = tuple[str, Sequence[float], Sequence[bool]]  # whose; seconds and whether it fits, for each run


def guesses(runs: Sequence[Run], predictor: Predictor) -> Iterator[Guess]:
    """Those of autopar with the predictor's constants, and of the baselines."""
    found = predictor.predict(runs)
    yield "autopar", [each.seconds for each in found], [each.fits for each in found]
    yield from plain(runs)


def plain(runs: Sequence[Run]) -> Iterator[Guess]:
    """Those of the baselines: without a fit, and fitted to a random fifth."""
    static = [baselines.fits(run) for run in runs]
    yield "alpha-beta", [baselines.alpha_beta(run) for run in runs], static
    fitted = baselines.fitted(runs)
    yield "11 fitted", [fitted(run) for run in runs], static


def cross_validated(runs: Sequence[Run], predictor: Predictor) -> Iterator[Guess]:
    """As `guesses`, each model's runs predicted by what was fitted to the others'; says what was found."""
    found: dict[Run, Prediction] = {}
    eleven: dict[Run, float] = {}
    for shape in sorted({run.shape for run in runs}, key=lambda shape: shape.weights):
        held = [run for run in runs if run.shape == shape]
        others = [run for run in runs if run.shape != shape]
        if not any(run.seconds for run in others):
            raise InputError(
                where="--cross-validate",
                found="runs with a throughput of one model alone",
                wanted="runs of at least two models",
                remedy="leave out --cross-validate, or give a file with runs of several models",
            )
        constants = fit(predictor, others)
        print(f"for {shape.weights / GIGA:.2f} billion weights: {constants}", file=sys.stderr)
        found |= zip(held, replace(predictor, constants=constants).predict(held), strict=True)
        parameters = baselines.fitted(runs, lambda run, shape=shape: run.shape != shape)  # type: ignore[misc]
        eleven |= {run: parameters(run) for run in held}
    yield "autopar", [found[run].seconds for run in runs], [found[run].fits for run in runs]
    yield from plain(runs)
    yield "11, others", [eleven[run] for run in runs], [baselines.fits(run) for run in runs]


def rows(runs: Sequence[Run], guess: Guess) -> Iterator[dict[str, Any]]:
    """The scores of one guesser, with the stack's engine mended and not; memory is that of all runs."""
    name, seconds, fits = guess
    for mended in (True, False):
        told = [
            each
            for each in zip(runs, seconds, fits, strict=True)
            if each[0].seconds and each[0].mended is mended
        ]
        if told:
            found = score(*map(list, zip(*told, strict=True)))
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
            "-" if row["rank"] is None else f"{row['rank']:.3f}",
            *(
                "-" if row[name] is None else f"{row[name]:.1%}"
                for name in ("regret", "median_error", "high_error", "right", "missed")
            ),
        )
    return shown


app = typer.Typer(add_completion=False)


@app.command()
def main(
    file: Annotated[Path, typer.Argument(help="a CSV file of runs")],
    links_from_rows: Annotated[
        bool, typer.Option("--links-from-rows", help="bandwidths as each row's own job measured them")
    ] = False,
    cross_validate: Annotated[
        bool, typer.Option("--cross-validate", help="constants fitted to the file's other models")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Predict published runs, and say how well."""
    predictor = Predictor(measured_links=links_from_rows)
    told = cross_validated if cross_validate else guesses
    try:
        runs = read(file)
        found = [row for guess in told(runs, predictor) for row in rows(runs, guess)]
    except AutoparError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    if as_json:
        print(json.dumps({"rows": found}))
    else:
        Console(width=120).print(table(found))


if __name__ == "__main__":
    app()
