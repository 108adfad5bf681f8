"""Loops over experts, each a module on the rows that choose it, as products of rows that choose.

    for e, expert in enumerate(experts):                         keys [t, k] choose of as many experts
        i, k = torch.where(keys == e)
        y.index_add_(0, i, expert(x[i]) * share[i, k, None])

is traced as (`autopar.trace.write.kept_rows`), and becomes

    rows = x of each key; y += sum over k of where(keys == e, f(rows, w_e), 0)           for each e
    y += sum over k of f(rows, w), with routed_mm(rows, stack(w_0, w_1, ...), keys) for products

where all experts are the same operators on weights of equal shapes, and every key has an expert. Elsewhere
each expert computes all rows, as a note says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from autopar.core.graph import Graph, InputKind, Operator, Ref, map_refs, refs
from autopar.core.operator_facts import facts_of, is_random
from autopar.trace.forms.simplify import without_identities
from autopar.trace.rewrites.routed_products import ROUTED_MM
from autopar.trace.write.element_numbers import VIEWS, bound_of
from autopar.trace.write.equal_tensors import EqualTensors
from autopar.trace.write.graph_editor import GraphEditor

aten = torch.ops.aten
_PRODUCTS = {aten.linear.default: True, aten.mm.default: False, aten.matmul.default: False}  # transposed?
NOTE = "rows that a mask keeps are computed with all others, as rows of no known number"


def with_looped_experts(graph: Graph, returned: Collection[str]) -> Graph:
    """The graph with each loop over equal experts as one chain of routed products; `returned` are tensors of
    rows that are given back, zeros where a mask keeps nothing."""
    return _ExpertLoops(graph, frozenset(returned)).run() if returned else graph


@dataclass(frozen=True, slots=True)
class ExpertMask:
    """The flat mask `keys == expert`; `order` are the dims of the keys in which it runs through them."""

    keys: str
    order: tuple[int, ...]
    expert: int


@dataclass(slots=True)
class LoopedExpert:
    """What one turn adds: rows of `choice`, from the operator `end` on added by the operator `added`."""

    choice: ExpertMask
    end: Operator
    after: tuple[object, ...]
    added: Operator
    body: list[Operator] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    sign: object = None


class _ExpertLoops:
    def __init__(self, graph: Graph, returned: frozenset[str]) -> None:
        self.graph, self.specs, self.returned = graph, graph.specs, returned
        self.makers, self.consumers = graph.makers(), graph.consumers()
        self.seen = {*graph.outputs, *(value for _, value in graph.writes)}
        self.weights = {item.name for item in graph.inputs if item.kind is InputKind.PARAMETER}
        self.equal = EqualTensors()
        for item in graph.operators:
            if item.operands and self.weights.issuperset(item.operands):
                self.weights.update(name for name in item.results if name)
        self.places = {item.name: place for place, item in enumerate(graph.operators)}
        self.fills: dict[object, list[int]] = {}
        for place, item in enumerate(graph.operators):
            if (fill := self.key(item)) is not None:
                self.fills.setdefault(fill, []).append(place)

    def number(self, name: str) -> int:
        """What two tensors share that the same operators make of the same tensors."""
        return self.equal.number(name, self.graph.operators)

    def run(self) -> Graph:
        ends = [item for item in self.graph.operators if not self.returned.isdisjoint(item.results)]
        turns = [turn for end in ends if (turn := self.turn(end))]
        loops = list(self.loops(turns))
        merged = {turn.end.name for loop in loops for turn in loop}
        graph = _MergedLoops(self, loops).run() if loops else self.graph
        left = dict.fromkeys(item.source or item.name for item in ends if item.name not in merged)
        return replace(graph, notes=(*graph.notes, *(f"{source}: {NOTE}" for source in left)))

    # -- what a turn is -----------------------------------------------------------------------------

    def turn(self, end: Operator) -> LoopedExpert | None:
        """The turn whose rows are given back by `end`; None if more becomes of them than a sum."""
        mask, users = self.flat(end), self.users(end)
        if mask is None or users is None:
            return None
        *before, added = users
        after = tuple((item.target, repr(item.args[1:])) for item in before)
        turn = LoopedExpert(self.choice(mask) or ExpertMask(mask, (), -1), end, after, added)
        turn.sign = self.sign(end, turn)
        return turn

    def users(self, end: Operator) -> list[Operator] | None:
        """What is made of rows that are given back, one by one, until they are added to others."""
        found, item = [], self.only_user(end)
        while item is not None and item.target in (aten.reshape.default, aten.sum.dim_IntList):
            found.append(item)
            item = self.only_user(item)
        last = found[-1] if found else end
        if item is None or item.target is not aten.add.Tensor or item.kwargs:
            return None
        return [*found, item] if item.args[1:] == (Ref(last.results[0] or ""),) else None

    def only_user(self, item: Operator) -> Operator | None:
        (name,) = item.results
        users = [user for user, _ in self.consumers.get(name or "", ())]
        return users[0] if len(users) == 1 and name not in self.seen else None

    def flat(self, item: Operator) -> str | None:
        """The flat mask whose negation an operator fills by."""
        maker = self.through(item.args[1].name)
        return maker.args[0].name if maker and maker.target is aten.logical_not.default else None

    def through(self, name: str) -> Operator | None:
        """What makes a tensor, views left out."""
        maker = self.makers.get(name)
        while maker is not None and maker.target in VIEWS:
            maker = self.makers.get(maker.args[0].name)
        return maker

    def choice(self, mask: str) -> ExpertMask | None:
        """The keys that a mask compares with an expert's number."""
        maker = self.through(mask)
        if maker is None:
            return None
        if maker.target is aten.eq.Scalar and type(maker.args[1]) is int:
            keys = maker.args[0].name
            return ExpertMask(keys, tuple(range(len(self.specs[keys].shape))), maker.args[1])
        picked = self.through(maker.args[0].name) if maker.target is aten.ne.Scalar else None
        if picked is None or maker.args[1] != 0 or picked.target is not aten.select.int:
            return None
        turned, dim, expert = picked.args
        source = self.makers.get(turned.name)
        order = [*range(len(self.specs[turned.name].shape))]
        if source is not None and source.target is aten.permute.default:
            order, source = (
                [each % len(order) for each in source.args[1]],
                self.makers.get(source.args[0].name),
            )
        last = len(order) - 1
        if source is None or source.target is not aten.one_hot.default or order[dim] != last or expert < 0:
            return None
        return ExpertMask(source.args[0].name, tuple(each for each in order if each != last), expert)

    def sign(self, end: Operator, turn: LoopedExpert) -> object:
        """What two turns share that compute the same with other weights; notes operators and weights."""
        known, found, own = dict[str, object](), list[object](), self.key_of(turn.choice)
        for item in self.between(end, turn.choice):
            names = [str(name) for name in item.results]
            if self.key(item) == own:  # rows, or what was made of them, filled anew
                known[names[0]] = known.get(item.args[0].name, ("rows", self.number(item.args[0].name)))
                continue
            turn.body.append(item)
            parts = [self.part(ref.name, turn, known) for ref in refs((item.args, item.kwargs))]
            call = map_refs((item.args, item.kwargs), lambda ref: Ref(""))
            alone = item.name if is_random(item.target) or len(names) != 1 else ""
            found.append((str(item.target), repr(call), parts, alone))
            known |= {name: (len(turn.body), place) for place, name in enumerate(names)}
        return found

    def part(self, name: str, turn: LoopedExpert, known: Mapping[str, object]) -> object:
        """What an operand is: made by the body, a weight of the expert's own, or the same for all."""
        if name in known:
            return known[name]
        if name not in self.weights:
            return "tensor", self.number(name)
        if name not in turn.weights:
            turn.weights.append(name)
        return "weight", turn.weights.index(name), self.specs[name]

    def between(self, end: Operator, choice: ExpertMask) -> list[Operator]:
        """The operators from which `end` has what it gives back, from the rows of the choice on, in order."""
        fills = self.fills.get(self.key_of(choice), [])
        last = self.places[end.name]
        span = self.graph.operators[min([*fills, last]) : last]
        made, wanted = set[str](), {end.args[0].name}
        for item in span:
            if self.places[item.name] in fills or not made.isdisjoint(item.operands):
                made |= {name for name in item.results if name}
        found = []
        for item in reversed(span):
            if not wanted.isdisjoint(made.intersection(name or "" for name in item.results)):
                found.append(item)
                wanted |= set(item.operands)
        return found[::-1]

    def key(self, item: Operator) -> object:
        """The choice whose rows an operator fills elsewhere; None for other operators."""
        if item.target is not aten.masked_fill.Scalar or (mask := self.flat(item)) is None:
            return None
        return self.key_of(self.choice(mask) or ExpertMask(mask, (), -1))

    def key_of(self, choice: ExpertMask) -> object:
        return self.number(choice.keys), choice.order, choice.expert

    # -- which turns are one loop -------------------------------------------------------------------

    def loops(self, turns: Sequence[LoopedExpert]) -> Iterator[list[LoopedExpert]]:
        """Turns that add to one tensor, one after the other, as many as there are experts."""
        by_sum = {turn.added.results[0]: turn for turn in turns}
        taken: set[int] = set()
        for turn in reversed(turns):
            loop = [turn]
            while id(loop[0]) not in taken and (before := by_sum.get(loop[0].added.args[0].name)):
                if self.only_user(before.added) is not loop[0].added or not self.alike(before, turn):
                    break
                loop.insert(0, before)
            if id(turn) not in taken and self.is_whole(loop):
                taken |= set(map(id, loop))
                yield loop

    def alike(self, one: LoopedExpert, other: LoopedExpert) -> bool:
        keys = self.number(one.choice.keys) == self.number(other.choice.keys)
        same = (one.sign, one.after, one.choice.order) == (other.sign, other.after, other.choice.order)
        regions = {item.checkpoint for turn in (one, other) for item in (*turn.body, turn.added)}
        return keys and same and len(regions) == 1

    def is_whole(self, loop: Sequence[LoopedExpert]) -> bool:
        """Whether every key has an expert, once, and all experts' operators have a form for all rows."""
        most = bound_of(loop[0].choice.keys, self.makers, self.specs)
        experts = sorted(turn.choice.expert for turn in loop)
        return (
            most is not None and most <= len(loop) and experts == [*range(len(loop))] and self.fits(loop[-1])
        )

    def fits(self, turn: LoopedExpert) -> bool:
        return bool(turn.body) and all(self.has_form(item) for item in turn.body)

    def has_form(self, item: Operator) -> bool:
        """Whether an operator on all rows has each row meet the weights that it chooses."""
        own = [name for name in item.operands if name in self.weights]
        ranks = [len(self.specs[name].shape) for name in own]
        flat = all(name and len(self.specs[name].shape) == 2 for name in (*item.operands[:1], *item.results))
        if item.target in _PRODUCTS and own:
            return flat and own == list(item.operands[1:]) and ranks in ([2], [2, 1])
        return not own or flat and facts_of(item.target).elementwise and set(ranks) == {1}


@dataclass(slots=True)
class _MergedLoops:
    """Writes loops as one chain each, in the place of the last turn."""

    found: _ExpertLoops
    loops: Sequence[list[LoopedExpert]]
    editor: GraphEditor = field(init=False)
    choice: object = None  # whose rows are those of the turn that is written

    def run(self) -> Graph:
        self.editor = editor = GraphEditor(self.found.graph)
        earlier = {turn.added.name for loop in self.loops for turn in loop[:-1]}
        sums = {loop[-1].added.name: loop[0].added.args[0] for loop in self.loops}
        ends = {loop[-1].end.name: loop for loop in self.loops}
        for item in self.found.graph.operators:
            editor.start(item)
            if item.name in sums:
                editor.keep(args=(sums[item.name], item.args[1]))
            elif item.name in ends:
                editor.keep(target=aten.alias.default, args=(self.merged(ends[item.name]),))
            elif item.name not in earlier:
                editor.keep()
        return without_identities(editor.finish())

    def merged(self, loop: list[LoopedExpert]) -> Ref:
        """What all experts make of their rows."""
        loop = sorted(loop, key=lambda turn: turn.choice.expert)
        last = next(turn for turn in loop if turn.end is self.editor.item)
        keys, made = self.keys(last.choice), dict[str, Ref]()
        self.choice = self.found.key_of(last.choice)
        columns = zip(*(turn.weights for turn in loop), strict=True)
        stacks = {own: self.stack(each) for own, each in zip(last.weights, columns, strict=True)}
        for item in last.body:
            (name,) = item.results
            made[str(name)] = Ref(self.written(item, keys, made, stacks))
        return self.rows(last.end.args[0].name, made)

    def keys(self, choice: ExpertMask) -> str:
        """The keys in one dim, in the order of rows."""
        editor, spec, name = self.editor, self.editor.specs[choice.keys], choice.keys
        if choice.order != tuple(range(len(spec.shape))):
            spec = replace(spec, shape=tuple(spec.shape[dim] for dim in choice.order))
            name = editor.emit(aten.permute.default, Ref(name), [*choice.order], spec=spec)
        flat = math.prod(spec.shape)
        return editor.emit(aten.reshape.default, Ref(name), [flat], spec=replace(spec, shape=(flat,)))

    def stack(self, weights: Sequence[str]) -> str:
        spec = self.editor.specs[weights[0]]
        learns = any(self.editor.specs[name].requires_grad for name in weights)
        made = replace(spec, shape=(len(weights), *spec.shape), requires_grad=learns)
        return self.editor.emit(
            aten.stack.default, [*map(Ref, weights)], 0, spec=made, word=f"stack_{weights[0]}"
        )

    def written(self, item: Operator, keys: str, made: Mapping[str, Ref], stacks: Mapping[str, str]) -> str:
        """An operator of one expert, on all rows."""
        editor, (result,) = self.editor, item.results
        spec, word = editor.specs[str(result)], f"{item.name}_of_all"
        rows = {name: self.rows(name, made) for name in item.operands if name not in stacks}
        if item.target in _PRODUCTS and len(rows) < len(item.operands):
            weight, *bias = (stacks[name] for name in item.operands[1:])
            if _PRODUCTS[item.target]:
                weight = self.transposed(weight)
            args = rows[item.operands[0]], Ref(weight), Ref(keys)
            product = editor.emit(ROUTED_MM, *args, spec=spec, word=word)
            terms = [Ref(self.picked(each, keys)) for each in bias]
            return editor.emit(aten.add.Tensor, Ref(product), *terms, spec=spec) if terms else product
        rows |= {
            name: Ref(self.picked(stack, keys)) for name, stack in stacks.items() if name in item.operands
        }
        args, kwargs = map_refs((item.args, item.kwargs), lambda ref: rows[ref.name])
        return editor.emit(item.target, *args, spec=spec, word=word, **kwargs)

    def rows(self, name: str, made: Mapping[str, Ref]) -> Ref:
        """What stands for an operand: what is made of all rows, or all of the rows that a mask keeps."""
        if name in made:
            return made[name]
        maker = self.found.makers.get(name)
        if maker is None or self.found.key(maker) != self.choice:
            return Ref(name)
        source: Ref = maker.args[0]
        return made.get(source.name, source)

    def transposed(self, name: str) -> str:
        spec = self.editor.specs[name]
        count, outer, inner = spec.shape
        return self.editor.emit(
            aten.transpose.int, Ref(name), 1, 2, spec=replace(spec, shape=(count, inner, outer))
        )

    def picked(self, name: str, keys: str) -> str:
        """For each row the vector of its expert."""
        spec, (length,) = self.editor.specs[name], self.editor.specs[keys].shape
        made = replace(spec, shape=(length, *spec.shape[1:]))
        return self.editor.emit(aten.index_select.default, Ref(name), 0, Ref(keys), spec=made)
