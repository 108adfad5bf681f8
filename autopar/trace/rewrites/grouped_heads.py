"""Keys and values that several heads share go to attention as they are, not spread over all heads.

    k[:, :, None].expand(b, h, n, s, e).reshape(b, h n, s, e)       sdpa(q, k, v, enable_gqa=True)

Models spread them where they are traced: fused kernels take shared heads only without a mask, and a mask is
written out there. What is spread takes n times the memory, until backward has used it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.core.graph import Graph, Operator, Ref
from autopar.core.operator_facts import facts_of
from autopar.trace.forms.call_forms import arguments_of, called, is_view
from autopar.trace.forms.spread_out import is_spread_out
from autopar.trace.write.graph_editor import GraphEditor

WIDEST_HEAD = 256  # elements of a head, of which fused kernels take shared keys


def with_grouped_heads(graph: Graph) -> Graph:
    """The graph whose attention takes keys and values by groups of heads, where they were spread for it."""
    writer = _HeadWriter(graph)
    for item in graph.operators:
        writer.write(item)
    unchanged = tuple(writer.editor.operators) == graph.operators
    return graph if unchanged else writer.editor.finish()


@dataclass(frozen=True, slots=True)
class _SpreadHeads:
    """A tensor whose heads are spread over several, and then cast."""

    source: str
    casts: tuple[Operator, ...]  # the first one first


class _HeadWriter:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.editor, self.makers = graph, GraphEditor(graph), graph.makers()
        self.casts: dict[str, str] = {}  # of groups, by those of all heads

    def write(self, item: Operator) -> None:
        """Write the operator, and before it the casts of its keys and values, if these were spread."""
        self.editor.start(item)
        changed = self._grouped(item)
        self.editor.operators.append(changed or item)

    def _grouped(self, item: Operator) -> Operator | None:
        """Attention that takes keys and values by groups; None for what doesn't spread them."""
        names, given = facts_of(item.target).attention, arguments_of(item)
        if names is None or given.get(names.mask) is not None:
            return None
        if given.get(names.dropout) or given.get(names.grouped):
            return None
        key, value = (self._spread(given[name].name) for name in (names.key, names.value))
        if key is None or value is None or not self._fit(key.source, value.source):
            return None
        told = {names.key: Ref(self._cast(key)), names.value: Ref(self._cast(value)), names.grouped: True}
        return called(item, given | told)

    def _fit(self, key: str, value: str) -> bool:
        """Whether fused kernels take keys and values of these shapes."""
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

    def _cast(self, spread: _SpreadHeads) -> str:
        """The source, cast."""
        name = spread.source
        for item in spread.casts:
            if item.name not in self.casts:
                self.editor.start(item)
                spec = replace(self.graph.specs[self.editor.result], shape=self._shape(spread.source))
                args = Ref(name), *item.args[1:]
                cast = self.editor.emit(item.target, *args, spec=spec, word="of_groups", **item.kwargs)
                self.casts[item.name] = cast
            name = self.casts[item.name]
        return name

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.graph.specs[name].shape
