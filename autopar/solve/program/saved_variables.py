"""Variables of what is kept for backward: the bytes of a storage once, however many views of it are kept.

y[t,p] >= 0: t is kept in storage of its own in layout p.
w[u,q,p] >= 0: t, a view of u, is kept as p in the storage of u, which is laid out as q.

    own     y[t,p] + sum of w[u,q,p] >= sum of x[v,s] that keep t as p     for each v that takes or makes t
                                        less r[v,s] of who makes t as p
            y[u,q] >= w[u,q,p], as if the view took u and kept it
    view    w[u,q,p] <= sum of x[v,s] that make p of q as a view

An operator that makes a view spares nothing if it runs again: who made the storage does. What has parted from
its storage by a conversion is kept in its own.

Members of one class share y and w, which are means over them (problem.py). A view whose members lie in
storages of several classes has a w for each of these. No row asks for more than members hold: of n members of
t that lie in U, up to k in one storage, the mean w makes up n / (k |U|) of a mean over U at least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.core.placement import Layout
from autopar.solve.choices.tensor_classes import Marginal, TensorClass, Use
from autopar.solve.linear_program import Terms
from autopar.solve.program.operator_variables import View, value_of

if TYPE_CHECKING:
    from autopar.solve.program.problem import Problem


@dataclass(frozen=True, slots=True)
class _Base:
    """The storages of one class that members of a view lie in: how many do, and up to how many in one."""

    tensor: TensorClass
    members: int
    most: int


class SavedVariables:
    """y and w of all tensors, each after the views of it."""

    def __init__(self, problem: Problem, uses: Mapping[str, Sequence[Use]]) -> None:
        self.problem, self.uses = problem, uses
        self.lp, self.operators, self.wiring = problem.lp, problem.operators, problem.wiring
        self.tensors = [
            tensor
            for tensor in problem.tensors
            if not (problem.offloads and tensor.name in problem.wiring.makers)
        ]
        self.class_of = {member: tensor for tensor in self.tensors for member in tensor.members}
        self.views = {tensor.name: self.views_of(tensor) for tensor in self.tensors}
        self.bases = {
            (tensor.name, place): list(self.bases_of(tensor, place))
            for tensor in self.tensors
            for place in dict.fromkeys(view.place for view in self.views[tensor.name])
        }
        self.viewers: dict[str, list[TensorClass]] = {}
        for (name, _), bases in self.bases.items():
            for base in bases:
                self.viewers.setdefault(base.tensor.name, []).append(self.class_of[name])
        self.kept: dict[str, list[Marginal]] = {}  # of what views keep, by tensor
        self.begun: set[str] = set()
        for tensor in self.tensors:
            self.add(tensor)

    def views_of(self, tensor: TensorClass) -> list[View]:
        if tensor.name not in self.wiring.makers:
            return []
        operation, index = self.wiring.makers[tensor.name]
        return self.operators.views(self.problem.folding.class_of[operation.name], index)

    def bases_of(self, tensor: TensorClass, place: int) -> Iterator[_Base]:
        """The classes whose storages the members of a view lie in, if it views the operand at `place`."""
        viewed = [self.wiring.makers[member][0].operands[place] for member in tensor.members]
        times = Counter(name for name in viewed if name in self.class_of)
        found: dict[str, list[int]] = {}
        for name, count in times.items():
            found.setdefault(self.class_of[name].name, []).append(count)
        for name, counts in found.items():
            yield _Base(self.class_of[name], sum(counts), max(counts))

    def add(self, tensor: TensorClass) -> None:
        """Add what is kept of a tensor, after what is kept of its views."""
        waiting = [(tensor, False)]
        while waiting:
            each, ready = waiting.pop()
            if ready:
                self.save(each)
            elif each.name not in self.begun:
                self.begun.add(each.name)
                waiting.append((each, True))
                waiting += [(viewer, False) for viewer in self.viewers.get(each.name, [])]

    def save(self, tensor: TensorClass) -> None:
        """y[t, p] and its bytes, once for all that keep the tensor in one layout.

        A parameter's own storage is state already: only a converted copy of it counts, and none that is
        regathered, of a cast one neither.
        """
        problem = self.problem
        rests = self.wiring.at_rest(tensor.name) or problem.copies_last
        stored = problem.inputs.get(tensor.name, {}) if rests else {}
        unkept = problem.unkept.get(tensor.name, [])
        recomputed = self.recomputed(tensor)
        covered: dict[Layout, Terms] = {}
        for by_layout in self.keepers(tensor):
            for layout, terms in by_layout.items():
                if layout not in covered:
                    own = [
                        (1.0, variable)
                        for (at, gathering), variable in stored.items()
                        if value_of(at, problem.alike) == layout or gathering in problem.spared
                    ]
                    y = self.lp.variable()
                    problem.memory.hold(self.nbytes(tensor, layout) * len(tensor.members), y)
                    spared = [*recomputed.get(layout, []), *unkept]
                    covered[layout] = [(1.0, y), *self.in_bases(tensor, layout), *own, *spared]
                self.lp.at_least([*covered[layout], *((-c, v) for c, v in terms)], 0.0)

    def keepers(self, tensor: TensorClass) -> Iterator[Marginal]:
        """For each that keeps the tensor, in which layouts."""
        operators = self.operators
        for use in self.uses[tensor.name]:
            if use.consumer:
                yield operators.savers(use.consumer, use.position, use.repetitions, of="operands")
        if tensor.name in self.wiring.makers:
            operation, index = self.wiring.makers[tensor.name]
            makers = operators.repetitions(self.wiring.makers[member][0].name for member in tensor.members)
            maker = self.problem.folding.class_of[operation.name]
            yield operators.savers(maker, index, makers, of="results")
        yield from self.kept.get(tensor.name, [])

    def recomputed(self, tensor: TensorClass) -> Marginal:
        """For each layout, the maker's recompute variables, averaged over the tensor's members: an upper
        bound."""
        if tensor.name not in self.wiring.makers:
            return {}
        operation, index = self.wiring.makers[tensor.name]
        maker = self.problem.folding.class_of[operation.name]
        share = len(self.operators.members[maker]) / len(tensor.members)
        return {
            layout: [(share * amount, variable) for amount, variable in terms]
            for layout, terms in self.operators.recomputed_result(maker, index).items()
        }

    def nbytes(self, tensor: TensorClass, layout: Layout) -> int:
        """A lower bound on the bytes that a saved tensor holds; fewer than its own if its maker expands
        it."""
        nbytes = self.problem.prices.local_bytes(tensor.name, layout)
        if tensor.name not in self.wiring.makers:
            return nbytes
        operation, index = self.wiring.makers[tensor.name]
        sizes = self.operators.storage_sizes(self.problem.folding.class_of[operation.name], index)
        return min(nbytes, sizes.get(layout, nbytes))

    def in_bases(self, tensor: TensorClass, layout: Layout) -> Terms:
        """W of a view kept in a layout, in whatever storage it may lie."""
        found: Terms = []
        for view in self.views[tensor.name]:
            if view.result != layout:
                continue
            makers = len(self.operators.members[view.maker])
            for base in self.bases[tensor.name, view.place]:
                w = self.lp.variable(upper=1.0)
                share = makers / base.members
                self.lp.at_least([*((share, variable) for variable in view.variables), (-1.0, w)], 0.0)
                found.append((base.members / len(tensor.members), w))
                kept = base.members / (base.most * len(base.tensor.members))
                self.kept.setdefault(base.tensor.name, []).append({view.operand: [(kept, w)]})
        return found
