"""Tightens the memory cap step by step: what each plan promises, and what it takes on real processes.

    cap        from what the fastest plan needs down to the least that any was found to need, and one less
    plan       one for each cap, by measured operators
    run        some steps of each: its seconds, and the peak of tensors alive on the fullest rank

python -m tests.benchmarks.caps                       the character GPT and the U-Net on two processes
python -m tests.benchmarks.caps --target examples/digits.py:digits --cluster local:4 --json
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from autopar.cluster import ClusterSpec
from autopar.runtime.launch.launch import run_function
from autopar.units import show_bytes, show_seconds
from tests.benchmarks.capped import Tightened, run_rank

TARGETS = ("examples/characters.py:characters", "examples/photographs.py:unet_crops")
CAPS = 9  # from the most to the least


def render(rows: Sequence[Tightened]) -> Table:
    table = Table(title=rows[0].target, title_justify="left", box=None)
    for name in ("cap", "peak: predicted", "measured", "ratio", "step: predicted", "measured", "gap", "how"):
        table.add_column(name, justify="left" if name == "how" else "right")
    for row in rows:
        if row.predicted_bytes is None or row.measured_bytes is None:
            least = "?" if row.least is None else show_bytes(row.least)
            table.add_row(show_bytes(row.cap), *[""] * 6, f"needs at least {least}")
            continue
        assert row.predicted_seconds is not None and row.measured_seconds is not None and row.gap is not None
        table.add_row(
            show_bytes(row.cap),
            show_bytes(row.predicted_bytes),
            show_bytes(row.measured_bytes) + ("" if row.measured_bytes <= row.cap else " !"),
            f"{row.predicted_bytes / row.measured_bytes:.3f}",
            show_seconds(row.predicted_seconds),
            show_seconds(row.measured_seconds),
            f"{row.gap:.1%}",
            f"{row.recomputed} operators again, {row.gathered} weights in shards",
        )
    return table


def main(
    target: Annotated[
        list[str] | None, typer.Option(help="file.py:function; may come several times.")
    ] = None,
    cluster: Annotated[str, typer.Option(help="local:N")] = "local:2",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan and run under tighter and tighter caps."""
    spec = ClusterSpec.parse(cluster)
    rows: list[Tightened] = []
    with tempfile.TemporaryDirectory() as folder:
        costdb = str(Path(folder) / "costs.sqlite")
        for each in target or TARGETS:
            found = run_function(run_rank, spec.num_devices, each, spec, costdb, CAPS)[0]
            rows += found
            if not as_json:
                Console(width=140).print(render(found))
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    typer.run(main)
