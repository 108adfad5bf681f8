"""Proofs run in float64: casts to less inside a model are raised, on both sides, and reported.

A model's own float32 cast (a normalisation that insists on it) moves float64 gradients by 1e-7 as
soon as sums are reordered, which would hide real faults. Tensors that only the code holds (the weights
of a loss) are raised where they meet a call, and numbers that it writes out (`torch.tensor(0.1)`) are
those of the graph, which have fewer digits.

Random masks, and noise like a tensor, are drawn in the order of dims, on both sides. Eager code draws in the
order of memory, which for an operand that is a transposed view is another one, and not known: where a dim is
1 long its stride means nothing, so that kernels and a trace may take the same view for different layouts.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autopar.core.graph import Graph, TensorSpec
from autopar.errors import InputError
from autopar.torch_seams import pytree
from autopar.torch_seams.modes import TorchDispatchMode
from autopar.torch_seams.modules import apply_to_tensors
from autopar.torch_seams.schemas import schema_of
from autopar.trace.call.user_source import is_library, shown_line
from autopar.trace.forms.simplify import with_masks_by_dims

LOW = (torch.float32, torch.float16, torch.bfloat16)
LOW_COMPLEX = (torch.complex64, torch.complex32)


def raised(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a proof runs what the model runs in `dtype`."""
    if dtype in LOW_COMPLEX:
        return torch.complex128
    return torch.float64 if dtype in LOW else dtype


def widest(tensor: Tensor) -> Tensor:
    """Its values, without gradient, as float64, or complex128 with both of their parts."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def raise_model(model: nn.Module) -> nn.Module:
    """The model, its parameters and buffers raised where they are: `double()` leaves complex ones alone.

    A buffer under several names stays one, of which `double()` makes several."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # each beside what it was, whose identity that holds

    def lift(tensor: Tensor) -> Tensor:
        return made.setdefault(id(tensor), (tensor, tensor.to(raised(tensor.dtype))))[1]

    apply_to_tensors(model, lift)  # in place, as double() does it
    return model


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model that holds compressed sparse matrices, which torch doesn't copy so."""
    held = [*model.buffers(), *(value for module in model.modules() for value in vars(module).values())]
    sparse = (item for item in held if isinstance(item, Tensor) and item.layout is not torch.strided)
    return copy.deepcopy(model, {id(item): item.detach().clone() for item in sparse})


def raise_graph(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """The graph in float64, and the operators whose own cast was raised."""

    def lift(tree: Any) -> Any:
        return pytree.tree_map(lambda leaf: raised(leaf) if isinstance(leaf, torch.dtype) else leaf, tree)

    casts = []
    operators = []
    for item in graph.operators:
        args, kwargs = _lift_tree(item.args, lift), _lift_tree(item.kwargs, lift)
        if (args, kwargs) != (item.args, item.kwargs):
            casts.append(f"{item.name} ({item.target})")
        target = _WITHOUT_FLOAT64.get(item.target, item.target)
        operators.append(replace(item, target=target, args=args, kwargs=kwargs))
    specs = {
        name: TensorSpec(spec.shape, raised(spec.dtype), spec.requires_grad)
        for name, spec in graph.specs.items()
    }
    inputs = tuple(
        replace(item, spec=specs[item.name], value=None if value is None else raise_tensor(value))
        for item in graph.inputs
        for value in (item.value if item.exact is None else item.exact,)
    )
    lifted = replace(graph, inputs=inputs, operators=tuple(operators), specs=specs)
    return with_masks_by_dims(lifted), tuple(casts)


def _lift_tree(tree: Any, lift: Any) -> Any:
    match tree:
        case tuple():
            return tuple(_lift_tree(item, lift) for item in tree)
        case list():
            return [_lift_tree(item, lift) for item in tree]
        case dict():
            return {key: _lift_tree(item, lift) for key, item in tree.items()}
        case torch.dtype():
            return raised(tree)
        case _:
            return tree


class _RaiseCasts(TorchFunctionMode):
    """Eager code's own dtype arguments, raised where Python makes the call, and noted."""

    def __init__(self, casts: dict[str, None]) -> None:
        super().__init__()
        self.casts = casts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _NAMED_CASTS:
            self.note(function)
            return args[0].to(torch.float64)
        if any(isinstance(item, torch.dtype) and item in LOW for item in (*args, *kwargs.values())):
            self.note(function)
        args, kwargs = pytree.tree_map(_raised_leaf, (args, kwargs))
        return _INSTEAD.get(function, function)(*args, **kwargs)

    def note(self, function: Any) -> None:
        line = next(reversed([line for line in map(_user_frame, traceback.extract_stack()) if line]), "")
        self.casts[f"{function.__name__} at {line}" if line else function.__name__] = None


def _raised_leaf(item: Any) -> Any:
    match item:
        case torch.dtype():
            return raised(item)
        case Tensor() if item.dtype in LOW:
            return item.to(torch.float64)
        case _:
            return item


def _user_frame(frame: traceback.FrameSummary) -> str:
    return "" if is_library(frame.filename) else shown_line(frame.filename, frame.lineno or 0)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """F.dropout with a mask that is drawn in the order of dims."""
    if not training or p == 0.0:
        return input
    mask = torch.dropout(torch.ones(input.shape, dtype=input.dtype, device=input.device), p, True)
    return input.mul_(mask) if inplace else input * mask


def _like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`draw`, of a tensor's shape, in the order of dims."""

    def drawn(input: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return draw(input.shape, dtype=dtype or input.dtype, device=input.device)

    return drawn


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiplies rows of `a` (T, k), up to each of `offs` (G), by a matrix of `b` (G, k, n); or columns
    (k, T) by as many rows (T, n). So do mixtures of experts. In float64, which torch's doesn't know; rows
    after the last are zeros."""
    if a.dim() != 2 or offs is None or bias is not None:
        return torch._grouped_mm(a, b, offs=offs, bias=bias, out_dtype=out_dtype)
    if a.is_meta:
        return a.new_empty(*((len(a), b.shape[2]) if b.dim() == 3 else (len(offs), len(a), b.shape[1])))
    bounds = [0, *offs.tolist()]
    if b.dim() == 2:
        return torch.stack([a[:, start:stop] @ b[start:stop] for start, stop in pairwise(bounds)])
    parts = [a[start:stop] @ each for (start, stop), each in zip(pairwise(bounds), b, strict=True)]
    return torch.cat([*parts, a.new_zeros(len(a) - bounds[-1], b.shape[2])])


_library = torch.library.Library("autopar_proof", "FRAGMENT")
_library.define(str(schema_of(torch.ops.aten._grouped_mm.default)).removeprefix("aten::"))
_library.impl("_grouped_mm", _grouped_mm, "CompositeImplicitAutograd")
_WITHOUT_FLOAT64 = {torch.ops.aten._grouped_mm.default: torch.ops.autopar_proof._grouped_mm.default}
_INSTEAD: dict[Any, Callable[..., Tensor]] = {
    torch.randn_like: _like(torch.randn),
    torch.rand_like: _like(torch.rand),
    functional.dropout: _dropout,
    torch.dropout: lambda input, p, train: _dropout(input, p, train),
    torch.dropout_: lambda input, p, train: _dropout(input, p, train, inplace=True),
}
_NAMED_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}


class _RaiseBelow(TorchDispatchMode):
    """Casts that torch's own code makes below Python, and numbers that became tensors there."""

    def __init__(self, casts: dict[str, None], constants: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts, self.constants = casts, constants

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.ops.aten.lift_fresh.default:
            return function(next((c.to(args[0]) for c in self.constants if _rounds_to(args[0], c)), args[0]))
        if kwargs.get("dtype") in LOW:
            self.casts[str(function)] = None
            kwargs["dtype"] = torch.float64
        if function in _WITHOUT_FLOAT64 and args[0].dtype == torch.float64:
            return _grouped_mm(*args, **kwargs)
        return in_float64(function, args, kwargs)


def in_float64(function: Any, args: Any, kwargs: Any) -> Any:
    """An operator's results. If it fails, but runs in a lower float, raises InputError with its name."""
    try:
        return function(*args, **kwargs)
    except (RuntimeError, ValueError) as cause:
        runs = next((dtype for dtype in LOW if _runs(function, args, kwargs, dtype)), None)
        if runs is None:
            raise
        raise InputError(
            where=f"{function}",
            found=f"no float64, in which proofs run, but {str(runs).removeprefix('torch.')} ({cause})",
            wanted="operators that compute in float64",
            remedy="let the model compute the same by other operators while it is proved",
        ) from cause


def _runs(function: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> bool:
    """Whether a call with float64 tensors runs with them in `dtype`."""

    def lowered(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return dtype if item is torch.float64 else item
        return item.detach().to(dtype if item.dtype == torch.float64 else item.dtype, copy=True)

    args, kwargs = pytree.tree_map(lowered, (args, kwargs))
    state = torch.get_rng_state()
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError):
        return False
    finally:
        torch.set_rng_state(state)
    return True


def _rounds_to(exact: Tensor, constant: Tensor) -> bool:
    return (
        exact.dtype == torch.float64
        and constant.dtype in LOW
        and constant.shape == exact.shape
        and torch.equal(exact.to(constant.dtype), constant.to(exact.device))
    )


def written_constants(graph: Graph) -> tuple[Tensor, ...]:
    """The tensors that a graph holds as values."""
    return tuple(item.value for item in graph.inputs if item.value is not None)


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Within, tensors that a forward makes of Python numbers (`torch.linspace(0, 1, n)`, a quotient of
    integers) are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def raised_eager(casts: dict[str, None], constants: Sequence[Tensor] = ()) -> Iterator[None]:
    """Run eager code with every cast to a lower float raised to float64, and noted in `casts`.

    A number that rounds to one of `constants`, those of the graph, is that one.
    """
    with float64_by_default(), _RaiseCasts(casts), _RaiseBelow(casts, constants):
        yield


def raise_tensor(tensor: Tensor) -> Tensor:
    """A float tensor as float64, a complex one as complex128, others as they are."""
    return tensor.detach().to(raised(tensor.dtype)).clone().requires_grad_(tensor.requires_grad)
