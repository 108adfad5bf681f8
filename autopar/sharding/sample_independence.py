"""How the samples of a batch go through a graph: apart from each other, or together, and into the loss.

    rows        a row for each sample, which depends on no other         x [4, 3] -> linear -> [4, 8]
    sum, mean   one number, or several, of all samples                   -> square -> sum
    bent        neither: a root of a mean, a largest sample
    sorted      rows of all samples, each of its own (sorted_rows.py)    x[keys.argsort()]
    mixed       rows that depend on other samples                        softmax over the batch, x @ x.t()

Micro-batches compute together what the batch computes at once where the loss is a sum or a mean of rows:
what an operator does on a part of its rows is what the option that shards them does on a rank, if that
needs nothing of other ranks. A sum may be divided by what the inputs alone count to (labels that are
kept, class weights, masks): whoever knows the count of the whole batch can weigh its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autopar.core.graph import Graph, InputKind, Operator, may_learn
from autopar.core.operator_facts import facts_of, is_random
from autopar.core.placement import P, Shard
from autopar.core.strategy import PARTIAL, Option
from autopar.errors import RuleError
from autopar.sharding.atoms import Atom, Dims
from autopar.sharding.equation import Kind
from autopar.sharding.made_constants import made_constants
from autopar.sharding.needed_rows import FETCHED
from autopar.sharding.rule import Instance, rule_of
from autopar.sharding.sample_values import TAKEN, Role, SampleValue, Scale
from autopar.sharding.sorted_rows import EMPTY, Order, SortedRows, SortingRelation
from autopar.sharding.strategies import options_of
from autopar.torch_seams.schemas import schema_of

MEAN_REDUCTION, SUM_REDUCTION = 1, 2  # at::Reduction


class SampleFlow:
    """The roles of all tensors of a graph, where the samples run through the loops `batch`.

    `statistics` are what batch norms take of them, the model's own too, after which rows are rows again.
    `whole` are inputs that hold no samples whatever the graph says. Of `trusted` samples, whose dims the user
    says, operators of which nothing is known keep the rows; `unknown` are these.
    """

    def __init__(
        self,
        graph: Graph,
        dims: Dims,
        batch: Iterable[Atom],
        whole: frozenset[str] = frozenset(),
        *,
        trusted: bool = False,
        made: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.graph, self.dims, self.batch = graph, dims, set(batch)
        self.trusted = trusted
        self.sorted_rows = SortedRows(graph)
        self.statistics: list[Operator] = []
        self.unknown: list[Operator] = []
        self.values: dict[str, SampleValue] = {}
        self.made = made_constants(graph) if made is None else made
        self.unfilled = {
            name for item in graph.operators if facts_of(item.target).is_undefined for name in item.results
        }
        self._join_own_rows()
        written = {buffer for buffer, _ in graph.writes}
        self.updates = [item.target for item in graph.inputs if item.mutated or item.name in written]
        for item in graph.inputs:
            users = item.kind is InputKind.USER and item.name not in whole
            places = len(list(self.places(item.name)))
            role = Role.ROWS if users and places == 1 else Role.FIXED if places else Role.WHOLE
            steady = item.kind is not InputKind.PARAMETER and item.target not in self.updates
            self.values[item.name] = SampleValue(role, given=steady)
        needed = ancestors(graph, *graph.outputs)
        for operator in graph.operators:
            if operator.name in needed:
                self.values |= {name: value for name, value in self._results(operator) if name}

    @property
    def loss(self) -> SampleValue:
        return self.values[self.graph.loss or ""]

    @property
    def depth(self) -> int:
        """Ranks how samples meet in a loss: 0 if they are apart, 1 if only statistics are in the way. 2 is a
        loss that is bent, 3 one whose samples meet before it."""
        match self.loss.role:
            case Role.SUM | Role.MEAN:
                return 1 if self.statistics or self.updates else 0
            case Role.BENT:
                return 2
            case _:
                return 3

    @property
    def obstacle(self) -> str | None:
        """Reason why parts of the batch would not compute what the whole does; None if they would."""
        mixed = self.loss.by if self.loss.role is Role.MIXED else None
        together = mixed or next(iter((*self.unknown, *self.statistics)), None)
        if together is not None:
            known = ", as far as is known" if together in self.unknown else ""
            return f"{together.module or together.name} ({together.target}) takes samples together{known}"
        if self.loss.role not in (Role.SUM, Role.MEAN):
            return "the loss is no plain mean or sum of samples"
        return f"every part of the batch updates {self.updates[0]}" if self.updates else None

    def places(self, name: str) -> Iterator[Shard]:
        """Shards of the tensor along the samples' loops."""
        for dim, atoms in enumerate(self.dims.atoms.of[name]):
            for atom in range(len(atoms)):
                if self.dims.atoms.components[(name, dim, atom)] in self.batch:
                    yield Shard(dim, atom)

    # -- one operator -------------------------------------------------------------------------------

    def _results(self, item: Operator) -> list[tuple[str | None, SampleValue]]:
        if any(name in self.made for name in item.results):
            return [
                (name, self._constant(name) if name else SampleValue(Role.WHOLE)) for name in item.results
            ]
        given = [self.values[name] for name in item.operands]
        random = is_random(item.target)
        values = self._roles(item, given)
        steady = all(value.given for value in given) and not random
        return [
            (name, self._checked(name, item, replace(value, given=steady)) if name else value)
            for name, value in zip(item.results, values, strict=True)
        ]

    def _constant(self, name: str) -> SampleValue:
        """A tensor made of numbers: rows if all samples have the same."""
        value, places = self.made[name], list(self.places(name))
        if not places:
            return SampleValue(Role.WHOLE, given=True)
        alike = len(places) == 1 and self._repeats(name, value, places[0])
        return SampleValue(Role.ROWS if alike else Role.FIXED, given=True)

    def _repeats(self, name: str, value: Tensor, place: Shard) -> bool:
        """Whether a tensor is the same all along one loop, which may be part of a dim: samples x heads."""
        loops = value.unflatten(place.dim, self.dims.atoms.of[name][place.dim])
        first = loops.narrow(place.dim + place.atom, 0, 1)
        return bool((loops == first).all())

    def _checked(self, name: str, item: Operator, value: SampleValue) -> SampleValue:
        """`value`, unless the tensor has another number of samples' dims than its role says."""
        places = len(list(self.places(name)))
        if value.role is Role.ROWS and places != 1:
            return replace(value, role=Role.MIXED, by=item)
        if value.role is Role.WHOLE and places:
            return replace(value, role=Role.ROWS if facts_of(item.target).rows_alike else Role.FIXED)
        return value

    def _roles(self, item: Operator, given: Sequence[SampleValue]) -> list[SampleValue]:
        count = len(item.results)
        mixed = next((value for value in given if value.role is Role.MIXED), None)
        if mixed is not None:
            return [mixed] * count
        if self._picks_own(item, given):
            return [SampleValue(Role.ROWS)]
        if item.target in EMPTY:
            return [self._empty(item, given[0])]
        if facts_of(item.target).draws_each:
            return [self._drawn(item, given)]
        in_order = self._sorted(item, given)
        if in_order is not None:
            return in_order
        if any(value.role is Role.FIXED for value in given):
            return [SampleValue(Role.MIXED, item)] * count
        scaled = self._scaled(item, given)
        if scaled is not None:
            return [scaled]
        rows = {place for place, value in enumerate(given) if value.role is Role.ROWS}
        taken = [value for value in given if value.role in TAKEN]
        if rows and taken:
            return self._normalised(item, given, taken)
        if taken:
            return [self._combined(item, given)] * count
        if not rows:
            return [SampleValue(Role.WHOLE)] * count
        return self._of_rows(item, given, rows)

    def _drawn(self, item: Operator, given: Sequence[SampleValue]) -> SampleValue:
        """Random numbers, each drawn for itself: rows where samples draw alike, or each by its own row."""
        (name,) = item.results
        assert name is not None
        if all(self._is_alike(operand) for operand in item.operands):
            return SampleValue(Role.ROWS if any(True for _ in self.places(name)) else Role.WHOLE)
        if {value.role for value in given} != {Role.ROWS} or any(value.scale for value in given):
            return SampleValue(
                Role.WHOLE if {value.role for value in given} == {Role.WHOLE} else Role.MIXED, item
            )
        shapes = {self.graph.specs[operand].shape for operand in (*item.operands, name)}
        places = {place for operand in item.operands for place in self.places(operand)}
        if len(shapes) > 1 or len(places) > 1:
            return SampleValue(Role.MIXED, item)
        (place,) = places
        self.batch.add(self.dims.atoms.components[(name, place.dim, place.atom)])
        return SampleValue(Role.ROWS)

    def _is_alike(self, name: str) -> bool:
        """Whether a tensor has one number throughout, or none yet."""
        made = self.made.get(name)
        if made is None:
            return name in self.unfilled
        return made.numel() == 0 or bool((made == made.flatten()[0]).all())

    def _sorted(self, item: Operator, given: Sequence[SampleValue]) -> list[SampleValue] | None:
        """Values after an operator that sorts rows or keeps them sorted; None if it does neither."""
        marks, known = [value.in_order for value in given], self.sorted_rows
        if not any(marks):
            keys = given[known.place_of_keys(item) or 0] if given else None
            is_rows = keys is not None and keys.role is Role.ROWS and keys.scale is None
            sorting = known.sorting(item) if is_rows and self._is_outermost(item.operands[0]) else None
            if sorting is None and is_rows and (counts := known.counted(item)):
                sorting = (counts,)
            return None if sorting is None else [self._in_order(item, mark) for mark in sorting]
        ones = 2 if known.place_of_keys(item) == 1 else None  # that a count adds up
        others = {value.role for place, value in enumerate(given) if not value.sorted and place != ones}
        fetched = known.fetched(item, marks)
        if fetched and others == {Role.ROWS} and given[0].scale is None:
            return [self._in_order(item, fetched if self._is_outermost(item.operands[0]) else None)]
        if known.put_back(item, marks) and others <= {Role.WHOLE, Role.ROWS}:
            self._join_rows(item.results[0])
            return [SampleValue(Role.ROWS)]
        if others - {Role.WHOLE}:
            return [self._in_order(item, None)] * len(item.results)
        ways = (known.numbers, known.picked, known.in_groups, self._row_by_row)
        found = next(filter(None, (way(item, marks) for way in ways)), None)
        *before, _ = item.results  # of a sort of numbers the last are the places
        is_places = found is not None and found.order is Order.PLACES
        return [
            *(self._in_order(item, None if is_places else found) for _ in before),
            self._in_order(item, found),
        ]

    def _join_rows(self, name: str | None) -> None:
        """Rows that come from an order to no loop of the samples: their first dim is one of them."""
        if name is not None and not any(True for _ in self.places(name)):
            self.batch.add(self.dims.atoms.components[(name, 0, 0)])

    def _empty(self, item: Operator, like: SampleValue) -> SampleValue:
        """A tensor of one number, as long as another."""
        if like.sorted is None:
            return SampleValue(Role.WHOLE)
        return self._in_order(item, SortingRelation(Order.NOTHING, like.sorted.by))

    def _in_order(self, item: Operator, mark: SortingRelation | None) -> SampleValue:
        """Rows in the order that `mark` tells; rows that meet if there is none."""
        return SampleValue(Role.SORTED if mark else Role.MIXED, item, sorted=mark)

    def _row_by_row(self, item: Operator, marks: Sequence[SortingRelation | None]) -> SortingRelation | None:
        """Relation after an operator on single sorted rows, beside operands that are the same for all."""
        sorts = {mark.by for mark in marks if mark}
        rows = {place for place, mark in enumerate(marks) if mark}
        if len(sorts) > 1 or any(mark.order not in (Order.ROWS, Order.KEYS) for mark in marks if mark):
            return None
        loops = {
            self.dims.atoms.components[(item.operands[place], 0, atom)]
            for place in rows
            for atom in range(len(self.dims.atoms.of[item.operands[place]][0]))
        }
        option = self._option(item, rows, loops)
        fits = option is not None and self._kind(item, option) is Kind.FREE and self._in_front(option)
        return SortingRelation(Order.ROWS, sorts.pop()) if fits else None

    def _in_front(self, option: Option) -> bool:
        """Whether an option shards the first dim of every result."""
        return all(isinstance(each, Shard) and each.dim == 0 for each in option.results)

    def _is_outermost(self, name: str) -> bool:
        """Whether a tensor's rows lie sample by sample."""
        return list(self.places(name)) == [Shard(0, 0)]

    def _join_own_rows(self) -> None:
        """Add to the batch the dims that are indexed by the samples' numbers: they hold a row for each
        sample."""
        for item in reversed(self.graph.operators):
            own = self._numbered(item)
            if own is not None and any(True for _ in self.places(item.operands[1 + own[1]])):
                self.batch.add(self.dims.atoms.components[(item.operands[0], own[0], 0)])

    def _numbered(self, item: Operator) -> tuple[int, int] | None:
        """The dim that an operator indexes by 0, 1, 2 ... as far as it goes, and which index that is."""
        indexed_dims = facts_of(item.target).indexed_dims
        for place, dim in enumerate(indexed_dims(item) if indexed_dims else ()):
            numbers = self.made.get(item.operands[1 + place])
            size = self.graph.specs[item.operands[0]].shape[dim]
            own = numbers is not None and numbers.numel() == size and 1 < size == max(numbers.shape)
            if own and numbers is not None and torch.equal(numbers.flatten(), torch.arange(size)):
                return dim, place
        return None

    def _picks_own(self, item: Operator, given: Sequence[SampleValue]) -> bool:
        """Whether every sample picks of its own row, whose number it is."""
        own = self._numbered(item)
        if own is None or given[0].role is not Role.ROWS or given[0].scale is not None:
            return False
        (place,) = self.places(item.operands[0])
        others = [value for index, value in enumerate(given[1:]) if index != own[1]]
        return place.dim == own[0] and all(value.role in (Role.WHOLE, Role.ROWS) for value in others)

    def _normalised(
        self, item: Operator, given: Sequence[SampleValue], taken: Sequence[SampleValue]
    ) -> list[SampleValue]:
        """Rows together with a mean, or another statistic, of all of them; only a sum mixes them for good."""
        statistics = [value.by for value in taken if value.by and value.role is not Role.SUM]
        if len(statistics) < len(taken) or any(value.scale for value in given):
            return [SampleValue(Role.MIXED, taken[0].by)] * len(item.results)
        self.statistics += statistics
        rows = {place for place, value in enumerate(given) if value.role is Role.ROWS}
        return self._of_rows(item, given, rows)

    def _scaled(self, item: Operator, given: Sequence[SampleValue]) -> SampleValue | None:
        """Value of rows or a sum that are divided or multiplied by a count of the batch; None otherwise."""
        facts = facts_of(item.target)
        if not (facts.multiplies or facts.divides) or len(given) != 2:
            return None
        for place in (1, 0) if facts.multiplies else (1,):
            count, other = given[place], given[1 - place]
            single = self.graph.specs[item.operands[place]].numel == 1
            if count.role in TAKEN and count.given and single and other.role in (Role.ROWS, Role.SUM):
                if other.scale is not None or self._is_half(item):
                    return SampleValue(Role.BENT if other.role is Role.SUM else Role.MIXED, count.by)
                return replace(other, scale=Scale(item.name, item.operands[place], facts.multiplies))
        return None

    def _is_half(self, item: Operator) -> bool:
        """Whether a sum might overflow where the mean does not."""
        return any(name and self.graph.specs[name].dtype is torch.float16 for name in item.results)

    def _combined(self, item: Operator, given: Sequence[SampleValue]) -> SampleValue:
        """Sums or means with each other, and with what is the same for all samples."""
        taken = {place for place, value in enumerate(given) if value.role in TAKEN}
        first = given[min(taken)]
        bent = SampleValue(Role.BENT, first.by)
        alike = all((given[place].role, given[place].scale) == (first.role, first.scale) for place in taken)
        if first.role is Role.BENT or not alike:
            return bent
        shifts = facts_of(item.target).shifts and first.role is Role.MEAN and first.scale is None
        return first if shifts or self._is_linear(item, taken) else bent

    def _is_linear(self, item: Operator, places: set[int]) -> bool:
        """Whether the operator is linear in the operands at `places` together, without a constant term."""
        linear = [option.operands for option in options_of(item, self.dims) if option.factor == PARTIAL]
        return any({place for place, each in enumerate(one) if each == P} == places for one in linear)

    def _of_rows(self, item: Operator, given: Sequence[SampleValue], rows: set[int]) -> list[SampleValue]:
        option = self._option(item, rows)
        named = [name for name in item.results if name]
        if option is None and self._is_trusted(item, rows):
            return [SampleValue(Role.ROWS)] * len(item.results)
        if option is None or self._reads_position(item, option):
            single = all(self.graph.specs[name].numel == 1 for name in named)
            moment = facts_of(item.target).is_moment
            taken = single or moment and not any(True for one in named for _ in self.places(one))
            role = Role.BENT if taken and len(rows) == len(given) else Role.MIXED
            return [SampleValue(role, item)] * len(item.results)
        scales = {given[place].scale for place in rows if given[place].scale}
        scaled = {place for place in rows if given[place].scale}
        if scales and (len(scales) > 1 or not self._is_linear(item, scaled)):
            return [SampleValue(Role.MIXED, item)] * len(item.results)
        scale = next(iter(scales), None)
        match self._kind(item, option):
            case Kind.FREE:
                return [SampleValue(Role.ROWS, scale=scale)] * len(item.results)
            case Kind.CONTRACTED if not rule_of(item).reads_values:  # else vertices meet in others
                return [self._reduced(item, given, scale)] * len(item.results)
            case Kind.STATISTIC if facts_of(item.target).joins_samples:
                self.statistics.append(item)
                return [SampleValue(Role.ROWS)] * len(item.results)
            case Kind.STATISTIC if not any(True for name in named for _ in self.places(name)):
                return [SampleValue(Role.BENT, item)] * len(item.results)
        return [SampleValue(Role.MIXED, item)] * len(item.results)

    def _option(self, item: Operator, rows: set[int], loops: set[Atom] | None = None) -> Option | None:
        """How the operator is sharded by samples, or other `loops`, in all that it takes of them and nothing
        else; none that fetches rows of others."""
        loops = self.batch if loops is None else loops
        for option in options_of(item, self.dims):
            if option.factor.split(".")[0] in FETCHED:
                continue
            sharded = {
                place
                for place, (name, each) in enumerate(zip(item.operands, option.operands, strict=True))
                if isinstance(each, Shard) and self.dims.component(name, each) in loops
            }
            if sharded == rows:
                return option
        return None

    def _is_trusted(self, item: Operator, rows: set[int]) -> bool:
        """Whether the results may be taken for rows, in the dim of the operator's first operand with rows."""
        first = item.operands[min(rows)]
        (place,) = self.places(first)
        size = self.graph.specs[first].shape[place.dim]
        named = [name for name in item.results if name]
        shapes = [self.graph.specs[name].shape for name in named]
        if not self.trusted or any(shape[place.dim : place.dim + 1] != (size,) for shape in shapes):
            return False
        self.batch |= {self.dims.atoms.components[(name, place.dim, 0)] for name in named}
        self.unknown.append(item)
        return True

    def _reads_position(self, item: Operator, option: Option) -> bool:
        """Whether a row's result depends on its position, as a causal query's does."""
        instance = Instance(item, self.dims.graph.specs)
        return rule_of(item).reads_position(instance, option.factor.split(".")[0])

    def _kind(self, item: Operator, option: Option) -> Kind:
        try:
            equation = rule_of(item).equation(Instance(item, self.dims.graph.specs))
        except RuleError:  # a view, which only relates dims
            return Kind.FREE
        return equation.kind(option.factor.split(".")[0])

    def _reduced(self, item: Operator, given: Sequence[SampleValue], scale: Scale | None) -> SampleValue:
        """Value of an operator's result that adds up over samples."""
        facts, reduction = facts_of(item.target), reduction_of(item)
        if facts.sum_of == len(item.operands) or reduction == SUM_REDUCTION:
            return SampleValue(Role.SUM, item, scale=scale)
        is_mean = reduction == MEAN_REDUCTION
        if facts.is_mean or is_mean and not counts_labels(item, self.graph):
            return SampleValue(Role.MEAN, item, scale=scale)
        if not is_mean or scale is not None or self._is_half(item):
            return SampleValue(Role.BENT, item)
        if not all(given[place].given for place in _counted(item)):
            return SampleValue(Role.BENT, item)
        return SampleValue(Role.SUM, item, scale=Scale(item.name, None))


def reduction_of(item: Operator) -> int | None:
    """ATen's number of the reduction that a loss ends with; None for an operator without one."""
    for place, argument in enumerate(schema_of(item.target).arguments):
        if argument.name == "reduction":
            given = item.kwargs.get("reduction", argument.default_value)
            return int(item.args[place] if place < len(item.args) else given)
    return None


def counts_labels(item: Operator, graph: Graph) -> bool:
    """Whether the mean of a loss is over labels that aren't ignored, each with the weight of its class."""
    names = [argument.name for argument in schema_of(item.target).arguments]
    return "ignore_index" in names and not may_learn(graph.specs[item.operands[1]].dtype)


def _counted(item: Operator) -> tuple[int, ...]:
    """The operands by which a loss counts its labels: these, and weights of classes."""
    names = [argument.name for argument in schema_of(item.target).arguments]
    return tuple(range(1, len(item.operands))) if "weight" in names else (1,)


def ancestors(graph: Graph, *results: str | None) -> set[str]:
    """The names of the operators that `results` come from."""
    needed, found = set(results), set[str]()
    for item in reversed(graph.operators):
        if not needed.isdisjoint(item.results):
            found.add(item.name)
            needed.update(item.operands)
    return found
