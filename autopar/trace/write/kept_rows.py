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
from autopar.trace.forms.linear_loss import LINEAR_LOSS
from autopar.trace.values.asked_inputs import inputs_behind
from autopar.trace.write.element_numbers import keeps_one
from autopar.trace.write.filled_rows import filling_before, filling_of, is_finite_everywhere
from autopar.trace.write.written_graph import WrittenGraph, refused

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
_RETURNS = (aten.index_add.default, aten.index_put.default)
_FLATTENING = (aten.squeeze.default, aten.squeeze.dim, aten.flatten.using_ints)
_HALF = (torch.float16, torch.bfloat16)
_COMPARED = (operator.eq, operator.ge, operator.gt, operator.le, operator.lt, operator.ne)  # for assertions
_BY_CHOOSING = (
    "keep all rows and choose by torch.where(mask, a, b), or compute it before the call and pass it"
)
_BY_ADDING = f"add by y.index_add_(0, places, rows), which sums in any case; {_BY_CHOOSING}"
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

    def __init__(self, graph: WrittenGraph, retyped: set[str]) -> None:
        self._graph, self._retyped = graph, retyped
        self._write: Write
        self._masks: dict[int, str] = {}  # number of a mask -> flat mask
        self._of_rows: set[str] = set()  # tensors that stand for what is kept
        self._fillings: dict[str, float] = {}  # tensors of rows -> what stands in those that are left out
        self._numbers: dict[Any, int] = {}  # what makes a tensor -> its number
        self._known: dict[str, int] = {}  # tensor -> the number of what makes it
        self._seen = 0  # operators that are numbered
        self.returned: set[str] = set()  # rows that are given back, zeros where a mask keeps nothing
        self._reads: dict[fx.Node, tuple[Any, ...]] = {}  # what `index` took, and by what

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
            target is aten.index.Tensor and self._is_mask(call.args)
        )

    def read(self, node: fx.Node, call: Call, write: Write) -> Any:
        """Result of an operator on kept rows; `write` writes an operator on all rows."""
        target, args, kwargs, self._write = call.target, call.args, call.kwargs, write
        leaves = pytree.tree_leaves((args, kwargs))
        kept = [leaf for leaf in leaves if isinstance(leaf, SelectedRows)]
        if target is aten.index.Tensor and (picked := self._picked(node, args)) is not None:
            self._reads[node] = args
            return self._keep(node, *picked)
        if target in _RETURNS:
            return self._returned(node, call)
        if target is aten.masked_select.default and all(isinstance(item, Ref) for item in args):
            return self._keep(node, *args)
        if target in _PLACES and isinstance(args[0], Ref):
            dims, mask = range(len(self._graph.specs[args[0].name].shape)), self._truth(node, args[0])
            return [Places(mask, dim) for dim in dims]
        if target is aten.nonzero.default and isinstance(args[0], Ref):
            return Places(self._truth(node, args[0]), None)
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

    def is_last_read(self, node: fx.Node, call: Call) -> bool:
        """Whether an operator in place writes rows that `index` took, read by its result alone."""
        if not schema_of(call.target).is_mutable or not isinstance(call.args[0], SelectedRows):
            return False
        match node.args[0]:
            case fx.Node(target=aten.index.Tensor) as rows:
                return all(user is node or _is_size(user) for user in rows.users)
        return False

    def _is_mask(self, args: Any) -> bool:
        """Whether `index` takes rows by a mask."""
        index = args[1]
        plain = len(index) == 1 and all(isinstance(item, Ref) for item in (args[0], index[0]))
        return plain and self._graph.specs[index[0].name].dtype is torch.bool

    def _picked(self, node: fx.Node, args: Any) -> tuple[Ref, Ref, tuple[int, ...]] | None:
        """A tensor, the mask by which `index` takes rows of it, and the mask's dims that its first dims are;
        None if that isn't what it does."""
        x, index = args
        if not isinstance(x, Ref):
            return None
        if self._is_mask(args):
            return x, index[0], tuple(range(len(self._graph.specs[index[0].name].shape)))
        if index[0] is None and len(index) == 2 and _in_one_row(node):
            x, index = self._first(node, x), index[1:]
        if not all(isinstance(item, Places) and item.dim is not None for item in index):
            return None
        dims = tuple(item.dim for item in index)
        alone = len({item.mask for item in index}) == 1 and len(set(dims)) == len(dims)
        return (x, index[0].mask, dims) if alone else None

    def _first(self, node: fx.Node, x: Ref) -> Ref:
        """`x[0]`, of a tensor with one row."""
        spec = self._graph.specs[x.name]
        return Ref(self._reshaped(node, x.name, spec.shape[1:])) if spec.shape[0] == 1 else x

    def _truth(self, node: fx.Node, mask: Ref) -> Ref:
        """A mask as truth values."""
        spec = self._graph.specs[mask.name]
        if spec.dtype is torch.bool:
            return mask
        made = replace(spec, dtype=torch.bool, requires_grad=False)
        return Ref(self._graph.add(node, aten.ne.Scalar, (mask, 0), made))

    def _column(self, target: Any, args: tuple[Any, ...]) -> int:
        """The column of a matrix of indices that a call takes, -1 for another call."""
        if target is aten.select.int and args[1] in (1, -1):
            return int(args[2]) % len(self._graph.specs[args[0].mask.name].shape)
        single = len(self._graph.specs[args[0].mask.name].shape) == 1
        return 0 if target in _FLATTENING and single else -1

    # -- rows ---------------------------------------------------------------------------------

    def _keep(self, node: fx.Node, x: Ref, mask: Ref, dims: tuple[int, ...] = ()) -> SelectedRows:
        """The rows of `x` that `mask` keeps; the first dims of `x` are these of the mask, by default all."""
        specs = self._graph.specs
        given, shape = specs[x.name], specs[mask.name].shape
        dims = dims or tuple(range(len(shape)))
        if given.shape[: len(dims)] != tuple(shape[dim] for dim in dims) or not shape:
            raise self.refused(node, "rows of a mask of another shape")
        flat, rest = self._flat(node, mask), given.shape[len(dims) :]
        name = self._along(node, x.name, shape, dims) if dims != tuple(range(len(shape))) else x.name
        rows = self._reshaped(node, name, (math.prod(shape), *rest))
        return SelectedRows(Ref(self._filled(node, rows, flat, filling_of(given.dtype), mark=True)), flat)

    def _flat(self, node: fx.Node, mask: Ref) -> str:
        """The mask in one dim; that of an equal one, if there is one."""
        number, size = self._number_of(mask.name), math.prod(self._graph.specs[mask.name].shape)
        if number not in self._masks:
            self._masks[number] = self._reshaped(node, mask.name, (size,))
        return self._masks[number]

    def _along(self, node: fx.Node, name: str, shape: tuple[int, ...], dims: tuple[int, ...]) -> str:
        """A tensor repeated along the dims of a mask that it lacks, in the mask's order."""
        spec = self._graph.specs[name]
        rest = spec.shape[len(dims) :]
        order = [*sorted(range(len(dims)), key=dims.__getitem__), *range(len(dims), len(spec.shape))]
        if order != sorted(order):
            turned = replace(spec, shape=tuple(spec.shape[dim] for dim in order))
            name = self._graph.add(node, aten.permute.default, (Ref(name), order), turned)
        ones = tuple(size if dim in dims else 1 for dim, size in enumerate(shape))
        name = self._reshaped(node, name, (*ones, *rest))
        whole = replace(spec, shape=(*shape, *rest))
        return self._graph.add(node, aten.expand.default, (Ref(name), [*whole.shape]), whole)

    def _returned(self, node: fx.Node, call: Call) -> Ref:
        """What becomes of a tensor to whose rows those that a mask keeps are added."""
        into, mask, dims, rows = self._added(node, call)
        specs = self._graph.specs
        given, shape = specs[into.name], specs[mask.name].shape
        whole = replace(self._spec(rows), shape=(*shape, *given.shape[len(dims) :]))
        if self._flat(node, mask) != rows.mask or given.dtype != self._spec(rows).dtype:
            raise self.refused(node, f"{call.target} of rows of another mask or kind")
        if given.shape[: len(dims)] != tuple(shape[dim] for dim in dims):
            raise self.refused(node, f"{call.target} to {given.shape[0]} rows, of a mask of {shape}")
        if math.prod(whole.shape) != math.prod(self._spec(rows).shape):
            raise self.refused(node, f"{call.target} of rows of another width")
        made = self._filled(node, rows.ref.name, rows.mask, 0)
        self.returned.add(made)
        made = self._reshaped(node, made, whole.shape)
        others = [dim for dim in range(len(shape)) if dim not in dims]
        if others:
            summed = replace(whole, shape=given.shape)
            made = self._graph.add(node, aten.sum.dim_IntList, (Ref(made), others), summed)
        learns = given.requires_grad or specs[made].requires_grad
        spec = replace(given, requires_grad=learns)
        return Ref(self._graph.add(node, aten.add.Tensor, (into, Ref(made)), spec))

    def _added(self, node: fx.Node, call: Call) -> tuple[Ref, Ref, tuple[int, ...], SelectedRows]:
        """The tensor, mask, dims and rows of `y.index_add_(0, i, rows)`, or of `y[i] += rows`.

        The mask's dims are those that the tensor's first ones are.
        """
        match call:
            case Call(aten.index_add.default, (Ref() as into, 0, Places() as places, SelectedRows() as rows)):
                if places.dim is not None and not call.kwargs:
                    return into, places.mask, (places.dim,), rows
            case Call(aten.index_put.default, (Ref() as into, [*index], SelectedRows())) if None not in index:
                picked, term = self._picked(node, (into, index)), self._term(node, (into, index))
                if picked is not None and term is not None and not call.kwargs:
                    return into, *self._once(node, *picked[1:]), self._promoted(node, into, term)
        raise self.refused(node, str(call.target))

    def _once(self, node: fx.Node, mask: Ref, dims: tuple[int, ...]) -> tuple[Ref, tuple[int, ...]]:
        """The mask and its dims, if no place along these is there twice: `y[i] += rows` adds only one row."""
        makers = {name: item for item in self._graph.operators for name in item.results if name}
        specs = self._graph.specs
        others = [dim for dim, size in enumerate(specs[mask.name].shape) if dim not in dims and size != 1]
        once = not others or len(others) == 1 and keeps_one(mask.name, others[0], makers, specs)
        if not once or dims != tuple(sorted(dims)):
            raise self.refused(
                node, "y[i] += rows at places that may repeat, where one row wins,", _BY_ADDING
            )
        return mask, dims

    def _term(self, node: fx.Node, read: tuple[Any, ...]) -> SelectedRows | None:
        """The rows that `y[i] += rows` adds."""
        added = node.args[2]
        if not isinstance(added, fx.Node) or added.target not in (aten.add.Tensor, aten.add_.Tensor):
            return None
        index, rows = added.args[0], self._graph.value(added.args[1])
        same = isinstance(index, fx.Node) and self._reads.get(index) == read  # and not written in between
        return rows if same and isinstance(rows, SelectedRows) and not added.kwargs else None

    def _promoted(self, node: fx.Node, into: Ref, rows: SelectedRows) -> SelectedRows:
        """The rows in the dtype of a tensor to which `+=` adds them, where that is the sum's."""
        spec, dtype = self._spec(rows), self._spec(into).dtype
        if spec.dtype == dtype or torch.promote_types(spec.dtype, dtype) != dtype:
            return rows
        made = self._graph.add(node, aten.to.dtype, (rows.ref, dtype), replace(spec, dtype=dtype))
        return SelectedRows(Ref(made), rows.mask)

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
        if rows in self._retyped:
            self._retyped.add(made)
        if mark:
            self._of_rows.add(made)
            self._fillings[made] = fill
        return made

    def _anew(self, node: fx.Node, call: Call, leaf: Any) -> Any:
        """An operand of rows with a number of its domain where the mask keeps nothing."""
        if not isinstance(leaf, SelectedRows):
            return leaf
        fill = filling_before(call, leaf, self._spec(leaf).dtype)
        if self._fillings.get(leaf.ref.name) == fill:
            return leaf
        return SelectedRows(Ref(self._filled(node, leaf.ref.name, leaf.mask, fill, mark=True)), leaf.mask)

    def _kept(self, node: fx.Node, ref: Ref, mask: str, *, finite: bool) -> SelectedRows:
        """A result as rows, a number where the mask keeps nothing and it may be infinite."""
        dtype = self._graph.specs[ref.name].dtype
        if not finite and (dtype.is_floating_point or dtype.is_complex):
            ref = Ref(self._filled(node, ref.name, mask, filling_of(dtype), mark=True))
        return SelectedRows(ref, mask)

    def _made(self, node: fx.Node, call: Call, one: SelectedRows) -> Any:
        target, given = call.target, arguments_of(call)
        if target in _SUMS + _MEANS:
            return self._reduced(node, target, given, one)
        if target is aten.linalg_vector_norm.default and given.get("dim") is None and given.get("ord", 2) > 0:
            filled = Ref(self._filled(node, one.ref.name, one.mask, 0))
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
        finite = is_finite_everywhere(call.target)
        args, kwargs = call.args, call.kwargs
        if not finite:
            args, kwargs = pytree.tree_map(lambda leaf: self._anew(node, call, leaf), (args, kwargs))
        before = len(self._graph.operators)
        full = pytree.tree_map(
            lambda leaf: leaf.ref if isinstance(leaf, SelectedRows) else leaf, (args, kwargs)
        )
        self._of_rows |= {
            leaf.ref.name for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, SelectedRows)
        }
        results = self._write(node, Call(call.target, *full), values)
        for item in self._graph.operators[before:]:  # it may begin with casts, of weights too
            if self._of_rows.isdisjoint(item.operands):
                continue
            if not self._is_by_rows(item):
                raise self.refused(node, str(call.target))
            self._of_rows |= {name for name in item.results if name}
        return pytree.tree_map_only(
            Ref,
            lambda ref: self._kept(node, ref, one.mask, finite=finite),
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
        labels = _BY_IGNORING[target]
        classes = self._graph.specs[given[labels].ref.name]
        if classes.dtype.is_floating_point:
            raise self.refused(node, f"{target} of probabilities")
        ignored = given.get("ignore_index", -100)
        filled = Ref(self._filled(node, given[labels].ref.name, one.mask, ignored))
        rows = {name: item.ref if isinstance(item, SelectedRows) else item for name, item in given.items()}
        call = called(Call(target, (), {}), rows | {labels: filled})
        return self._write(node, call, node.meta["val"])

    # -- numbers ------------------------------------------------------------------------------

    def _count(self, node: fx.Node, args: tuple[Any, ...]) -> NumberKept:
        item = args[0]
        if isinstance(item, Places):
            return NumberKept(self._flat(node, item.mask))
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

    def refused(self, node: fx.Node, found: str, remedy: str = _BY_CHOOSING) -> ValuesAskedError:
        """The error of what can't be made of rows that a mask keeps."""
        error = refused(
            node,
            f"{found} of what a mask keeps, which depends on values",
            "sums, means and losses of it, or rows that are added by y[mask] += rows or index_add_",
            remedy,
        )
        asked = ValuesAskedError(**error.as_words())
        names = {item.name for item in map(_tensor, pytree.tree_leaves(self._graph.value(node.args))) if item}
        asked.inputs = inputs_behind(names, self._graph.inputs, self._graph.operators)
        return asked


def _is_size(node: fx.Node) -> bool:
    return node.target in (aten.sym_size.int, aten.sym_numel.default)


def _in_one_row(node: fx.Node) -> bool:
    """Whether `x[None, i]` is only read as rows, by `.reshape(-1, width)`."""
    width = node.meta["val"].shape[-1]
    reads = (aten.reshape.default, aten.view.default)
    shapes = [user.args[1] for user in node.users if user.target in reads]
    return len(shapes) == len(node.users) and all(shape == [-1, width] for shape in shapes)


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
