"""Experts of a mixture: rows that each go through the expert that they choose.

    "t i, e. i h, e. h o, t -> t o"       of one body of two products

Rows are free. Experts are a factor of their own, in two ways: rows are split, too, and travel to the ranks
that own their experts and back (*experts*, `autopar.runtime.collectives.travelling_rows`); or all ranks have
all rows, each runs its own experts, and results are partial sums (*own*). Channels that run through the body
from product to product (*hidden*) give partial sums, and those of the last product (*o*) columns of the
result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import networkx as nx
import torch

from autopar.core.placement import B, P, Placement, Shard
from autopar.core.strategy import Option
from autopar.sharding.atoms import Atoms, Dim, Group, Relation
from autopar.sharding.equation import Equation
from autopar.sharding.needed_rows import EXPERTS, OWN
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.trace.experts.body import (
    CALL,
    EVERY,
    PART,
    PICK,
    PRODUCT,
    BodyStep,
    BodyValue,
    read_body,
    write_body,
)
from autopar.trace.experts.channels import RESULT, ChannelClasses, ChannelTerm, channel_classes
from autopar.trace.experts.routed_experts import ROUTED_EXPERTS
from autopar.trace.experts.sent_rows import KEYS_OF_COUNTS, ROWS_TO_SEND

aten = torch.ops.aten
HIDDEN, OUT = "hidden", "o"


class ColumnState(Enum):
    """How the columns of a body's value lie on an axis."""

    WHOLE = "whole"
    SPLIT = "split"
    PARTIAL = "partial"


@register
class RoutedExperts(Rule):
    """A body of products and row-wise operators, on rows and the weights of the expert that each chooses."""

    targets = (ROUTED_EXPERTS,)

    def rows(self, op: Instance) -> int:
        """Number of operands that hold rows; weights follow, and keys."""
        return len(op["rows"])

    def weights(self, op: Instance) -> range:
        return range(self.rows(op), len(op.operands) - 1)

    def equation(self, op: Instance) -> Equation:
        rows = [("t", None)] * self.rows(op)
        weights = [(None,) * len(op.shape(place)) for place in self.weights(op)]
        return Equation((*rows, *weights, ("t",)), (("t", None),))

    def classes(self, op: Instance) -> ChannelClasses:
        """The loops of the body's columns."""
        widths = tuple(op.shape(place)[1:] for place in range(len(op.operands) - 1))
        return channel_classes(op["body"], self.rows(op), widths)

    def relations(self, op: Instance) -> list[Relation]:
        first, *others = self.weights(op)
        experts = [Relation(((op.operands[first], 0),), ((op.operands[each], 0),)) for each in others]
        return [*super().relations(op), *experts, *self.channels(op)]

    def channels(self, op: Instance) -> list[Relation]:
        """Dims that run through one loop of the body's columns."""
        found = []
        for terms in self.classes(op).terms:
            plain = next((term for term in terms if term.is_plain), None)
            if plain is not None:
                others = (term for term in terms if term != plain)
                found += [Relation((_dim(op, each),), _around(_dim(op, plain), each)) for each in others]
        return found

    def options(self, op: Instance, atoms: Atoms) -> list[Option]:
        rows, weights = self.rows(op), len(self.weights(op))
        by_expert = (Shard(0),) * weights
        found = super().options(op, atoms)
        split = [option.results[0] for option in found if option.shards]  # by rows
        return [
            *found,
            *(
                Option(f"{EXPERTS}.{number}" if number else EXPERTS, (at,) * rows + by_expert + (at,), (at,))
                for number, at in enumerate(split)
            ),
            Option(OWN, ((B,) * rows + by_expert + (B,)), (P,)),
            *self.by_channels(op, atoms),
        ]

    def by_channels(self, op: Instance, atoms: Atoms) -> Iterator[Option]:
        """Options that split a loop of columns, as far as the body goes on with parts of it."""
        loops = nx.utils.UnionFind()
        for relation in self.channels(op):
            for left, right in atoms.matches(relation):
                loops.union(left, right)
        count: dict[str, int] = {}
        for loop in sorted(map(sorted, loops.to_sets())):
            places = {(name, dim): atom for name, dim, atom in loop}
            option = _SplitColumns(self, op, places).option()
            if option is not None:
                factor, operands, result = option
                number = count[factor] = count.get(factor, -1) + 1
                yield Option(f"{factor}.{number}" if number else factor, operands, (result,))

    def lower(self, site: Site) -> Sequence[Handle]:
        axes, count = site.sharding_axes(EXPERTS), self.rows(site)
        if not axes and not site.axes(OWN):
            return (site.local_call(),)
        ranks = list(site.mates(axes))
        owned = [self.owned(site, at) for at in ranks]
        starts, stops = (list(ends) for ends in zip(*owned, strict=True))
        place, experts = ranks.index(site.coordinate), site.shape(count)[0]
        most = self.most(site, ranks, stops[place] - starts[place])
        leaving = self.most(site, [site.coordinate], sum(stops) - sum(starts))
        sent, picked = site.call(ROWS_TO_SEND, site.values[-1], experts, starts, stops, leaving)
        rows = [site.call(aten.index_select.default, each, 0, picked) for each in site.values[:count]]
        got = sent
        if axes:
            lengths = [stop - start for start, stop in owned]
            got = self.exchanged(site, sent, lengths, place)
            rows = [self.travelled(site, each, (sent, got, lengths, False, most)) for each in rows]
        keys = site.call(KEYS_OF_COUNTS, got, len(ranks), most)
        weights = site.values[count:-1]
        made = site.call(ROUTED_EXPERTS, rows, weights, keys, site["body"], list(site["dtypes"]))
        if axes:
            made = self.travelled(site, made, (sent, got, lengths, True, leaving))
        shape = [site.emitter.shape(site.values[0])[0], *site.emitter.shape(made)[1:]]
        whole = site.call(aten.new_zeros.default, made, shape)
        return (site.call(aten.index_copy.default, whole, 0, picked, made),)

    def owned(self, site: Site, coordinate: Sequence[int]) -> tuple[int, int]:
        """The experts [start, stop) of a rank."""
        first = self.rows(site)
        return site.dims.rows(site.operands[first], Shard(0), site.operand_layout(first), coordinate)

    def most(self, site: Site, ranks: Sequence[Sequence[int]], experts: int) -> int:
        """Rows of some ranks that choose so many experts, where these are the fullest."""
        name, layout = site.operands[0], site.operand_layout(0)
        rows = sum(site.dims.local_shape(name, layout, at)[0] for at in ranks)
        every = site.shape(self.rows(site))[0]
        share = site.dims.fullest(every // max(1, experts))
        return rows if experts == every else min(rows, math.ceil(share * rows * experts / every))

    def exchanged(self, site: Site, sent: Handle, lengths: Sequence[int], place: int) -> Handle:
        """Numbers of rows that come for each own expert from each rank."""
        args = sent, list(lengths), place, site.key(site.sharding_axes(EXPERTS))
        shape = [len(lengths) * lengths[place]]
        return site.emitter.collective(torch.ops.autopar.expert_counts.default, args, shape)

    def travelled(self, site: Site, x: Handle, how: tuple[Any, ...]) -> Handle:
        """Rows where they travel, as many as are expected."""
        args = x, *how, site.key(site.sharding_axes(EXPERTS))
        shape = how[-1], *site.emitter.shape(x)[1:]
        return site.emitter.collective(torch.ops.autopar.travel.default, args, shape)

    def samples(self) -> Iterable[Sample]:
        x, keys = torch.randn(10, 6), torch.tensor([2, 0, 0, 4, 1, 0, 2, 2, 1, 4])
        up, down = torch.randn(5, 6, 8), torch.randn(5, 4, 6)
        gated = [_product(0, 1), *_gate(3, PART), _product(7, 2)]
        yield Sample(ROUTED_EXPERTS, ([x], [up, down], keys, write_body(gated), []))
        biased = [
            _product(0, 1),
            BodyStep(PICK, (3,)),
            _call(aten.add.Tensor, 5, 6),
            *_gate(7, EVERY),
            _product(11, 2),
            BodyStep(PICK, (4,)),
            _call(aten.add.Tensor, 12, 13),
        ]
        biases = torch.randn(5, 8), torch.randn(5, 6)
        yield Sample(ROUTED_EXPERTS, ([x], [up, down, *biases], keys, write_body(biased), []))
        scaled = [_product(0, 2), _call(aten.mul.Tensor, 3, 1)]
        yield Sample(ROUTED_EXPERTS, ([x, torch.randn(10, 1)], [up], keys % 2, write_body(scaled), []))


def _product(x: int, w: int) -> BodyStep:
    return BodyStep(PRODUCT, (x, w))


def _call(target: Any, *values: int) -> BodyStep:
    return BodyStep(CALL, values, target=target, args=tuple(map(BodyValue, values)))


def _gate(value: int, kind: str) -> list[BodyStep]:
    """One half of a value's columns times the other's activation."""
    halves = [BodyStep(kind, (value,), place, 2) for place in range(2)]
    first, second, active = range(value + 1, value + 4)
    return [*halves, _call(aten.silu.default, first), _call(aten.mul.Tensor, second, active)]


def _dim(op: Instance, term: ChannelTerm) -> Dim:
    """The dim of a term."""
    name = op.operator.results[0] if term.operand == RESULT else op.operands[term.operand]
    assert name is not None
    return name, term.dim


def _around(loop: Dim, term: ChannelTerm) -> Group:
    """The loops that a term's dim runs through."""
    return (*term.outer, loop, *term.inner)


class _SplitColumns:
    """Follows a loop of columns through a body whose operands are split along it on one axis."""

    def __init__(self, rule: RoutedExperts, op: Instance, places: Mapping[tuple[str, int], int]) -> None:
        self.op, self.places, self.classes = op, places, rule.classes(op)
        self.count = rule.rows(op)
        self.first = len(op.operands) - 1  # the number of the first step's value
        self.steps = read_body(op["body"]).steps
        self.states: dict[int, ColumnState] = {}
        self.partial: set[int] = set()  # operands that join partial sums once

    def option(self) -> tuple[str, tuple[Placement, ...], Placement] | None:
        """Factor, and placements of operands and result; None if the body needs the whole loop."""
        for number in range(self.count):
            self.states[number] = self.split(self.has(number, 1))
        for number, step in enumerate(self.steps, start=self.first):
            state = self.after(number, step)
            if state is None:
                return None
            self.states[number] = state
        result = self.op.operator.results[0]
        assert result is not None
        operands = tuple(self.operand(place) for place in range(len(self.op.operands)))
        match self.states[self.first + len(self.steps) - 1]:
            case ColumnState.SPLIT if (result, 1) in self.places:
                return OUT, operands, Shard(1, self.places[result, 1])
            case ColumnState.PARTIAL:
                return HIDDEN, operands, P
            case _:
                return None

    def operand(self, place: int) -> Placement:
        name = self.op.operands[place]
        dims = [dim for dim in range(len(self.op.shape(place))) if (name, dim) in self.places]
        if dims:
            return Shard(dims[0], self.places[name, dims[0]])
        return P if place in self.partial else B

    def has(self, operand: int, dim: int) -> bool:
        """Whether the loop runs through a dim of an operand."""
        return (self.op.operands[operand], dim) in self.places

    def split(self, yes: bool) -> ColumnState:
        return ColumnState.SPLIT if yes else ColumnState.WHOLE

    def after(self, number: int, step: BodyStep) -> ColumnState | None:
        """State of what a step gives; None if it needs the whole loop."""
        match step.kind:
            case "product":
                return self.product(*step.values)
            case "pick":
                return self.split(self.has(step.values[0], 1))
            case "part" | "every":
                return self.part(number, self.states[step.values[0]])
            case _:
                return self.call(number, step)

    def product(self, x: int, w: int) -> ColumnState | None:
        inner, outer = self.has(w, 1), self.has(w, 2)
        state = self.states[x]
        if state is ColumnState.PARTIAL or inner != (state is ColumnState.SPLIT) or inner and outer:
            return None
        return ColumnState.PARTIAL if inner else self.split(outer)

    def part(self, number: int, whole: ColumnState) -> ColumnState | None:
        """State of some of a value's columns; None if the loop doesn't run inside of them."""
        if whole is not ColumnState.SPLIT:
            return whole
        plain = self.classes.plain(number)
        return whole if plain is not None and _dim(self.op, plain) in self.places else None

    def call(self, number: int, step: BodyStep) -> ColumnState | None:
        states = {value: self.states[value] for value in step.values}
        kinds = set(states.values())
        if ColumnState.PARTIAL in kinds:
            return self.sum_of(step, states)
        if kinds == {ColumnState.WHOLE}:
            return ColumnState.WHOLE
        wide = [value for value in states if self.classes.of[value] == self.classes.of[number]]
        return ColumnState.SPLIT if all(states[value] is ColumnState.SPLIT for value in wide) else None

    def sum_of(self, step: BodyStep, states: Mapping[int, ColumnState]) -> ColumnState | None:
        """A sum of partial sums, of which vectors that are picked are terms of one rank; or such a one
        scaled by row."""
        others = [value for value, state in states.items() if state is not ColumnState.PARTIAL]
        if step.target is aten.mul.Tensor and len(others) == 1:
            (value,) = others
            return ColumnState.PARTIAL if states[value] is ColumnState.WHOLE else None
        if step.target is not aten.add.Tensor or step.kwargs:
            return None
        for value in others:
            picked = self.steps[value - self.first] if value >= self.first else None
            if picked is None or picked.kind != PICK or states[value] is not ColumnState.WHOLE:
                return None
            self.partial.add(picked.values[0])
        return ColumnState.PARTIAL
