"""Rows of all samples in an order that depends on them, as mixtures of experts compute: apart all the same.

    keys      6 rows choose experts       1 0 1 | 0 0 1      two samples of three rows
    order     keys.sort()                 1 3 4 0 2 5        which row is where
    rows      x[order]                    each is one of its own sample, by whose key it lies in a group
    ends      keys.histc().cumsum(0)      3 6                ends of groups, of keys in any order; or bincount
    products  grouped_mm(rows, w, ends)   each row by the matrix of its own key
    biases    b[keys]                     to each the vector of its key, of sorted keys
    back      rows[places], or zeros.index_put([order], rows), index_add

What a row becomes depends on its own sample alone as long as every operator takes row by row what lies in
this order, or asks for its key. Parts of the batch sort their own rows, and each becomes the same. Equal
sorts of one tensor are one sort; where groups end is the same however their keys are sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch

from autopar.core.graph import Graph, Operator
from autopar.core.operator_facts import facts_of
from autopar.sharding.rule import Instance

aten = torch.ops.aten

_SORTS = {aten.sort.default: 1, aten.sort.stable: 1, aten.argsort.default: 0, aten.argsort.stable: 0}
_QUOTIENTS = {aten.floor_divide.default, aten.div.Tensor_mode}
_CHOICES = {aten.topk.default: (1, 2), aten.argmax.default: (0, 1), aten.max.dim: (1, 1)}  # result, dim
_PASSED_ON = {  # keys stay keys
    *(aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.to.dtype, aten.clone.default),
    *(aten._to_copy.default, aten.contiguous.default, aten.detach.default),
}
_WIDE = (torch.int32, torch.int64, torch.float32, torch.float64)  # in which no number of a key is another
EMPTY = {aten.empty_like.default, aten.zeros_like.default, aten.new_empty.default, aten.new_zeros.default}


class Order(Enum):
    """Meaning of a tensor's numbers with regard to sorted rows."""

    NUMBERS = "of the rows, sorted by their keys"
    PLACES = "at which the rows are"
    KEYS = "sorted"
    ROWS = "sorted by their keys"
    COUNTS = "of rows with each key"
    ENDS = "of the groups of rows with one key"
    NOTHING = "but as many numbers as there are rows"


@dataclass(frozen=True, slots=True)
class SortingRelation:
    """Relation of a tensor to the rows that the operator `by`, or an equal one, sorted. `per` numbers of the
    order belong to one row: 2 where each row has two keys."""

    order: Order
    by: str
    per: int = 1


@dataclass(frozen=True)
class SortedRows:
    """Tells what operators make of sorted rows in one graph."""

    graph: Graph

    def sorting(self, item: Operator) -> tuple[SortingRelation | None, ...] | None:
        """Relations of the results of an operator that sorts rows along their one dim; None for any other."""
        if item.target not in _SORTS or len(self.shape(item.operands[0])) != 1:
            return None
        if Instance(item, self.graph.specs)["descending"]:
            return None
        by = self._firsts[self._way(item)]
        numbers = SortingRelation(Order.NUMBERS, by)
        return (SortingRelation(Order.KEYS, by), numbers) if _SORTS[item.target] else (numbers,)

    def counted(self, item: Operator) -> SortingRelation | None:
        """Relation of a count of unsorted keys, if the keys are sorted elsewhere; None if not."""
        place = self.place_of_keys(item)
        if place is None:
            return None
        sort = self._sorts_of.get(self._keys(item.operands[place]))
        return SortingRelation(Order.COUNTS, sort) if sort and self._counts_all(item, sort) else None

    def place_of_keys(self, item: Operator) -> int | None:
        """Operand whose values an operator counts, by bins or by adding up ones; None if it doesn't count."""
        if item.target is aten.histc.default:
            return 0
        if item.target is not aten.index_add.default or item.args[1] != 0 or item.kwargs:
            return None
        makers = [self.makers.get(item.operands[place]) for place in (0, 2)]
        adds = [each and each.target for each in makers] == [aten.zeros.default, aten.ones.default]
        return 1 if adds and len(self.shape(item.operands[0])) == 1 else None

    def numbers(self, item: Operator, given: Sequence[SortingRelation | None]) -> SortingRelation | None:
        """Relation after an operator that only numbers or counts rows."""
        if self.place_of_keys(item) == 1 and not given[0] and not given[2]:
            given = given[1:2]
        first, rest = given[0], given[1:]
        if first is None or any(rest):
            return self._inverse(item, given)
        scalar = item.args[1] if len(item.args) > 1 else None
        match first.order:
            case Order.NUMBERS if item.target in _QUOTIENTS and isinstance(scalar, int) and scalar > 0:
                rounds = (
                    item.target is not aten.div.Tensor_mode or item.kwargs.get("rounding_mode") == "floor"
                )
                return SortingRelation(Order.NUMBERS, first.by, first.per * scalar) if rounds else None
            case Order.NUMBERS if item.target in _SORTS and first.per == 1:
                return SortingRelation(Order.PLACES, first.by)
            case Order.KEYS if self._counts_all(item, first.by):
                return SortingRelation(Order.COUNTS, first.by)
            case Order.COUNTS if item.target is aten.cumsum.default and item.args[1] in (0, -1):
                return SortingRelation(Order.ENDS, first.by)
        return first if self._passes_on(item) and first.order is not Order.ROWS else None

    def fetched(self, item: Operator, given: Sequence[SortingRelation | None]) -> SortingRelation | None:
        """The sort of whose rows an operator fetches all, each as often as it was sorted: `x[order]`."""
        index = self._index(item)
        number = given[1] if index and len(given) == 2 else None
        if number is None or number.order is not Order.NUMBERS or given[0] is not None:
            return None
        return SortingRelation(Order.ROWS, number.by) if self._numbers_all(item, number) else None

    def picked(self, item: Operator, given: Sequence[SortingRelation | None]) -> SortingRelation | None:
        """The sort in whose order an operator picks a row of a table for each key: `biases[keys]`."""
        keys = given[1] if self._index(item) and len(given) == 2 else None
        if keys is None or keys.order is not Order.KEYS or given[0] is not None:
            return None
        return SortingRelation(Order.ROWS, keys.by)

    def put_back(self, item: Operator, given: Sequence[SortingRelation | None]) -> bool:
        """Whether an operator puts sorted rows back at the places that they came from."""
        if self._index(item) and len(given) == 2:
            return _are(given[0], Order.ROWS) and _are(given[1], Order.PLACES, given[0])
        is_put = item.target is aten.index_put.default and self._index(item, after=1)
        is_added = item.target is aten.index_add.default and item.args[1] == 0
        if not (is_put or is_added) or len(given) != 3 or given[0] is not None or given[1] is None:
            return False
        if not _are(given[1], Order.NUMBERS) or not _are(given[2], Order.ROWS, given[1]):
            return False
        return self._numbers_all(item, given[1]) and (is_added or given[1].per == 1)

    def in_groups(self, item: Operator, given: Sequence[SortingRelation | None]) -> SortingRelation | None:
        """Sorted rows, each times the matrix of its key."""
        if facts_of(item.target).group_ends != 2 or len(given) != 3 or given[1] is not None:
            return None
        rows, ends = given[0], given[2]
        if rows is None or ends is None or (rows.order, ends.order) != (Order.ROWS, Order.ENDS):
            return None
        return rows if self._sorted_keys(rows.by) == self._sorted_keys(ends.by) else None

    def _numbers_all(self, item: Operator, numbers: SortingRelation) -> bool:
        """Whether numbers are those of all rows of the first operand."""
        return self.shape(item.operands[0])[0] * numbers.per == self.shape(item.operands[1])[0]

    def _inverse(self, item: Operator, given: Sequence[SortingRelation | None]) -> SortingRelation | None:
        """The places of rows: 0, 1, 2 ... put where their numbers say."""
        if item.target is not aten.index_put.default or not self._index(item, after=1) or len(given) != 3:
            return None
        number, count = given[1], self.makers.get(item.operands[2])
        if number is None or number.order is not Order.NUMBERS or number.per != 1 or given[0] or given[2]:
            return None
        size = self.shape(item.operands[1])
        counts = count is not None and count.target is aten.arange.default and count.args == size
        return (
            SortingRelation(Order.PLACES, number.by)
            if counts and self.shape(item.operands[0]) == size
            else None
        )

    def _index(self, item: Operator, after: int = 0) -> bool:
        """Whether an operator is indexed in dim 0 alone, by one tensor of one dim."""
        if item.target not in (aten.index.Tensor, aten.index_put.default):
            return False
        if bool(after) != (item.target is aten.index_put.default) or len(item.args[1]) != 1:
            return False
        return len(self.shape(item.operands[1])) == 1

    def _counts_all(self, item: Operator, sort: str) -> bool:
        """Whether each key is counted: none lies beside the bins."""
        place, choices = self.place_of_keys(item), self._number_of_keys(sort)
        if place is None or choices is None:
            return False
        if place == 1:
            return choices <= self.shape(item.operands[0])[0]
        found = Instance(item, self.graph.specs)
        bins = int(found["bins"])
        return choices <= bins and (found["min"], found["max"]) == (0, bins - 1)

    def _number_of_keys(self, sort: str) -> int | None:
        """Among how many things the keys chose that were sorted, if they are choices."""
        name = self._sorted_keys(sort)
        item = self.makers.get(name)
        if item is None or item.target not in _CHOICES or item.results[_CHOICES[item.target][0]] != name:
            return None
        dim = Instance(item, self.graph.specs)["dim"]
        return None if dim is None else self.shape(item.operands[0])[int(dim)]

    def _way(self, item: Operator) -> object:
        """Equal for sorts that give the same order: whether equal keys stay in theirs is up to it."""
        given, spec = Instance(item, self.graph.specs).arguments, self.graph.specs[item.operands[0]]
        how = given.get("dim"), bool(given["descending"]), bool(given.get("stable"))
        return self._keys(item.operands[0]), spec.shape, spec.dtype, how

    def _sorted_keys(self, sort: str) -> str:
        return self._keys(self._operators[sort].operands[0])

    def _keys(self, name: str) -> str:
        """The tensor whose keys, in the order of its elements, these are."""
        while name in self.makers and self._passes_on(self.makers[name]):
            name = self.makers[name].operands[0]
        return name

    def _passes_on(self, item: Operator) -> bool:
        """Whether an operator gives the keys that it takes: others are none that are rounded or cut off."""
        result = item.results[0]
        return item.target in _PASSED_ON and result is not None and self.graph.specs[result].dtype in _WIDE

    @cached_property
    def _firsts(self) -> dict[object, str]:
        """The first of the sorts that give the same order."""
        found: dict[object, str] = {}
        for item in self.graph.operators:
            if item.target in _SORTS and item.operands:
                found.setdefault(self._way(item), item.name)
        return found

    @cached_property
    def _sorts_of(self) -> dict[str, str]:
        """A sort of the keys that a tensor holds, by that tensor."""
        sorts = [item for item in self.graph.operators if item.operands and self.sorting(item)]
        return {self._keys(item.operands[0]): item.name for item in reversed(sorts)}

    @cached_property
    def _operators(self) -> dict[str, Operator]:
        return {item.name: item for item in self.graph.operators}

    @cached_property
    def makers(self) -> dict[str, Operator]:
        """The operator that makes each tensor."""
        return {name: item for item in self.graph.operators for name in item.results if name}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.graph.specs[name].shape


def _are(given: SortingRelation | None, order: Order, other: SortingRelation | None = None) -> bool:
    """Whether a tensor is that of an order, of the same sort as another if there is one."""
    return given is not None and given.order is order and (other is None or other.by == given.by)
