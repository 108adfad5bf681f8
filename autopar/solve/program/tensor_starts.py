"""Where the flow of a tensor begins: out[t, .], by what makes it, or x[t, p], by how an input is stored.

made by an operator     the layouts of its strategies' results
an input                one variable for each layout, and of a weight for each way of gathering it
a weight that is cast   gathered whole, or regathered from the cast shard in backward
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from autopar.core.gathering import Gathering
from autopar.core.placement import Layout, Shard
from autopar.cost.operators.host_weights import stream_seconds
from autopar.solve.choices.gather_phases import GatherPhase, Place, first_phase
from autopar.solve.choices.memory_price import FREE
from autopar.solve.choices.tensor_classes import Marginal, TensorClass
from autopar.solve.linear_program import Terms

if TYPE_CHECKING:
    from autopar.solve.program.problem import Problem

Stored = tuple[Layout, Gathering]  # how an input lies, and when it is gathered if it is a weight


class TensorStarts:
    """The layouts in which one tensor is there, with their variables and, of inputs, what these hold."""

    def __init__(self, problem: Problem, tensor: TensorClass) -> None:
        self.problem, self.tensor = problem, tensor
        self.name, self.count = tensor.name, len(tensor.members)
        self.lp, self.memory, self.space = problem.lp, problem.memory, problem.space
        self.wiring, self.prices = problem.wiring, problem.prices

    def find(self) -> dict[Place, Terms]:
        """out[t, .] in the phases in which the flow begins."""
        if self.name in self.problem.cast_weights and self.problem.requires_grad(self.name):
            return self.cast()
        if self.name not in self.wiring.kinds:
            return {(layout, GatherPhase.EVERY): terms for layout, terms in self.made().items()}
        waits = self.problem.may_lead(self.name)
        found: dict[Place, Terms] = {}
        for (layout, gathering), variable in self.kept().items():
            phase = first_phase(gathering, waits=waits)
            found.setdefault((self.problem.canonical(self.name, layout), phase), []).append((1.0, variable))
        return found

    def cast(self) -> dict[Place, Terms]:
        """out[t, .] of a weight that is cast before it is gathered: its full copy stays until backward, or is
        regathered from the cast shard, which then stays."""
        found: dict[Place, Terms] = {}
        forced = self.space.gatherings == (Gathering.REGATHER,)
        if not forced and self.problem.cap is None and self.problem.memory_price == FREE:
            return {(layout, GatherPhase.EVERY): terms for layout, terms in self.made().items()}
        choice = None if forced else self.lp.variable(integer=True, upper=1.0)
        self.problem.regathered[self.name] = choice
        for layout, terms in self.made().items():
            if not any(isinstance(place, Shard) for place in layout):
                found[layout, GatherPhase.EVERY] = terms
                continue
            regathered = terms
            if choice is not None:
                part = self.lp.variable(upper=1.0)
                regathered, rest = [(1.0, part)], [*terms, (-1.0, part)]
                self.lp.at_most([(1.0, part), (-1.0, choice)], 0.0)
                self.lp.at_most([*rest, (1.0, choice)], 1.0)
                self.lp.at_least(rest, 0.0)
                found[layout, GatherPhase.EVERY] = rest
            found[layout, GatherPhase.REGATHER] = regathered
            self.problem.unkept.setdefault(self.name, []).extend(regathered)
            nbytes = self.prices.local_bytes(self.name, layout) * self.count
            for share, variable in regathered:
                self.memory.hold(nbytes * share, variable)
        return found

    def made(self) -> Marginal:
        """out[t, .]: in which layouts an operator makes the tensor."""
        found: Marginal = {}
        operation, index = self.wiring.makers[self.name]
        name = self.problem.folding.class_of[operation.name]
        repetitions = self.problem.operators.repetitions(
            self.wiring.makers[member][0].name for member in self.tensor.members
        )
        layouts = self.problem.layouts(self.name, name, "results", index)
        for layout, terms in zip(layouts, self.problem.operators.mean(name, repetitions), strict=True):
            found.setdefault(layout, []).extend(terms)
        return found

    def kept(self) -> dict[Stored, int]:
        """x[t, p] of an input, and of a weight in shards for each way of gathering it."""
        is_parameter = self.wiring.is_parameter(self.name)
        requires_grad = is_parameter and self.problem.requires_grad(self.name)
        variables: dict[Stored, int] = {}
        for stored in itertools.chain.from_iterable(map(self.stored, self.space.inputs[self.name])):
            layout, gathering = stored
            cost = self.prices.update(self.name, layout) if is_parameter else 0.0
            cost *= self.prices.step_weight
            cost += sum(stream_seconds(self.prices, self.name, layout))
            variables[stored] = self.lp.variable(cost * self.count, integer=True, upper=1.0)
            if self.wiring.at_rest(self.name) and not self.wiring.may_be_left(self.name):
                nbytes = self.prices.state_bytes(self.name, layout) * self.count
                self.memory.rest(nbytes, variables[stored])
                if requires_grad and (not self.prices.accumulates or gathering is Gathering.ONCE):
                    gradient = self.prices.local_bytes(self.name, layout) * self.count
                    self.memory.add_gradient(gradient, variables[stored])  # made of the full one's sum
        self.lp.equal([(1.0, variable) for variable in variables.values()], 1.0)
        self.problem.inputs[self.name] = variables
        return variables

    def stored(self, layout: Layout) -> list[Stored]:
        """An input in a layout, with each way of gathering it that could serve: regathered where memory is
        scarce, once only where something else is repeated and it needn't come from the host for that."""
        plain = [(layout, Gathering.KEEP)]
        if not self.wiring.is_parameter(self.name) or not self.prices.training:
            return plain
        if not self.space.gatherings or not any(isinstance(place, Shard) for place in layout):
            return plain
        if len(self.space.gatherings) == 1 and self.name not in self.prices.on_host:
            return [(layout, self.space.gatherings[0])]
        serve = {
            Gathering.KEEP: True,
            Gathering.REGATHER: self.problem.cap is not None or self.problem.memory_price != FREE,
            Gathering.ONCE: self.problem.may_lead(self.name),
        }
        return [(layout, gathering) for gathering in self.space.gatherings if serve[gathering]] or plain
