"""Keys and values that several heads share go to attention as they are, not spread over all heads.

    k[:, :, None].expand(b, h, n, s, e).reshape(b, h n, s, e)       sdpa(q, k, v, enable_gqa=True)

Models spread them where they are traced: fused kernels take shared heads only without a mask, and a mask is
written out there. What is spread takes n times the memory, until backward has used it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.core.graph import Graph, Operator, Ref, TensorSpec, map_refs
from autopar.core.operator_facts import facts_of
from autopar.trace.forms.call_forms import arguments_of, called, is_view
from autopar.trace.forms.simplify import without_dead_code
from autopar.trace.forms.spread_out import is_spread_out

WIDEST_HEAD = 256  # elements of a head, of which fused kernels take shared keys


def with_grouped_heads(graph: Graph) -> Graph:
    """The graph whose attention takes keys and values by groups of heads, where they were spread for it."""
    reader = _HeadReader(graph)
    operators = tuple(each for item in graph.operators for each in reader.read(item))
    if operators == graph.operators:
        return graph
    return without_dead_code(replace(graph, operators=operators, specs=graph.specs | reader.specs))


@dataclass(frozen=True, slots=True)
class _SpreadHeads:
    """A tensor whose heads are spread over several, and then cast."""

    source: str
    casts: tuple[Operator, ...]  # the first one first


class _HeadReader:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = {name: item for item in graph.operators for name in item.results if name}
        self.specs: dict[str, TensorSpec] = {}  # of casts that are made anew

    def read(self, item: Operator) -> list[Operator]:
        """The operator, and before it the casts of its keys and values, if these were spread."""
        names = facts_of(item.target).attention
        if names is None:
            return [item]
        given = arguments_of(item)
        if given.get(names.mask) is not None or given.get(names.dropout) or given.get(names.grouped):
            return [item]
        key, value = (self._spread(given[name].name) for name in (names.key, names.value))
        if key is None or value is None or not self._fit(key.source, value.source):
            return [item]
        casts: list[Operator] = []
        told = {
            names.key: Ref(self._cast(key, casts)),
            names.value: Ref(self._cast(value, casts)),
            names.grouped: True,
        }
        return [*casts, called(item, given | told)]

    def _fit(self, key: str, value: str) -> bool:
        """Whether fused kernels take these."""
        keys, values = self._shape(key), self._shape(value)
        return keys[-3] == values[-3] and keys[-1] == values[-1] <= WIDEST_HEAD

    def _spread(self, name: str) -> _SpreadHeads | None:
        casts: list[Operator] = []
        while (maker := self.makers.get(name)) is not None and facts_of(maker.target).is_cast:
            casts.insert(0, maker)
            name = maker.operands[0]
        source = self._before_reshape(name)
        return None if source is None else _SpreadHeads(source, tuple(casts))

    def _before_reshape(self, name: str) -> str | None:
        """The tensor (..., h, s, e) of which `name`, (..., h n, s, e), has each head n times."""
        reshaped = self.makers.get(name)
        if reshaped is None or not facts_of(reshaped.target).copies_expanded:
            return None
        copied = self.makers.get(reshaped.operands[0])
        if copied is None or not is_spread_out(copied):
            return None
        expanded = self.makers.get(copied.operands[0])
        added = expanded and self.makers.get(expanded.operands[0])
        if not (expanded and added and is_view(expanded.target) and is_view(added.target)):
            return None
        source = added.operands[0]
        *lead, heads, length, width = self._shape(source)
        times = self._shape(name)[-3] // heads
        shapes = [
            (*lead, heads * times, length, width),
            (*lead, heads, times, length, width),
            (*lead, heads, 1, length, width),
        ]
        found = [self._shape(each) for each in (name, copied.operands[0], expanded.operands[0])]
        return source if found == shapes and times > 1 else None

    def _cast(self, spread: _SpreadHeads, casts: list[Operator]) -> str:
        """The source, cast; `casts` take what that needs."""
        name = spread.source
        for item in spread.casts:
            result = item.results[0]
            assert result is not None
            made = f"{result}_of_groups"
            if made not in self.specs:
                self.specs[made] = replace(self.graph.specs[result], shape=self._shape(name))
                args, kwargs = _of(item, name)
                casts.append(replace(item, name=made, args=args, kwargs=kwargs, results=(made,)))
            name = made
        return name

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.graph.specs[name].shape


def _of(item: Operator, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operator of one operand, of another one."""
    args, kwargs = map_refs((item.args, item.kwargs), lambda ref: Ref(name))
    return args, kwargs
