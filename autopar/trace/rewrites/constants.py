"""Values of a graph's constants and of what follows from them, computed when they are asked for.

Where numbers are rounded they are known in more digits, too: as many as a proof has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Graph, GraphInput, Operator, eager_target, map_refs
from autopar.core.operator_facts import is_repeatable
from autopar.errors import TraceError
from autopar.torch_seams import pytree

RAISED = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}


def held_value(item: GraphInput) -> Tensor | None:
    """The numbers of a constant; None of other inputs, and of constants without memory."""
    return None if item.value is None or item.value.is_meta else item.value


class Constants:
    """Constants of a graph, and what operators make of them, which has to be added."""

    def __init__(self, graph: Graph) -> None:
        self.makers = graph.makers()
        held = [(item, value) for item in graph.inputs if (value := held_value(item)) is not None]
        self._values = {item.name: value for item, value in held}
        self._exact = {item.name: value if item.exact is None else item.exact for item, value in held}
        self._fixed = set(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._fixed

    def add(self, item: Operator) -> None:
        """Add results of an operator that folds."""
        self._fixed.update(name for name in item.results if name)

    def folds(self, item: Operator) -> bool:
        """Whether the operator's operands are constants, at least one of them not made of numbers alone."""
        names = item.operands
        return (
            bool(names)
            and any(name in self._fixed for name in names)
            and all(name in self._fixed or self.is_made(name) for name in names)
            and is_repeatable(item.target)
            and item.target.namespace == "aten"
        )

    def is_made(self, name: str) -> bool:
        """Whether a tensor is made of numbers alone, and equal at each call."""
        maker = self.makers.get(name)
        return maker is not None and is_repeatable(maker.target) and all(map(self.is_made, maker.operands))

    def value(self, name: str) -> Tensor:
        if name not in self._values:
            self._run(self.makers[name], self.value, self._values, lambda tree: tree)
        return self._values[name]

    def exact_value(self, name: str) -> Tensor:
        """The value in as many digits as a proof has."""
        if name not in self._exact:
            self._run(self.makers[name], self.exact_value, self._exact, _raised)
        found = self._exact[name]
        return found.to(RAISED.get(found.dtype, found.dtype))

    def _run(
        self,
        item: Operator,
        value: Callable[[str], Tensor],
        values: dict[str, Tensor],
        lift: Callable[[Any], Any],
    ) -> None:
        args, kwargs = map_refs((lift(item.args), lift(item.kwargs)), lambda ref: value(ref.name))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        try:
            with torch.no_grad():
                results = eager_target(item)(*args, **kwargs)
        except (IndexError, RuntimeError) as cause:
            raise out_of_range(item, str(cause).partition("\n")[0]) from cause
        results = results if isinstance(results, (tuple, list)) else (results,)
        values.update((name, each) for name, each in zip(item.results, results, strict=False) if name)


def out_of_range(item: Operator, found: str) -> TraceError:
    """The error of indices that name rows which aren't there."""
    return TraceError(
        where=item.source or f"module {item.module or 'of the whole model'}",
        found=f"a graph whose edges name {found}",
        wanted="edges between vertices that are there",
        remedy="number vertices from 0, and pass the features of all of them",
    )


def _raised(tree: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: RAISED.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf, tree
    )
