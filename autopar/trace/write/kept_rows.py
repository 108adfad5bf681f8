"""What a boolean mask keeps, nobody knows how many rows: sums, means and losses of it are static.

    x[mask].square().mean()      rows = where(mask, x, 1);  sum(where(mask, rows.square(), 0)) / count(mask)
    F.mse_loss(x[mask], y[mask])                            the same, of the loss without a reduction
    F.cross_entropy(x[m], y[m])  rows that m leaves out have for their target what the loss ignores
    x[mask].shape[0]             count(mask)
    i, k = torch.where(mask2)    rows = where(mask2, x[:, None], 1)
    y.index_add_(0, i, f(x[i]))  y + sum over k of where(mask2, f(rows), 0)

`x[mask]` has as many rows as the mask has elements here. What operators make of rows, one by one, they make
of all; what is left out is 1 (0 for integers), which is in the domain of most functions (`filled_rows`), and
has no gradient, as the first `where` drops it. What sums over rows has zeros in their place. Rules say
whether an operator goes row by row: along a factor of its equation that is free. Anything else is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.core.graph import Call, Operator, Ref, TensorSpec
from autopar.core.operator_facts import is_random
from autopar.sharding.equation import Kind
from autopar.sharding.rule import Instance, Regroup, rule_of
from autopar.torch_seams import pytree
from autopar.torch_seams.schemas import OpOverload, schema_of
from autopar.trace.forms.call_forms import arguments_of, called
from autopar.trace.forms.linear_loss import LINEAR_LOSS
from autopar.trace.write.filled_rows import is_finite_everywhere
from autopar.trace.write.mask_rows import MaskRows, NumberKept, Places, SelectedRows
from autopar.trace.write.returned_rows import RETURNS, ReturnedRows
from autopar.trace.write.written_graph import WrittenGraph

aten = torch.ops.aten

_NONE, _MEAN = 0, 1  # at::Reduction
_BY_IGNORING = {  # losses that leave out labels of one value: the argument that has the labels
    aten.cross_entropy_loss.default: "target",
    aten.nll_loss_nd.default: "target",
    aten.nll_loss.default: "target",
    LINEAR_LOSS: "labels",
}
_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_MEANS = (aten.mean.default, aten.mean.dim)
_PLACES = (aten.nonzero_numpy.default, aten.where.default)
_FLATTENING = (aten.squeeze.default, aten.squeeze.dim, aten.flatten.using_ints)
_HALF = (torch.float16, torch.bfloat16)
_COMPARED = (operator.eq, operator.ge, operator.gt, operator.le, operator.lt, operator.ne)  # for assertions
Write = Callable[[fx.Node, Call, Any], Any]


class KeptRows:
    """Writes into `graph` what operators make of rows that masks keep."""

    def __init__(self, graph: WrittenGraph, retyped: set[str]) -> None:
        self._graph, self.rows = graph, MaskRows(graph, retyped)
        self._back = ReturnedRows(self.rows)
        self._write: Write

    @property
    def returned(self) -> set[str]:
        """Rows that are given back, zeros where a mask keeps nothing."""
        return self._back.written

    def counts(self, node: fx.Node) -> bool:
        """Whether a Python function takes the number of kept rows; its result is noted then."""
        if isinstance(node.target, OpOverload):
            return False
        args = self._graph.value(node.args)
        given = [item for item in args if isinstance(item, NumberKept)]
        if not given and not (node.target in _COMPARED and None in args):
            return False
        number = next((item for item in args if type(item) is int), None)
        if node.target in _COMPARED:
            self._graph.env[node] = None  # of an assertion, which is left out
        elif node.target is operator.mul and number is not None and not given[0].least:
            self._graph.env[node] = replace(given[0], times=given[0].times * number)
        elif node.target is torch.sym_max and number is not None:
            self._graph.env[node] = replace(given[0], least=max(given[0].least, number))
        else:
            raise self.rows.refused(node, f"{getattr(node.target, '__name__', node.target)} of a count")
        return True

    def concerns(self, call: Call) -> bool:
        """Whether an operator makes rows of a mask, or takes such rows."""
        target, leaves = call.target, pytree.tree_leaves((call.args, call.kwargs))
        if any(isinstance(leaf, (SelectedRows, Places, NumberKept)) for leaf in leaves):
            return True
        return target in (aten.masked_select.default, aten.nonzero.default, *_PLACES) or (
            target is aten.index.Tensor and self.rows.is_mask(call.args)
        )

    def read(self, node: fx.Node, call: Call, write: Write) -> Any:
        """Result of an operator on kept rows; `write` writes an operator on all rows."""
        target, args, kwargs, self._write = call.target, call.args, call.kwargs, write
        leaves = pytree.tree_leaves((args, kwargs))
        kept = [leaf for leaf in leaves if isinstance(leaf, SelectedRows)]
        if target is aten.index.Tensor and (picked := self.rows.picked(node, args)) is not None:
            self._back.reads[node] = args
            return self.rows.keep(node, *picked)
        if target in RETURNS:
            return self._back.write(node, call)
        if target is aten.masked_select.default and all(isinstance(item, Ref) for item in args):
            return self.rows.keep(node, *args)
        if target in _PLACES and isinstance(args[0], Ref):
            dims, mask = range(len(self._graph.specs[args[0].name].shape)), self.rows.truth(node, args[0])
            return [Places(mask, dim) for dim in dims]
        if target is aten.nonzero.default and isinstance(args[0], Ref):
            return Places(self.rows.truth(node, args[0]), None)
        if isinstance(args[0], Places) and args[0].dim is None and (place := self._column(target, args)) >= 0:
            return Places(args[0].mask, place)
        if target in (aten.sym_size.int, aten.sym_numel.default):
            return self._count(node, args)
        numbers = any(isinstance(leaf, NumberKept) for leaf in leaves)
        if not kept and numbers and str(target).endswith(".Tensor"):
            args = tuple(self._number(node, item) if isinstance(item, NumberKept) else item for item in args)
            return self._write(node, Call(target, args, kwargs), node.meta["val"])
        others = numbers or any(isinstance(leaf, Places) for leaf in leaves)
        if not kept or others or schema_of(target).is_mutable or is_random(target):
            raise self.rows.refused(node, str(target))
        if len({item.mask for item in kept}) > 1:
            raise self.rows.refused(node, f"{target} of rows of two masks")
        return self._made(node, call, kept[0])

    def is_last_read(self, node: fx.Node, call: Call) -> bool:
        """Whether an operator in place writes rows that `index` took, read by its result alone."""
        if not schema_of(call.target).is_mutable or not isinstance(call.args[0], SelectedRows):
            return False
        match node.args[0]:
            case fx.Node(target=aten.index.Tensor) as rows:
                return all(user is node or _is_size(user) for user in rows.users)
        return False

    def _column(self, target: Any, args: tuple[Any, ...]) -> int:
        """The column of a matrix of indices that a call takes, -1 for another call."""
        if target is aten.select.int and args[1] in (1, -1):
            return int(args[2]) % len(self._graph.specs[args[0].mask.name].shape)
        single = len(self._graph.specs[args[0].mask.name].shape) == 1
        return 0 if target in _FLATTENING and single else -1

    # -- rows ---------------------------------------------------------------------------------

    def _made(self, node: fx.Node, call: Call, one: SelectedRows) -> Any:
        target, given = call.target, arguments_of(call)
        if target in _SUMS + _MEANS:
            return self._reduced(node, target, given, one)
        if target is aten.linalg_vector_norm.default and given.get("dim") is None and given.get("ord", 2) > 0:
            filled = Ref(self.rows.filled(node, one.ref.name, one.mask, 0))
            call = Call(target, (filled, *call.args[1:]), call.kwargs)
            return self._write(node, call, node.meta["val"])
        reduction = _reduction(target, given)
        labels = given[_BY_IGNORING[target]] if target in _BY_IGNORING else None
        if reduction != _NONE and isinstance(labels, SelectedRows):
            return self._ignoring(node, target, given, one)
        if reduction != _NONE:
            each = called(call, given | {"reduction": _NONE})
            rows = self._by_rows(node, each, one, self._shape(call))
            sums = aten.mean.default if reduction == _MEAN else aten.sum.default
            return self._reduced(node, sums, {"self": rows}, rows)
        return self._by_rows(node, call, one)

    def _shape(self, call: Call) -> tuple[int, ...]:
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        shapes = [self.rows.spec(item).shape for item in leaves if _is_tensor(item)]
        return tuple(torch.broadcast_shapes(*shapes))

    # -- what is made of them -----------------------------------------------------------------

    def _by_rows(self, node: fx.Node, call: Call, one: SelectedRows, shape: Any = None) -> Any:
        """Result of an operator on single rows."""
        length = self._graph.specs[one.mask].shape[0]
        values = node.meta["val"]
        if shape is not None:
            values = torch.empty(shape, dtype=values.dtype, device="meta")
        values = pytree.tree_map_only(torch.Tensor, lambda item: _whole(item, length), values)
        if any(value is None for value in pytree.tree_leaves(values)):
            raise self.rows.refused(node, str(call.target))
        finite = is_finite_everywhere(call.target)
        args, kwargs = call.args, call.kwargs
        if not finite:
            args, kwargs = pytree.tree_map(lambda leaf: self.rows.anew(node, call, leaf), (args, kwargs))
        before = len(self._graph.operators)
        full = pytree.tree_map(
            lambda leaf: leaf.ref if isinstance(leaf, SelectedRows) else leaf, (args, kwargs)
        )
        self.rows.of_rows |= {
            leaf.ref.name for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, SelectedRows)
        }
        results = self._write(node, Call(call.target, *full), values)
        for item in self._graph.operators[before:]:  # it may begin with casts, of weights too
            if self.rows.of_rows.isdisjoint(item.operands):
                continue
            if not self._is_by_rows(item):
                raise self.rows.refused(node, str(call.target))
            self.rows.of_rows |= {name for name in item.results if name}
        return pytree.tree_map_only(
            Ref,
            lambda ref: self.rows.kept(node, ref, one.mask, finite=finite),
            results,
            is_leaf=lambda item: isinstance(item, Ref),
        )

    def _is_by_rows(self, item: Operator) -> bool:
        """Whether each row of the operator's results depends on the same row of its operands alone."""
        rule = rule_of(item)
        if isinstance(rule, Regroup):  # of rows one after the other, as many as before
            specs = [self._graph.specs[name] for name in (*item.operands, *item.results) if name]
            return len({spec.shape[:1] for spec in specs}) == 1
        equation = rule.equation(Instance(item, self._graph.specs))
        pairs = [*zip(item.operands, equation.operands, strict=True)]
        first = {labels[0] if labels else None for name, labels in pairs if name in self.rows.of_rows}
        if len(first) != 1 or (factor := first.pop()) is None or equation.kind(factor) is not Kind.FREE:
            return False
        places = [labels.index(factor) for _, labels in pairs if factor in labels]
        mine = all(name in self.rows.of_rows for name, labels in pairs if factor in labels)
        results = all(labels and labels[0] == factor for labels in equation.results)
        return mine and results and set(places) == {0}

    def _reduced(self, node: fx.Node, target: Any, given: dict[str, Any], one: SelectedRows) -> Any:
        """A sum or mean over rows, or of each row if dim 0 isn't among its dims."""
        spec = self._graph.specs[one.ref.name]
        dims = given.get("dim")
        dims = [dim % len(spec.shape) for dim in dims] if dims else [*range(len(spec.shape))]
        if 0 not in dims:
            return self._by_rows(node, called(Call(target, (), {}), given), one)
        result = node.meta["val"]
        filled = Ref(self.rows.filled(node, one.ref.name, one.mask, 0))
        if target in _SUMS:
            value = torch.empty(result.shape, dtype=result.dtype, device="meta")
            return self._write(node, called(Call(target, (), {}), given | {"self": filled}), value)
        dtype = torch.float32 if result.dtype in _HALF else result.dtype
        made = TensorSpec(tuple(result.shape), dtype, spec.requires_grad)
        args = (filled, dims, bool(given.get("keepdim")))
        total = self._graph.add(node, aten.sum.dim_IntList, args, made, dtype=dtype)
        count = NumberKept(one.mask, math.prod(spec.shape[dim] for dim in dims if dim))
        mean = self._graph.add(node, aten.div.Tensor, (Ref(total), self._number(node, count)), made)
        if dtype != result.dtype:
            spec = replace(made, dtype=result.dtype)
            mean = self._graph.add(node, aten._to_copy.default, (Ref(mean),), spec, dtype=spec.dtype)
        return Ref(mean)

    def _ignoring(self, node: fx.Node, target: Any, given: dict[str, Any], one: SelectedRows) -> Any:
        """A loss of classes, of which rows that are left out have none."""
        labels = _BY_IGNORING[target]
        classes = self._graph.specs[given[labels].ref.name]
        if classes.dtype.is_floating_point:
            raise self.rows.refused(node, f"{target} of probabilities")
        ignored = given.get("ignore_index", -100)
        filled = Ref(self.rows.filled(node, given[labels].ref.name, one.mask, ignored))
        rows = {name: item.ref if isinstance(item, SelectedRows) else item for name, item in given.items()}
        call = called(Call(target, (), {}), rows | {labels: filled})
        return self._write(node, call, node.meta["val"])

    # -- numbers ------------------------------------------------------------------------------

    def _count(self, node: fx.Node, args: tuple[Any, ...]) -> NumberKept:
        item = args[0]
        if isinstance(item, Places):
            return NumberKept(self.rows.flat(node, item.mask))
        if not isinstance(item, SelectedRows) or (len(args) > 1 and args[1] != 0):
            raise self.rows.refused(node, "a size")
        rest = 1 if len(args) > 1 else math.prod(self._graph.specs[item.ref.name].shape[1:])
        return NumberKept(item.mask, rest)

    def _number(self, node: fx.Node, count: NumberKept) -> Ref:
        """A count as a tensor."""
        spec = TensorSpec((), torch.int64)
        made = self._graph.add(node, aten.sum.default, (Ref(count.mask),), spec)
        if count.times != 1:
            made = self._graph.add(node, aten.mul.Tensor, (Ref(made), count.times), spec)
        if count.least:
            made = self._graph.add(node, aten.clamp_min.default, (Ref(made), count.least), spec)
        return Ref(made)


def _is_size(node: fx.Node) -> bool:
    return node.target in (aten.sym_size.int, aten.sym_numel.default)


def _is_tensor(item: Any) -> bool:
    return isinstance(item, (Ref, SelectedRows))


def _reduction(target: Any, given: dict[str, Any]) -> int:
    """How a loss is reduced; as if it weren't for what is none."""
    schema = {item.name: item for item in schema_of(target).arguments}
    if "reduction" not in schema:
        return _NONE
    return int(given.get("reduction", schema["reduction"].default_value))


def _whole(value: torch.Tensor, length: int) -> torch.Tensor | None:
    """A tensor without values of all rows, in the place of one of those that are kept."""
    first: Any = value.shape[0] if value.dim() else 0
    rest = tuple(value.shape[1:])
    if any(type(size) is not int for size in rest):
        return None
    if type(first) is int and value.device.type != "meta":
        return None
    if type(first) is not int and not first.node.expr.is_symbol:
        return None
    return torch.empty((length, *rest), dtype=value.dtype, device="meta")
