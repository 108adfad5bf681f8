"""A fused group as one call, by the calls that its members' rules write: what is measured, compiled.

    members     gelu on S(0)        dropout on S(0)                 strategies that agree
    written     aten.gelu(x)        autopar.shard_mask, aten.mul
    call        autopar.fused("a2 = aten.gelu.default(a0) ...", traffic, [x, mask])

Masks that a rank draws are operands: autopar draws them itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.core.costs import OperatorCost
from autopar.core.graph import Call, Operator, TensorSpec
from autopar.core.placement import Placement
from autopar.core.strategy import Option, Strategy
from autopar.cost.operators.fused_prices import Traffic
from autopar.cost.operators.lowering import LoweredOperator
from autopar.rewrite.emit import GraphEmitter
from autopar.runtime.compiled.fused_kernel import FUSED
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import is_legal, options_of


@dataclass(frozen=True, slots=True)
class GroupCall:
    """A group as one call, and the seconds that its members are estimated to take together."""

    call: Call
    forward: float
    backward: float


def joined(
    members: Sequence[LoweredOperator],
    written: Mapping[str, bool],
    parts: Sequence[tuple[OperatorCost, Traffic]],
) -> GroupCall | None:
    """Join members, with what each is estimated to take and to move, to a group; None if it does nothing.

    `written` says of tensors whether they are saved behind it."""
    moved = Traffic(sum(each.forward for _, each in parts), sum(each.backward for _, each in parts))
    if not (written and moved.forward):
        return None
    forward, backward = (sum(seconds) for seconds in zip(*(_passes(cost) for cost, _ in parts), strict=True))
    return GroupCall(_GroupWriter().call(members, written, moved), forward, backward)


def _passes(cost: OperatorCost) -> tuple[float, float]:
    return cost.forward_seconds, cost.backward_seconds


def companions(
    operation: Operator, strategy: Strategy, group: Sequence[Operator], dims: Dims
) -> dict[str, Strategy] | None:
    """The strategies of all members of a group under which no move parts them from `operation` with its own;
    None if there are none."""
    found = {operation.name: strategy}
    known: dict[str, tuple[Placement, ...]] = dict(_ends(operation, strategy))
    waiting = [item for item in group if item.name != operation.name]
    while waiting:
        beside = [item for item in waiting if not known.keys().isdisjoint((*item.operands, *item.results))]
        if not beside:
            return None
        item = beside[0]
        chosen = _agreeing(item, known, dims)
        if chosen is None:
            return None
        found[item.name] = chosen
        known = {**dict(_ends(item, chosen)), **known}
        waiting.remove(item)
    return found


def _agreeing(item: Operator, known: Mapping[str, tuple[Placement, ...]], dims: Dims) -> Strategy | None:
    """A strategy of a member with the layouts that are known."""
    chosen: list[Option] = []
    for axis in dims.mesh.axes:
        for option in options_of(item, dims):
            ends = _ends(item, (option,))
            if all(known[name][axis] == layout[0] for name, layout in ends if name in known):
                chosen.append(option)
                break
        else:
            return None
    strategy = tuple(chosen)
    return strategy if is_legal(item, strategy, dims) else None


def _ends(item: Operator, strategy: Strategy) -> Iterator[tuple[str, tuple[Placement, ...]]]:
    """Every tensor of an operator, with its layout."""
    for index, name in enumerate(item.operands):
        yield name, tuple(option.operands[index] for option in strategy)
    for index, result in enumerate(item.results):
        if result:
            yield result, tuple(option.results[index] for option in strategy)


@dataclass(slots=True)
class _GroupWriter:
    operands: list[TensorSpec] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # of the graph's tensors
    count: int = 0

    def call(self, members: Sequence[LoweredOperator], written: Mapping[str, bool], moved: Traffic) -> Call:
        for member in members:
            self.add(member)
        given = ", ".join(
            f"autopar.taken_up.default({self.names[name]}, {is_saved})" for name, is_saved in written.items()
        )
        text = "\n".join((*self.lines, f"return ({given},)"))
        return Call(FUSED, (text, moved.forward, moved.backward, self.operands), {})

    def add(self, member: LoweredOperator) -> None:
        known: dict[fx.Node, str] = {}
        for name, node in zip(member.operation.operands, member.values, strict=True):
            if name not in self.names:
                self.names[name] = self.operand(member.emitter, node)
            known[node] = self.names[name]
        for node in member.emitter.graph.nodes:
            if node not in known:
                known[node] = self.value(member.emitter, node, known)
        for result, node in zip(member.operation.results, member.results, strict=True):
            if result is not None:
                self.names[result] = known[node]

    def value(self, emitter: GraphEmitter, node: fx.Node, known: Mapping[fx.Node, str]) -> str:
        """Name of a node's value in the joined call. Placeholders and autopar's own operators become
        operands."""
        if node.op == "placeholder" or getattr(node.target, "namespace", "") == "autopar":
            return self.operand(emitter, node)
        name = f"b{self.count}"
        self.count += 1
        shown = [_show(each, known) for each in node.args]
        if node.target is operator.getitem:
            self.lines.append(f"{name} = {shown[0]}[{shown[1]}]")
            return name
        shown += [f"{key}={_show(each, known)}" for key, each in node.kwargs.items()]
        self.lines.append(f"{name} = {node.target}({', '.join(shown)})")
        return name

    def operand(self, emitter: GraphEmitter, node: fx.Node) -> str:
        self.operands.append(emitter.described(node))
        return f"a{len(self.operands) - 1}"


def _show(tree: Any, known: Mapping[fx.Node, str]) -> str:
    """Show an argument as Python; without [], which in keys of calls begin sizes of tensors."""
    match tree:
        case fx.Node():
            return known[tree]
        case tuple() | list():
            return "(" + "".join(f"{_show(each, known)}, " for each in tree) + ")"
        case torch.device():
            return f"torch.device('{tree}')"
        case float() if not math.isfinite(tree):
            return "nan" if math.isnan(tree) else f"({tree})"
        case _:
            return repr(tree) if isinstance(tree, str) else str(tree)
