"""What else would give memory where no plan meets the cap, and what the leanest assignment would then
need."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.core.offload import Offload
from autopar.core.recompute import Recompute
from autopar.cost.operators.host_weights import weights_of
from autopar.cost.program.priced_program import PricedProgram
from autopar.solve.memory.offload import fit_by_offload, offload_everything
from autopar.solve.memory.recompute import everything
from autopar.units import show_bytes


def remedies(priced: PricedProgram, recompute: Recompute, offload: Offload) -> Iterator[str]:
    """Options that are not used, of those that would help; the program needs least as it was asked for."""
    prices, least, plain = priced.prices, priced.peak.nbytes, priced.plain
    if not prices.training:
        return
    if recompute is Recompute.NONE:
        lean = everything(plain).peak.nbytes
        if lean < least:
            yield f"allow to recompute (--recompute auto), which would need {show_bytes(lean)}"
    if prices.cluster.host is not None and offload is not Offload.ALL:
        lean = fit_by_offload(
            offload_everything(plain), 0, recompute=recompute, offload=Offload.ALL
        ).peak.nbytes
        if lean < least:
            yield f"offload all that is worth it (--offload all), which would need {show_bytes(lean)}"
    if _may_lie_on_host(priced, offload):
        hosted = priced.hosting(weights_of(prices))
        lean = fit_by_offload(hosted, 0, recompute=recompute, offload=offload).peak.nbytes
        if lean < least:
            yield f"put weights into the host's memory (--offload state), which would need {show_bytes(lean)}"
    if prices.cluster.host is None and prices.cluster.device_type != "cpu":
        yield "say how fast the link to the host is (links.host), so that activations can be offloaded"


def _may_lie_on_host(priced: PricedProgram, offload: Offload) -> bool:
    """Whether weights could lie on the host, which nobody has tried: by a link, or in the part of a CPU's
    memory that stands for the host's."""
    cluster = priced.prices.cluster
    if priced.program.on_host:
        return False
    return cluster.device_type == "cpu" if cluster.host is None else offload is not Offload.AUTO
