"""What of an assignment's seconds follows the samples of a micro-batch, and what stays.

work      operators, each shared by all devices        shrinks
weights   gradients as large as an embedding           stay
gathers   weights in shards or on the host             stay
shares    among how many devices samples are split     by which the rest shrinks
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.core.graph import Graph, InputKind
from autopar.core.placement import Shard
from autopar.core.program import Program
from autopar.cost.program.gathering import regathers
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.program.step import move_seconds
from autopar.cost.program.streams import streamed


def work_of(priced: PricedProgram) -> float:
    """Seconds of operators, of each its part that all devices would have if they shared it evenly."""
    devices, found = priced.program.mesh.num_devices, 0.0
    for item, price in zip(priced.graph.operators, priced.operator_prices, strict=True):
        options = zip(priced.program.strategies[item.name], priced.program.mesh.shape, strict=True)
        found += price.compute * math.prod(size for option, size in options if option.shards) / devices
    return found


def weight_seconds(priced: PricedProgram, launch: float) -> float:
    """Seconds, but for launches, of gradients as large as an embedding, whatever the samples are.

    Of what an operator without products writes and reads for them, its weights are one part and its results
    the other."""
    seconds, nbytes, specs = 0.0, priced.prices.local_bytes, priced.graph.specs
    for item, price in zip(priced.graph.operators, priced.operator_prices, strict=True):
        if price.weights and not price.flops:
            strategy = priced.program.strategies[item.name]
            weights = sum(
                nbytes(name, tuple(option.operands[place] for option in strategy))
                for place, name in enumerate(item.operands)
                if specs[name].requires_grad
            )
            results = sum(
                nbytes(name, tuple(option.results[place] for option in strategy))
                for place, name in enumerate(item.results)
                if name
            )
            moved = max(0.0, price.weights - price.launches * launch)
            seconds += moved * weights / max(1, weights + results)
    return seconds


def gather_seconds(priced: PricedProgram) -> float:
    """Seconds in which every micro-batch gathers weights that lie in shards or on the host, and takes their
    gradients back."""
    parameters = {item.name for item in priced.graph.inputs if item.kind is InputKind.PARAMETER}
    found = sum(each.seconds for each in regathers(priced)) + sum(streamed(priced))
    for value in priced.values.of.values():
        if value.move is not None and value.name in parameters and not value.leads:
            found += sum(move_seconds(priced, value, name_is_weight=True))
    return found


def shares_of(graph: Graph, program: Program, samples: int, seconds: Sequence[float]) -> dict[int, float]:
    """Among how many devices the samples are split, and for which part of the operators' seconds."""
    found: dict[int, float] = {}
    for item, each in zip(graph.operators, seconds, strict=True):
        result, devices = item.results[0], 1
        if result is not None and graph.specs[result].shape[:1] == (samples,):
            for option, size in zip(program.strategies[item.name], program.mesh.shape, strict=True):
                devices *= size if option.results[0] == Shard(0) else 1
        found[devices] = found.get(devices, 0.0) + each
    total = sum(found.values())
    return {devices: each / total for devices, each in found.items()} if total else {1: 1.0}
