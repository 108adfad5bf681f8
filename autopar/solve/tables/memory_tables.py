"""Tables of what a program costs where bytes have a price, and the bytes that its choices hold.

    held <= cap            when backward begins, less the gradients that come later
    at the end <= cap      state and gradients, when backward ends

Each of these rows has a price of its own (`RowPrices`). State is held by how an input is kept, which nothing
else depends on; what is saved for backward by how a tensor is made and taken: once for all that save it in
one layout. Of a storage only one view is counted, and none where it may be saved beside its views: bytes are
no more than those of the integer program's rows (saved_variables.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autopar.convert.network import Flags, Network, Numbers, Seconds
from autopar.core.gathering import Gathering
from autopar.core.graph import Graph
from autopar.core.placement import Layout
from autopar.cost.operators.prices import Prices
from autopar.solve.choices.direct_ways import settled
from autopar.solve.choices.fold import Folding
from autopar.solve.choices.gather_phases import GatherPhase, first_phase
from autopar.solve.choices.memory_price import MemoryPrice
from autopar.solve.choices.space import Space
from autopar.solve.choices.tensor_classes import TensorClass, Use
from autopar.solve.linear_program import Terms
from autopar.solve.program.operator_variables import value_of
from autopar.solve.program.tensor_starts import Stored
from autopar.solve.tables.choice_tables import (
    MOST_SUMS,
    MOST_USES,
    ChoiceTables,
    CostTable,
    End,
    InputLayouts,
    Joint,
    WideError,
    from_layouts,
    table_of,
)


@dataclass(frozen=True, slots=True)
class RowPrices:
    """Seconds that a byte costs which is `held` when backward begins, and one that `rests` when it ends."""

    held: float = 0.0
    rests: float = 0.0

    @property
    def sum(self) -> float:
        return self.held + self.rests


UNPRICED = RowPrices()


@dataclass(frozen=True, slots=True)
class Totals:
    """Seconds of choices, and the bytes of both rows."""

    seconds: float
    held: float
    rests: float

    @property
    def most(self) -> float:
        """The bytes of the row that has more."""
        return max(self.held, self.rests)

    def at(self, prices: RowPrices, cap: float) -> float:
        """Seconds, and what bytes beyond the cap cost; less than nothing if there are fewer."""
        return self.seconds + prices.held * (self.held - cap) + prices.rests * (self.rests - cap)


@dataclass(frozen=True, slots=True)
class Chosen:
    """An alternative of each choice, and for each tensor that is an input how it is kept, by number."""

    taken: Sequence[int]
    kept: Mapping[int, int]


class MemoryTables(ChoiceTables):
    """Choice tables with what bytes cost; weights may be regathered, or gathered once for all micro-batches.

    Raises WideError as these do, and where a weight that may be so has several uses.
    """

    def __init__(
        self, graph: Graph, prices: Prices, space: Space, folding: Folding, *, offloads: bool
    ) -> None:
        # Moves in each phase of weights that aren't gathered in EVERY micro-batch alone.
        self.phased: dict[str, Mapping[GatherPhase, Flags]] = {}
        super().__init__(graph, prices, space, folding, cap=math.inf, offloads=offloads)
        count = len(self.lp.costs)
        later = _summed(self.memory.gradients, count)
        self.held_bytes = _summed(self.memory.held, count) - later
        self.resting_bytes = _summed(self.memory.resting, count)
        self.lasting_bytes = _summed(self.memory.lasting, count)
        self.saved_bytes = _summed(self.memory.held, count) - self.lasting_bytes
        self.joints, self.saved_flags = self._with_savers()
        found = [
            self._saved_bytes(tensor, joint, saves)
            for tensor, joint, saves in zip(self.tensors, self.joints, self.saved_flags, strict=True)
        ]
        self.nbytes = [nbytes for nbytes, _ in found]
        self.made_bytes = [as_made for _, as_made in found]
        self.copies = [
            self._copied_bytes(*pair) for pair in zip(self.tensors, self.joints, strict=True)
        ]  # of weights that are gathered once

    def save(self, uses: Mapping[str, Sequence[Use]]) -> None:
        """Write no rows: tables say what is saved."""

    def add_tensor(self, tensor: TensorClass) -> list[Use]:
        """Note where a tensor is made and used."""
        starts, uses, taken = self.routed(tensor)
        phases = {phase for _, phase in starts}
        if len(uses) > (MOST_USES if phases == {GatherPhase.EVERY} else 1):
            raise WideError
        if phases != {GatherPhase.EVERY}:
            self.phased[tensor.name] = taken[0]
        none = np.zeros(len(tensor.network.source), dtype=np.bool_)
        moves = np.logical_or.reduce([each.get(GatherPhase.EVERY, none) for each in taken])
        if int(np.count_nonzero(moves)) * math.prod(len(use.needs) for use in uses) > MOST_SUMS:
            raise WideError
        made: dict[Layout, Terms] = {}
        for (layout, _), terms in starts.items():
            made.setdefault(layout, []).extend(terms)
        self.routes.append((made, uses, moves))
        return uses

    # -- what is saved ----------------------------------------------------------------------------------

    def _with_savers(self) -> tuple[list[Joint], list[list[Flags]]]:
        """The joints, in which layouts are told apart by whether the end saves the tensor, and that."""
        joints, saves = list[Joint](), list[list[Flags]]()
        for tensor, joint, (_, uses, _) in zip(self.tensors, self.joints, self.routes, strict=True):
            ends, flags = list[End](), list[Flags]()
            for end, use in zip(joint.uses, uses, strict=True):
                known = self._savers(use.consumer, use.position, of="operands") if use.consumer else None
                told, saved = _told_apart(end, known)
                ends.append(told)
                flags.append(saved)
            made = joint.made
            if isinstance(made, End):
                operation, index = self.wiring.makers[tensor.name]
                made, saved = _told_apart(made, self._savers(operation.name, index, of="results"))
                flags.insert(0, saved)
            joints.append(replace(joint, made=made, uses=tuple(ends)))
            saves.append(flags)
        return joints, saves

    def _savers(self, name: str, position: int, *, of: str) -> Flags:
        """Which strategies of an operator save one of its operands, or results."""
        operation = self.operators.by_name[name]
        saved = (self.prices.plain(operation, each).saved for each in self.space.strategies[name])
        return np.array([position in (each.operands if of == "operands" else each.results) for each in saved])

    def _saved_bytes(
        self, tensor: TensorClass, joint: Joint, saves: Sequence[Flags]
    ) -> tuple[Seconds, Seconds]:
        """Bytes [made or kept, use, ...] that are saved of a tensor, by the numbers of ends' layouts.

        With those of them that are in the layout in which an operator makes it."""
        ends = list(joint.ends)
        lengths = [len(end.layouts) for end in ends]
        if isinstance(joint.made, InputLayouts):
            lengths = [len(joint.made.layouts), *lengths]
        found, as_made = np.zeros(lengths), np.zeros(lengths)
        if tensor.name in self.wiring.makers and tensor.name not in self.counted:
            return found, as_made
        values = self._values(tensor)
        sizes = np.array([self._size(tensor.name, layout) for layout in values])
        numbers = [
            _along(self._codes(tensor, end.layouts, values), lengths, dim)
            for dim, end in enumerate(ends, len(lengths) - len(ends))
        ]
        flags = [_along(saved, lengths, dim) for dim, saved in enumerate(saves, len(lengths) - len(ends))]
        own = np.zeros([1] * len(lengths), dtype=np.bool_)
        for place, (number, saved) in enumerate(zip(numbers, flags, strict=True)):
            new = saved & ~own
            for before, other in zip(numbers[:place], flags[:place], strict=True):
                new = new & ~(other & (before == number))
            if isinstance(joint.made, InputLayouts) and self.wiring.at_rest(tensor.name):
                stored = self._codes(tensor, joint.made.layouts, values)
                spared = _along(self._regathered(tensor, joint.made), lengths, 0)
                new = new & ~spared & (_along(stored, lengths, 0) != number)
            found += np.where(new, sizes[number], 0.0)
            if isinstance(joint.made, End):
                as_made += np.where(new & (number == numbers[0]), sizes[number], 0.0)
        return found, as_made

    def _values(self, tensor: TensorClass) -> dict[Layout, int]:
        values = (value_of(layout, self.alike) for layout in tensor.network.layouts)
        return {layout: number for number, layout in enumerate(dict.fromkeys(values))}

    def _codes(self, tensor: TensorClass, layouts: Numbers, values: Mapping[Layout, int]) -> Numbers:
        own = tensor.network.layouts
        return np.array([values[value_of(own[number], self.alike)] for number in layouts], dtype=np.intp)

    def _size(self, name: str, layout: Layout) -> int:
        """Bytes that are held at least where the tensor is saved: fewer than its own if its maker expands."""
        if not self.prices.dims.legal(name, layout):
            return 0
        nbytes = self.prices.local_bytes(name, layout)
        if name not in self.wiring.makers:
            return nbytes
        operation, index = self.wiring.makers[name]
        return min(nbytes, self.operators.storage_sizes(operation.name, index).get(layout, nbytes))

    @cached_property
    def counted(self) -> frozenset[str]:
        """The tensors, of those that operators make, whose saved bytes count: one of each storage."""
        if self.offloads:
            return frozenset()
        found = dict[str, str]()
        saved = {name for name in self.wiring.makers if self._is_saved(name)}
        for name in self.wiring.makers:
            base = self._storage(name, saved) if name in saved else None
            if base is not None:
                found.setdefault(base, name)
        return frozenset(found.values())

    def _storage(self, name: str, saved: set[str]) -> str | None:
        """The tensor in whose storage one lies, if nothing else of that is saved but its views."""
        while (base := self._viewed(name)) is not None:
            if base not in self.wiring.makers or base in saved:
                return None
            if self.graph.specs[name].nbytes > self.graph.specs[base].nbytes:
                return None
            name = base
        return name if self._owns(name) else None

    def _aliases(self, name: str) -> set[int | None]:
        operation, index = self.wiring.makers[name]
        strategies = self.space.strategies[operation.name]
        return {self.prices.plain(operation, each).saved.aliases[index] for each in strategies}

    def _viewed(self, name: str) -> str | None:
        """The operand of which a tensor is a view under all strategies."""
        aliases = self._aliases(name)
        place = next(iter(aliases))
        return (
            self.wiring.makers[name][0].operands[place] if len(aliases) == 1 and place is not None else None
        )

    def _owns(self, name: str) -> bool:
        """Whether a tensor has a storage of its own under all strategies."""
        return self._aliases(name) == {None}

    def _is_saved(self, name: str) -> bool:
        """Whether some operator saves a tensor under some strategy."""
        maker, index = self.wiring.makers[name]
        return bool(self._savers(maker.name, index, of="results").any()) or any(
            self._savers(item.name, position, of="operands").any()
            for item, position in self.wiring.uses[name]
        )

    # -- tables -----------------------------------------------------------------------------------------

    def _regathered(self, tensor: TensorClass, made: InputLayouts) -> Flags:
        return self._gathered(tensor, made, Gathering.REGATHER)

    def _gathered(self, tensor: TensorClass, made: InputLayouts, wanted: Gathering) -> Flags:
        """Which ways of keeping an input gather it so."""
        so = {variable for (_, way), variable in self.inputs[tensor.name].items() if way is wanted}
        return np.array([variable in so for variable in made.variables.tolist()])

    def seconds(self, number: int) -> Seconds:
        """Seconds [made or kept, use, ...] of a tensor's conversions."""
        tensor, joint = self.tensors[number], self.joints[number]
        known, found = self.known.get(number, (None, np.empty(0)))
        if known is not tensor.network:
            found = self._seconds(tensor, joint)
            self.known[number] = tensor.network, found
        return found

    def _seconds(self, tensor: TensorClass, joint: Joint) -> Seconds:
        network, uses = tensor.network, [use.layouts for use in joint.uses]
        if tensor.name not in self.phased or not isinstance(joint.made, InputLayouts):
            return from_layouts(network, uses, joint)
        found = np.full((len(joint.made.layouts), len(uses[0])), np.inf)
        for way in Gathering:
            kept = self._gathered(tensor, joint.made, way)
            if kept.any():
                found[kept] = self._ways(tensor, joint.made.layouts[kept], way)[uses[0]].T
        return found

    def _ways(self, tensor: TensorClass, kept: Numbers, way: Gathering) -> Seconds:
        """Seconds [layout, kept] of the cheapest ways from layouts in which a weight is kept.

        What is made once a step counts by its weight, what backward gathers again twice."""
        network, moves = tensor.network, self.phased[tensor.name]
        first = first_phase(way, waits=self.may_lead(tensor.name))
        last, leading = first.next or first, first.next is not None
        weight = self.prices.step_weight if leading else 1.0
        begun = self._begun(network, kept)
        if leading:
            begun = settled(replace(network, seconds=weight * network.seconds), begun, moves[first])
        if way is Gathering.REGATHER and self._use_saves(tensor.name):
            network = replace(
                network, seconds=network.seconds + np.where(network.gathers, network.forward, 0.0)
            )
        return settled(network, begun, moves[last])

    def _begun(self, network: Network, kept: Numbers) -> Seconds:
        begun = np.full((len(network.layouts), len(kept)), np.inf)
        begun[kept, np.arange(len(kept))] = 0.0
        return begun

    def _copied_bytes(self, tensor: TensorClass, joint: Joint) -> Seconds | None:
        """Bytes [kept, use] of the copy of a weight that is gathered once, at least; None where none is.

        It lies in the layout in which the weight settles: of all from which a way leads on the smallest."""
        if GatherPhase.ONCE not in self.phased.get(tensor.name, {}) or not self.requires_grad(tensor.name):
            return None
        assert isinstance(joint.made, InputLayouts)
        network, moves, once = tensor.network, self.phased[tensor.name], Gathering.ONCE
        flags = self._gathered(tensor, joint.made, once)
        kept = joint.made.layouts[flags]
        sizes = np.array([self._size(tensor.name, layout) for layout in network.layouts], dtype=np.float64)
        sizes[kept] = 0.0
        free = replace(network, seconds=np.zeros(len(network.seconds)))
        reached = np.isfinite(settled(free, self._begun(network, kept), moves[GatherPhase.ONCE]))
        least = settled(free, np.where(reached, sizes[:, None], np.inf), moves[GatherPhase.SETTLED])
        found = np.zeros((len(flags), len(joint.uses[0].layouts)))
        found[flags] = least[joint.uses[0].layouts].T
        return np.where(np.isfinite(found), found, 0.0)

    def _use_saves(self, name: str) -> bool:
        """Whether some operator that takes a tensor saves it under some strategy."""
        uses = self.wiring.uses[name]
        return any(self._savers(item.name, position, of="operands").any() for item, position in uses)

    def priced_tables(self, prices: RowPrices, *, recomputes: bool) -> Iterator[CostTable]:
        """All tables at prices of bytes in the rows under a cap; see `tables_at`."""
        costs, price = self.priced_costs(prices), self.price_of(prices)
        return self.tables_at(costs, price, recomputes=recomputes, converted=True)

    def price_of(self, prices: RowPrices) -> MemoryPrice:
        """Price of a byte that is held when backward begins, of a weight's copy and of saved tensors.

        Where gradients don't accumulate that of the weight comes later, and counts as much less.
        """
        return MemoryPrice(prices.held if self.prices.accumulates else 0.0, prices.held)

    def tables_at(
        self, costs: Seconds, price: MemoryPrice, *, recomputes: bool, converted: bool = False
    ) -> Iterator[CostTable]:
        """All tables where variables have these costs, and bytes that are saved, and copies, a price.

        With `recomputes` what is saved as it was made costs no more than to compute it again. If what was
        `converted` doesn't either, that is less than any plan that computes something again takes."""
        own = self.costs if recomputes else costs
        for choice, variables in enumerate(self.choices):
            yield CostTable((choice,), own[variables])
        for number, joint in enumerate(self.joints):
            table = self._table(number, joint, costs, price)
            yield self._sparing(number, joint, table, price, converted=converted) if recomputes else table

    def priced_costs(self, prices: RowPrices) -> Seconds:
        """Cost of each variable, its bytes included."""
        return self.costs + prices.held * self.held_bytes + prices.rests * self.resting_bytes

    def costs_at(self, price: MemoryPrice) -> Seconds:
        """Costs of choices where bytes have a price for how long they are held, and there are no rows."""
        return self.costs + price.state * self.lasting_bytes + price.saved * self.saved_bytes

    def held_at(self, number: int, price: MemoryPrice) -> Seconds:
        """Cost of a tensor's bytes, as a table [made or kept, use, ...]."""
        copies = self.copies[number]
        saved: Seconds = price.saved * self.nbytes[number]
        return saved if copies is None else saved + price.state * copies

    def _table(self, number: int, joint: Joint, costs: Seconds, price: MemoryPrice) -> CostTable:
        seconds = self.seconds(number) + self.held_at(number, price)
        if isinstance(joint.made, InputLayouts):
            own = costs[joint.made.variables].reshape([-1] + [1] * (seconds.ndim - 1))
            seconds = (seconds + own).min(axis=0)
        return table_of(joint, seconds)

    def _sparing(
        self, number: int, joint: Joint, table: CostTable, price: MemoryPrice, *, converted: bool
    ) -> CostTable:
        """The table in which what is saved may be computed again."""
        spared = price.saved * (self.nbytes if converted else self.made_bytes)[number]
        if isinstance(joint.made, InputLayouts) or not spared.any():
            return table
        held = table_of(joint, spared).costs
        return CostTable(table.choices, table.costs - np.maximum(0.0, held - self._again(number, table)))

    def _again(self, number: int, table: CostTable) -> Seconds:
        """The part of computing its operator again that falls to one of its results, by the table's dims; no
        end to it where ranks exchange something to make it, which is kept."""
        tensor = self.tensors[number].name
        operation, index = self.wiring.makers[tensor]
        count, choice = len(list(filter(None, operation.results))), self.numbers[operation.name]
        if self._viewed(tensor) is not None:
            return np.zeros(())
        plain = [self.prices.plain(operation, each) for each in self.space.strategies[operation.name]]
        own = np.array([math.inf if index in each.saved.held else each.recompute for each in plain])
        return own.reshape([-1 if each == choice else 1 for each in table.choices]) / count

    # -- choices ----------------------------------------------------------------------------------------

    def chosen(self, taken: Sequence[int], costs: Seconds, price: MemoryPrice) -> Chosen:
        """The alternatives that are taken, with the best way of keeping each input beside them.

        Variables have these costs, and bytes that are saved, and of copies, a price."""
        kept = {}
        for number, joint in enumerate(self.joints):
            if isinstance(joint.made, InputLayouts):
                place: Any = (slice(None), *(end.number(taken) for end in joint.uses))
                saved = self.held_at(number, price)[place]
                kept[number] = int(
                    (costs[joint.made.variables] + self.seconds(number)[place] + saved).argmin()
                )
        return Chosen(taken, kept)

    def totals(self, chosen: Chosen) -> Totals:
        """Seconds and bytes of choices."""
        costs, taken = self.costs, chosen.taken
        own = [variables[each] for variables, each in zip(self.choices, taken, strict=True)]
        seconds, held, rests = costs[own].sum(), self.held_bytes[own].sum(), 0.0
        for number, joint in enumerate(self.joints):
            place: tuple[int, ...] = tuple(end.number(taken) for end in joint.ends)
            if isinstance(joint.made, InputLayouts):
                variable = joint.made.variables[chosen.kept[number]]
                place = (chosen.kept[number], *place)
                seconds += costs[variable]
                held += self.held_bytes[variable]
                rests += self.resting_bytes[variable]
            seconds += self.seconds(number)[place]
            held += self.nbytes[number][place]
            copies = self.copies[number]
            if copies is not None and self.prices.accumulates:
                held += copies[place]
        return Totals(float(seconds), float(held), float(rests))

    def stored_ways(self, chosen: Chosen) -> dict[str, Stored]:
        """The stored layout of each input, and when it is gathered."""
        found = dict[str, Stored]()
        for number, kept in chosen.kept.items():
            made, name = self.joints[number].made, self.tensors[number].name
            assert isinstance(made, InputLayouts)
            ways = {variable: stored for stored, variable in self.inputs[name].items()}
            found[name] = ways[int(made.variables[kept])]
        return found


def _summed(terms: Terms, count: int) -> Seconds:
    found = np.zeros(count)
    for amount, variable in terms:
        found[variable] += amount
    return found


def _told_apart(end: End, flags: Flags | None) -> tuple[End, Flags]:
    """The end with its layouts told apart by a flag of each alternative, and the flag of each of these."""
    if flags is None or end.choice is None:
        return end, np.zeros(len(end.layouts), dtype=np.bool_)
    kinds, codes = np.unique(2 * end.codes + flags, return_inverse=True)
    return End(end.choice, end.layouts[kinds // 2], codes.astype(np.intp)), kinds % 2 == 1


def _along(values: Numbers | Flags, lengths: Sequence[int], dim: int) -> Numbers | Flags:
    """The values along one dim of as many as there are lengths."""
    return values.reshape([-1 if each == dim else 1 for each in range(len(lengths))])
