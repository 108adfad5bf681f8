"""Seconds of every strategy of every operator on one mesh of one cluster.

An operator's cost is that of the calls that its rule writes for one rank: measured at that local
shape where the database has it, else estimated and marked. Nothing is the serial time divided by n.

What is known of an operator under a strategy is found by the operator's kind, by an order of the strategy's
axes that are alike, or by its local call: one `KnownOperator` for all that are equal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from autopar.cluster import ClusterSpec
from autopar.core.costs import OperatorCost
from autopar.core.deadline import check_time
from autopar.core.graph import Call, Operator, TensorSpec
from autopar.core.placement import Layout
from autopar.core.strategy import Option, Strategy
from autopar.cost.machine.flops import flops
from autopar.cost.operators.calls import OperatorCalls, read_calls
from autopar.cost.operators.fused_groups import OperatorTraffic
from autopar.cost.operators.fused_memory import fused_calls, fused_saved
from autopar.cost.operators.group_prices import GroupPrices
from autopar.cost.operators.lowering import LoweredOperator, local_shapes, lower, priced_rank
from autopar.cost.operators.price import KnownOperator, PartBytes
from autopar.cost.operators.price import Price as Price
from autopar.cost.operators.rank_calls import RankCalls
from autopar.cost.operators.saved import SavedTensors
from autopar.cost.operators.tensor_prices import TensorPrices
from autopar.runtime.collectives.late_gradients import PRODUCTS
from autopar.sharding.rule import GATHER, Rule, rule_of
from autopar.sharding.strategies import number_of, sign_of, text_of
from autopar.trace.backwards.custom_operator import CUSTOM, call_at

TIE = 1e-3  # of the time to write what is saved: too little to change which plan is fastest


class OperatorKind(NamedTuple):
    """Numbers that operators have in common which cost the same: under equal strategies; as calls on operands
    of equal shapes, None of those that aren't one local call. Other graphs know none of the graph's `own`."""

    number: int
    local: int | None
    own: bool


class _RuleWork(NamedTuple):
    """What a rule writes for a rank: costs of its calls, those that may be products, those that can be
    measured, seconds of exchanges within, seconds that recomputing repeats, tensors that it saves and takes,
    and launches."""

    costs: Sequence[OperatorCost]
    products: tuple[Call, ...]
    calls: tuple[Call, ...]
    inner: Sequence[tuple[float, float]]
    recompute: float
    saved: SavedTensors
    operands: Sequence[TensorSpec]
    launches: int


@dataclass(slots=True)
class Prices(TensorPrices):
    """The cost table of one graph on one mesh: operators beside tensors."""

    _kinds: dict[str, OperatorKind] = field(default_factory=dict)
    _own: dict[object, KnownOperator] = field(default_factory=dict)
    _held: dict[tuple[str, Strategy], PartBytes] = field(default_factory=dict)
    _credited: dict[object, Price] = field(default_factory=dict)  # under the multipliers
    _group_prices: GroupPrices | None = None
    _parts: dict[ClusterSpec, Prices] = field(default_factory=dict)  # on parts of an unlike cluster
    read_back: dict[str, int] = field(default_factory=dict)  # by weight, calls whose backward reads it
    read: dict[str, bool] = field(default_factory=dict)  # by weight, whether anything reads it
    _hosting: dict[frozenset[str], Prices] = field(default_factory=dict)
    by_group: dict[int, Prices] = field(init=False)  # of unlike devices, on the ranks of each kind
    _kinds_of_devices: int = field(init=False)

    def __post_init__(self) -> None:
        TensorPrices.__post_init__(self)
        self.by_group = self._by_group() if self.cluster.groups else {}
        models = [each.model for each in self.by_group.values()]
        self._kinds_of_devices = number_of(
            tuple((each.device, each.contention, each.of_file) for each in models)
        )
        if self.groups and self._group_prices is None:
            self._group_prices = GroupPrices(
                self.groups, self.dims, self.model, self._lower, training=self.training
            )

    def under(
        self,
        *,
        shown: float = 1.0,
        credit: float = 0.0,
        compute_credit: float = 0.0,
        late_credit: float = 0.0,
        late_shown: float = 1.0,
    ) -> Prices:
        """The prices under other multipliers; what doesn't depend on them is found once for all."""
        made = replace(
            self,
            shown=shown,
            credit=credit,
            compute_credit=compute_credit,
            late_credit=late_credit,
            late_shown=late_shown,
            _known=self.known,
            _credited={},
            _moves={},
            _networks={},
            _parts={},
            _hosting={},
        )
        made.by_group = self.by_group  # of which no price depends on multipliers
        return made

    def hosting(self, names: Collection[str]) -> Prices:
        """The prices where these weights lie in the host's memory; these, if they do."""
        on_host = frozenset(names)
        if on_host == self.on_host:
            return self
        if on_host not in self._hosting:
            made = replace(self, on_host=on_host, _known=self.known, _parts={}, _hosting=self._hosting)
            made.by_group = {number: each.hosting(on_host) for number, each in self.by_group.items()}
            self._hosting[on_host] = made
            self._hosting.setdefault(self.on_host, self)
        return self._hosting[on_host]

    def in_order(self, ranks: Sequence[ClusterSpec]) -> Prices:
        """The prices of pipeline ranks on these parts of the cluster."""
        made = replace(self, ranks=tuple(ranks), _known=self.known, _hosting={})
        made.by_group = self.by_group  # with all that is known of groups
        return made

    def on_rank(self, rank: int) -> Prices:
        """The prices on the devices of one pipeline rank; these, where all are alike."""
        part = self.ranks[rank] if self.ranks else self.cluster
        if part == self.cluster:
            return self
        if part not in self._parts:
            numbers = {number for groups in part.places for number in groups}
            alone = next(iter(numbers)) if len(numbers) == 1 else None
            self._parts[part] = replace(
                self,
                cluster=part if alone is None else part.of_group(alone),
                model=self.model if alone is None else self.model.of_group(alone),
                ranks=(),
                _known=None,
                _group_prices=None,
                _parts={},
                **_no_prices(),
            )
        return self._parts[part]

    def _by_group(self) -> dict[int, Prices]:
        """The prices on the ranks that may be of each group, as if all devices were like its."""
        mesh, coordinates = self.dims.mesh, dict[int, dict[object, list[tuple[int, ...]]]]()
        for rank, groups in enumerate(self.cluster.places):
            place = mesh.coordinate(rank)
            shares = tuple(mesh.shares_of(axis)[index] for axis, index in enumerate(place))
            for number in groups:
                coordinates.setdefault(number, {}).setdefault(shares, []).append(place)
        return {
            number: replace(
                self,
                dims=self.dims.seen_by([each[end] for each in places.values() for end in (0, -1)]),
                cluster=self.cluster.of_group(number),
                model=self.model.of_group(number),
                ranks=(),
                _known=None,
                _group_prices=None,
                _parts={},
                **_no_prices(),
            )
            for number, places in coordinates.items()
        }

    def update(self, name: str, layout: Layout) -> float:
        """Seconds of the optimizer's step on a parameter, on the slowest rank."""
        slowest = max((each.update(name, layout) for each in self.by_group.values()), default=0.0)
        return slowest or TensorPrices.update(self, name, layout)

    def operator(self, operation: Operator, strategy: Strategy) -> Price:
        """The price of `operation` under `strategy`, by the largest rank's calls, less what hides behind
        it."""
        if not any(self.credits):
            return self.plain(operation, strategy)
        key = self._kind(operation), strategy
        if key not in self._credited:
            price = self.plain(operation, strategy)
            credit = sum(each * seconds for each, seconds in zip(self.credits, price.hiding, strict=True))
            self._credited[key] = replace(price, credit=credit) if credit else price
        return self._credited[key]

    def plain(self, operation: Operator, strategy: Strategy) -> Price:
        """The price without credit for what hides."""
        known = self._known_operator(operation, strategy)
        if known.price is None:
            check_time()
            known.price = self._price(operation, strategy)
        return known.price

    @property
    def credits(self) -> tuple[float, float, float]:
        """Seconds that one second of each of `Price.hiding` takes off."""
        return self.credit, self.compute_credit, self.late_credit

    def calls(
        self,
        operation: Operator,
        strategy: Strategy,
        *,
        moved: tuple[int, ...] = (),
        needed: tuple[int, ...] = (),
    ) -> OperatorCalls:
        """The operator's calls on the largest rank: what each takes, gives and keeps in memory. Operands that
        are `moved`, and results that are `needed` by moves, lie outside of fused groups."""
        known, member = self._known_operator(operation, strategy), self._member(operation)
        ends = () if member is None else (moved, needed)
        if ends not in known.calls:
            lowered = self._lower(operation, strategy)
            found = read_calls(lowered.emitter, lowered.values, lowered.results, self.device.kind)
            if member is not None and not lowered.emitter.collectives:
                found = fused_calls(found, member, lowered.operands, moved=moved, needed=needed)
            known.calls[ends] = found
        return known.calls[ends]

    def parts(self, operation: Operator, strategy: Strategy) -> Mapping[object, int]:
        """Bytes of each tensor that the largest rank's program holds for the operator from the start: its
        block of a sparse matrix, say. Operators may share them."""
        return self._hold(operation, strategy).parts if rule_of(operation).reads_values else {}

    def reads(self, operation: Operator, strategy: Strategy) -> frozenset[str]:
        """The operands that the largest rank's program reads for the operator: not a graph of which it has
        its block."""
        if not rule_of(operation).reads_values:
            return frozenset(operation.operands)
        return self._hold(operation, strategy).reads

    def _hold(self, operation: Operator, strategy: Strategy) -> PartBytes:
        key = operation.name, strategy  # no other order of axes: parts tell which blocks they are
        if key not in self._held:
            lowered = self._lower(operation, strategy)
            meta, memory = lowered.emitter.meta, lowered.emitter.memory
            parts = {part: meta[node].nbytes for node, part in memory.items()}
            values = zip(operation.operands, lowered.values, strict=True)
            self._held[key] = PartBytes(parts, frozenset(name for name, value in values if value.users))
        return self._held[key]

    def is_gathered(self, operation: Operator) -> bool:
        """Whether an operator with operands runs on gathered ones, for want of a rule."""
        if operation.target is CUSTOM:
            return not call_at(operation.args[4]).factors
        return rule_of(operation) is GATHER and bool(operation.operands)

    # -- what is equal --------------------------------------------------------------------------------

    def operator_kind(self, operation: Operator) -> int:
        """A number that operators have in common that cost the same under equal strategies."""
        return self._kind(operation).number

    def _known_operator(self, operation: Operator, strategy: Strategy) -> KnownOperator:
        kind = self._kind(operation)
        store, key = self._own if kind.own else self.known.operators, (kind.number, strategy)
        if key not in store:
            alike = kind.number, self._alike(strategy)
            if alike not in store:
                store[alike] = self._new_operator(operation, strategy, kind.local)
            store[key] = store[alike]
        return store[key]

    def _new_operator(self, operation: Operator, strategy: Strategy, local: int | None) -> KnownOperator:
        if local is None:
            return KnownOperator()
        devices = self, *self.by_group.values()
        key = local, *(each.operand_shapes(operation, strategy) for each in devices)
        return self.known.local.setdefault((key, self._kinds_of_devices), KnownOperator())

    def operand_shapes(self, operation: Operator, strategy: Strategy) -> tuple[tuple[int, ...], ...]:
        """Shapes of the operands of the rank that is priced."""
        place = priced_rank(operation, strategy, self.dims)
        return local_shapes(operation, strategy, self.dims, place)

    def _alike(self, strategy: Strategy) -> Strategy:
        """Axes of one size and one link are interchangeable: strategies in one order stand for all. Some of
        the ranks may be `among` those that an axis cuts short."""
        equal = self._exchanges.are_equal and not self.dims.among
        return tuple(sorted(strategy, key=_factor)) if equal else strategy

    def _kind(self, operation: Operator) -> OperatorKind:
        found = self._kinds.get(operation.name)
        if found is None:
            found = self._kinds[operation.name] = self._find_kind(operation)
        return found

    def _find_kind(self, operation: Operator) -> OperatorKind:
        operands, by_values = operation.operands, rule_of(operation).reads_values
        # Which are parameters, and which are made of such alone.
        weights = tuple((name in self._parameters, name in self._weights) for name in operands)
        constants = tuple(name if name in self._constants else None for name in operands)
        traits = operation.order, weights, self._member(operation), constants if by_values else ()
        # Not Python that reads what it likes, nor what depends on constants' values.
        own = operation.target is CUSTOM or by_values or any(constants)
        local = None if own or not self._is_local(operation) else self._local_kind(operation, weights)
        return OperatorKind(number_of((sign_of(operation, self.dims), *traits)), local, own)

    def _is_local(self, operation: Operator) -> bool:
        """Whether the rule writes the plain call and nothing else: it depends on operands' shapes alone, on
        whatever mesh."""
        plain = type(rule_of(operation)).lower is Rule.lower and operation.target.namespace != "autopar"
        return plain and self._member(operation) is None

    def _local_kind(self, operation: Operator, weights: tuple[tuple[bool, bool], ...]) -> int:
        specs, operands = self.graph.specs, operation.operands
        args = text_of(operation, lambda name: str(replace(specs[name], shape=())))
        same = tuple(map(operands.index, operands))
        return number_of((operation.target, args, operation.order, weights, same))

    def _member(self, operation: Operator) -> OperatorTraffic | None:
        """The operator's part of a fused group, where programs are compiled."""
        return self.groups.members.get(operation.name) if self.groups else None

    # -- what a rule writes ---------------------------------------------------------------------------

    def _lower(self, operation: Operator, strategy: Strategy) -> LoweredOperator:
        member = self._member(operation)
        return lower(operation, strategy, self.dims, training=self.training, member=member)

    def _price(self, operation: Operator, strategy: Strategy) -> Price:
        """The price on the largest rank; of unlike devices on the rank that takes longest, and the memory of
        the largest."""
        largest = RankCalls.of(self._lower(operation, strategy), self.device.kind)
        own = self.price_of(largest, strategy)
        if not self.by_group:
            return own
        written = {tuple(spec.shape for spec in largest.operands): largest}
        prices = [each.priced_among(operation, strategy, written) for each in self.by_group.values()]
        slowest = max(prices, key=lambda price: price.compute + price.communication)
        return replace(slowest, saved=own.saved, tie=own.tie)

    def priced_among(
        self,
        operation: Operator,
        strategy: Strategy,
        written: dict[tuple[tuple[int, ...], ...], RankCalls],
    ) -> Price:
        """The price on these ranks. Ranks whose operands have equal shapes, by which calls are `written`
        already, run equal calls."""
        known = self._known_operator(operation, strategy)
        if known.price is None:
            shapes = self.operand_shapes(operation, strategy)
            if shapes not in written:
                written[shapes] = RankCalls.of(self._lower(operation, strategy), self.device.kind)
            known.price = self.price_of(written[shapes], strategy)
        return known.price

    def price_of(self, written: RankCalls, strategy: Strategy) -> Price:
        """The price of what a rule wrote for a rank."""
        operation = written.lowered.operation
        work = self._work(written, strategy)
        compute = sum(map(self._seconds, work.costs))
        ahead = sum(item.forward_seconds for item in work.costs) * self.model.contention
        behind, products = compute - ahead, sum(map(flops, work.products))
        price = Price(
            compute,
            sum(map(sum, work.inner)),
            sum(self._seconds(item) for item in work.costs if not item.measured),
            products,
            work.calls,
            SavedTensors(aliases=work.saved.aliases),
            forward=ahead + sum(before for before, _ in work.inner),
            interpolated_seconds=sum(self._seconds(item) for item in work.costs if item.interpolated),
            launches=work.launches,
        )
        if not self.training:
            return price
        weights = behind * self._weights_share(operation, products)
        sizes = (
            work.operands[index].nbytes
            for index in work.saved.operands
            if operation.operands[index] not in self._parameters
        )
        return replace(
            price,
            saved=work.saved,
            tie=TIE * (sum(sizes) + work.saved.extra_bytes) / self.device.bandwidth,
            weights=weights,
            recompute=work.recompute * self.model.contention,
            behind=behind,
            late=weights if operation.target in PRODUCTS else 0.0,
        )

    def _work(self, written: RankCalls, strategy: Strategy) -> _RuleWork:
        cost, lowered, operands = self.model.cost, written.lowered, written.operands
        drawn = [self._drawn(call) for call in written.drawn]
        inner = [
            self._exchanges.inner(target, args, spec, training=self.training)
            for target, args, spec in written.exchanges
        ]
        saved, strips = written.saved, written.strips
        fused = self._group_prices.member(lowered, strategy) if self._group_prices else None
        if fused is None or lowered.member is None:
            own, products = list(map(cost, written.own)), (*written.own, *written.doubles)
            costs, calls = [*drawn, *own, *map(cost, written.doubles + strips)], products + strips
            launches = len(calls)
        else:
            part, measured = fused
            own, products, costs, calls = [part], (), [*drawn, part], measured + strips
            launches, saved = int(lowered.member.leads), fused_saved(saved, lowered.member, operands)
        recompute = sum(item.forward_seconds for item in drawn) + sum(item.forward_seconds for item in own)
        return _RuleWork(costs, products, calls, inner, recompute, saved, operands, launches)

    def _weights_share(self, operation: Operator, flops: int) -> float:
        """The part of the operator's backward pass that gives gradients of weights alone.

        Each gradient of a product costs what the product does; elsewhere the gradients of weights come
        along with the others.
        """
        wanted = [name for name in operation.operands if self.graph.specs[name].requires_grad]
        if self._weights.issuperset(wanted):
            return 1.0
        factors = [name for name in wanted if len(self.graph.specs[name].shape) > 1]
        return sum(name in self._weights for name in factors) / len(factors) if flops and factors else 0.0

    def _seconds(self, item: OperatorCost) -> float:
        backward = item.backward_seconds if self.training else 0.0
        return (item.forward_seconds + backward) * self.model.contention

    def _drawn(self, item: Call) -> OperatorCost:
        """The cost of a mask that autopar draws: what filling its memory takes."""
        seconds = self.device.launch_seconds + 4 * math.prod(item.args[0]) / self.device.bandwidth * 4
        return OperatorCost(seconds, 0.0, measured=False)


def _no_prices() -> dict[str, Any]:
    """Empty memories of prices, for other devices."""
    names = ("_own", "_held", "_credited", "_bytes", "_moves", "_networks", "_hosting")
    return {name: {} for name in names}


def _factor(option: Option) -> str:
    return option.factor
