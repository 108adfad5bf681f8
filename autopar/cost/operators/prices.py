"""Seconds of every strategy of every operator, and of every move, on one mesh of one cluster.

An operator's cost is that of the calls that its rule writes for one rank: measured at that local
shape where the database has it, else estimated and marked. Collectives are priced by kind, size and
the slowest link of their group. Nothing is the serial time divided by n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

import autopar.runtime.collectives.placement_moves
import autopar.runtime.collectives.random  # noqa: F401  (registers the operators that rules write)
from autopar.cluster import ClusterSpec, Link
from autopar.convert.moves import MoveAction, effect
from autopar.convert.network import Alike, Change, Network, Numbers, Placements, Seconds, network
from autopar.convert.network import Price as PriceOfChange
from autopar.core.costs import ADAM, Collective, DeviceModel, OperatorCost, OptimizerState
from autopar.core.graph import Call, Graph, InputKind, Operator, TensorSpec
from autopar.core.mesh import parse_key
from autopar.core.move import Move
from autopar.core.placement import Layout
from autopar.core.precision import Precision
from autopar.core.strategy import Option, Strategy
from autopar.cost.machine import nccl
from autopar.cost.machine.flops import flops
from autopar.cost.machine.model import CostModel
from autopar.cost.machine.neighbours import ratio
from autopar.cost.operators.calls import OperatorCalls, read_calls
from autopar.cost.operators.fused_groups import FusedGroups, Member
from autopar.cost.operators.fused_memory import fused_calls, fused_saved
from autopar.cost.operators.fused_prices import Traffic, fused_cost, traffic
from autopar.cost.operators.group_calls import Group, Lowered, companions, joined
from autopar.cost.operators.halo_convolution import foreign, strip_calls
from autopar.cost.operators.known_prices import Known, known_prices
from autopar.cost.operators.saved import SavedTensors, find_saved, stand_ins
from autopar.errors import AutoparError
from autopar.rewrite.emit import GraphEmitter, Written
from autopar.runtime.collectives.late_gradients import PRODUCTS
from autopar.runtime.parameters.gradient_buckets import ALONE_BYTES, BUCKET_BYTES
from autopar.sharding.atoms import Dims
from autopar.sharding.rule import GATHER, Site, rule_of
from autopar.sharding.strategies import sign_of, text_of
from autopar.trace.custom_operator import CUSTOM, call_at
from costdb.footprint import footprint

_COLLECTIVE = {
    MoveAction.ALL_REDUCE: Collective.ALL_REDUCE,
    MoveAction.ALL_GATHER: Collective.ALL_GATHER,
    MoveAction.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
    MoveAction.ALL_TO_ALL: Collective.ALL_TO_ALL,
}
TIE = 1e-3  # of the time to write what is saved: too little to change which plan is fastest
# Of an optimizer's step on each parameter, plain or a DTensor, as launches: Adam on CPUs took 29 and 50 us
# beside the bytes, of 55 and 92 small parameters, where a launch took 1.9 us. A GPU's host runs ahead.
UPDATE_LAUNCHES = {False: 15, True: 26}
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


@dataclass(slots=True)
class Prices:
    """The cost table of one graph on one mesh; filled on demand and remembered.

    The graph is that of one micro-batch. `step_weight` is what a second that is spent once a step counts
    against one that every micro-batch spends: 1 without micro-batches. `training` counts backward passes.
    """

    graph: Graph
    dims: Dims
    cluster: ClusterSpec
    model: CostModel
    training: bool = True
    optimizer: OptimizerState = ADAM
    step_weight: float = 1.0
    micro_batches: int = 1
    accumulates: bool = False  # whether gradients of several micro-batches add up
    shown: float = 1.0  # of gradient sums in buckets, a multiplier
    credit: float = 0.0  # of the backward seconds of operators, behind which such sums hide
    early: bool = False  # whether gathers and sums of activations start early, too
    compute_credit: float = 0.0  # then of all seconds of operators; `shown` is of gathers, too
    late_credit: float = 0.0  # and of those of gradients of weights, which may be late
    late_shown: float = 1.0  # of exchanges of activations' gradients
    reduce: Precision = Precision.FP32  # what gradients of cast weights are summed in
    groups: FusedGroups | None = None  # of a compiled program
    _operators: dict[Any, Price] = field(default_factory=dict)
    _priced: dict[Any, tuple[Strategy, Price]] = field(default_factory=dict)  # by identity
    _places: dict[Any, tuple[int, ...]] = field(default_factory=dict)  # fullest ranks, by identity
    _parts: dict[Any, dict[object, int]] = field(default_factory=dict)
    _bytes: dict[tuple[str, Layout], int] = field(default_factory=dict)
    _calls: dict[Any, OperatorCalls] = field(default_factory=dict)
    _moves: dict[Any, tuple[float, float]] = field(default_factory=dict)
    _groups: dict[Any, Group | None] = field(default_factory=dict)
    _known: Known | None = None
    _networks: dict[Any, Network] = field(default_factory=dict)  # under multipliers
    _links: dict[tuple[int, ...], tuple[Link, int]] = field(default_factory=dict)  # and nodes spanned
    _texts: dict[str, str] = field(default_factory=dict)
    _equal_axes: bool | None = None
    _parameters: frozenset[str] = frozenset()
    _constants: frozenset[str] = frozenset()
    _reduced: frozenset[str] = frozenset()  # tensors whose gradients are summed in `reduce`
    _weights: frozenset[str] = frozenset()  # the parameters and what is made of them alone

    def __post_init__(self) -> None:
        parameters = (item.name for item in self.graph.inputs if item.kind is InputKind.PARAMETER)
        self._parameters = frozenset(parameters)
        constants = (item.name for item in self.graph.inputs if item.kind is InputKind.CONSTANT)
        self._constants = frozenset(constants)
        weights = set(self._parameters)
        for item in self.graph.operators:
            if item.operands and weights.issuperset(item.operands):
                weights.update(name for name in item.results if name)
        self._weights = frozenset(weights)
        self._reduced = self.graph.cast_weights
        if self.reduce is not Precision.FP32:
            self._reduced |= self.graph.cast_alone

    @property
    def device(self) -> DeviceModel:
        return self.model.device

    @property
    def overlap(self) -> float:
        """The part of a backward pass that sums of gradients may hide behind. A compiled one gives all
        gradients when it ends."""
        if self.groups:
            return 0.0
        return self.device.kernels.overlap if self.device.kernels and self.training else 0.0

    @property
    def known(self) -> Known:
        """What equal operators and tensors of other graphs cost on this mesh, but for multipliers."""
        if self._known is None:
            self._known = known_prices(self.cluster, self.dims.mesh, self.model, training=self.training)
        return self._known

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
        # Equal operators, and programs, share strategies, whose keys take long to make.
        member = self._member(operation)
        same = sign_of(operation, self.dims), id(strategy), member, *self._values(operation)
        if same in self._priced:
            return self._priced[same][1]
        sign = self._sign(operation, strategy)
        # Not Python that reads what it likes, nor what depends on constants' values.
        by_values = rule_of(operation).reads_values or not self._constants.isdisjoint(operation.operands)
        is_general = operation.target is not CUSTOM and not by_values
        found = self.known.operators.get(sign) if is_general else None
        if found is None:
            key = self._key(operation, strategy)
            if key not in self._operators:
                self._operators[key] = self._price(operation, strategy)
            found = self._operators[key]
            if is_general:
                self.known.operators[sign] = found
        found = self._credited(found)
        self._priced[same] = strategy, found
        return found

    def _credited(self, price: Price) -> Price:
        """The price less what hides behind the operator."""
        credit = (
            self.credit * price.behind + self.compute_credit * price.compute + self.late_credit * price.late
        )
        return replace(price, credit=credit) if credit else price

    def _sign(self, operation: Operator, strategy: Strategy) -> Any:
        """Equal for operators of all graphs, and strategies, that have one price on this mesh."""
        own = [(name in self._parameters, name in self._weights) for name in operation.operands]
        factors = tuple(option.factor for option in self._alike(strategy))
        return sign_of(operation, self.dims), operation.order, factors, tuple(own), self._member(operation)

    def _member(self, operation: Operator) -> Member | None:
        """The operator's part of a fused group, where programs are compiled."""
        return self.groups.members.get(operation.name) if self.groups else None

    def _key(self, operation: Operator, strategy: Strategy) -> Any:
        specs, place = self.graph.specs, self._place(operation, strategy)
        shapes = tuple(
            self.dims.local_shape(name, tuple(o.operands[i] for o in strategy), place)
            for i, name in enumerate(operation.operands)
        )
        if operation.name not in self._texts:
            results = [str(specs[name]) if name else "" for name in operation.results]
            args = text_of(operation, lambda name: str(specs[name]))
            self._texts[operation.name] = f"{args}{results}"
        text = self._texts[operation.name]
        how = self._alike(strategy), self._member(operation)
        return operation.target, text, shapes, *how, *self._values(operation)

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
        if rule_of(operation).reads_values:
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
        key = operation.target, *self._values(operation), strategy
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
        key = self._key(operation, strategy), moved, needed
        if key not in self._calls:
            emitter, values, results = self._lower(operation, strategy)
            found = read_calls(emitter, values, results, self.device.kind)
            member = self._member(operation)
            if member is not None and not emitter.collectives:
                found = fused_calls(
                    found, member, emitter.described(tuple(values)), moved=moved, needed=needed
                )
            self._calls[key] = found
        return self._calls[key]

    def parts(self, operation: Operator, strategy: Strategy) -> Mapping[object, int]:
        """Bytes of each tensor that the largest rank's program holds for the operator from the start: its
        block of a sparse matrix, say. Operators may share them."""
        if not rule_of(operation).reads_values:
            return {}
        key = operation.name, strategy
        if key not in self._parts:
            emitter, *_ = self._lower(operation, strategy)
            held = emitter.memory.items()
            self._parts[key] = {memory: emitter.meta[node].nbytes for node, memory in held}
        return self._parts[key]

    def _lower(self, operation: Operator, strategy: Strategy) -> tuple[GraphEmitter, list[Any], list[Any]]:
        """What the operator's rule writes for the rank that is priced, its operands and results."""
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

    def _price(self, operation: Operator, strategy: Strategy) -> Price:
        emitter, values, results = self._lower(operation, strategy)
        doubles = stand_ins(emitter)
        local = tuple(item.call for item in (*emitter.written, *doubles) if _is_local(item))
        strips = tuple(strip_calls(emitter))
        costs = [self.call(item) for item in emitter.calls if item.target.namespace == "autopar"]
        recompute = sum(item.forward_seconds for item in costs)
        fused = self._fused(operation, strategy, Lowered(operation, emitter, values, results))
        measurable, member = local, self._member(operation)
        if fused is not None:
            part, measurable = fused
            recompute, local = recompute + part.forward_seconds, ()
            costs.append(part)
        else:
            recompute += sum(
                self.call(item.call).forward_seconds for item in emitter.written if _is_local(item)
            )
            costs += [self.call(item) for item in (*local, *strips)]
        compute = sum(self._seconds(item) for item in costs)
        missing = sum(self._seconds(item) for item in costs if not item.measured)
        between = sum(self._seconds(item) for item in costs if item.interpolated)
        inner = [self._inner(target, args, spec) for target, args, spec in emitter.collectives]
        talk = sum(map(sum, inner))
        work = sum(flops(item) for item in local)
        ahead = sum(item.forward_seconds for item in costs) * self.model.contention
        behind = compute - ahead
        weights = behind * self._weights_share(operation, work)
        late = weights if operation.target in PRODUCTS else 0.0
        ahead += sum(before for before, _ in inner)
        saved = find_saved(emitter, (*emitter.written, *doubles), values, results, self.device.kind)
        if fused is not None and member is not None:
            saved = fused_saved(saved, member, emitter.described(tuple(values)))
        calls = measurable + strips
        launches = len(calls) if fused is None or member is None else int(member.leads)
        if not self.training:
            return Price(
                compute,
                talk,
                missing,
                work,
                calls,
                SavedTensors(aliases=saved.aliases),
                forward=ahead,
                interpolated_seconds=between,
                launches=launches,
            )
        sizes = (
            emitter.meta[values[index]].numel() * emitter.meta[values[index]].element_size()
            for index in saved.operands
            if operation.operands[index] not in self._parameters
        )
        tie = TIE * (sum(sizes) + saved.extra_bytes) / self.device.bandwidth
        recompute *= self.model.contention
        return Price(
            compute,
            talk,
            missing,
            work,
            calls,
            saved,
            tie,
            forward=ahead,
            weights=weights,
            recompute=recompute,
            behind=behind,
            late=late,
            interpolated_seconds=between,
            launches=launches,
        )

    def _estimated(self, operation: Operator, lowered: Lowered) -> tuple[OperatorCost, Traffic] | None:
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
        self, operation: Operator, strategy: Strategy, lowered: Lowered
    ) -> tuple[OperatorCost, tuple[Call, ...]] | None:
        """As `_estimated`, but by what its group took where that is measured; at its first member with the
        group's call."""
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

    def _group(self, operation: Operator, strategy: Strategy) -> Group | None:
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

    def _joined(self, group: Sequence[Operator], strategies: Mapping[str, Strategy]) -> Group | None:
        lowered = [Lowered(item, *self._lower(item, strategies[item.name])) for item in group]
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
        """One local call; a mask of autopar's own costs what filling its memory costs."""
        if item.target.namespace != "autopar":
            return self.model.cost(item)
        nbytes = 1
        for size in item.args[0]:
            nbytes *= size
        return OperatorCost(
            self.device.launch_seconds + 4 * nbytes / self.device.bandwidth * 4, 0.0, measured=False
        )

    def _inner(self, target: str, args: Sequence[Any], spec: TensorSpec) -> tuple[float, float]:
        """Communication inside an operator, forward and backward: halos, and sums of statistics."""
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
        """What an operator takes that cuts, exchanges and adds rows or sums, beside these exchanges, one way.

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
        """The slowest rank's rows from others, one message from each side."""
        axes = parse_key(key)[1]
        row = spec.nbytes // max(1, spec.shape[dim])
        worst = max(foreign(owned, starts, stops))
        return self._collective(Collective.SEND_RECV, worst * row, axes) if worst else 0.0

    # -- moves --------------------------------------------------------------------------------------

    def move(self, name: str, move: Move) -> float:
        """Seconds of a conversion, forward and backward."""
        return sum(self.move_parts(name, move))

    def move_parts(self, name: str, move: Move) -> tuple[float, float]:
        """Seconds of a conversion in the forward and in the backward pass."""
        nbytes = max(self.local_bytes(name, move.source), self.local_bytes(name, move.target))
        change, weight = Change(move.axis, *move.placements), name in self._parameters
        return self._change(
            change,
            nbytes,
            requires_grad=self._requires_grad(name),
            weight=weight,
            wide=self.widening(name),
            parts=self._parts_group(name),
        )

    def widening(self, name: str) -> float:
        """How many times the bytes of a tensor its gradient has where it is summed over ranks."""
        return self.reduce.nbytes / self.graph.specs[name].dtype.itemsize if name in self._reduced else 1.0

    def summed_bytes(self, name: str, layout: Layout) -> int:
        """Bytes of the largest rank's part of a gradient, in the dtype in which it is summed over ranks."""
        return round(self.widening(name) * self.local_bytes(name, layout))

    def _change(
        self, change: Change, nbytes: int, *, requires_grad: bool, weight: bool, wide: float, parts: bool
    ) -> tuple[float, float]:
        """Seconds of a change of placement of a tensor whose larger part, before or after, has `nbytes`; sums
        of its gradient have `wide` times as many. One that `parts` a fused group writes and reads it."""
        what = change.effect
        wide = wide if what.name in ("r_to_b", "s_to_b") else 1.0
        key = what.name, change.axis, nbytes, requires_grad, weight, wide, parts
        if key not in self._moves:
            full = nbytes * (self.dims.mesh.shape[change.axis] if what.name == "s_to_s" else 1)
            fresh = self._fresh(full) if weight and what.forward is MoveAction.ALL_GATHER else 0.0
            back = (
                fresh + self._action(what.backward, round(wide * full), change.axis) if requires_grad else 0.0
            )
            back += 2 * self._copy(full) if requires_grad and wide != 1 else 0.0  # to another dtype and back
            ahead = fresh + self._action(what.forward, full, change.axis)
            if parts:
                ahead += self._apart(what.forward, nbytes)
                back += self._apart(what.backward, nbytes) if requires_grad else 0.0
            self._moves[key] = self._shown(what.name, ahead, back, weight=weight)
        return self._moves[key]

    def _apart(self, action: MoveAction, nbytes: int) -> float:
        """What kernels write and read around a move between members of a group."""
        return 0.0 if action is MoveAction.NOTHING else self._copy(nbytes)

    def _parts_group(self, name: str) -> bool:
        return self.groups is not None and name in self.groups.inside

    def _shown(self, move: str, ahead: float, back: float, *, weight: bool) -> tuple[float, float]:
        """Seconds of a move, of what may start early as much as is shown: of weights gathers and scatters, of
        activations the exchange in backward."""
        if not self.early:
            return ahead, back
        if weight and move in ("s_to_b", "s_to_r"):
            return self.shown * ahead, self.shown * back
        return ahead, (1.0 if weight or move not in ("r_to_b", "s_to_b") else self.late_shown) * back

    def _requires_grad(self, name: str) -> bool:
        return self.training and self.graph.specs[name].requires_grad

    def network(
        self, name: str, placements: Placements, *, alike: Alike = (), fixed: Set[Layout] = frozenset()
    ) -> Network:
        """The tensor's moves between all layouts of `placements` that are legal, or `fixed`, with seconds;
        a weight's as of every micro-batch. Made once for all tensors that are cut alike."""
        key = self.kind(name), placements, alike, fixed
        weight = name in self._parameters
        usual = self.shown == self.late_shown == 1.0 or not (weight or self.early)
        networks = self.known.networks if usual else self._networks
        if key not in networks and not usual and not self.early and key in self.known.networks:
            networks[key] = self.known.networks[key].scaled(self.shown)
        if key not in networks:
            networks[key] = network(
                placements,
                legal=lambda layout: layout in fixed or self.dims.legal(name, layout),
                price=lambda layouts: self._changes(name, layouts),
                alike=alike,
            )
        return networks[key]

    def kind(self, name: str) -> Any:
        """Equal for tensors whose layouts have the same parts and whose moves cost the same."""
        spec, atoms = self.graph.specs[name], self.dims.atoms
        cuts = tuple(
            self.dims.way_of_cutting(atoms.components[name, dim, atom])
            for dim, lengths in enumerate(atoms.of[name])
            for atom in range(len(lengths))
        )
        own = name in self._parameters, self.widening(name), self._parts_group(name)
        return spec, atoms.of[name], cuts, *own

    def _changes(self, name: str, layouts: Sequence[Layout]) -> PriceOfChange:
        """Seconds of changes between numbers of `layouts`."""
        sizes = np.array([self.local_bytes(name, layout) for layout in layouts])
        requires_grad, weight = self._requires_grad(name), name in self._parameters

        def seconds(change: Change, source: Numbers, target: Numbers) -> tuple[Seconds, Seconds]:
            different, back = np.unique(np.maximum(sizes[source], sizes[target]), return_inverse=True)
            price = partial(
                self._change,
                change,
                requires_grad=requires_grad,
                weight=weight,
                wide=self.widening(name),
                parts=self._parts_group(name),
            )
            parts = [price(nbytes) for nbytes in different.tolist()]
            whole = [sum(each) for each in parts]
            if weight and change.effect.name == "r_to_b":
                pairs = zip(whole, different.tolist(), strict=True)
                wide = self.widening(name)
                whole = [self._in_buckets(each, nbytes, change.axis, wide) for each, nbytes in pairs]
            ahead = np.array([forward for forward, _ in parts])
            return np.array(whole, dtype=np.float64)[back], ahead.astype(np.float64)[back]

        return seconds

    def _action(self, action: MoveAction, nbytes: int, axis: int) -> float:
        match action:
            case MoveAction.NOTHING:
                return 0.0
            case MoveAction.COPY:
                return self._copy(nbytes)
            case MoveAction.ALL_REDUCE:  # of a copy: others may read the terms
                return self._copy(nbytes) + self._collective(Collective.ALL_REDUCE, nbytes, (axis,))
            case _:
                return self._collective(_COLLECTIVE[action], nbytes, (axis,))

    def _fresh(self, nbytes: int) -> float:
        """What a weight costs that has no memory of its own, beside one that stays: its pages, each time.

        With glibc's default settings fresh pages for 16.8 MB took 12 ms, and none with raised thresholds;
        a copy takes 3. A GPU's memory is torch's, which keeps it.
        """
        return self._copy(nbytes) if self.device.kind == "cpu" else 0.0

    def _copy(self, nbytes: int) -> float:
        return self.device.launch_seconds + 2 * nbytes / self.device.bandwidth

    def _collective(self, kind: Collective, nbytes: int, axes: Sequence[int]) -> float:
        size = 1
        for axis in axes:
            size *= self.dims.mesh.shape[axis]
        key = tuple(axes)
        if key not in self._links:
            mesh = self.dims.mesh
            self._links[key] = self.cluster.link(mesh, axes[0]), self.cluster.nodes_of(mesh, key)
        link, nodes = self._links[key]
        # A GPU copies much faster than its links send.
        copy_rate = self.device.bandwidth if self.device.kind == "cpu" else math.inf
        estimate = None
        if self.device.kernels:
            group = nccl.Group(size, nodes, self.cluster.intra, self.cluster.inter)
            estimate = nccl.seconds(kind, nbytes, group)
        found = self.model.collectives.cost(
            kind, nbytes, size, link, nodes=nodes, copy_rate=copy_rate, estimate=estimate
        )
        return found.seconds

    def weight_move(self, name: str, move: Move, *, leads: bool) -> float:
        """A weight's conversion as it counts beside what each micro-batch does; those that lead from where
        the weight is stored are made once a step."""
        seconds = self.gradient_sync(name, move)
        return self.step_weight * seconds if leads else seconds

    def gradient_sync(self, name: str, move: Move) -> float:
        """A weight's conversion: its all-reduce is that of a bucket, or of a gradient where it lies."""
        seconds = self.move(name, move)
        if effect(move).name != "r_to_b":
            return seconds
        return self._in_buckets(seconds, self.local_bytes(name, move.source), move.axis, self.widening(name))

    def _in_buckets(self, seconds: float, nbytes: int, axis: int, wide: float) -> float:
        """Seconds of a gradient's all-reduce, of which one by itself would take `seconds`; summed are `wide`
        times its bytes."""
        if seconds == 0.0:
            return 0.0
        sent, copies = round(wide * nbytes), self._copy(nbytes) if wide != 1 else 0.0
        if sent >= ALONE_BYTES:
            return self.shown * (self._collective(Collective.ALL_REDUCE, sent, (axis,)) + 2 * copies)
        share = sent / BUCKET_BYTES
        shared = self._collective(Collective.ALL_REDUCE, BUCKET_BYTES, (axis,)) * share + self._copy(nbytes)
        return self.shown * min(seconds, shared + copies)

    # -- state ----------------------------------------------------------------------------------------

    def local_bytes(self, name: str, layout: Layout) -> int:
        """Bytes of the largest rank's part of a tensor."""
        key = name, layout
        if key not in self._bytes:
            shape = self.dims.local_shape(name, layout, self.dims.largest(name, layout))
            self._bytes[key] = math.prod(shape) * self.graph.specs[name].dtype.itemsize
        return self._bytes[key]

    def state_bytes(self, name: str, layout: Layout) -> int:
        """A parameter with its gradient and optimizer state; frozen ones have neither."""
        nbytes = self.local_bytes(name, layout)
        if not self._requires_grad(name):
            return nbytes
        return round(nbytes * (2 + self.optimizer.ratio)) + self.optimizer.fixed

    def update(self, name: str, layout: Layout) -> float:
        """Seconds of the optimizer's step on a parameter: each of its tensors is read and written, and the
        host gets at it."""
        if not self._requires_grad(name):
            return 0.0
        launches = UPDATE_LAUNCHES[self.dims.mesh.num_devices > 1] if self.device.kind == "cpu" else 0
        moved = 2 * self.state_bytes(name, layout) / self.device.bandwidth
        return moved + launches * self.device.launch_seconds

    def is_gathered(self, operation: Operator) -> bool:
        """Whether no rule shards the operator, which has tensors that could have been sharded."""
        if operation.target is CUSTOM:
            return not call_at(operation.args[4]).factors
        return rule_of(operation) is GATHER and bool(operation.operands)


def _factor(option: Option) -> str:
    return option.factor


def _is_local(written: Written) -> bool:
    return bool(written.call.target.namespace != "autopar")
