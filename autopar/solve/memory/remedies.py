"""What else would give memory where no plan meets the cap, and what the leanest placement would then need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.core.graph import Graph
from autopar.core.offload import Offload
from autopar.core.program import Program
from autopar.core.recompute import Recompute
from autopar.cost.operators.prices import Prices
from autopar.cost.program.peak_memory import peak_memory
from autopar.solve.memory.offload import everywhere, spare
from autopar.solve.memory.recompute import everything
from autopar.units import show_bytes


def remedies(
    graph: Graph, prices: Prices, program: Program, recompute: Recompute, offload: Offload
) -> Iterator[str]:
    """Options that are not used, of those that would help; `program` needs least as it was asked for."""
    if not prices.training:
        return
    least, plain = peak_memory(graph, prices, program).nbytes, replace(program, recompute=(), offload=())
    if recompute is Recompute.NONE:
        lean = peak_memory(graph, prices, everything(graph, prices, plain)).nbytes
        if lean < least:
            yield f"allow to recompute (--recompute auto), which would need {show_bytes(lean)}"
    if prices.cluster.host is not None and offload is not Offload.ALL:
        away = everywhere(graph, prices, plain)
        lean = spare(graph, prices, away, 0, recompute=recompute, offload=Offload.ALL).peak.nbytes
        if lean < least:
            yield f"offload all that is worth it (--offload all), which would need {show_bytes(lean)}"
    if prices.cluster.host is None and prices.cluster.device_type != "cpu":
        yield "say how fast the link to the host is (links.host), so that activations can be offloaded"
