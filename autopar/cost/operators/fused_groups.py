"""What a compiler fuses: operators that together read what comes from outside once, and write what leaves.

    level       0           1              1          2                  level: products and the like on the
              linear ---> [ gelu ---> dropout ] ---> linear              longest way to an operator
    forward     h   reads   h                        y                   one launch
                    writes              y
    backward        reads   h (mask), gradient of y; writes the gradient of h

A *group* is made of operators of one level that take each other's results: of pointwise operators, norms,
softmaxes, pools, sums and views. So nothing between two members waits for what is outside. An operator that
only later levels need is computed there, as late as it can be. Products, convolutions, attention and all that
isn't in the tables below are kernels of their own: by default Inductor gives them no epilogue.

What stays inside a group is neither written nor saved: backward recomputes it from what was read. So
that costs stay sums over operators, each *member* answers for its own part of the group's traffic:

    reads      operands from outside, each at its first reader
    writes     results that others need
    reread     of these what backward reads as well

Sums over a whole batch (batch norm) are complete before anything behind them starts: their operand is read
twice, and in backward too. The weights of a norm over rows have gradients that add up over rows: its backward
reads twice.

A group stands together where all its members have matching placements. Where they don't, there is a move
between two of them, which then writes and reads what the group would not (prices.py).

Source: Ansel et al., PyTorch 2, 2024 (how Inductor fuses, and what AOTAutograd's partitioner keeps).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import networkx as nx
import torch

from autopar.core.costs import Footprint
from autopar.core.graph import Call, Graph, Operator, map_refs
from autopar.cost.machine.flops import flops
from autopar.errors import CostMissingError
from costdb.footprint import footprint

ATEN = torch.ops.aten


class TrafficKind(Enum):
    """Pattern in which a fused operator goes through its tensors."""

    VIEW = "view"  # not at all
    POINTWISE = "pointwise"
    ROWS = "rows"  # sums over parts of a tensor that fit a cache
    WHOLE = "whole"  # sums over all of it come first
    WINDOW = "window"  # reads numbers several times, which therefore are written before


ROWS = {
    ATEN.layer_norm,
    ATEN.rms_norm,
    ATEN.softmax,
    ATEN._softmax,
    ATEN.log_softmax,
    ATEN._log_softmax,
    ATEN.cross_entropy_loss,
    ATEN.nll_loss,
    ATEN.mse_loss,
    ATEN.l1_loss,
    ATEN.smooth_l1_loss,
    ATEN.binary_cross_entropy_with_logits,
    ATEN.sum,
    ATEN.mean,
    ATEN.amax,
    ATEN.amin,
    ATEN.var,
    ATEN.std,
}
WHOLE = {ATEN.batch_norm, ATEN.native_batch_norm, ATEN.group_norm, ATEN.instance_norm}
POINTWISE = {  # beside what torch marks so
    ATEN.dropout,
    ATEN.to,
    ATEN._to_copy,
    ATEN.masked_fill,
}
WINDOW = {ATEN.max_pool2d, ATEN.avg_pool2d, ATEN.adaptive_avg_pool2d}


@dataclass(frozen=True, slots=True)
class OperatorTraffic:
    """One operator's part of its group's traffic, by positions of operands and results. `leads` is who
    launches the group; of a `group` of one nothing is saved but views."""

    group: int = field(compare=False)
    kind: TrafficKind
    leads: bool
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    reread_operands: tuple[int, ...] = ()
    reread_results: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()  # of `writes` those that are saved for the kernels behind as well


@dataclass(frozen=True, slots=True)
class FusedGroups:
    """The members by operator, those of each group in order, and the tensors that stay inside a group."""

    members: Mapping[str, OperatorTraffic]
    groups: Mapping[int, tuple[Operator, ...]]
    inside: frozenset[str]


def kind_of(operation: Operator, graph: Graph) -> TrafficKind | None:
    """Pattern of an operator in a fused group; None for a kernel of its own."""
    if getattr(operation.target, "namespace", "") != "aten":
        return None
    packet = operation.target.overloadpacket
    if packet in ROWS:
        return TrafficKind.ROWS
    if packet in WHOLE:
        return TrafficKind.WHOLE
    if packet in WINDOW:
        return TrafficKind.WINDOW
    if torch.Tag.pointwise in operation.target.tags or packet in POINTWISE:
        return TrafficKind.POINTWISE
    found = _footprint(operation, graph)
    return TrafficKind.VIEW if found and None not in found.aliases else None


def _footprint(operation: Operator, graph: Graph) -> Footprint | None:
    """The footprint of an operator on whole tensors; None where products, or refusals, make it a kernel of
    its own."""
    args, kwargs = map_refs((operation.args, operation.kwargs), lambda ref: graph.specs[ref.name])
    call = Call(operation.target, args, kwargs)
    try:
        return None if flops(call) else footprint(call)
    except CostMissingError:
        return None


def is_recomputed(kind: TrafficKind, own: int, taken: int) -> bool:
    """Whether backward recomputes the `own` bytes that an operator by itself would save. Masks that were
    drawn and sums of rows are saved; logarithms of a loss, about as large as the operand's bytes `taken`, are
    recomputed."""
    return kind is TrafficKind.ROWS and 2 * own >= taken > 0


def find_groups(graph: Graph) -> FusedGroups:
    """The groups of a graph, whatever its placements."""
    kinds = {item.name: kind for item in graph.operators if (kind := kind_of(item, graph)) is not None}
    finder = _GroupFinder(graph, kinds)
    return FusedGroups(finder.members(), finder.groups(), finder.inside())


class _GroupFinder:
    def __init__(self, graph: Graph, kinds: Mapping[str, TrafficKind]) -> None:
        self.graph, self.kinds = graph, kinds
        self.uses = graph.consumers()
        self.maker = graph.makers()
        self.levels = self.find_levels()
        self.group_of = self.find_group_of()
        self.leaving = {*graph.outputs, *(name for _, name in graph.writes)}
        self.roots: dict[str, str] = {}
        for item in graph.operators:
            if kinds.get(item.name) is TrafficKind.VIEW and item.operands:
                root = self.roots.get(item.operands[0], item.operands[0])
                self.roots |= {name: root for name in item.results if name}

    def find_levels(self) -> dict[str, int]:
        """Find the level of every operator; members of groups come as late as their users allow."""
        early: dict[str, int] = {}
        for item in self.graph.operators:
            makers = [self.maker[name].name for name in item.operands if name in self.maker]
            early[item.name] = max((early[name] + (name not in self.kinds) for name in makers), default=0)
        late = dict(early)
        for item in reversed(self.graph.operators):
            users = [user for name in item.results if name for user, _ in self.uses[name]]
            if item.name in self.kinds and users:
                late[item.name] = min(late[user.name] for user in users)
        return late

    def find_group_of(self) -> dict[str, int]:
        links = nx.Graph()
        links.add_nodes_from(self.kinds)
        for item in self.graph.operators:
            for name in item.operands:
                maker = self.maker.get(name)
                if maker and self.are_linked(maker.name, item.name):
                    links.add_edge(maker.name, item.name)
        parts = nx.connected_components(links)
        return {name: number for number, part in enumerate(parts) for name in part}

    def are_linked(self, one: str, other: str) -> bool:
        fused = one in self.kinds and other in self.kinds
        return (
            fused and self.levels[one] == self.levels[other] and self.kinds[other] is not TrafficKind.WINDOW
        )

    # -- traffic ----------------------------------------------------------------------------------

    def groups(self) -> dict[int, tuple[Operator, ...]]:
        found: dict[int, list[Operator]] = {}
        for item in self.graph.operators:
            if item.name in self.kinds:
                found.setdefault(self.group_of[item.name], []).append(item)
        return {number: tuple(group) for number, group in found.items()}

    def members(self) -> dict[str, OperatorTraffic]:
        return {name: member for group in self.groups().values() for name, member in self.of_group(group)}

    def of_group(self, group: Sequence[Operator]) -> Iterator[tuple[str, OperatorTraffic]]:
        reread, seen, led = self.reread(group), set[object](), False
        for item in group:
            kind = self.kinds[item.name]
            number = self.group_of[item.name]
            if kind is TrafficKind.VIEW:
                yield item.name, OperatorTraffic(number, kind, leads=False)
                continue
            reads = []
            for place, name in enumerate(item.operands):
                if self.is_inside(name, number) or self.part(name) in seen:
                    continue
                seen.add(self.part(name))
                reads.append(place)
            writes = [place for place, name in enumerate(item.results) if name and self.leaves(name, number)]
            yield (
                item.name,
                OperatorTraffic(
                    number,
                    kind,
                    leads=not led,
                    reads=tuple(reads),
                    writes=tuple(writes),
                    reread_operands=tuple(
                        place for place in reads if self.part(item.operands[place]) in reread
                    ),
                    reread_results=tuple(
                        place for place in writes if self.part(str(item.results[place])) in reread
                    ),
                    saved=tuple(place for place in writes if self.is_saved(str(item.results[place]))),
                ),
            )
            led = True

    def part(self, name: str) -> object:
        """A key that is equal for names of the same numbers in memory."""
        root = self.roots.get(name, name)
        whole = math.prod(self.graph.specs[root].shape) == math.prod(self.graph.specs[name].shape)
        return root if whole else name

    def is_inside(self, name: str, group: int) -> bool:
        """Whether a member of the group makes the tensor, or the tensor that it views."""
        maker = self.maker.get(self.roots.get(name, name))
        return maker is not None and self.group_of.get(maker.name) == group

    def leaves(self, name: str, group: int) -> bool:
        """Whether an operator outside of the group needs the tensor, or a view of it."""
        if name in self.leaving:
            return True
        for user, _ in self.uses[name]:
            if self.group_of.get(user.name) != group:
                viewing = self.kinds.get(user.name) is TrafficKind.VIEW
                if not viewing or any(self.leaves(each, group) for each in user.results if each):
                    return True
            elif self.kinds[user.name] is TrafficKind.VIEW and any(
                self.leaves(each, group) for each in user.results if each
            ):
                return True
        return False

    def is_saved(self, name: str) -> bool:
        """Whether a kernel outside of all groups, such as a product, takes the tensor or a view of it."""
        users = [user for user, _ in self.uses[name]]
        return any(
            user.name not in self.kinds
            or (
                self.kinds[user.name] is TrafficKind.VIEW
                and any(self.is_saved(each) for each in user.results if each)
            )
            for user in users
        )

    def reread(self, group: Sequence[Operator]) -> set[object]:
        """The tensors that backward reads: what members save, or from what it is recomputed."""
        number = self.group_of[group[0].name]
        wanted = [name for item in group for name in self.saved(item)]
        found: set[object] = set()
        reached: set[str] = set()
        while wanted:
            name = wanted.pop()
            if name in reached:
                continue
            reached.add(name)
            root = self.roots.get(name, name)
            if not self.is_inside(name, number) or self.leaves(root, number):
                found.add(self.part(name))
            else:
                wanted += self.maker[root].operands
        return found

    def saved(self, operation: Operator) -> Iterator[str]:
        if not any(self.graph.specs[name].requires_grad for name in operation.results if name):
            return
        if self.kinds[operation.name] is TrafficKind.VIEW:
            return
        found = _footprint(operation, self.graph)
        if found is not None:
            yield from (operation.operands[place] for place in found.saved.operands)
            yield from (name for place in found.saved.results if (name := operation.results[place]))
            own = found.saved.extra_bytes
            if is_recomputed(self.kinds[operation.name], own, self.graph.specs[operation.operands[0]].nbytes):
                yield operation.operands[0]

    def inside(self) -> frozenset[str]:
        """The tensors that no kernel writes while their group stands together."""
        return frozenset(
            name
            for item in self.graph.operators
            if item.name in self.kinds
            for name in item.results
            if name and not self.leaves(name, self.group_of[item.name])
        )
