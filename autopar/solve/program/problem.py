"""Where every operator runs: the program whose answer is the plan of one stage.

**Sets.** Operators v with strategies s (one option for each mesh axis). Tensors t with layouts p;
uses (t, v): one for each place among v's operands, also when v takes t twice. Moves a of t: legal
changes of one placement on one axis (convert/moves.py).

**Variables.** x[v,s] in {0,1}: operator v runs as s; for an input, x[t,p]: how it is kept or passed; for
an output, x[t,p]: how it leaves the graph.
f[t,v,a] >= 0: the flow of use (t, v) over move a. z[t,a] >= 0: move a of t is made.
y[t,p] >= 0: t is saved for backward in layout p, in storage of its own (views: saved_variables.py).
r[v,s] <= x[v,s]: what v makes is recomputed in backward instead, where that may be chosen.

**Minimise**  sum cost[v,s] x[v,s] + sum cost[t,a] z[t,a] + sum update[t,p] x[t,p] + price * memory
              + sum recompute[v,s] r[v,s]

Costs are seconds of one micro-batch; what is done once a step, the optimizer's update and the sums of
gradients by those r_to_b that lead from where a weight is stored, counts `step_weight` of its seconds
(cost/operators/prices.py): the flow of a weight goes through phases (gather_phases.py), by when it is
gathered: x[t,p] of a weight in shards is one variable for each way of gathering it that may serve. `price`,
seconds per byte, is 0 unless memory is scarce on a pipeline stage (`memory_price`), where no single row could
state the cap.

**Subject to**
    one       sum_s x[v,s] = 1                                      every operator runs one way
    flow      out[t,p] + sum of f into p = need[v,p] + sum of f out of p
              out[t,p] = sum of x[producer,s] with result p;  need[v,p] = sum of x[v,s] with operand p,
              or x[t,p] where t leaves the graph
    share     z[t,a] >= f[t,v,a]                                    a shared conversion is paid once
    keep      y[t,p] >= sum of x[v,s] that keep t as p              ... and kept once,
                        less r[v,s] of the maker of t as p
                        (not of a weight that is regathered)
    memory    sum state[t,p] x[t,p] + sum bytes y[t,p] + own[v,s] (x[v,s] - r[v,s]) <= cap
              when backward begins: gradients, unless those of earlier micro-batches are there, come
              later; and the state with them when it ends

A tensor with one use needs no z: its cost is on f; where its ways from layout to layout are fewer than
moves, f is of these (direct_ways.py). Without `memory` the relaxation was integral on
every graph tried, so it is solved first and mixed-integer branching starts only if it has to.

Operators are recomputed in whole parts, whose inputs are kept (recompute.py): r, which asks for no
more than each operator's own time, is a relaxation of that, for the bound and for a placement to begin with.
So is it to leave out all y of what operators make where that may wait in the host's memory (offload.py).

**Folding.** Operators of one class (fold.py) share x, and every sum counts its members. That
restricts the program, so the bound comes from a relaxation that does not: x[v] is then the mean
over the N repetitions, and a use that the first or last repetition lacks takes the mean of the
others, (N x - x_first) / (N - 1), with x_first and x_last free. Averaging any plan of the unfolded
program over its repetitions gives a point of this relaxation of equal cost, so its optimum is a
lower bound for all plans.

**Axes alike.** With `alike` the program forgets which of several equal axes is which: layouts are
multisets of placements there (symmetry.py). That relaxes it, to a quarter of its size on three axes.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from autopar.convert.moves import canonical
from autopar.convert.network import Alike, Flags, Network, Placements, order, unnamed
from autopar.convert.path import interesting
from autopar.core.deadline import check_time
from autopar.core.gathering import Gathering
from autopar.core.graph import Graph
from autopar.core.move import Move
from autopar.core.placement import Layout
from autopar.cost.operators.prices import Prices
from autopar.sharding.rule import rule_of
from autopar.solve.choices.fold import Folding
from autopar.solve.choices.gather_phases import GatherPhase, Place, completing, phased
from autopar.solve.choices.memory_price import FREE, MemoryPrice
from autopar.solve.choices.space import Space
from autopar.solve.choices.tensor_classes import Marginal, TensorClass, Use, Wiring
from autopar.solve.linear_program import LinearProgram, Terms
from autopar.solve.program.flow_rows import ONE
from autopar.solve.program.memory_rows import MemoryRows
from autopar.solve.program.operator_variables import OperatorVariables
from autopar.solve.program.saved_variables import SavedVariables
from autopar.solve.program.tensor_flows import TensorFlows
from autopar.solve.program.tensor_starts import Stored, TensorStarts


class Problem:
    """The program above for one graph; `relaxed` builds the bound's relaxation of folding."""

    def __init__(
        self,
        graph: Graph,
        prices: Prices,
        space: Space,
        folding: Folding,
        *,
        cap: float | None,
        relaxed: bool = False,
        alike: Alike = (),
        memory_price: MemoryPrice = FREE,
        recomputes: bool = False,
        offloads: bool = False,
        copies_last: bool = False,
    ) -> None:
        self.graph, self.prices, self.space, self.folding = graph, prices, space, folding
        self.offloads = offloads and memory_price == FREE
        self.cap, self.relaxed, self.alike, self.memory_price = cap, relaxed, alike, memory_price
        # The copy of a weight that is gathered once serves all micro-batches, and the whole batch is there
        # from the start: they last, or are taken for something that each micro-batch keeps.
        self.copies_last = copies_last
        self.spared = (Gathering.REGATHER, Gathering.ONCE) if copies_last else (Gathering.REGATHER,)
        self.lp, self.wiring = LinearProgram(), Wiring(graph)
        self.inputs: dict[str, dict[Stored, int]] = {}
        self.output_layouts: dict[str, dict[Layout, int]] = {}
        self.memory = MemoryRows(self.lp, memory_price)
        self.cast_weights = graph.cast_weights if Gathering.REGATHER in space.gatherings else frozenset()
        # Of weights that are cast before they are gathered: the choice to regather, None where it is
        # forced, and what it spares in every layout.
        self.regathered: dict[str, int | None] = {}
        self.unkept: dict[str, Terms] = {}
        self.found_layouts: dict[object, list[Layout]] = {}  # by strategies
        self.paths: dict[object, tuple[Move, ...]] = {}  # those found so far between the ends of a tensor
        self.operators = OperatorVariables(
            graph,
            prices,
            space,
            folding,
            lp=self.lp,
            memory=self.memory,
            relaxed=relaxed,
            alike=alike,
        )
        if recomputes and (cap is not None or memory_price.saved):
            self.operators.add_recompute()
        self.tensors = self.wiring.classes(folding, prices.dims.atoms)
        uses = {tensor.name: self.add_tensor(tensor) for tensor in self.tensors}
        if cap is not None or memory_price.saved:
            self.save(uses)
        if cap is not None and cap < math.inf:
            self.memory.cap(cap)

    def save(self, uses: Mapping[str, Sequence[Use]]) -> None:
        """Add what is saved for backward."""
        SavedVariables(self, uses)

    def under(self, prices: Prices) -> Self:
        """The program under other multipliers: operators and moves cost something else, and rows stay."""
        other, costs = copy.copy(self), list(self.lp.costs)
        other.prices, other.paths = prices, {}
        other.lp = replace(self.lp, costs=costs)
        other.operators = self.operators.under(prices, other.lp)
        other.memory = self.memory.within(other.lp)
        other.operators.memory = other.memory
        other.tensors = [other.repriced(tensor) for tensor in self.tensors]
        return other

    def repriced(self, tensor: TensorClass) -> TensorClass:
        """The tensor with what its moves cost by these prices."""
        before = tensor.network
        placements, fixed = tensor.asked
        after = self.prices.network(tensor.name, placements, alike=self.alike, fixed=fixed)
        if after is before:
            return tensor
        changed = copy.copy(tensor)
        changed.network = after
        if tensor.ways:
            exist = tensor.ways.variables >= 0
            seconds = self.times(tensor, GatherPhase.EVERY) * tensor.ways.seconds(after)[exist]
            for variable, cost in zip(tensor.ways.variables[exist].tolist(), seconds.tolist(), strict=True):
                self.lp.costs[variable] = cost
        for phase, variables in tensor.paid.items():
            moves = np.flatnonzero((after.seconds != before.seconds) & (variables >= 0))
            times = self.times(tensor, phase)
            for variable, seconds in zip(
                variables[moves].tolist(), after.seconds[moves].tolist(), strict=True
            ):
                self.lp.costs[variable] = times * seconds
        return changed

    def times(self, tensor: TensorClass, phase: GatherPhase) -> float:
        """Weight of a move of a tensor in a phase: its members, times the step weight if the move is made
        once a step."""
        count = float(len(tensor.members))
        return count if phase.next is None else count * self.prices.step_weight

    # -- tensors --------------------------------------------------------------------------------------

    def canonical(self, name: str, layout: Layout) -> Layout:
        differentiable = self.prices.training and self.graph.specs[name].requires_grad
        return unnamed(canonical(layout, differentiable=differentiable), self.alike)

    def add_tensor(self, tensor: TensorClass) -> list[Use]:
        check_time()
        starts, uses, taken = self.routed(tensor)
        TensorFlows(self, tensor, starts, uses, taken).add()
        return uses

    def routed(
        self, tensor: TensorClass
    ) -> tuple[dict[Place, Terms], list[Use], list[dict[GatherPhase, Flags]]]:
        """Layouts in which the tensor is made, its uses, and the moves that may lead from one to the
        other."""
        starts, uses = TensorStarts(self, tensor).find(), self.uses_of(tensor)
        sources = list(dict.fromkeys(layout for layout, _ in starts))
        tensor.asked = placements, ends = self.layouts_of_interest(tensor.name, sources, uses)
        tensor.network = network = self.prices.network(tensor.name, placements, alike=self.alike, fixed=ends)
        fixed = self.wiring.is_fixed(tensor.name)
        taken = [
            phased(
                network,
                starts,
                np.zeros(len(network.source), dtype=np.bool_)
                if fixed
                else self.arcs(tensor.name, network, sources, use, alone=len(uses) == 1),
            )
            for use in uses
        ]
        return starts, uses, taken

    def layouts_of_interest(
        self, name: str, sources: Sequence[Layout], uses: Sequence[Use]
    ) -> tuple[Placements, frozenset[Layout]]:
        """The placements on each axis between which a tensor may move, and ends that are not legal else.

        Placements are those that anybody makes or needs on an axis, so that uses can share a way, and the
        hubs R, P and B, through which changes lead that are illegal or, on some links, slower.
        """
        ends = dict.fromkeys(itertools.chain(sources, *(use.needs for use in uses)))
        requires_grad = self.prices.training and self.graph.specs[name].requires_grad
        placements = list(interesting(ends, differentiable=requires_grad))
        for axes in self.alike:
            joined = dict.fromkeys(itertools.chain.from_iterable(placements[axis] for axis in axes))
            for axis in axes:
                placements[axis] = tuple(sorted(joined, key=order))
        fixed = frozenset(end for end in ends if not self.prices.dims.legal(name, end))
        return tuple(placements), fixed

    def arcs(self, name: str, network: Network, sources: Sequence[Layout], use: Use, *, alone: bool) -> Flags:
        """Moves that a flow from `sources` to the use's needs can take.

        Into an operator that only hands the tensor on, layouts that it can take are not converted: that
        is as cheap behind it. Before an elementwise operator those that end in shards stay, because they
        spare it work.
        """
        through, view = self.passes(name, use) if alone else (False, False)
        needs = network.flags(list(use.needs))
        allowed = np.ones(len(network.source), dtype=np.bool_)
        if through:
            allowed = ~needs[network.source]
            if not view:
                allowed |= network.into_shard
        if not self.may_gather(name):
            allowed &= ~completing(network)
        return network.between(network.flags(sources), needs, allowed)

    def layouts(self, name: str, operation: str, ends: str, index: int) -> list[Layout]:
        """The layout of a tensor by each strategy of an operator class, as one of its operands or results;
        found once for all operators of the same strategies."""
        strategies = self.space.strategies[operation]
        requires_grad = self.graph.specs[name].requires_grad
        key = ends, index, requires_grad, *map(id, strategies)
        if key not in self.found_layouts:
            self.found_layouts[key] = [
                self.canonical(name, tuple(getattr(option, ends)[index] for option in strategy))
                for strategy in strategies
            ]
        return self.found_layouts[key]

    def may_lead(self, name: str) -> bool:
        """Whether conversions that lead from where a weight is stored are made once a step: not of one that
        comes from the host for every micro-batch."""
        once = self.prices.step_weight < 1.0 and self.wiring.is_parameter(name)
        return once and name not in self.prices.on_host

    def may_gather(self, name: str) -> bool:
        """Whether a tensor may be gathered. Weights may not where no gathering is allowed, nor weights that
        are cast first where none but regathering is."""
        if not self.wiring.is_parameter(name):
            return True
        if self.space.gatherings != (Gathering.REGATHER,):
            return bool(self.space.gatherings)
        return not all(self.cast_weights.issuperset(item.results) for item, _ in self.wiring.uses[name])

    def requires_grad(self, name: str) -> bool:
        return self.prices.training and self.graph.specs[name].requires_grad

    def uses_of(self, tensor: TensorClass) -> list[Use]:
        """need[v, .] of every use."""
        found = []
        members = [self.wiring.uses[member] for member in tensor.members]
        for index, (operation, position) in enumerate(self.wiring.uses[tensor.name]):
            name = self.folding.class_of[operation.name]
            repetitions = self.operators.repetitions(uses[index][0].name for uses in members)
            needs: Marginal = {}
            layouts = self.layouts(tensor.name, name, "operands", position)
            for layout, terms in zip(layouts, self.operators.mean(name, repetitions), strict=True):
                needs.setdefault(layout, []).extend(terms)
            found.append(Use(name, position, needs, repetitions))
        if tensor.name in self.graph.outputs:
            found.append(Use(None, 0, self.output_needs(tensor.name)))
        if tensor.name in self.wiring.written:
            buffer = self.wiring.written[tensor.name]
            found.append(Use(None, 1, {layout: [(1.0, ONE)] for layout in self.space.inputs[buffer][:1]}))
        return found

    def output_needs(self, name: str) -> Marginal:
        """Layouts in which a tensor leaves the graph: one, or a variable for each that may be chosen."""
        layouts = self.space.outputs[name]
        if len(layouts) == 1:
            return {self.canonical(name, layouts[0]): [(1.0, ONE)]}
        variables = {layout: self.lp.variable(integer=True, upper=1.0) for layout in layouts}
        self.lp.equal([(1.0, variable) for variable in variables.values()], 1.0)
        self.output_layouts[name] = variables
        found: Marginal = {}
        for layout, variable in variables.items():
            found.setdefault(self.canonical(name, layout), []).append((1.0, variable))
        return found

    # -- moves ----------------------------------------------------------------------------------------

    def move_seconds(self, name: str, move: Move, *, leads: bool) -> float:
        """Seconds of a move in the program."""
        if not self.wiring.is_parameter(name):
            return self.prices.move(name, move)
        return self.prices.weight_move(name, move, leads=leads)

    def passes(self, name: str, use: Use) -> tuple[bool, bool]:
        """Whether the user only passes the tensor on, as one of equal size, and whether its result is a view.

        A weight's conversions cost less than those of a view of it: gradients are summed in buckets.
        """
        if use.consumer is None or self.wiring.is_parameter(name):
            return False, False
        operation = self.operators.by_name[use.consumer]
        rule, specs = rule_of(operation), self.graph.specs
        if len(operation.operands) != 1 or len(operation.results) != 1:
            return False, False
        if specs[name].nbytes != specs[operation.results[0] or name].nbytes:
            return False, False
        return rule.is_view or rule.passes_layout_on, rule.is_view
