"""Tensors that a forward makes of numbers alone: positions, causal masks, numbers of samples.

What they are in a part of the batch is known only by making them: of `arange(len(x))` each sample has a
number that another part has too, of a mask made of such numbers all rows may be the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Graph, Operator, eager_target, map_refs
from autopar.core.operator_facts import is_repeatable

MOST_MADE_ELEMENTS = 1 << 22  # elements; what is larger is made of smaller ones


def made_constants(graph: Graph) -> dict[str, Tensor]:
    """The values of tensors that follow from no input and no random number, up to a size, by name."""
    values: dict[str, Tensor] = {}
    for item in graph.operators:
        if values.keys() >= set(item.operands) and _is_small(item, graph) and is_repeatable(item.target):
            results = _run(item, values)
            values |= {name: value for name, value in zip(item.results, results, strict=False) if name}
    return values


def _is_small(item: Operator, graph: Graph) -> bool:
    return all(graph.specs[name].numel <= MOST_MADE_ELEMENTS for name in item.results if name)


def _run(item: Operator, values: dict[str, Tensor]) -> tuple[Any, ...]:
    args = map_refs(item.args, lambda ref: values[ref.name])
    kwargs = map_refs(item.kwargs, lambda ref: values[ref.name])
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    results = eager_target(item)(*args, **kwargs)
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)
