"""Rows that a boolean mask keeps, as all rows: how they are taken, and what stands where it keeps nothing.

x[mask]   ->   masked_fill(reshape(x, [L, ...]), not flat mask [L], 1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.core.graph import Call, Ref, TensorSpec
from autopar.errors import ValuesAskedError
from autopar.torch_seams import pytree
from autopar.trace.values.asked_inputs import inputs_behind
from autopar.trace.write.equal_tensors import EqualTensors
from autopar.trace.write.filled_rows import filling_before, filling_of
from autopar.trace.write.written_graph import WrittenGraph, refused

aten = torch.ops.aten

BY_CHOOSING = "keep all rows and choose by torch.where(mask, a, b), or compute it before the call and pass it"


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


class MaskRows:
    """Writes into `graph` the rows that masks keep."""

    def __init__(self, graph: WrittenGraph, retyped: set[str]) -> None:
        self.graph, self.retyped = graph, retyped
        self.of_rows: set[str] = set()  # tensors that stand for what is kept
        self.fillings: dict[str, float] = {}  # tensors of rows -> what stands in those that are left out
        self.masks: dict[int, str] = {}  # number of a mask -> flat mask
        self.equal = EqualTensors()

    def is_mask(self, args: Any) -> bool:
        """Whether `index` takes rows by a mask."""
        index = args[1]
        plain = len(index) == 1 and all(isinstance(item, Ref) for item in (args[0], index[0]))
        return plain and self.graph.specs[index[0].name].dtype is torch.bool

    def picked(self, node: fx.Node, args: Any) -> tuple[Ref, Ref, tuple[int, ...]] | None:
        """A tensor, the mask by which `index` takes rows of it, and the mask's dims that its first dims are;
        None if that isn't what it does."""
        x, index = args
        if not isinstance(x, Ref):
            return None
        if self.is_mask(args):
            return x, index[0], tuple(range(len(self.graph.specs[index[0].name].shape)))
        if index[0] is None and len(index) == 2 and _in_one_row(node):
            x, index = self.first(node, x), index[1:]
        if not all(isinstance(item, Places) and item.dim is not None for item in index):
            return None
        dims = tuple(item.dim for item in index)
        alone = len({item.mask for item in index}) == 1 and len(set(dims)) == len(dims)
        return (x, index[0].mask, dims) if alone else None

    def first(self, node: fx.Node, x: Ref) -> Ref:
        """`x[0]`, of a tensor with one row."""
        spec = self.graph.specs[x.name]
        return Ref(self.reshaped(node, x.name, spec.shape[1:])) if spec.shape[0] == 1 else x

    def truth(self, node: fx.Node, mask: Ref) -> Ref:
        """A mask as truth values."""
        spec = self.graph.specs[mask.name]
        if spec.dtype is torch.bool:
            return mask
        made = replace(spec, dtype=torch.bool, requires_grad=False)
        return Ref(self.graph.add(node, aten.ne.Scalar, (mask, 0), made))

    def keep(self, node: fx.Node, x: Ref, mask: Ref, dims: tuple[int, ...] = ()) -> SelectedRows:
        """The rows of `x` that `mask` keeps; the first dims of `x` are these of the mask, by default all."""
        specs = self.graph.specs
        given, shape = specs[x.name], specs[mask.name].shape
        dims = dims or tuple(range(len(shape)))
        if given.shape[: len(dims)] != tuple(shape[dim] for dim in dims) or not shape:
            raise self.refused(node, "rows of a mask of another shape")
        flat, rest = self.flat(node, mask), given.shape[len(dims) :]
        name = self.along(node, x.name, shape, dims) if dims != tuple(range(len(shape))) else x.name
        rows = self.reshaped(node, name, (math.prod(shape), *rest))
        return SelectedRows(Ref(self.filled(node, rows, flat, filling_of(given.dtype), mark=True)), flat)

    def flat(self, node: fx.Node, mask: Ref) -> str:
        """The mask in one dim; that of an equal one, if there is one."""
        number = self.equal.number(mask.name, self.graph.operators)
        size = math.prod(self.graph.specs[mask.name].shape)
        if number not in self.masks:
            self.masks[number] = self.reshaped(node, mask.name, (size,))
        return self.masks[number]

    def along(self, node: fx.Node, name: str, shape: tuple[int, ...], dims: tuple[int, ...]) -> str:
        """A tensor repeated along the dims of a mask that it lacks, in the mask's order."""
        spec = self.graph.specs[name]
        rest = spec.shape[len(dims) :]
        order = [*sorted(range(len(dims)), key=dims.__getitem__), *range(len(dims), len(spec.shape))]
        if order != sorted(order):
            turned = replace(spec, shape=tuple(spec.shape[dim] for dim in order))
            name = self.graph.add(node, aten.permute.default, (Ref(name), order), turned)
        ones = tuple(size if dim in dims else 1 for dim, size in enumerate(shape))
        name = self.reshaped(node, name, (*ones, *rest))
        whole = replace(spec, shape=(*shape, *rest))
        return self.graph.add(node, aten.expand.default, (Ref(name), [*whole.shape]), whole)

    def reshaped(self, node: fx.Node, name: str, shape: tuple[int, ...]) -> str:
        spec = self.graph.specs[name]
        if spec.shape == shape:
            return name
        made = replace(spec, shape=shape)
        return self.graph.add(node, aten.reshape.default, (Ref(name), [*shape]), made)

    def filled(self, node: fx.Node, rows: str, mask: str, fill: float, *, mark: bool = False) -> str:
        """`rows` with a number where the mask keeps nothing."""
        spec, flag = self.graph.specs[rows], self.graph.specs[mask]
        left_out = self.graph.add(node, aten.logical_not.default, (Ref(mask),), flag)
        left_out = self.reshaped(node, left_out, (*flag.shape, *(1 for _ in spec.shape[1:])))
        made = self.graph.add(node, aten.masked_fill.Scalar, (Ref(rows), Ref(left_out), fill), spec)
        if rows in self.retyped:
            self.retyped.add(made)
        if mark:
            self.of_rows.add(made)
            self.fillings[made] = fill
        return made

    def anew(self, node: fx.Node, call: Call, leaf: Any) -> Any:
        """An operand of rows with a number of its domain where the mask keeps nothing."""
        if not isinstance(leaf, SelectedRows):
            return leaf
        fill = filling_before(call, leaf, self.spec(leaf).dtype)
        if self.fillings.get(leaf.ref.name) == fill:
            return leaf
        return SelectedRows(Ref(self.filled(node, leaf.ref.name, leaf.mask, fill, mark=True)), leaf.mask)

    def kept(self, node: fx.Node, ref: Ref, mask: str, *, finite: bool) -> SelectedRows:
        """A result as rows, a number where the mask keeps nothing and it may be infinite."""
        dtype = self.graph.specs[ref.name].dtype
        if not finite and (dtype.is_floating_point or dtype.is_complex):
            ref = Ref(self.filled(node, ref.name, mask, filling_of(dtype), mark=True))
        return SelectedRows(ref, mask)

    def spec(self, item: Ref | SelectedRows) -> TensorSpec:
        return self.graph.specs[(item.ref if isinstance(item, SelectedRows) else item).name]

    def refused(self, node: fx.Node, found: str, remedy: str = BY_CHOOSING) -> ValuesAskedError:
        """The error of what can't be made of rows that a mask keeps."""
        error = refused(
            node,
            f"{found} of what a mask keeps, which depends on values",
            "sums, means and losses of it, or rows given back by y[mask] = rows, += or index_add_",
            remedy,
        )
        asked = ValuesAskedError(**error.as_words())
        names = {item.name for item in map(_tensor, pytree.tree_leaves(self.graph.value(node.args))) if item}
        asked.inputs = inputs_behind(names, self.graph.inputs, self.graph.operators)
        return asked


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
