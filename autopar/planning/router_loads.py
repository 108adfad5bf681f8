"""How a mixture's routers spread the rows of the example over their experts: one forward, in this process.

    rows of six experts 9 4 1 2 7 1, on 3 ranks 13 3 8       fullest 13, of an even share of 8: 1.63

Operators up to the last router run as they are traced, without gradients, where the example and the model
are plain tensors of one device, and that takes a second at most; nothing is drawn from the user's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.core.graph import Call, Graph, InputKind, Operator, map_refs
from autopar.cost.machine.flops import flops
from autopar.torch_seams.schemas import schema_of
from autopar.trace.backwards.custom_operator import CUSTOM
from autopar.trace.experts.routed_experts import ROUTED_EXPERTS
from autopar.trace.export import Traced

MOST_OPERATIONS = 10**10  # of a forward: a second on a laptop
_PLAIN = (Tensor, nn.Parameter)


def with_router_loads(traced: Traced, model: nn.Module) -> Traced:
    """The traced call, whose graph says how many rows of it choose each expert, where that is soon known."""
    graph = traced.graph
    keys = {item.args[2].name: item for item in graph.operators if item.target is ROUTED_EXPERTS}
    if not keys or (values := _inputs(traced, model)) is None:
        return traced
    needed = list(_needed(graph, set(keys)))
    if any(item.target is CUSTOM for item in needed) or _operations(graph, needed) > MOST_OPERATIONS:
        return traced
    found = _run(needed, values, keys)
    loads = tuple(
        tuple(torch.bincount(found[name], minlength=graph.specs[item.args[1][0].name].shape[0]).tolist())
        for name, item in keys.items()
    )
    return replace(traced, graph=replace(graph, loads=loads))


def _inputs(traced: Traced, model: nn.Module) -> dict[str, Tensor] | None:
    """The tensors that the graph takes; None where some have no values here, or lie in parts."""
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    given = dict(zip(traced.arguments.paths, traced.arguments.tensors, strict=True))
    values: dict[str, Tensor] = {}
    for item in traced.graph.inputs:
        is_held = item.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        source: Mapping[str, Tensor] = held if is_held else given
        value = item.value if item.value is not None else source.get(item.target)
        if value is None or type(value) not in _PLAIN or value.device.type == "meta":
            return None
        # Running statistics are written by operators that say nothing of it.
        values[item.name] = value.detach() if item.kind is InputKind.PARAMETER else value.detach().clone()
    return values if len({value.device for value in values.values()}) == 1 else None


def _needed(graph: Graph, names: set[str]) -> Iterator[Operator]:
    """The operators that make these tensors, in order."""
    found: list[Operator] = []
    for item in reversed(graph.operators):
        if not names.isdisjoint(item.results):
            names.update(item.operands)
            found.append(item)
    yield from reversed(found)


def _operations(graph: Graph, operators: list[Operator]) -> int:
    specs = graph.specs
    return sum(
        flops(Call(item.target, *map_refs((item.args, item.kwargs), lambda ref: specs[ref.name])))
        for item in operators
    )


def _run(
    operators: list[Operator], values: dict[str, Tensor], wanted: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The wanted tensors; others are let go after their last use."""
    last = {name: place for place, item in enumerate(operators) for name in item.operands}
    device = next(iter(values.values())).device
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for place, item in enumerate(operators):
            args, kwargs = map_refs((item.args, item.kwargs), lambda ref: values[ref.name])
            if any(argument.name == "device" for argument in schema_of(item.target).arguments):
                kwargs = {**kwargs, "device": device}
            made = item.target(*args, **kwargs)
            results = [made] if isinstance(made, Tensor) else list(made)
            values.update((name, result) for name, result in zip(item.results, results, strict=False) if name)
            for name in {name for name in item.operands if last[name] == place} - wanted.keys():
                del values[name]
    return {name: values[name] for name in wanted}
