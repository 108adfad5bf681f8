"""What a program costs as tables: each has the costs of one tensor by the choices of who makes and takes it.

    choices    a strategy of each operator, a layout of each output that has several
    tables     of each choice alone what it costs by itself; of a tensor what the cheapest conversions take,
               from the layout in which it is made to those in which it is used; of an input from the best
               layout to keep it in, which nothing else depends on

A program costs what its tables say, added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.convert.network import Flags, Network, Numbers, Seconds
from autopar.core.graph import Graph
from autopar.core.placement import Layout
from autopar.cost.operators.prices import Prices
from autopar.solve.choices.conversion_trees import tree_seconds
from autopar.solve.choices.direct_ways import settled
from autopar.solve.choices.fold import Folding
from autopar.solve.choices.gather_phases import GatherPhase
from autopar.solve.choices.space import Space
from autopar.solve.choices.tensor_classes import TensorClass, Use
from autopar.solve.linear_program import Terms
from autopar.solve.program.flow_rows import ONE
from autopar.solve.program.problem import Problem
from autopar.solve.program.tensor_starts import Stored

MOST_ENTRIES = 1 << 21  # of a table
MOST_SUMS = 1 << 20  # in each round of Bellman and Ford: beyond, the integer program is found sooner
MOST_USES = 3  # of a tensor: each more makes its table so many times larger


class WideError(Exception):
    """Tables would be too large, or there is what they can't say."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs by the alternatives of some choices, one dim for each."""

    choices: tuple[int, ...]
    costs: Seconds


@dataclass(frozen=True, slots=True)
class End:
    """One end of a tensor: `codes` has for each alternative of a choice the number of its layout among
    `layouts`; without a choice there is one layout."""

    choice: int | None
    layouts: Numbers
    codes: Numbers

    def layout(self, taken: Sequence[int]) -> int:
        """The layout, by its number in the network, of the alternatives that are taken."""
        return int(self.layouts[self.number(taken)])

    def number(self, taken: Sequence[int]) -> int:
        """The place among `layouts` of the one of the alternatives that are taken."""
        return int(self.codes[0 if self.choice is None else taken[self.choice]])


@dataclass(frozen=True, slots=True)
class InputLayouts:
    """The layouts in which an input may be kept, by number in the network, and the variable of each."""

    layouts: Numbers
    variables: Numbers


@dataclass(frozen=True, slots=True)
class Joint:
    """A tensor with its ends: where it is made, by an operator or as an input, and where it is used. `moves`
    may lead from the one to the others."""

    made: End | InputLayouts
    uses: tuple[End, ...]
    moves: Flags

    @property
    def ends(self) -> tuple[End, ...]:
        """The ends that choices decide on, in the order of the table's dims."""
        return self.uses if isinstance(self.made, InputLayouts) else (self.made, *self.uses)


class ChoiceTables(Problem):
    """The choices of a graph, each a list of variables of the program, and a table for each tensor.

    Raises WideError where an input's conversions are made at several times of a step (gather_phases.py), or
    tables are too large. What bytes cost only memory_tables.py knows.
    """

    def __init__(
        self,
        graph: Graph,
        prices: Prices,
        space: Space,
        folding: Folding,
        *,
        cap: float | None = None,
        offloads: bool = False,
    ) -> None:
        self.routes: list[tuple[Mapping[Layout, Terms], list[Use], Flags]] = []
        super().__init__(graph, prices, space, folding, cap=cap, offloads=offloads)
        if self.regathered:
            raise WideError
        outputs = (list(variables.values()) for variables in self.output_layouts.values())
        self.choices = [*self.operators.x.values(), *outputs]
        self.numbers = {name: number for number, name in enumerate(self.operators.x)}
        self.place = {
            variable: (choice, number)
            for choice, variables in enumerate(self.choices)
            for number, variable in enumerate(variables)
        }
        self.joints = [
            self._joint(tensor, *route) for tensor, route in zip(self.tensors, self.routes, strict=True)
        ]
        self.known: dict[int, tuple[Network, Seconds]] = {}  # costs of conversions, and by which prices

    def add_tensor(self, tensor: TensorClass) -> list[Use]:
        """Note where a tensor is made and used."""
        starts, uses, taken = self.routed(tensor)
        if any(phase is not GatherPhase.EVERY for _, phase in starts) or len(uses) > MOST_USES:
            raise WideError
        moves = np.logical_or.reduce([each[GatherPhase.EVERY] for each in taken])
        if int(np.count_nonzero(moves)) * math.prod(len(use.needs) for use in uses) > MOST_SUMS:
            raise WideError
        self.routes.append(({layout: terms for (layout, _), terms in starts.items()}, uses, moves))
        return uses

    def _joint(
        self, tensor: TensorClass, made: Mapping[Layout, Terms], uses: Sequence[Use], moves: Flags
    ) -> Joint:
        ends = tuple(self._end(tensor, use.needs) for use in uses)
        if tensor.name not in self.inputs:
            return Joint(self._end(tensor, made), ends, moves)
        kept = [
            (tensor.network.place[layout], variable)
            for layout, terms in made.items()
            for _, variable in terms
        ]
        layouts, variables = (np.array(each, dtype=np.intp) for each in zip(*kept, strict=True))
        return Joint(InputLayouts(layouts, variables), ends, moves)

    def _end(self, tensor: TensorClass, layouts: Mapping[Layout, Terms]) -> End:
        numbers = np.array([tensor.network.place[layout] for layout in layouts], dtype=np.intp)
        pairs = [(variable, code) for code, terms in enumerate(layouts.values()) for _, variable in terms]
        if pairs[0][0] == ONE:
            return End(None, numbers, np.zeros(1, dtype=np.intp))
        choice, _ = self.place[pairs[0][0]]
        codes = np.full(len(self.choices[choice]), -1)
        for variable, code in pairs:
            codes[self.place[variable][1]] = code
        return End(choice, numbers, codes)

    @property
    def costs(self) -> Seconds:
        """The cost of each variable."""
        return np.asarray(self.lp.costs)

    def tables(self) -> Iterator[CostTable]:
        """All tables, of choices and of tensors."""
        costs = self.costs
        for choice, variables in enumerate(self.choices):
            yield CostTable((choice,), costs[variables])
        for number, (tensor, joint) in enumerate(zip(self.tensors, self.joints, strict=True)):
            known, seconds = self.known.get(number, (None, np.empty(0)))
            if known is not tensor.network:
                seconds = conversions(tensor.network, joint, costs)
                self.known[number] = tensor.network, seconds
            yield table_of(joint, seconds)

    def kept(self, taken: Sequence[int]) -> dict[str, Stored]:
        """The best way to store each input beside the alternatives that are taken."""
        costs, found = np.asarray(self.lp.costs), dict[str, Stored]()
        for tensor, joint in zip(self.tensors, self.joints, strict=True):
            if isinstance(joint.made, InputLayouts):
                needs = [np.array([use.layout(taken)]) for use in joint.uses]
                seconds = from_layouts(tensor.network, needs, joint).ravel() + costs[joint.made.variables]
                best = int(joint.made.variables[seconds.argmin()])
                found[tensor.name] = next(
                    stored for stored, variable in self.inputs[tensor.name].items() if variable == best
                )
        return found


def table_of(joint: Joint, seconds: Seconds) -> CostTable:
    """The table by choices of costs by layouts; a choice that is several ends of the tensor has one dim."""
    choices = tuple(dict.fromkeys(end.choice for end in joint.ends if end.choice is not None))
    index = []
    for end in joint.ends:
        shape = [1] * len(choices)
        if end.choice is not None:
            shape[choices.index(end.choice)] = len(end.codes)
        index.append(end.codes.reshape(shape))
    return CostTable(choices, seconds[tuple(index)])


def conversions(network: Network, joint: Joint, costs: Seconds) -> Seconds:
    """Seconds of the cheapest conversions, by the number of each end's layout; `costs` are the variables'."""
    uses = [use.layouts for use in joint.uses]
    if isinstance(joint.made, End):
        return from_layouts(network, uses, joint)
    own = costs[joint.made.variables]
    if len(uses) > 1:
        return np.asarray((from_layouts(network, uses, joint).T + own).min(axis=-1).T)
    begun = np.full((len(network.layouts), 1), np.inf)
    np.minimum.at(begun[:, 0], joint.made.layouts, own)
    return np.asarray(settled(network, begun, joint.moves)[uses[0], 0])


def from_layouts(network: Network, uses: Sequence[Numbers], joint: Joint) -> Seconds:
    """Seconds [layout, use, ...] of the cheapest trees from the layouts in which the tensor is made."""
    return tree_seconds(network, uses, joint.moves)[tuple(range(len(uses)))][joint.made.layouts]
