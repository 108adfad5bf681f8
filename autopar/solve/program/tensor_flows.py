"""Flow of a tensor from where it is made to its uses: f[t,v,a] and z[t,a], and the rows that keep it.

one use       direct ways from layout to layout, where these are fewer than moves
several       a flow for each over moves that are paid once
a weight      in phases, by when it is gathered (gather_phases.py)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autopar.convert.network import Flags, Numbers
from autopar.core.placement import Layout
from autopar.solve.choices.direct_ways import DirectWays, ways
from autopar.solve.choices.gather_phases import GatherPhase, Place
from autopar.solve.choices.tensor_classes import TensorClass, Use
from autopar.solve.linear_program import Terms
from autopar.solve.program.flow_rows import FlowRows

if TYPE_CHECKING:
    from autopar.solve.program.problem import Problem

FEWER = 2  # times as many moves as ways there must be for these to be solved sooner
FEW_MOVES = 32  # moves, of which ways may be as many


class TensorFlows:
    """The flows of one tensor, from `starts`, each use by the moves that it may take."""

    def __init__(
        self,
        problem: Problem,
        tensor: TensorClass,
        starts: Mapping[Place, Terms],
        uses: Sequence[Use],
        taken: Sequence[Mapping[GatherPhase, Flags]],
    ) -> None:
        self.problem, self.lp = problem, problem.lp
        self.tensor, self.network = tensor, tensor.network
        self.starts, self.uses, self.taken = starts, uses, taken
        self.copies: dict[Layout, int] = {}  # of a weight that is gathered once, all step long

    def add(self) -> None:
        """Add variables and rows."""
        if not (len(self.uses) == 1 and self.join(self.uses[0], self.taken[0])):
            self.add_flows()

    def join(self, use: Use, moves: Mapping[GatherPhase, Flags]) -> bool:
        """Add the ways from where a tensor is made to its only use, if they are fewer than its moves."""
        if set(moves) != {GatherPhase.EVERY}:
            return False
        network, allowed, starts = self.network, moves[GatherPhase.EVERY], self.starts
        if FEWER * len(starts) * len(use.needs) > max(FEW_MOVES, int(np.count_nonzero(allowed))):
            return False
        begin = np.array([network.place[layout] for layout, _ in starts], dtype=np.intp)
        ends = np.array([network.place[layout] for layout in use.needs], dtype=np.intp)
        seconds = ways(network, begin, ends, allowed)
        exist = np.isfinite(seconds)
        variables = np.full(seconds.shape, -1)
        times = self.problem.times(self.tensor, GatherPhase.EVERY)
        variables[exist] = self.lp.variables(seconds[exist] * times)
        self.tensor.ways = DirectWays(begin, ends, allowed, variables)
        rows = FlowRows(self.lp, len(begin) + len(ends))
        for number, terms in enumerate(starts.values()):
            rows.add(number, None, terms)
        for number, terms in enumerate(use.needs.values()):
            rows.add(len(begin) + number, None, [(-amount, variable) for amount, variable in terms])
        places = np.nonzero(exist)
        rows.carry(places[0], len(begin) + places[1], None, variables[places])
        rows.write()
        return True

    def add_flows(self) -> None:
        """Add the moves of the tensor, and the flow of each use over them."""
        for phase in self.taken[0]:
            seconds = self.network.seconds * self.problem.times(self.tensor, phase)
            moves = np.logical_or.reduce([each[phase] for each in self.taken])
            self.tensor.paid[phase] = self.flow_variables(moves, seconds)
        for use, moves_in in zip(self.uses, self.taken, strict=True):
            self.conserve(use, self.flows(use, moves_in))

    def flow_variables(self, moves: Flags, seconds: NDArray[np.float64]) -> Numbers:
        """For each of `moves` a variable with its cost, -1 for the others."""
        found = np.full(len(moves), -1)
        found[moves] = self.lp.variables(seconds[moves])
        return found

    def flows(self, use: Use, taken: Mapping[GatherPhase, Flags]) -> dict[GatherPhase, Numbers]:
        """f[t,v,.]: z[t,.] itself unless others use the tensor too. What a use regathers in backward
        is paid for each."""
        network, paid, found = self.network, self.tensor.paid, dict[GatherPhase, Numbers]()
        for phase, moves in taken.items():
            regather = np.zeros(len(moves))
            if phase is GatherPhase.REGATHER and self.saves(use):
                regather = np.where(network.gathers, network.forward, 0.0) * len(self.tensor.members)
            if len(self.uses) > 1:
                found[phase] = self.flow_variables(moves, regather)
                rows = self.lp.between(np.zeros(moves.sum()), np.full(moves.sum(), math.inf))
                self.lp.enter(rows, paid[phase][moves], 1.0)
                self.lp.enter(rows, found[phase][moves], -1.0)
                continue
            found[phase] = paid[phase]
            for move in np.flatnonzero(moves & (regather > 0)):
                self.lp.costs[found[phase][move]] += float(regather[move])
        return found

    def saves(self, use: Use) -> bool:
        """Whether some strategy of the use's operator saves this operand for backward."""
        return use.consumer is not None and bool(
            self.problem.operators.savers(use.consumer, use.position, use.repetitions, of="operands")
        )

    def conserve(self, use: Use, flows: Mapping[GatherPhase, Numbers]) -> None:
        """Flow into a layout is flow out of it, in each phase."""
        network, starts = self.network, self.starts
        rows = FlowRows(self.lp, len(network.layouts))
        for (layout, phase), terms in starts.items():
            rows.add(network.place[layout], phase, terms)
        for phase, variables in flows.items():
            over = np.flatnonzero(variables >= 0)
            rows.carry(network.source[over], network.target[over], phase, variables[over])
        for phase in [phase for phase in flows if phase.next is not None]:
            for place in rows.touched(phase):
                leaving = self.lp.variable()
                rows.add(place, phase, [(-1.0, leaving)])
                rows.add(place, phase.next, [(1.0, leaving)])
                layout = network.layouts[place]
                if phase is GatherPhase.ONCE and (layout, phase) not in starts:
                    self.hold_copy(layout, leaving)
        last = list(dict.fromkeys(phase.next or phase for _, phase in starts))
        for layout, terms in use.needs.items():
            place, needed = network.place[layout], [(-amount, variable) for amount, variable in terms]
            if len(last) == 1:
                rows.add(place, last[0], needed)
                continue
            for end in last:
                arriving = self.lp.variable()
                rows.add(place, end, [(-1.0, arriving)])
                rows.add(place, None, [(1.0, arriving)])
            rows.add(place, None, needed)
        rows.write()

    def hold_copy(self, layout: Layout, leaving: int) -> None:
        """The full gradient of a weight that is gathered once; the copy itself is kept by who reads it, if it
        isn't counted here."""
        problem, tensor = self.problem, self.tensor
        if not problem.requires_grad(tensor.name):
            return
        if problem.prices.step_weight == 1.0:  # it is scattered as soon as it comes
            return
        if layout not in self.copies:
            self.copies[layout] = self.lp.variable()
            nbytes = problem.prices.local_bytes(tensor.name, layout) * len(tensor.members)
            held = 2 * nbytes if problem.copies_last else nbytes
            problem.memory.hold(held, self.copies[layout], lasts=True)
            if not problem.prices.accumulates:
                problem.memory.add_gradient(nbytes, self.copies[layout])
        self.lp.at_least([(1.0, self.copies[layout]), (-1.0, leaving)], 0.0)
