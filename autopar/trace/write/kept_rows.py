"""What a boolean mask keeps, nobody knows how many rows: sums, means and losses of it are static.

    x[mask].square().mean()      rows = where(mask, x, 1);  sum(where(mask, rows.square(), 0)) / count(mask)
    F.mse_loss(x[mask], y[mask])                            the same, of the loss without a reduction
    F.cross_entropy(x[m], y[m])  rows that m leaves out have for their target what the loss ignores
    x[mask].shape[0]             count(mask)

`x[mask]` has as many rows as the mask has elements here. What operators make of rows, one by one, they make
of all; what is left out is 1 (0 for integers), which is in the domain of most functions, and has no gradient,
as the first `where` drops it. What sums over rows has zeros in their place. Rules say whether an operator
goes row by row: along a factor of its equation that is free. Anything else is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.core.graph import Call, Operator, Ref, TensorSpec, map_refs
from autopar.core.operator_facts import is_random
from autopar.errors import ValuesAskedError
from autopar.sharding.equation import Kind
from autopar.sharding.rule import Instance, Regroup, rule_of
from autopar.torch_seams import pytree
from autopar.torch_seams.schemas import OpOverload, schema_of
from autopar.trace.forms.call_forms import arguments_of, called
from autopar.trace.values.asked_inputs import inputs_behind
from autopar.trace.write.written_graph import WrittenGraph, refused

aten = torch.ops.aten

_NONE, _MEAN = 0, 1  # at::Reduction
_BY_IGNORING = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default)
_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_MEANS = (aten.mean.default, aten.mean.dim)
_PLACES = (aten.nonzero_numpy.default, aten.where.default)
_FLATTENING = (aten.squeeze.default, aten.squeeze.dim, aten.flatten.using_ints)
_HALF = (torch.float16, torch.bfloat16)
_COMPARED = (operator.eq, operator.ge, operator.gt, operator.le, operator.lt, operator.ne)  # for assertions
Write = Callable[[fx.Node, Call, Any], Any]


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """The rows of `ref` [L, ...] that the flat mask `mask` [L] keeps."""

    ref: Ref
    mask: str


@dataclass(frozen=True, slots=True)
class Places:
    """The indices along a dim of what a mask keeps, or, without a dim, along all as columns."""

    mask: Ref
    dim: int | None


@dataclass(frozen=True, slots=True)
class NumberKept:
    """The number of elements that a mask keeps, times a factor, but at least a lower bound."""

    mask: str
    times: int = 1
    least: int = 0


class KeptRows:
    """Writes into `graph` what operators make of rows that masks keep."""

    def __init__(self, graph: WrittenGraph) -> None:
        self._graph = graph
        self._write: Write
        self._masks: dict[int, str] = {}  # number of a mask -> flat mask
        self._of_rows: set[str] = set()  # tensors that stand for what is kept
        self._numbers: dict[Any, int] = {}  # what makes a tensor -> its number
        self._known: dict[str, int] = {}  # tensor -> the number of what makes it
        self._seen = 0  # operators that are numbered

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
            raise self.refused(node, f"{getattr(node.target, '__name__', node.target)} of a count")
        return True

    def concerns(self, call: Call) -> bool:
        """Whether an operator makes rows of a mask, or takes such rows."""
        target, leaves = call.target, pytree.tree_leaves((call.args, call.kwargs))
        if any(isinstance(leaf, (SelectedRows, Places, NumberKept)) for leaf in leaves):
            return True
        return target in (aten.masked_select.default, aten.nonzero.default, *_PLACES) or (
            target is aten.index.Tensor and self._mask_of(call.args) is not None
        )

    def read(self, node: fx.Node, call: Call, write: Write) -> Any:
        """Result of an operator on kept rows; `write` writes an operator on all rows."""
        target, args, kwargs, self._write = call.target, call.args, call.kwargs, write
        leaves = pytree.tree_leaves((args, kwargs))
        kept = [leaf for leaf in leaves if isinstance(leaf, SelectedRows)]
        if target is aten.index.Tensor and (mask := self._mask_of(args)) is not None:
            return self._keep(node, args[0], mask)
        if target is aten.masked_select.default and all(isinstance(item, Ref) for item in args):
            return self._keep(node, *args)
        if target in _PLACES and isinstance(args[0], Ref):
            return [Places(args[0], dim) for dim in range(len(self._graph.specs[args[0].name].shape))]
        if target is aten.nonzero.default and isinstance(args[0], Ref):
            return Places(args[0], None)
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
            raise self.refused(node, str(target))
        if len({item.mask for item in kept}) > 1:
            raise self.refused(node, f"{target} of rows of two masks")
        return self._made(node, call, kept[0])

    def _mask_of(self, args: Any) -> Ref | None:
        """The mask by which `index` takes rows, if that is what it does."""
        if not isinstance(args[0], Ref):
            return None
        specs, index = self._graph.specs, args[1]
        if len(index) == 1 and isinstance(index[0], Ref) and specs[index[0].name].dtype is torch.bool:
            return index[0]
        if all(isinstance(item, Places) for item in index):
            mask: Ref = index[0].mask
            dims = range(len(specs[mask.name].shape))
            return mask if list(index) == [Places(mask, dim) for dim in dims] else None
        return None

    def _column(self, target: Any, args: tuple[Any, ...]) -> int:
        """The column of a matrix of indices that a call takes, -1 for another call."""
        if target is aten.select.int and args[1] in (1, -1):
            return int(args[2]) % len(self._graph.specs[args[0].mask.name].shape)
        single = len(self._graph.specs[args[0].mask.name].shape) == 1
        return 0 if target in _FLATTENING and single else -1

    # -- rows ---------------------------------------------------------------------------------

    def _keep(self, node: fx.Node, x: Ref, mask: Ref) -> SelectedRows:
        """The rows of `x` that `mask` keeps, whose leading dims are the mask's."""
        specs = self._graph.specs
        given, shape = specs[x.name], specs[mask.name].shape
        if given.shape[: len(shape)] != shape or not shape:
            raise self.refused(node, "rows of a mask of another shape")
        number = self._number_of(mask.name)
        if number not in self._masks:
            self._masks[number] = self._reshaped(node, mask.name, (math.prod(shape),))
        flat = self._masks[number]
        rows = self._reshaped(node, x.name, (math.prod(shape), *given.shape[len(shape) :]))
        fill = 1 if given.dtype.is_floating_point or given.dtype.is_complex else 0
        return SelectedRows(Ref(self._filled(node, rows, flat, fill, mark=True)), flat)

    def _reshaped(self, node: fx.Node, name: str, shape: tuple[int, ...]) -> str:
        spec = self._graph.specs[name]
        if spec.shape == shape:
            return name
        made = replace(spec, shape=shape)
        return self._graph.add(node, aten.reshape.default, (Ref(name), [*shape]), made)

    def _filled(self, node: fx.Node, rows: str, mask: str, fill: float, *, mark: bool = False) -> str:
        """`rows` with a number where the mask keeps nothing."""
        spec, flag = self._graph.specs[rows], self._graph.specs[mask]
        left_out = self._graph.add(node, aten.logical_not.default, (Ref(mask),), flag)
        left_out = self._reshaped(node, left_out, (*flag.shape, *(1 for _ in spec.shape[1:])))
        made = self._graph.add(node, aten.masked_fill.Scalar, (Ref(rows), Ref(left_out), fill), spec)
        if mark:
            self._of_rows.add(made)
        return made

    def _made(self, node: fx.Node, call: Call, one: SelectedRows) -> Any:
        target, given = call.target, arguments_of(call)
        if target in _SUMS + _MEANS:
            return self._reduced(node, target, given, one)
        if target is aten.linalg_vector_norm.default and given.get("dim") is None and given.get("ord", 2) > 0:
            filled = Ref(self._filled(node, one.ref.name, one.mask, 0))
            call = Call(target, (filled, *call.args[1:]), call.kwargs)
            return self._write(node, call, node.meta["val"])
        reduction = _reduction(target, given)
        if target in _BY_IGNORING and reduction != _NONE and isinstance(given["target"], SelectedRows):
            return self._ignoring(node, target, given, one)
        if reduction != _NONE:
            each = called(call, given | {"reduction": _NONE})
            rows = self._by_rows(node, each, one, self._shape(call))
            sums = aten.mean.default if reduction == _MEAN else aten.sum.default
            return self._reduced(node, sums, {"self": rows}, rows)
        return self._by_rows(node, call, one)

    def _shape(self, call: Call) -> tuple[int, ...]:
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        shapes = [self._spec(item).shape for item in leaves if _is_tensor(item)]
        return tuple(torch.broadcast_shapes(*shapes))

    def _spec(self, item: Ref | SelectedRows) -> TensorSpec:
        return self._graph.specs[(item.ref if isinstance(item, SelectedRows) else item).name]

    # -- what is made of them -----------------------------------------------------------------

    def _by_rows(self, node: fx.Node, call: Call, one: SelectedRows, shape: Any = None) -> Any:
        """Result of an operator on single rows."""
        length = self._graph.specs[one.mask].shape[0]
        values = node.meta["val"]
        if shape is not None:
            values = torch.empty(shape, dtype=values.dtype, device="meta")
        values = pytree.tree_map_only(torch.Tensor, lambda item: _whole(item, length), values)
        if any(value is None for value in pytree.tree_leaves(values)):
            raise self.refused(node, str(call.target))
        before = len(self._graph.operators)
        full = pytree.tree_map(
            lambda leaf: leaf.ref if isinstance(leaf, SelectedRows) else leaf, (call.args, call.kwargs)
        )
        results = self._write(node, Call(call.target, *full), values)
        for item in self._graph.operators[before:]:  # it may begin with casts, of weights too
            if self._of_rows.isdisjoint(item.operands):
                continue
            if not self._is_by_rows(item):
                raise self.refused(node, str(call.target))
            self._of_rows |= {name for name in item.results if name}
        return pytree.tree_map_only(
            Ref, lambda ref: SelectedRows(ref, one.mask), results, is_leaf=lambda item: isinstance(item, Ref)
        )

    def _is_by_rows(self, item: Operator) -> bool:
        """Whether each row of the operator's results depends on the same row of its operands alone."""
        rule = rule_of(item)
        if isinstance(rule, Regroup):  # of rows one after the other, as many as before
            specs = [self._graph.specs[name] for name in (*item.operands, *item.results) if name]
            return len({spec.shape[:1] for spec in specs}) == 1
        equation = rule.equation(Instance(item, self._graph.specs))
        pairs = [*zip(item.operands, equation.operands, strict=True)]
        first = {labels[0] if labels else None for name, labels in pairs if name in self._of_rows}
        if len(first) != 1 or (factor := first.pop()) is None or equation.kind(factor) is not Kind.FREE:
            return False
        places = [labels.index(factor) for _, labels in pairs if factor in labels]
        mine = all(name in self._of_rows for name, labels in pairs if factor in labels)
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
        filled = Ref(self._filled(node, one.ref.name, one.mask, 0))
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
        classes = self._graph.specs[given["target"].ref.name]
        if classes.dtype.is_floating_point:
            raise self.refused(node, f"{target} of probabilities")
        ignored = given.get("ignore_index", -100)
        filled = Ref(self._filled(node, given["target"].ref.name, one.mask, ignored))
        rows = {name: item.ref if isinstance(item, SelectedRows) else item for name, item in given.items()}
        call = called(Call(target, (), {}), rows | {"target": filled})
        return self._write(node, call, node.meta["val"])

    # -- numbers ------------------------------------------------------------------------------

    def _count(self, node: fx.Node, args: tuple[Any, ...]) -> NumberKept:
        item = args[0]
        if isinstance(item, Places):
            number = self._number_of(item.mask.name)
            size = math.prod(self._graph.specs[item.mask.name].shape)
            if number not in self._masks:
                self._masks[number] = self._reshaped(node, item.mask.name, (size,))
            return NumberKept(self._masks[number])
        if not isinstance(item, SelectedRows) or (len(args) > 1 and args[1] != 0):
            raise self.refused(node, "a size")
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

    def _number_of(self, name: str) -> int:
        """A number that two masks share if the same operators make them of the same tensors."""
        for item in self._graph.operators[self._seen :]:
            call = map_refs((item.args, item.kwargs), lambda ref: Ref(str(self._of(ref.name))))
            key = item.name if is_random(item.target) else (str(item.target), repr(call))
            for place, result in enumerate(item.results):
                if result:
                    self._known[result] = self._numbers.setdefault((key, place), len(self._numbers))
        self._seen = len(self._graph.operators)
        return self._of(name)

    def _of(self, name: str) -> int:
        if name not in self._known:
            self._known[name] = self._numbers.setdefault(("input", name), len(self._numbers))
        return self._known[name]

    def refused(self, node: fx.Node, found: str) -> ValuesAskedError:
        """The error of what can't be made of rows that a mask keeps."""
        error = refused(
            node,
            f"{found} of what a mask keeps, which depends on values",
            "sums, means and losses of it",
            "keep all rows and choose by torch.where(mask, a, b), or compute it before the call and pass it",
        )
        asked = ValuesAskedError(**error.as_words())
        names = {item.name for item in map(_tensor, pytree.tree_leaves(self._graph.value(node.args))) if item}
        asked.inputs = inputs_behind(names, self._graph.inputs, self._graph.operators)
        return asked


def _tensor(item: Any) -> Ref | None:
    match item:
        case Ref():
            return item
        case SelectedRows() | NumberKept():
            return Ref(item.mask)
        case Places():
            return item.mask
    return None


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
