"""Numbers that tensors have in common which the same operators make of the same tensors."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.core.graph import Operator, Ref, map_refs
from autopar.core.operator_facts import is_random


class EqualTensors:
    """Tells which tensors of a graph are equal by what makes them; operators may be added to its end."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}  # what makes a tensor -> its number
        self._known: dict[str, int] = {}
        self._seen = 0  # operators that are numbered

    def number(self, name: str, operators: Sequence[Operator]) -> int:
        """The number of a tensor of a graph with these operators."""
        for item in operators[self._seen :]:
            call = map_refs((item.args, item.kwargs), lambda ref: Ref(str(self._of(ref.name))))
            key = item.name if is_random(item.target) else (str(item.target), repr(call))
            for place, result in enumerate(item.results):
                if result:
                    self._known[result] = self._numbers.setdefault((key, place), len(self._numbers))
        self._seen = len(operators)
        return self._of(name)

    def _of(self, name: str) -> int:
        if name not in self._known:
            self._known[name] = self._numbers.setdefault(("input", name), len(self._numbers))
        return self._known[name]
