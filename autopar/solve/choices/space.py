"""What may be chosen: strategies of every operator and stored layouts of every input.

`force` narrows it: to one kind of parallelism on every axis, or to one for each axis (operators that
compute and have such a factor must shard it); `pins` to given options for the layers that they name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from autopar.convert.moves import canonical
from autopar.core.cut import chunked, nested
from autopar.core.force import Force, Pins
from autopar.core.gathering import Gathering, ShardState
from autopar.core.graph import Graph, GraphInput, InputKind, Operator
from autopar.core.placement import Layout, Placement, R, Shard
from autopar.core.strategy import UNSUMMED, Option, Strategy
from autopar.cost.operators.prices import Prices
from autopar.errors import InputError
from autopar.sharding.atoms import Atom, Dims
from autopar.sharding.needed_rows import AT_RUN_TIME
from autopar.sharding.rule import Regroup, rule_of
from autopar.sharding.strategies import options_of, strategies_of
from autopar.solve.choices.fold import Folding, pin_of
from autopar.solve.choices.kinds import Kinds, kind_by_axis, placed
from autopar.solve.choices.shard_state import most_sharded, ways


@dataclass(frozen=True, slots=True)
class Space:
    """Choices of the solver: strategies of operator classes, layouts of inputs and outputs, and when weights
    in shards may be gathered: never if there is nothing to choose."""

    strategies: Mapping[str, Sequence[Strategy]]
    inputs: Mapping[str, Sequence[Layout]]
    outputs: Mapping[str, Sequence[Layout]]
    gatherings: tuple[Gathering, ...] = (Gathering.KEEP,)

    def without_regather(self) -> Space:
        """The space in which no weight is regathered, if there are other ways; else itself."""
        others = tuple(way for way in self.gatherings if way is not Gathering.REGATHER)
        return replace(self, gatherings=others) if others not in ((), self.gatherings) else self


@dataclass(frozen=True, slots=True)
class Borders:
    """How tensors may lie where they enter and leave.

    `stored` fixes where parameters and buffers (by target name) lie already. With `local_inputs` a user
    input may come in parts, as its operators take it; `user_layouts` (by path) fixes how, where the
    input is long enough for that. With `local_outputs` every output but the loss may leave in parts.
    A `shard_state` that is forced leaves weights that require gradients the layouts in most shards.
    """

    stored: Mapping[str, Layout] | None = None
    local_inputs: bool = False
    user_layouts: Mapping[str, Layout] | None = None
    local_outputs: bool = False
    shard_state: ShardState = ShardState.AUTO


CLOSED = Borders()


def build_space(
    graph: Graph,
    prices: Prices,
    folding: Folding,
    *,
    force: Force | None = None,
    pins: Pins | None = None,
    borders: Borders = CLOSED,
) -> Space:
    """The space of plans under a force, pins and borders."""
    kinds = Kinds(graph, prices.dims)
    anchors = anchored(graph, prices.dims)
    strategies: dict[str, Sequence[Strategy]] = {}
    pruned: dict[object, list[Strategy]] = {}
    groups: Groups = {}
    cast_weights = graph.cast_weights
    splitting = {item.name for item in split_by_force(graph, prices)} if force is not None else set()
    pins = dict(pins or {})
    used: set[str] = set()
    for item in graph.operators:
        used |= {item.name, item.module} & pins.keys()
        if folding.class_of[item.name] != item.name:
            continue
        offered = runnable(item, prices)
        pin = pin_of(item, pins)
        if pin is None:
            offered = useful(item, offered, prices, anchors)
        if force is not None and cast_weights.isdisjoint(item.results):  # where weights lie isn't forced
            offered = forced(item, offered, force, kinds, most=item.name in splitting)
        elif pin is None:
            offered = idle(offered, prices.dims)
        same = prices.operator_kind(item), tuple(map(id, offered))
        if same not in pruned:  # equal operators share what they offer
            pruned[same] = undominated(item, offered, prices, groups)
        offered = pruned[same]
        if pin is not None:
            offered = pinned(item, offered, pin, prices)
        strategies[item.name] = offered
    if pins.keys() - used:
        raise InputError(
            where="force",
            found=", ".join(sorted(pins.keys() - used)),
            wanted="names of layers or operators of the graph",
            remedy="take the names from the plan's table",
        )
    uses = graph.consumers()
    inputs: dict[str, Sequence[Layout]] = {}
    alike: dict[object, Sequence[Layout]] = {}
    for given in graph.inputs:
        if fixed := _fixed(given, prices.dims, borders.stored or {}, borders.user_layouts or {}):
            inputs[given.name] = [fixed]
            continue
        users = tuple((folding.class_of[item.name], index) for item, index in uses[given.name])
        key = users, given.kind, given.mutated, given.spec, prices.dims.atoms.of[given.name]
        if key not in alike:
            forced_shards = borders.shard_state.is_forced and prices.training and given.spec.requires_grad
            alike[key] = _layouts_of(
                given, users, prices, strategies, local=borders.local_inputs, most=forced_shards
            )
        inputs[given.name] = alike[key]
    whole: Layout = (R,) * len(prices.dims.mesh.shape)
    outputs: dict[str, Sequence[Layout]] = {
        name: _layouts_of_output(name, graph, prices.dims, strategies, folding, inputs)
        if borders.local_outputs and name != graph.loss
        else [whole]
        for name in graph.outputs
    }
    return Space(strategies, inputs, outputs, ways(borders.shard_state, stored=bool(borders.stored)))


def anchored(graph: Graph, dims: Dims) -> set[Atom]:
    """Components on which at least two operators that are no mere views can be sharded."""
    users: dict[Atom, set[str]] = {}
    for item in graph.operators:
        if isinstance(rule_of(item), Regroup):
            continue
        for option in options_of(item, dims):
            for name, place in placed(item, option):
                users.setdefault(dims.component(name, place), set()).add(item.name)
    return {component for component, names in users.items() if len(names) > 1}


def useful(
    operation: Operator, offered: Sequence[Strategy], prices: Prices, anchors: set[Atom]
) -> list[Strategy]:
    """Leave out what could only lose: atoms of a product dim on which no other operator can run
    (another atom of the dim shards it as well), and, for operators that do products and can be
    sharded on an axis, an unsummed gradient there (sharded, they would do a part of the work)."""
    dims = prices.dims
    lonely = {
        id(option)
        for option in options_of(operation, dims)
        if any(
            len(dims.atoms.of[name][place.dim]) > 1 and dims.component(name, place) not in anchors
            for name, place in placed(operation, option)
        )
    }
    kept = [strategy for strategy in offered if lonely.isdisjoint(map(id, strategy))]
    if not is_heavy(operation, prices):
        return kept
    axes = prices.dims.mesh.axes
    shardable = [any(strategy[axis].shards for strategy in kept) for axis in axes]
    return [
        strategy
        for strategy in kept
        if not any(shardable[axis] and strategy[axis].factor == UNSUMMED for axis in axes)
    ]


def runnable(operation: Operator, prices: Prices) -> Sequence[Strategy]:
    """Every strategy; of a compiled program those by which a rank's tensors have sizes known before."""
    every = strategies_of(operation, prices.dims)
    if prices.groups is None:
        return every
    return [each for each in every if all(has_sizes(option.factor, prices) for option in each)]


def has_sizes(factor: str, prices: Prices) -> bool:
    """Whether a program may split a factor: of a compiled one, sizes of its parts are known before."""
    return prices.groups is None or factor.partition(".")[0] not in AT_RUN_TIME


def idle(offered: Sequence[Strategy], dims: Dims) -> Sequence[Strategy]:
    """Strategies that do nothing on axes of one rank, where sharding is free and still copies."""
    single = [axis for axis in dims.mesh.axes if dims.mesh.shape[axis] == 1]
    return [
        strategy
        for strategy in offered
        if all(place == R for axis in single for place in (*strategy[axis].operands, *strategy[axis].results))
    ]


Groups = dict[object, list[list[Strategy]]]  # of strategies with equal placements, for all operators


def undominated(
    operation: Operator, offered: Sequence[Strategy], prices: Prices, groups: Groups | None = None
) -> list[Strategy]:
    """The cheapest of strategies with equal placements, the only ones that are priced here; partial sums of
    integers are not offered. Operators of the same strategies share `groups`."""
    groups = {} if groups is None else groups
    specs, training = prices.graph.specs, prices.training
    operands = tuple(training and specs[name].requires_grad for name in operation.operands)
    results = tuple(training and specs[name].requires_grad if name else None for name in operation.results)

    def seconds(strategy: Strategy) -> float:
        return prices.operator(operation, strategy).seconds

    key = operands, results, *map(id, offered)
    if key not in groups:
        groups[key] = _alike(offered, operands, results)
    return [first if not others else min((first, *others), key=seconds) for first, *others in groups[key]]


def _alike(
    offered: Sequence[Strategy], operands: Sequence[bool], results: Sequence[bool | None]
) -> list[list[Strategy]]:
    """Strategies in groups of equal placements, by whether each operand and result requires a gradient; None
    where a result is no tensor."""
    equal: dict[object, list[Strategy]] = {}

    def layouts(
        strategy: Strategy, of: Callable[[Option], tuple[Placement, ...]], kinds: Sequence[bool | None]
    ) -> object:
        return tuple(
            canonical(tuple(of(option)[index] for option in strategy), differentiable=kind)
            for index, kind in enumerate(kinds)
            if kind is not None
        )

    for strategy in offered:
        key = (
            layouts(strategy, lambda option: option.operands, operands),
            layouts(strategy, lambda option: option.results, results),
        )
        equal.setdefault(key, []).append(strategy)
    return list(equal.values())


def forced(
    operation: Operator, offered: Sequence[Strategy], force: Force, kinds: Kinds, *, most: bool
) -> list[Strategy]:
    """Strategies that shard each axis by the kind that is forced there or not at all; with `most` those that
    shard as many axes as can be, which aren't offered if no other do."""
    wanted = kind_by_axis(force, kinds.dims.mesh)

    def count(strategy: Strategy) -> int:
        return sum(option.shards for option in strategy)

    options = options_of(operation, kinds.dims)
    kind_of = [kinds.of(operation, option) for option in options]
    fitting = {
        kind: {
            id(option)
            for option, own in zip(options, kind_of, strict=True)
            if not option.shards or kind.has(own)
        }
        for kind in set(wanted)
    }
    allowed = [fitting[kind] for kind in wanted]

    def pure(strategies: Iterable[Strategy]) -> list[Strategy]:
        return [
            strategy
            for strategy in strategies
            if all(id(option) in own for option, own in zip(strategy, allowed, strict=True))
        ]

    found = pure(offered)
    every = pure(strategies_of(operation, kinds.dims))
    axes = max(map(count, every))
    if axes and most:
        return [each for each in found if count(each) == axes] or [
            each for each in every if count(each) == axes
        ]
    return found


def split_by_force(graph: Graph, prices: Prices) -> list[Operator]:
    """The operators that a forced kind has to split: those that do products, or all where none does."""
    return [item for item in graph.operators if is_heavy(item, prices)] or list(graph.operators)


def is_heavy(operation: Operator, prices: Prices) -> bool:
    """Whether the operator has products, for which flops are counted."""
    whole, *_ = options_of(operation, prices.dims)
    return prices.operator(operation, (whole,) * len(prices.dims.mesh.shape)).flops > 0


def pinned(
    operation: Operator, offered: Sequence[Strategy], pin: Sequence[str | None], prices: Prices
) -> list[Strategy]:
    """Strategies whose factor on each axis is the pinned one; None is any unsharded option."""
    found = [
        strategy
        for strategy in offered
        if len(pin) == len(strategy)
        and all(
            (option.factor if option.shards else None) == want
            for option, want in zip(strategy, pin, strict=True)
        )
    ]
    if not found:
        offers = sorted({option.factor for strategy in offered for option in strategy if option.shards})
        raise InputError(
            where=f"force[{operation.module or operation.name!r}]",
            found=f"{list(pin)} on mesh {prices.dims.mesh}, of operands {_shapes(operation, prices.graph)}",
            wanted=f"a factor or None for each axis, of {', '.join(offers) or 'none'}",
            remedy="choose a factor that the operator has and that is long enough for the axis",
        )
    return found


def _shapes(operation: Operator, graph: Graph) -> str:
    return ", ".join("x".join(map(str, graph.specs[name].shape)) for name in operation.operands) or "none"


# -- inputs and outputs ----------------------------------------------------------------------------------


def _fixed(
    item: GraphInput, dims: Dims, stored: Mapping[str, Layout], user_layouts: Mapping[str, Layout]
) -> Layout | None:
    """The layout that an input has already; None if it may be chosen."""
    if item.kind is not InputKind.USER:
        return stored.get(item.target)
    layout = user_layouts.get(item.target)
    return layout if layout is not None and dims.legal(item.name, layout) else None


def _layouts_of(
    item: GraphInput,
    uses: Sequence[tuple[str, int]],
    prices: Prices,
    strategies: Mapping[str, Sequence[Strategy]],
    *,
    local: bool,
    most: bool,
) -> Sequence[Layout]:
    """The layouts of an input that `uses`, classes of operators and positions, take."""
    whole: Layout = (R,) * len(prices.dims.mesh.shape)
    needs = {
        canonical(
            tuple(option.operands[index] for option in strategy),
            differentiable=prices.training and item.spec.requires_grad,
        )
        for name, index in uses
        for strategy in strategies[name]
    }
    if item.mutated:
        return sorted(needs, key=str) or [whole]
    if item.kind is InputKind.PARAMETER:
        dims = range(len(item.spec.shape) if most else 1)
        found = _in_parts(needs, prices.dims, extra=_whole_dims(item, dims))
        kept = [layout for layout in found if storable(item.name, layout, prices.dims)]
        return most_sharded(kept) if most else kept
    if item.kind is InputKind.USER and local:
        found = _in_parts(needs, prices.dims)
        return [layout for layout in found if prices.dims.legal(item.name, layout)]
    return [whole]


def _layouts_of_output(
    name: str,
    graph: Graph,
    dims: Dims,
    strategies: Mapping[str, Sequence[Strategy]],
    folding: Folding,
    inputs: Mapping[str, Sequence[Layout]],
) -> Sequence[Layout]:
    """Whole, or in parts as its operator makes it, on each axis."""
    made = {
        tuple(option.results[index] for option in strategy)
        for operation in graph.operators
        for index, result in enumerate(operation.results)
        if result == name
        for strategy in strategies[folding.class_of[operation.name]]
    }
    found = _in_parts([*made, *inputs.get(name, ())], dims)
    return [layout for layout in found if dims.legal(name, layout)]


def _in_parts(needs: Iterable[Layout], dims: Dims, extra: Set[Shard] = frozenset()) -> list[Layout]:
    """On each axis whole, in shards as `needs` have there, or in `extra` ones; not all are legal."""
    columns = list(zip(*needs, strict=True)) or [() for _ in dims.mesh.shape]
    choices: list[tuple[Placement, ...]] = [
        (R, *sorted({place for place in column if isinstance(place, Shard)} | extra)) if size > 1 else (R,)
        for column, size in zip(columns, dims.mesh.shape, strict=True)
    ]
    return list(itertools.product(*choices))


def _whole_dims(item: GraphInput, dims: Iterable[int]) -> set[Shard]:
    """The dims, of `dims`, along which a weight can be stored in shards whatever its operators do."""
    return {Shard(dim) for dim in dims if dim < len(item.spec.shape)}


def storable(name: str, layout: Layout, dims: Dims) -> bool:
    """Whether a DTensor can hold the parameter in this layout: its shards are those of torch.chunk."""
    if not dims.legal(name, layout):
        return False
    for dim in range(len(dims.atoms.of[name])):
        places = {place for place in layout if isinstance(place, Shard) and place.dim == dim}
        if len(places) > 1:
            return False
        for place in places:
            axes = tuple(axis for axis, item in enumerate(layout) if item == place)
            sizes = [dims.mesh.shape[axis] for axis in axes]
            atoms = dims.atoms.of[name][dim]
            scale = math.prod(atoms) // atoms[place.atom]
            ours = tuple(bound * scale for bound in dims.cut(dims.component(name, place), axes))
            if ours != nested(math.prod(atoms), sizes, chunked):
                return False
    return True
