"""How layers of PyTorch Geometric run on two ranks: split by vertices and edges, partly gathered, or refused.

python -m tests.benchmarks.graph_layers            all of them, in a minute or two
python -m tests.benchmarks.graph_layers GATConv    some
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.proof.graph_layers import convolutions, judge, poolings


def main(names: Annotated[list[str] | None, typer.Argument(help="Layers.")] = None) -> None:
    """Print what becomes of each layer, and its largest relative error."""
    known = convolutions() | poolings()
    table = Table("layer", "on two ranks", "largest error", box=None)
    for name in names or known:
        judgement = judge(known[name])
        error = "" if judgement.refused else f"{judgement.error:.1g}"
        table.add_row(name, judgement.refused or judgement.word, error)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
