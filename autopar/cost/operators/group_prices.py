"""Seconds of operators whose group a compiler fuses: by what the group took, else by the bytes it moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.core.costs import OperatorCost
from autopar.core.graph import Call, Operator
from autopar.core.strategy import Strategy
from autopar.cost.machine.model import CostModel
from autopar.cost.machine.neighbours import ratio
from autopar.cost.operators.fused_groups import FusedGroups
from autopar.cost.operators.fused_prices import Traffic, fused_cost, traffic
from autopar.cost.operators.group_calls import GroupCall, companions, joined
from autopar.cost.operators.lowering import LoweredOperator
from autopar.sharding.atoms import Dims
from costdb.footprint import footprint


class GroupPrices:
    """Prices of groups' members on one mesh; `lower` writes a member's calls."""

    def __init__(
        self,
        groups: FusedGroups,
        dims: Dims,
        model: CostModel,
        lower: Callable[[Operator, Strategy], LoweredOperator],
        *,
        training: bool,
    ) -> None:
        self.groups, self.dims, self.model, self.lower = groups, dims, model, lower
        self.training = training
        self._calls: dict[object, GroupCall | None] = {}

    def member(
        self, lowered: LoweredOperator, strategy: Strategy
    ) -> tuple[OperatorCost, tuple[Call, ...]] | None:
        """Price an operator by what its group took, where that is measured; else as `_estimated` does.

        With the first member of a group comes the group's call. None for what is in no group.
        """
        found = self._estimated(lowered)
        if found is None:
            return None
        part, _ = found
        group = self._group(lowered.operation, strategy) if self.model.here else None
        if group is None:
            return part, ()
        whole, member = self.model.cost(group.call), lowered.member
        assert member is not None
        cost = OperatorCost(
            part.forward_seconds * ratio(whole.forward_seconds, group.forward),
            part.backward_seconds * ratio(whole.backward_seconds, group.backward),
            whole.measured,
            whole.interpolated,
        )
        return cost, (group.call,) if member.leads else ()

    def _estimated(self, lowered: LoweredOperator) -> tuple[OperatorCost, Traffic] | None:
        """The operator's part of what its group is estimated to cost; None for a kernel of its own, or what
        exchanges something within."""
        member, device = lowered.member, self.model.device
        if member is None or lowered.emitter.collectives:
            return None
        local = [item.call for item in lowered.emitter.written if item.is_local]
        own = sum(footprint(call, device.kind).saved.extra_bytes for call in local) if self.training else 0
        moved = traffic(member, lowered.operands, lowered.given, own)
        return fused_cost(member, moved, device), moved

    def _group(self, operation: Operator, strategy: Strategy) -> GroupCall | None:
        """The group of an operator with matching strategies of all members; None where some have none."""
        number = self.groups.members[operation.name].group
        group = self.groups.groups[number]
        strategies = companions(operation, strategy, group, self.dims)
        if strategies is None:
            return None
        key = number, *(strategies[item.name] for item in group)
        if key not in self._calls:
            self._calls[key] = self._joined(group, strategies)
        return self._calls[key]

    def _joined(self, group: Sequence[Operator], strategies: Mapping[str, Strategy]) -> GroupCall | None:
        lowered = [self.lower(item, strategies[item.name]) for item in group]
        parts = [self._estimated(item) for item in lowered]
        if None in parts:
            return None
        of = self.groups.members
        written = {
            str(item.results[place]): place in of[item.name].saved
            for item in group
            for place in of[item.name].writes
        }
        return joined(lowered, written, [part for part in parts if part is not None])
