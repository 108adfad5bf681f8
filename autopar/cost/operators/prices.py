"""Seconds of every strategy of every operator on one mesh of one cluster.

An operator's cost is that of the calls that its rule writes for one rank: measured at that local
shape where the database has it, else estimated and marked. Nothing is the serial time divided by n.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import autopar.runtime.collectives.placement_moves
import autopar.runtime.collectives.random  # noqa: F401  (registers the operators that rules write)
from autopar.core.costs import Collective, OperatorCost
from autopar.core.deadline import check_time
from autopar.core.graph import Call, Operator, TensorSpec, map_refs
from autopar.core.mesh import parse_key
from autopar.core.operator_facts import facts_of
from autopar.core.strategy import Option, Strategy
from autopar.cost.machine.flops import flops
from autopar.cost.machine.neighbours import ratio
from autopar.cost.operators.calls import OperatorCalls, read_call, read_calls
from autopar.cost.operators.fused_groups import OperatorTraffic
from autopar.cost.operators.fused_memory import fused_calls, fused_saved
from autopar.cost.operators.fused_prices import Traffic, fused_cost, traffic
from autopar.cost.operators.group_calls import GroupCall, LoweredMember, companions, joined
from autopar.cost.operators.halo_convolution import foreign, strip_calls
from autopar.cost.operators.ring_attention import hops, ring_calls
from autopar.cost.operators.saved import SavedTensors, find_saved, saved_by_call, stand_ins
from autopar.cost.operators.tensor_prices import TensorPrices
from autopar.errors import AutoparError
from autopar.rewrite.emit import GraphEmitter, LocalCall
from autopar.runtime.collectives.late_gradients import PRODUCTS
from autopar.runtime.collectives.merged_attention import merged_bytes
from autopar.sharding.rule import GATHER, Instance, Rule, Site, rule_of
from autopar.sharding.strategies import sign_of, text_of
from autopar.trace.backwards.custom_operator import CUSTOM, call_at
from costdb.footprint import footprint
from costdb.operands import specs as operands_of

TIE = 1e-3  # of the time to write what is saved: too little to change which plan is fastest
INNER_LAUNCHES = {"cpu": 100, "cuda": 6}  # of an operator that exchanges within, each way


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of one operator under one strategy on one rank, forward and backward, for one micro-batch.

    `forward` is the part of `seconds` before the loss, `weights` the part of the backward pass that
    only gradients of weights need. `flops` are forward flops; `calls` the local calls, for measuring;
    `missing_seconds` the part of `compute` that isn't measured, `interpolated_seconds` what of it follows
    from other sizes; `saved` what stays in memory for backward.
    `recompute` are the forward seconds that recomputing in backward repeats: what ranks exchanged is kept.
    Sums of gradients may hide `behind` so many seconds, of which `late` ones may end late; `credit` is taken
    off for what hides.
    """

    compute: float
    communication: float
    missing_seconds: float
    flops: int
    calls: tuple[Call, ...]
    saved: SavedTensors
    tie: float = 0.0  # seconds that only break ties: of equally fast plans the one that keeps less
    forward: float = 0.0
    weights: float = 0.0
    recompute: float = 0.0
    behind: float = 0.0
    late: float = 0.0
    credit: float = 0.0
    interpolated_seconds: float = 0.0
    launches: int = 0  # each way, about

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.tie - self.credit

    @property
    def backward(self) -> float:
        return self.seconds - self.forward

    @property
    def hiding(self) -> tuple[float, float, float]:
        """Seconds behind which exchanges may hide, each for a credit of its own (`Prices.credits`)."""
        return self.behind, self.compute, self.late


@dataclass(frozen=True, slots=True)
class _HeldBytes:
    """Bytes that a rank's program holds for an operator from the start, and the operands that it reads."""

    parts: Mapping[object, int]
    reads: frozenset[str]


@dataclass(frozen=True, slots=True)
class _RuleWork:
    """Result of a rule for a rank: costs of its calls, those that may be products, those that can be
    measured, seconds of exchanges within, seconds that recomputing repeats, and tensors that it saves and
    takes."""

    costs: tuple[OperatorCost, ...]
    products: tuple[Call, ...]
    calls: tuple[Call, ...]
    inner: tuple[tuple[float, float], ...]
    recompute: float
    saved: SavedTensors
    taken: Sequence[TensorSpec]
    launches: int


@dataclass(slots=True)
class Prices(TensorPrices):
    """The cost table of one graph on one mesh: operators beside tensors."""

    _operators: dict[Any, Price] = field(default_factory=dict)
    _priced: dict[Any, tuple[Strategy, Price]] = field(default_factory=dict)  # by identity
    _plain: dict[Any, tuple[Strategy, Price]] = field(default_factory=dict)  # the same without credit
    _places: dict[Any, tuple[int, ...]] = field(default_factory=dict)  # fullest ranks, by identity
    _held: dict[Any, _HeldBytes] = field(default_factory=dict)
    _calls: dict[Any, OperatorCalls] = field(default_factory=dict)
    _groups: dict[Any, GroupCall | None] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)  # of operators' kinds
    _operator_kinds: dict[Any, int] = field(default_factory=dict)
    _kinds: dict[str, Any] = field(default_factory=dict)  # of local calls, but for their shapes
    _equal_axes: bool | None = None

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
        return replace(
            self,
            shown=shown,
            credit=credit,
            compute_credit=compute_credit,
            late_credit=late_credit,
            late_shown=late_shown,
            _known=self.known,
            _priced={},
            _moves={},
            _networks={},
        )

    # -- operators ----------------------------------------------------------------------------------

    def operator(self, operation: Operator, strategy: Strategy) -> Price:
        """The price of `operation` under `strategy`, by the largest rank's calls."""
        same = self._same(operation, strategy)
        if same not in self._priced:
            self._priced[same] = strategy, self._credited(self.plain(operation, strategy))
        return self._priced[same][1]

    def plain(self, operation: Operator, strategy: Strategy) -> Price:
        """The price without credit for what hides."""
        same = self._same(operation, strategy)
        if same not in self._plain:
            self._plain[same] = strategy, self._operator(operation, strategy)
        return self._plain[same][1]

    def _same(self, operation: Operator, strategy: Strategy) -> Any:
        """Equal operators, and programs, share strategies, whose keys take long to make."""
        return self.operator_kind(operation), id(strategy)

    def operator_kind(self, operation: Operator) -> int:
        """A number that operators of the graph have in common that cost the same under equal strategies."""
        if operation.name not in self._numbers:
            kind = *self._traits(operation), *self._values(operation)
            self._numbers[operation.name] = self._operator_kinds.setdefault(kind, len(self._operator_kinds))
        return self._numbers[operation.name]

    def _traits(self, operation: Operator) -> tuple[Any, ...]:
        """Traits on which an operator's price depends, beside its strategy and the values of constants."""
        sign, own = sign_of(operation, self.dims), self._own(operation)
        return sign, operation.order, own, self._member(operation)

    def _own(self, operation: Operator) -> tuple[tuple[bool, bool], ...]:
        """Which operands are parameters, and which are made of such alone."""
        return tuple((name in self._parameters, name in self._weights) for name in operation.operands)

    @property
    def credits(self) -> tuple[float, float, float]:
        """Seconds that one second of each of `Price.hiding` takes off."""
        return self.credit, self.compute_credit, self.late_credit

    def _operator(self, operation: Operator, strategy: Strategy) -> Price:
        """The price without credit."""
        check_time()
        sign = self._sign(operation, strategy)
        # Not Python that reads what it likes, nor what depends on constants' values.
        by_values = rule_of(operation).reads_values or not self._constants.isdisjoint(operation.operands)
        is_general = operation.target is not CUSTOM and not by_values
        found = self.known.operators.get(sign) if is_general else None
        if found is None:
            local = self._local(operation, strategy)
            known = self._operators if local is None else self.known.local
            key = self._key(operation, strategy) if local is None else local
            if key not in known:
                known[key] = (
                    self._price(operation, strategy)
                    if local is None
                    else self._price_of_call(operation, local)
                )
            found = known[key]
            if is_general:
                self.known.operators[sign] = found
        return found

    def _local(self, operation: Operator, strategy: Strategy) -> Any | None:
        """Equal for operators and strategies, also of other meshes, that make one local call and nothing
        else: where the rule writes the plain call, it depends on operands' shapes. None of others."""
        if type(rule_of(operation)).lower is not Rule.lower or self._member(operation) is not None:
            return None
        if operation.target is CUSTOM or operation.target.namespace == "autopar":
            return None
        if not self._constants.isdisjoint(operation.operands):
            return None
        specs, place = self.graph.specs, self._place(operation, strategy)
        if operation.name not in self._kinds:
            args = text_of(operation, lambda name: str(replace(specs[name], shape=())))
            same = tuple(map(operation.operands.index, operation.operands))
            own = self._own(operation)
            self._kinds[operation.name] = operation.target, args, operation.order, own, same
        shapes = tuple(
            self.dims.local_shape(name, tuple(option.operands[index] for option in strategy), place)
            for index, name in enumerate(operation.operands)
        )
        return *self._kinds[operation.name], shapes

    def _credited(self, price: Price) -> Price:
        """The price less what hides behind the operator."""
        credit = sum(each * seconds for each, seconds in zip(self.credits, price.hiding, strict=True))
        return replace(price, credit=credit) if credit else price

    def _sign(self, operation: Operator, strategy: Strategy) -> Any:
        """Equal for operators of all graphs, and strategies, that have one price on this mesh."""
        return *self._traits(operation), tuple(option.factor for option in self._alike(strategy))

    def _member(self, operation: Operator) -> OperatorTraffic | None:
        """The operator's part of a fused group, where programs are compiled."""
        return self.groups.members.get(operation.name) if self.groups else None

    def _key(self, operation: Operator, strategy: Strategy) -> Any:
        """Equal for operators of the graph, and strategies, that have one price."""
        return self.operator_kind(operation), *self._alike(strategy)

    def _values(self, operation: Operator) -> tuple[str, ...]:
        """The constants on whose values an operator's price depends."""
        depends = rule_of(operation).reads_values
        return tuple(filter(self._constants.__contains__, operation.operands)) if depends else ()

    def _alike(self, strategy: Strategy) -> Strategy:
        """Axes of one size and one link are interchangeable: strategies in one order stand for all."""
        if self._equal_axes is None:
            mesh = self.dims.mesh
            signs = {(mesh.shape[axis], self.cluster.link(mesh, axis)) for axis in mesh.axes}
            self._equal_axes = len(signs) == 1 and len(mesh.axes) > 1
        return tuple(sorted(strategy, key=_factor)) if self._equal_axes else strategy

    def _place(self, operation: Operator, strategy: Strategy) -> tuple[int, ...]:
        """The rank that is priced: the one that its rule calls the fullest, else the one whose operands and
        results have the most elements."""
        if rule_of(operation).is_uneven(Instance(operation, self.graph.specs)):
            return self._fullest(operation, strategy)
        taken = [(name, tuple(o.operands[i] for o in strategy)) for i, name in enumerate(operation.operands)]
        made = [
            (name, tuple(o.results[i] for o in strategy)) for i, name in enumerate(operation.results) if name
        ]
        ends = [*taken, *made]
        places = dict.fromkeys(self.dims.largest(*end) for end in ends)

        def elements(place: tuple[int, ...]) -> int:
            return sum(math.prod(self.dims.local_shape(*end, place)) for end in ends)

        if len(places) > 1:
            return max(places, key=elements)
        return next(iter(places), (0,) * len(self.dims.mesh.shape))

    def _fullest(self, operation: Operator, strategy: Strategy) -> tuple[int, ...]:
        key = self.operator_kind(operation), strategy
        if key not in self._places:
            first, emitter = (0,) * len(self.dims.mesh.shape), GraphEmitter(runs=False)
            site = Site(
                operation, dims=self.dims, strategy=strategy, coordinate=first, emitter=emitter, values=()
            )
            self._places[key] = rule_of(operation).fullest(site)
        return self._places[key]

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
        local = self._local(operation, strategy)
        known = self._calls if local is None else self.known.calls
        key = (self._key(operation, strategy), moved, needed) if local is None else local
        if key not in known and local is not None:
            known[key] = read_call(self._local_call(operation, local), self.device.kind)
        elif key not in known:
            emitter, values, results = self._lower(operation, strategy)
            found = read_calls(emitter, values, results, self.device.kind)
            member = self._member(operation)
            if member is not None and not emitter.collectives:
                found = fused_calls(
                    found, member, emitter.described(tuple(values)), moved=moved, needed=needed
                )
            known[key] = found
        return known[key]

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

    def _hold(self, operation: Operator, strategy: Strategy) -> _HeldBytes:
        key = operation.name, strategy
        if key not in self._held:
            emitter, values, _ = self._lower(operation, strategy)
            parts = {memory: emitter.meta[node].nbytes for node, memory in emitter.memory.items()}
            read = [name for name, value in zip(operation.operands, values, strict=True) if value.users]
            self._held[key] = _HeldBytes(parts, frozenset(read))
        return self._held[key]

    def _lower(self, operation: Operator, strategy: Strategy) -> tuple[GraphEmitter, list[Any], list[Any]]:
        """Calls that the operator's rule writes for the priced rank, its operands and its results."""
        emitter, place = GraphEmitter(runs=False), self._place(operation, strategy)
        values = []
        for index, name in enumerate(operation.operands):
            layout = tuple(option.operands[index] for option in strategy)
            spec = self.graph.specs[name]
            shape = self.dims.local_shape(name, layout, place)
            grad = spec.requires_grad and self.training
            values.append(emitter.placeholder(f"operand_{index}", TensorSpec(shape, spec.dtype, grad)))
        site = Site(
            operation,
            dims=self.dims,
            strategy=strategy,
            coordinate=place,
            emitter=emitter,
            values=values,
            exact_random=False,
        )
        try:
            return emitter, values, list(rule_of(operation).lower(site))
        except (AutoparError, RuntimeError, TypeError) as error:
            error.add_note(
                f"while pricing {operation.name} ({operation.target}) as {[str(o) for o in strategy]}"
            )
            raise

    def _price_of_call(self, operation: Operator, local: Any) -> Price:
        """The price of an operator that is one local call."""
        call = self._local_call(operation, local)
        try:
            cost = self.call(call)
            saved = saved_by_call(call, self.device.kind)
        except (AutoparError, RuntimeError, TypeError) as error:
            error.add_note(f"while pricing {operation.name}, {call.key()}")
            raise
        return self._put_together(
            operation,
            _RuleWork((cost,), (call,), (call,), (), cost.forward_seconds, saved, operands_of(call), 1),
        )

    def _local_call(self, operation: Operator, local: Any) -> Call:
        """The call of an operator that is one, on operands of the shapes that `local` ends with."""
        *_, shapes = local
        specs = [self.graph.specs[name] for name in operation.operands]
        operands = iter(
            TensorSpec(shape, spec.dtype, spec.requires_grad and self.training)
            for spec, shape in zip(specs, shapes, strict=True)
        )
        args, kwargs = map_refs((operation.args, operation.kwargs), lambda _: next(operands))
        return Call(operation.target, args, kwargs)

    def _price(self, operation: Operator, strategy: Strategy) -> Price:
        emitter, values, results = self._lower(operation, strategy)
        doubles = stand_ins(emitter)
        local = _calls_within(item.call for item in (*emitter.written, *doubles) if _is_local(item))
        strips = *strip_calls(emitter), *ring_calls(emitter)
        costs = [self.call(item) for item in emitter.calls if item.target.namespace == "autopar"]
        recompute = sum(item.forward_seconds for item in costs)
        written = len(_calls_within(item.call for item in emitter.written if _is_local(item)))
        fused = self._fused(operation, strategy, LoweredMember(operation, emitter, values, results))
        measurable, member = local, self._member(operation)
        if fused is not None:
            part, measurable = fused
            recompute, local = recompute + part.forward_seconds, ()
            costs.append(part)
        else:
            own = [self.call(item) for item in (*local, *strips)]
            recompute += sum(item.forward_seconds for item in own[:written])
            costs += own
        inner = [
            self._inner(target, emitter.described(args), spec) for target, args, spec in emitter.collectives
        ]
        saved = find_saved(emitter, (*emitter.written, *doubles), values, results, self.device.kind)
        if fused is not None and member is not None:
            saved = fused_saved(saved, member, emitter.described(tuple(values)))
        calls = measurable + strips
        launches = len(calls) if fused is None or member is None else int(member.leads)
        taken = emitter.described(tuple(values))
        return self._put_together(
            operation, _RuleWork(tuple(costs), local, calls, tuple(inner), recompute, saved, taken, launches)
        )

    def _put_together(self, operation: Operator, work: _RuleWork) -> Price:
        """The price of what a rule writes."""
        costs, saved = work.costs, work.saved
        compute = sum(self._seconds(item) for item in costs)
        ahead = sum(item.forward_seconds for item in costs) * self.model.contention
        behind, products = compute - ahead, sum(flops(item) for item in work.products)
        price = Price(
            compute,
            sum(map(sum, work.inner)),
            sum(self._seconds(item) for item in costs if not item.measured),
            products,
            work.calls,
            SavedTensors(aliases=saved.aliases),
            forward=ahead + sum(before for before, _ in work.inner),
            interpolated_seconds=sum(self._seconds(item) for item in costs if item.interpolated),
            launches=work.launches,
        )
        if not self.training:
            return price
        weights = behind * self._weights_share(operation, products)
        sizes = (
            math.prod(work.taken[index].shape) * work.taken[index].dtype.itemsize
            for index in saved.operands
            if operation.operands[index] not in self._parameters
        )
        return replace(
            price,
            saved=saved,
            tie=TIE * (sum(sizes) + saved.extra_bytes) / self.device.bandwidth,
            weights=weights,
            recompute=work.recompute * self.model.contention,
            behind=behind,
            late=weights if operation.target in PRODUCTS else 0.0,
        )

    def _estimated(self, operation: Operator, lowered: LoweredMember) -> tuple[OperatorCost, Traffic] | None:
        """The operator's part of what its group is estimated to cost; None for a kernel of its own, or what
        exchanges something within."""
        member = self._member(operation)
        if member is None or lowered.emitter.collectives:
            return None
        kind = self.device.kind
        local = [item.call for item in lowered.emitter.written if _is_local(item)]
        own = sum(footprint(call, kind).saved.extra_bytes for call in local) if self.training else 0
        moved = traffic(member, lowered.specs(lowered.values), lowered.specs(lowered.results), own)
        return fused_cost(member, moved, self.device), moved

    def _fused(
        self, operation: Operator, strategy: Strategy, lowered: LoweredMember
    ) -> tuple[OperatorCost, tuple[Call, ...]] | None:
        """Price an operator by what its group took, where that is measured; else as `_estimated` does.

        With the first member of a group comes the group's call.
        """
        found = self._estimated(operation, lowered)
        if found is None:
            return None
        part, _ = found
        group = self._group(operation, strategy) if self.model.here else None
        if group is None:
            return part, ()
        whole, member = self.model.cost(group.call), self._member(operation)
        assert member is not None
        forward, backward = (
            own * ratio(all_of_it, thought)
            for own, all_of_it, thought in (
                (part.forward_seconds, whole.forward_seconds, group.forward),
                (part.backward_seconds, whole.backward_seconds, group.backward),
            )
        )
        cost = OperatorCost(forward, backward, whole.measured, whole.interpolated)
        return cost, (group.call,) if member.leads else ()

    def _group(self, operation: Operator, strategy: Strategy) -> GroupCall | None:
        """The group of an operator with matching strategies of all members; None where some have none."""
        assert self.groups is not None
        member = self.groups.members[operation.name]
        group = self.groups.groups[member.group]
        strategies = companions(operation, strategy, group, self.dims)
        if strategies is None:
            return None
        key = member.group, *(strategies[item.name] for item in group)
        if key not in self._groups:
            self._groups[key] = self._joined(group, strategies)
        return self._groups[key]

    def _joined(self, group: Sequence[Operator], strategies: Mapping[str, Strategy]) -> GroupCall | None:
        lowered = [LoweredMember(item, *self._lower(item, strategies[item.name])) for item in group]
        parts = [self._estimated(item.operation, item) for item in lowered]
        if None in parts:
            return None
        assert self.groups is not None
        of = self.groups.members
        written = {
            str(item.results[place]): place in of[item.name].saved
            for item in group
            for place in of[item.name].writes
        }
        return joined(lowered, written, [part for part in parts if part is not None])

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

    def call(self, item: Call) -> OperatorCost:
        """Price one local call; a mask of autopar's own costs what filling its memory costs."""
        if item.target.namespace != "autopar":
            return self.model.cost(item)
        nbytes = 1
        for size in item.args[0]:
            nbytes *= size
        return OperatorCost(
            self.device.launch_seconds + 4 * nbytes / self.device.bandwidth * 4, 0.0, measured=False
        )

    def _inner(self, target: str, args: Sequence[Any], spec: TensorSpec) -> tuple[float, float]:
        """Seconds of communication inside an operator, forward and backward: halos, and sums of
        statistics."""
        name = target.split(".")[1] if "::" not in target else target.split("::")[1].split(".")[0]
        backward = self.training and spec.requires_grad
        if name == "exchange":
            key, dim, _, owned, starts, stops, _ = args
            copy = 2 * spec.nbytes / self.device.bandwidth  # of its own rows
            seconds = self._around() + copy + self._halo(key, spec, dim, owned, starts, stops)
            return seconds, seconds if backward else 0.0
        if name == "needed_rows":
            key, _, sends, receives = args
            seconds = self._needed_rows(key, spec, sends, receives)
            return seconds, seconds if backward else 0.0
        if name == "convolution":
            _, _, key, owned, starts, stops, dim, *_ = args
            seconds = self._around() + self._halo(key, spec, dim, owned, starts, stops)
            return seconds, seconds if backward else 0.0
        if name == "ring_attention":
            return self._ring(args, spec, backward=backward)
        if name == "merged_attention":
            most, added = merged_bytes(spec, args[1])
            axes = parse_key(args[3])[1]
            sums = sum(self._collective(Collective.ALL_REDUCE, nbytes, axes) for nbytes in (most, added))
            return self._around() + sums + self._copy(added), 0.0
        if name == "s_to_b":  # a row of each rank
            group, dim, _, sizes = args[:4]
            nbytes = spec.nbytes // max(1, spec.shape[dim]) * sum(sizes)
            seconds = self._collective(Collective.ALL_GATHER, nbytes, parse_key(group)[1])
            return seconds, seconds if backward else 0.0
        if name == "batch_norm":
            key = next(item for item in args if isinstance(item, str))
            number = max(4, spec.dtype.itemsize)  # bytes: statistics of halves are floats
            sums = self._collective(Collective.ALL_REDUCE, 3 * spec.shape[1] * number, parse_key(key)[1])
            seconds = self._around() + sums
            return seconds, seconds if backward else 0.0
        axes = parse_key(args[0])[1]
        both = name == "p_to_b" and backward
        seconds = self._collective(Collective.ALL_REDUCE, spec.nbytes, axes) + self._copy(spec.nbytes)
        return seconds, seconds if both else 0.0

    def _ring(self, args: Sequence[Any], query: TensorSpec, *, backward: bool) -> tuple[float, float]:
        """What hops of keys, and of their gradients, take longer than the blocks beside which they travel.

        A CPU's transfers keep its cores busy: beside them it computes nothing.
        """
        seconds = [self._around(), self._around() if backward else 0.0]
        axes = parse_key(args[3])[1]
        for nbytes, calls in hops(query, args):
            hop = self._collective(Collective.SEND_RECV, nbytes, axes) if nbytes else 0.0
            costs = [self.model.cost(call) for call in calls] if self.device.kind != "cpu" else []
            seconds[0] += max(0.0, hop - sum(cost.forward_seconds for cost in costs))
            if backward:
                seconds[1] += max(0.0, 2 * hop - sum(cost.backward_seconds for cost in costs))
        return seconds[0], seconds[1]

    def _needed_rows(
        self, key: str, spec: TensorSpec, sends: Sequence[int], receives: Sequence[int]
    ) -> float:
        """An exchange of rows that a graph names, one way: a message to and from each peer, and copies of the
        rank's own rows and of those that it sends."""
        row, axes = spec.nbytes // max(1, spec.shape[0]), parse_key(key)[1]
        messages = [max(pair) * row for pair in zip(sends, receives, strict=True) if any(pair)]
        seconds = sum(self._collective(Collective.SEND_RECV, nbytes, axes) for nbytes in messages)
        copied = spec.nbytes + (sum(sends) + sum(receives)) * row
        return self._around() + 2 * copied / self.device.bandwidth + seconds

    def _around(self) -> float:
        """Seconds of a rule's Python code that cuts, exchanges and adds rows or sums, beside the exchanges
        themselves.

        It is written in Python: of convolutions and batch norms of a few numbers over two processes 0.2 to
        0.3 ms each way, where a launch took 2.2 us. A GPU's host runs ahead, and its kernels count.
        """
        return INNER_LAUNCHES[self.device.kind] * self.device.launch_seconds

    def _halo(
        self,
        key: str,
        spec: TensorSpec,
        dim: int,
        owned: Sequence[int],
        starts: Sequence[int],
        stops: Sequence[int],
    ) -> float:
        """Seconds of the slowest rank's rows from others, one message from each side."""
        axes = parse_key(key)[1]
        row = spec.nbytes // max(1, spec.shape[dim])
        worst = max(foreign(owned, starts, stops))
        return self._collective(Collective.SEND_RECV, worst * row, axes) if worst else 0.0

    def is_gathered(self, operation: Operator) -> bool:
        """Whether an operator with operands runs on gathered ones, for want of a rule."""
        if operation.target is CUSTOM:
            return not call_at(operation.args[4]).factors
        return rule_of(operation) is GATHER and bool(operation.operands)


def _factor(option: Option) -> str:
    return option.factor


def _calls_within(calls: Iterable[Call]) -> tuple[Call, ...]:
    """Calls, or what they are made of where that is declared."""
    found: list[Call] = []
    for call in calls:
        within = facts_of(call.target).within
        found.extend(within(call.args) if within else (call,))
    return tuple(found)


def _is_local(written: LocalCall) -> bool:
    return bool(written.call.target.namespace != "autopar")
