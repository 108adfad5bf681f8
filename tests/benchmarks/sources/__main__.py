"""The tables: `python -m tests.benchmarks.sources [NAME ...]`, in text or Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import typer
from rich.console import Console

from autopar.errors import InputError, show_value
from tests.benchmarks.sources import domain, integrated, loops, peak, products, projection, server
from tests.benchmarks.sources.figures import FigureTable

TABLES: Mapping[str, Callable[[], FigureTable]] = {
    "integrated": integrated.table,
    "server": server.table,
    "products": products.table,
    "projection": projection.table,
    "domain": domain.table,
    "peak": peak.table,
    "loops": loops.table,
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def sources(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(TABLES)}; all without.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables of Markdown.")] = False,
) -> None:
    """Compute the figures of the sources again, beside what was published."""
    console = Console()
    for name in names or TABLES:
        if name not in TABLES:
            raise InputError(
                where="sources",
                found=show_value(name),
                wanted=f"names of {', '.join(TABLES)}",
                remedy="write python -m tests.benchmarks.sources server",
            )
        table = TABLES[name]()
        print(table.markdown(), "\n") if markdown else console.print(table.rendered(), "")


if __name__ == "__main__":
    app()
