"""What follows from constants alone is folded into constants, and rows that they place are added up by rows.

    ones(E), dst -> scatter_add -> pow -> norm              one constant
    scatter_add(zeros, 0, dst.view(-1, 1).expand(E, F), x)  index_add(zeros, 0, dst, x)
    scatter_reduce(..., "amax")                             index_reduce

Only where integer constants pick or place rows: of other models nothing changes. What is made of numbers,
and what is larger than its memory (`expand`), stays an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import (
    Graph,
    GraphInput,
    InputKind,
    Operator,
    Ref,
    TensorSpec,
    eager_target,
    map_refs,
    may_learn,
)
from autopar.core.operator_facts import facts_of, is_repeatable
from autopar.errors import TraceError
from autopar.torch_seams import pytree
from autopar.trace.forms.simplify import without_dead_code
from autopar.trace.forms.sparse_products import PRODUCT
from autopar.trace.rewrites.edge_operators import with_edge_operators
from autopar.trace.rewrites.fused_products import with_products
from autopar.trace.rewrites.placed_rows import RowPlacer
from autopar.trace.rewrites.row_placements import PlacementReader
from autopar.trace.rewrites.sorted_edges import with_sorted_edges
from autopar.trace.values.structure import digest_of

aten = torch.ops.aten

_RAISED = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}


def folded(graph: Graph) -> Graph:
    """The graph with what follows from its constants as constants, if they pick or place rows."""
    return _Folding(graph).run() if _has_structure(graph) else graph


def _has_structure(graph: Graph) -> bool:
    held = {item.name for item in graph.inputs if _held(item) is not None and not may_learn(item.spec.dtype)}
    return bool(held) and any(facts_of(item.target).indexed for item in graph.operators)


def _held(item: GraphInput) -> Tensor | None:
    """The numbers of a constant; None of other inputs, and of constants without memory."""
    return None if item.value is None or item.value.is_meta else item.value


class _Folding:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = {name: item for item in graph.operators for name in item.results if name}
        self.values: dict[str, Tensor] = {
            item.name: value for item in graph.inputs if (value := _held(item)) is not None
        }
        self.exact: dict[str, Tensor] = {
            item.name: value if item.exact is None else item.exact
            for item in graph.inputs
            if (value := _held(item)) is not None
        }
        self.fixed = set(self.values)  # constants and what follows from them
        self.specs = dict(graph.specs)
        self.placements = PlacementReader(self.specs, self.fixed, self.value, self.rows)
        self.placer = RowPlacer(self.specs, self.makers, self.title)

    def run(self) -> Graph:
        kept: list[Operator] = []
        for item in self.graph.operators:
            if self.folds(item):
                self.fixed.update(name for name in item.results if name)
            else:
                kept += self.by_rows(item)
        used = {name for item in kept for name in item.operands} | {*self.graph.outputs}
        used |= {value for _, value in self.graph.writes}
        held = {item.name for item in self.graph.inputs}
        made: list[GraphInput] = []
        operators: list[Operator] = []
        self.materialise(used - held, made, operators)
        graph = replace(
            self.graph,
            inputs=(*self.graph.inputs, *made),
            operators=(*operators, *kept),
            specs=self.specs | {item.name: item.spec for item in made},
        )
        fused = with_products(_without_twins(without_dead_code(graph)))
        return _without_twins(with_sorted_edges(with_edge_operators(_without_twins(fused))))

    def folds(self, item: Operator) -> bool:
        """Whether the operator's operands are constants, at least one of them not made of numbers alone."""
        names = item.operands
        return (
            bool(names)
            and any(name in self.fixed for name in names)
            and all(name in self.fixed or self.is_made(name) for name in names)
            and is_repeatable(item.target)
            and item.target.namespace == "aten"
        )

    def is_made(self, name: str) -> bool:
        """Whether a tensor is made of numbers alone, and equal at each call."""
        maker = self.makers.get(name)
        return maker is not None and is_repeatable(maker.target) and all(map(self.is_made, maker.operands))

    def value(self, name: str) -> Tensor:
        if name not in self.values:
            self._run(self.makers[name], self.value, self.values, lambda tree: tree)
        return self.values[name]

    def exact_value(self, name: str) -> Tensor:
        """The value in as many digits as a proof has."""
        if name not in self.exact:
            self._run(self.makers[name], self.exact_value, self.exact, _raised)
        found = self.exact[name]
        return found.to(_RAISED.get(found.dtype, found.dtype))

    def _run(
        self,
        item: Operator,
        value: Callable[[str], Tensor],
        values: dict[str, Tensor],
        lift: Callable[[Any], Any],
    ) -> None:
        args, kwargs = map_refs((lift(item.args), lift(item.kwargs)), lambda ref: value(ref.name))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        try:
            with torch.no_grad():
                results = eager_target(item)(*args, **kwargs)
        except (IndexError, RuntimeError) as cause:
            raise _out_of_range(item, str(cause).partition("\n")[0]) from cause
        results = results if isinstance(results, (tuple, list)) else (results,)
        values.update((name, each) for name, each in zip(item.results, results, strict=False) if name)

    def materialise(self, names: set[str], made: list[GraphInput], operators: list[Operator]) -> None:
        """Constants for what is used of that which was folded; views that are larger than their memory are
        made again of what they are views of."""
        done = {item.name for item in made}
        for name in sorted(names):
            if name not in self.fixed or name in done or name in {r for o in operators for r in o.results}:
                continue
            value, maker = self.value(name), self.makers.get(name)
            if maker is not None and value.numel() > _elements(value):
                held = {item.name for item in self.graph.inputs}
                self.materialise(set(maker.operands) - held, made, operators)
                operators += [self.makers[each] for each in maker.operands if self.is_made(each)]
                operators.append(maker)
                continue
            made.append(self.constant(name, value))
            done.add(name)

    def constant(self, name: str, value: Tensor) -> GraphInput:
        spec = replace(self.specs[name], requires_grad=False)
        exact = self.exact_value(name) if value.dtype in _RAISED else None
        return GraphInput(
            name, InputKind.CONSTANT, f"folded.{name}", spec, value=value.contiguous(), exact=exact
        )

    # -- rows that are picked or placed ---------------------------------------------------------------

    def by_rows(self, item: Operator) -> list[Operator]:
        """The operator, by rows if it picks or places whole rows of one dim by a constant."""
        if item.target is PRODUCT:
            self.check_entries(item)
            return [item]
        if item.target is aten.index.Tensor:
            item = self.picked(item) or item
        self.check_rows(item)
        if item.target is aten.index_fill.int_Scalar:
            return [self.filled(item) or item]
        before, placed = self.placements.read(item)
        written = None if placed is None else self.placer.write(item, placed)
        return [item] if written is None else [*before, *written]

    def filled(self, item: Operator) -> Operator | None:
        """Rows that get one number, as a mask."""
        itself, dim, index, value = item.args
        shape = self.specs[itself.name].shape
        if index.name not in self.fixed or not shape:
            return None
        mask = torch.zeros(shape[dim % len(shape)], dtype=torch.bool)
        mask[self.value(index.name)] = True
        mask = mask.view(-1, *[1] * (len(shape) - dim % len(shape) - 1))
        name = self.title(mask, f"{item.name}_mask", torch.bool)
        return replace(item, target=aten.masked_fill.Scalar, args=(itself, Ref(name), value))

    def title(self, value: Tensor, name: str, dtype: torch.dtype) -> str:
        """The name of a new constant, of which `value` has more digits than its dtype if that is rounded."""
        if not may_learn(dtype):
            return self.known(value, name)
        self.values[name], self.exact[name] = value.to(dtype), value
        self.specs[name] = TensorSpec(tuple(value.shape), dtype)
        self.fixed.add(name)
        return name

    def rows(self, name: str, dim: int) -> str | None:
        """The rows along `dim` by which an index names whole rows, as a constant; None if it doesn't."""
        value = self.value(name)
        others = [place for place in range(value.dim()) if place != dim]
        if any(value.shape[place] > 1 and value.stride(place) for place in others):
            return None
        if not all(value.shape):
            return None
        rows = value
        for place in reversed(others):
            rows = rows.select(place, 0)
        return self.known(rows, name)

    def known(self, rows: Tensor, name: str) -> str:
        """The name of a constant with this value, a new one if there is none."""
        for other, value in self.values.items():
            if other in self.fixed and _are_one(value, rows):
                return other
        title = f"{name}_rows"
        self.values[title] = rows
        self.specs[title] = TensorSpec(tuple(rows.shape), rows.dtype)
        self.fixed.add(title)
        return title

    def picked(self, item: Operator) -> Operator | None:
        """x[:, rows] as index_select."""
        source, indices = item.args
        given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        if len(given) != 1:
            return None
        dim, index = given[0]
        if index.name not in self.fixed or len(self.specs[index.name].shape) != 1:
            return None
        if may_learn(self.specs[index.name].dtype) or self.specs[index.name].dtype is torch.bool:
            return None
        rows, length = self.value(index.name), self.specs[source.name].shape[dim]
        name = index.name
        if rows.numel() and int(rows.min()) < 0:
            name = self.known(rows + length * (rows < 0), index.name)
        return replace(item, target=aten.index_select.default, args=(source, dim, Ref(name)), kwargs={})

    def check_entries(self, item: Operator) -> None:
        """Raise TraceError for a sparse matrix with rows or columns that aren't there."""
        lengths = int(item.args[4]), self.specs[item.args[3].name].shape[0]
        for index, length in zip(item.args[:2], lengths, strict=True):
            rows = self.value(index.name)
            if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < length:
                raise _out_of_range(item, f"rows {int(rows.min())} to {int(rows.max())} of {length}")

    def check_rows(self, item: Operator) -> None:
        """Raise TraceError for constant rows that a tensor hasn't."""
        if item.target not in (aten.index_select.default, aten.index_add.default, aten.index_reduce.default):
            return
        source, dim, index = item.args[:3]
        shape = self.specs[source.name].shape
        if index.name not in self.fixed or not shape:
            return
        rows, length = self.value(index.name), shape[dim % len(shape)]
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < length:
            raise _out_of_range(item, f"rows {int(rows.min())} to {int(rows.max())} of {length}")


def _without_twins(graph: Graph) -> Graph:
    """The graph with one constant for all that are equal."""
    first: dict[tuple[TensorSpec, str], str] = {}
    same: dict[str, str] = {}
    for item in graph.inputs:
        if (value := _held(item)) is not None:
            same[item.name] = first.setdefault((item.spec, digest_of(value)), item.name)

    def told(ref: Ref) -> Ref:
        return Ref(same.get(ref.name, ref.name))

    operators = tuple(
        replace(item, args=map_refs(item.args, told), kwargs=map_refs(item.kwargs, told))
        for item in graph.operators
    )
    outputs = tuple(same.get(name, name) for name in graph.outputs)
    writes = tuple((buffer, same.get(name, name)) for buffer, name in graph.writes)
    return without_dead_code(replace(graph, operators=operators, outputs=outputs, writes=writes))


def _are_one(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors view the same memory in the same way."""
    alike = one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
    return alike and one.data_ptr() == other.data_ptr()


def _out_of_range(item: Operator, found: str) -> TraceError:
    return TraceError(
        where=item.source or f"module {item.module or 'of the whole model'}",
        found=f"a graph whose edges name {found}",
        wanted="edges between vertices that are there",
        remedy="number vertices from 0, and pass the features of all of them",
    )


def _elements(value: Tensor) -> int:
    """How many elements a view looks at."""
    return max(1, _product(size for size, stride in zip(value.shape, value.stride(), strict=True) if stride))


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _raised(tree: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: _RAISED.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf, tree
    )
