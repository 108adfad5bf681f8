"""The character GPT on four hosts: autopar's own plan beside DistributedDataParallel and all alternatives.

python -m tests.benchmarks.hosts                 as root; slow links, then fast ones
python -m tests.benchmarks.hosts --links slow --rounds 20 --json
python -m tests.benchmarks.hosts "4 stages"      own plan, DistributedDataParallel, and these

Network namespaces of this machine are the hosts, with one process and one thread each; they share its
cores, which the cluster's description says. Every contender first trains a few steps, and the run fails
unless the loss of each is the serial model's; then all are timed in turn.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from autopar.errors import AutoparError
from tests.benchmarks.allocators import ALLOCATORS, environment
from tests.benchmarks.host_contest import (
    DATA_PARALLEL,
    HOSTS,
    NETWORKS,
    OURS,
    PLANNED,
    STEPS,
    HostFigures,
    contest,
)
from tests.benchmarks.namespaces import hosts, run_on_hosts
from tests.benchmarks.statistics import Ratio, ratio

ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Row:
    """One contender over one network: median seconds, of a step and of its busiest process's processor
    time; `warm_up` where it was too slow to go on."""

    name: str
    plan: str
    seconds: float
    cpu_seconds: float | None
    predicted: float | None
    error: float
    warm_up: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """`faster` is how many times as fast as `theirs`, the faster DistributedDataParallel, our plan is."""

    network: str
    rows: tuple[Row, ...]
    refused: dict[str, str]
    theirs: str
    faster: Ratio
    rounds: int


def evaluate(network: str, found: HostFigures) -> Outcome:
    timed = found.timed
    medians = {name: median(seconds) for name, seconds in timed.seconds.items()}
    theirs = min(DATA_PARALLEL, key=lambda name: medians[name])
    worked = {name: median(seconds) for name, seconds in timed.cpu_seconds.items()}
    rows = [
        Row(
            name=name,
            plan=found.plans[name],
            seconds=seconds,
            cpu_seconds=worked.get(name),
            predicted=timed.predicted[name],
            error=found.errors[name],
            warm_up=name in timed.left_out,
        )
        for name, seconds in (medians | timed.left_out).items()
    ]
    return Outcome(
        network=network,
        rows=tuple(sorted(rows, key=lambda row: row.seconds)),
        refused=found.refused,
        theirs=theirs,
        faster=ratio(timed.seconds[theirs], timed.seconds[OURS]),
        rounds=len(timed.seconds[OURS]),
    )


def table(outcome: Outcome) -> Table:
    network = NETWORKS[outcome.network]
    links = network.rate or "as fast as the machine"
    faster = outcome.faster
    found = Table(
        "contender",
        "plan",
        "measured",
        "predicted",
        "processor",
        "error of loss",
        title=f"{HOSTS} hosts, links {links}: a step, median of {outcome.rounds} rounds",
        caption=f"{OURS} is {faster.median:.2f} ({faster.low:.2f} to {faster.high:.2f}) x as fast as "
        f"{outcome.theirs}; losses of {STEPS} steps",
    )
    for row in outcome.rows:
        measured = _milliseconds(row.seconds) + (" (warm-up only)" if row.warm_up else "")
        rest = (_milliseconds(row.predicted), _milliseconds(row.cpu_seconds), f"{row.error:.0e}")
        found.add_row(row.name, row.plan, measured, *rest)
    for name, reason in outcome.refused.items():
        found.add_row(name, reason)
    return found


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.0f} ms"


def measure(network: str, names: tuple[str, ...], rounds: int, costdb: str) -> Outcome:
    """Make the hosts, run the contest there, and remove them."""
    with environment(ALLOCATORS["tuned"]), hosts(HOSTS, rate=NETWORKS[network].rate) as made:
        return evaluate(network, run_on_hosts(contest, made, network, names, rounds, costdb)[0])


def main(
    names: Annotated[list[str] | None, typer.Argument(help="contenders whose names start so")] = None,
    *,
    links: Annotated[str, typer.Option(help="slow, fast or both")] = "both",
    rounds: Annotated[
        int, typer.Option(min=5, help="in each of which every contender takes a step")
    ] = ROUNDS,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
    costdb: Annotated[str | None, typer.Option(help="a cost database to go on with")] = None,
) -> None:
    """Time the character GPT on four hosts over slow and over fast links."""
    if links not in (*NETWORKS, "both"):
        raise typer.BadParameter("slow, fast or both")
    wanted = tuple(
        each
        for each in (*DATA_PARALLEL, *PLANNED)
        if not names or each in (OURS, *DATA_PARALLEL) or each.startswith(tuple(names))
    )
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="autopar-hosts-") as folder:
        database = costdb or str(Path(folder) / "costs.sqlite")
        for name in NETWORKS if links == "both" else [links]:
            try:
                outcomes.append(measure(name, wanted, rounds, database))
            except AutoparError as error:
                print(f"{getattr(error, 'traceback', '')}\n{error}".lstrip(), file=sys.stderr)
                raise typer.Exit(error.exit_code) from None
            Console(stderr=as_json, width=120).print(table(outcomes[-1]))
    if as_json:
        print(json.dumps({"outcomes": [asdict(outcome) for outcome in outcomes]}))


if __name__ == "__main__":
    typer.run(main)
