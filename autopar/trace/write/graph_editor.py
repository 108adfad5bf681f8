"""A graph written anew, operator by operator, with the tensors and constants that this needs.

A pass starts each operator of the graph, and keeps it, changed or not, or emits several in its place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from autopar.core.graph import Graph, GraphInput, InputKind, Operator, TensorSpec
from autopar.torch_seams.schemas import schema_of
from autopar.trace.forms.simplify import without_dead_code


class GraphEditor:
    """Operators that take the places of a graph's, item by item."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.specs, self.makers = graph, dict(graph.specs), graph.makers()
        self.inputs = {item.name: item for item in graph.inputs}
        self.operators: list[Operator] = []
        self.item: Operator  # whose place is taken
        self.begun = 0

    @property
    def result(self) -> str:
        """The first result of the operator whose place is taken."""
        result = self.item.results[0]
        assert result is not None
        return result

    def start(self, item: Operator) -> None:
        self.item, self.begun = item, len(self.operators)

    def keep(self, **changes: Any) -> None:
        """Write the operator itself, changed."""
        self.operators.append(replace(self.item, **changes))

    def emit(
        self, target: Any, *args: Any, spec: TensorSpec | None = None, word: str = "", **kwargs: Any
    ) -> str:
        """Write an operator as a part of what the item is, and return its result, by default like the
        item's."""
        if not word:
            operator = schema_of(target).name.partition("::")[2]
            word = f"{operator}_{len(self.operators) - self.begun}"
        name = self.title(f"{self.result}_{word}")
        self.specs[name] = spec or self.specs[self.result]
        self.keep(name=name, target=target, args=args, kwargs=kwargs, results=(name,), order=())
        return name

    def end(self) -> None:
        """Give the item's name and results to the last operator that was written."""
        self.operators[-1] = replace(self.operators[-1], name=self.item.name, results=self.item.results)

    def constant(self, name: str, value: Tensor, exact: Tensor | None = None) -> str:
        """Add a constant, and return its name; `exact` has more digits where the value is rounded."""
        name, spec = self.title(name), TensorSpec(tuple(value.shape), value.dtype)
        self.specs[name] = spec
        self.inputs[name] = GraphInput(
            name, InputKind.CONSTANT, f"folded.{name}", spec, value=value.contiguous(), exact=exact
        )
        return name

    def title(self, name: str) -> str:
        """A name like this that no tensor has."""
        while name in self.specs:
            name += "_"
        return name

    def finish(self, **changes: Any) -> Graph:
        """The graph of what is written."""
        operators, inputs = tuple(self.operators), tuple(self.inputs.values())
        assert len({item.name for item in operators}) == len(operators), "operators share a name"
        made = replace(self.graph, operators=operators, inputs=inputs, specs=self.specs)
        return without_dead_code(replace(made, **changes))
