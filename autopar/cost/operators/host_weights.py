"""Weights that lie in the host's memory: what their copies to the device and back cost a micro-batch.

    forward    fetch
    backward   fetch, for each call that reads the weight      give back its gradient

A copy takes what the link to the host takes. On a CPU, whose memory is the host's, it is one to fresh memory.
"""

from __future__ import annotations

from autopar.core.graph import InputKind
from autopar.core.placement import Layout
from autopar.core.strategy import GATHERED
from autopar.cost.operators.prices import Prices
from autopar.sharding.strategies import options_of


def weights_of(prices: Prices) -> list[str]:
    """The weights that may lie in the host's memory: all parameters that operators take."""
    used = {name for item in prices.graph.operators for name in item.operands}
    kinds = ((item.name, item.kind) for item in prices.graph.inputs)
    return [name for name, kind in kinds if kind is InputKind.PARAMETER and name in used]


def stream_seconds(prices: Prices, name: str, layout: Layout) -> tuple[float, float]:
    """Seconds of a weight's copies in forward and in backward, of the largest rank's part; none of one that
    nothing reads."""
    if name not in prices.on_host or not is_read(prices, name):
        return 0.0, 0.0
    once = prices.host_copy(prices.local_bytes(name, layout))
    returns = prices.training and prices.graph.specs[name].requires_grad
    return once, (reads_in_backward(prices, name) + returns) * once


def is_read(prices: Prices, name: str) -> bool:
    """Whether a program fetches a weight that lies on the host."""
    if name not in prices.read:
        graph = prices.graph
        prices.read[name] = name in graph.outputs or any(name in item.operands for item in graph.operators)
    return prices.read[name]


def reads_in_backward(prices: Prices, name: str) -> int:
    """How many calls' backward reads a weight, by what they save of it where operators run whole."""
    if name not in prices.read_back:
        prices.read_back[name] = _count(prices, name) if prices.training else 0
    return prices.read_back[name]


def _count(prices: Prices, name: str) -> int:
    found = 0
    for item in prices.graph.operators:
        for index in (index for index, operand in enumerate(item.operands) if operand == name):
            whole = next(each for each in options_of(item, prices.dims) if each.factor == GATHERED)
            calls = prices.calls(item, (whole,) * len(prices.dims.mesh.shape)).calls
            found += sum(index in call.saves for call in calls)
    return found
