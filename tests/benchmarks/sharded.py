"""Weights in shards on four hosts: gathers that start early, gathers that don't, and FSDP2.

python -m tests.benchmarks.sharded                     as root; links of 1 Gbit/s
python -m tests.benchmarks.sharded --rate 500mbit --rounds 20

The character GPT of `tests.benchmarks.host_contest` on few tokens, in network namespaces. Each contender
first trains a few steps, and the run fails unless the loss of each is the serial model's; then all are timed
in turn.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.benchmarks import host_contest
from tests.benchmarks.allocators import ALLOCATORS, environment
from tests.benchmarks.contest import Timed
from tests.benchmarks.namespaces import hosts, run_on_hosts
from tests.benchmarks.sharded_contest import OURS, contest
from tests.benchmarks.statistics import ratio

ROUNDS = 20


def table(timed: Timed, rate: str) -> Table:
    found = Table("contender", "step", f"{OURS} / it (95 % interval)", title=f"4 hosts, links of {rate}")
    for name, seconds in timed.seconds.items():
        paired = ratio(timed.seconds[OURS], seconds)
        figure = f"{paired.median:.3f} ({paired.low:.3f} to {paired.high:.3f})"
        found.add_row(name, f"{1000 * median(seconds):,.0f} ms", figure if name != OURS else "")
    return found


def main(
    rate: Annotated[str, typer.Option(help="of each link, in tc's words")] = "1gbit",
    rounds: Annotated[
        int, typer.Option(min=5, help="in each of which every contender takes a step")
    ] = ROUNDS,
) -> None:
    """Time training with weights in shards on four hosts."""
    with (
        tempfile.TemporaryDirectory(prefix="autopar-sharded-") as folder,
        environment(ALLOCATORS["tuned"]),
        hosts(host_contest.HOSTS, rate=rate) as made,
    ):
        timed = run_on_hosts(contest, made, rounds, str(Path(folder) / "costs.sqlite"))[0]
    Console(width=110).print(table(timed, rate))


if __name__ == "__main__":
    typer.run(main)
