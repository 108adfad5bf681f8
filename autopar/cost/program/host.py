"""What a micro-batch asks of a GPU's host: to call each operator, forward, and its derivative, backward.

    host     | op 0 | op 1 | op 2 | op 3 |             launches go on while kernels run
    GPU             | 0 | 1 | wait | 2 | 3 |           a step takes at least as long as its calls

On a CPU operators were timed with their calls, and a compiled program calls few. Calls of three nets of 230
operators, so narrow that nothing else is timed, took 8 to 14 us forward and 10 to 19 backward, on a core of
an Intel Xeon with other work (`tests/benchmarks/host.py`); the least are assumed for the host of any GPU.
"""

from __future__ import annotations

from autopar.core.graph import Graph
from autopar.cost.operators.prices import Prices

FORWARD_CALL_SECONDS = 8e-6
BACKWARD_CALL_SECONDS = 10e-6


def host_seconds(graph: Graph, prices: Prices) -> float:
    """Seconds of a micro-batch's calls on the host of a GPU; 0 where they count elsewhere."""
    if prices.device.kind == "cpu" or prices.groups is not None:
        return 0.0
    forward = len(graph.operators) * FORWARD_CALL_SECONDS
    if not prices.training:
        return forward
    learns = (
        any(graph.specs[name].requires_grad for name in item.results if name) for item in graph.operators
    )
    return forward + sum(learns) * BACKWARD_CALL_SECONDS
