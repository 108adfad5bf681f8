"""What follows from a graph's structure alone is computed once, on its values, outside of the trace.

    edge_index [2, E] --- ne, index by a mask, cat, max ---.            values: sizes may depend on them
                                                            constants of the graph, from here on
    x [N, F] --- linear --------------------------- x[src], index_add --- ...            traced

Structure is a tensor that picks and places rows: an edge list, an adjacency, what the user calls `static`. A
program is made for its values, and guarded by them. Floating-point arithmetic on it is traced, and folded
afterwards (`constant_folding`), since proofs do it in more digits.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.core.graph import Graph, InputKind, refs
from autopar.core.operator_facts import facts_of
from autopar.core.structure import Structure
from autopar.errors import InputError
from autopar.torch_seams import pytree
from autopar.torch_seams.fakes import FakeTensor
from autopar.torch_seams.modules import own_buffers
from autopar.torch_seams.tensors import sparse_indices, sparse_values
from autopar.trace.call.call_signature import Arguments, LossFunction, split_for_loss
from autopar.trace.forms.sparse_products import PRODUCT, Entries, entries_of, product_call
from autopar.trace.forward.refusals import sparse_refusal
from autopar.trace.values.asked_inputs import DRAWS
from autopar.trace.values.decided_numbers import DecidedNumbers
from autopar.trace.values.exact_matrices import ExactMatrices, outside

_MAKERS = {"arange", "zeros", "ones", "full", "tensor", "eye"}
_MOVED = """
    __getitem__ index_select masked_select cat concat stack view reshape flatten squeeze unsqueeze t T mT
    transpose permute clone contiguous detach select narrow expand expand_as repeat repeat_interleave flip
    unbind split chunk gather unique unique_consecutive take numpy view_as to cpu alias tile roll values sort
    indices _values _indices col_indices crow_indices to_dense to_sparse to_sparse_csr
"""
_MOVING = frozenset(_MOVED.split())  # give elements of their operands, unrounded
_ABOUT = {"size", "dim", "numel", "stride", "is_floating_point", "is_complex", "is_contiguous", "get_device"}


def said_structure(said: Sequence[str], model: nn.Module, arguments: Arguments, own: OwnNames) -> Structure:
    """The tensors that the user calls static: arguments of forward by their name or path, buffers by theirs.

    Raises InputError for a name that nothing has.
    """
    paths = {path: place for place, path in enumerate(arguments.paths)}
    for path, place in [*paths.items()]:
        paths.setdefault(own.get(path, path), place)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    unknown = [name for name in said if name not in paths and name not in buffers]
    if unknown:
        raise InputError(
            where="static",
            found=", ".join(map(repr, unknown)),
            wanted=f"an argument or a buffer: {', '.join([*paths, *buffers])}",
            remedy="name tensors that forward takes, or buffers of the model",
        )
    return Structure(
        frozenset(paths[name] for name in said if name in paths),
        frozenset(name for name in said if name not in paths),
    )


def asked_of(structure: Structure, mode: object, arguments: Arguments) -> Structure:
    """The part of a structure on whose values numbers or sizes depended under a mode, if that sees it."""
    names = mode.asked if isinstance(mode, Evaluating) else set()
    users = frozenset(place for place in structure.users if arguments.paths[place] in names)
    return Structure(users, structure.buffers & names)


def sparse_structure(model: nn.Module, arguments: Arguments) -> Structure:
    """The sparse matrices of a call and its model."""
    sparse = {place for place, item in enumerate(arguments.tensors) if item.layout is not torch.strided}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    held = {name for name, item in buffers.items() if item.layout is not torch.strided}
    return Structure(frozenset(sparse), frozenset(held))


OwnNames = Mapping[str, str]


def own_names(model: nn.Module, loss_fn: LossFunction | None, arguments: Arguments) -> OwnNames:
    """Names that forward has for the arguments at its own paths; arguments of a loss have none."""
    args, kwargs = arguments.rebuild(arguments.tensors)
    args, kwargs, *_ = split_for_loss(model, loss_fn, args, kwargs)
    taken = inspect.signature(model.forward).parameters.values()
    names = [item.name for item in taken if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    found: dict[str, str] = {}
    for path in arguments.paths:
        number = re.fullmatch(r"input_(\d+)(_.*)?", path)
        if number is None:
            if any(path == key or path.startswith(f"{key}_") for key in kwargs):
                found[path] = path
        elif (place := int(number[1])) < len(args):
            found[path] = path if number[2] or place >= len(names) else names[place]
    return found


def edge_lists(graph: Graph, arguments: Arguments) -> Structure:
    """The inputs that are edge lists: integers of two rows or columns by which operators add up rows.

    A table of labels or tokens isn't one: what places rows must follow from it and from constants alone.
    """
    follows: dict[str, frozenset[str]] = {}
    kinds = {item.name: item for item in graph.inputs}
    for item in graph.inputs:
        pairs = len(item.spec.shape) == 2 and 2 in item.spec.shape
        is_int = not (item.spec.dtype.is_floating_point or item.spec.dtype.is_complex)
        if pairs and is_int and item.kind is not InputKind.PARAMETER and item.spec.dtype is not torch.bool:
            follows[item.name] = frozenset((item.name,))
    fixed = {item.name for item in graph.inputs if item.value is not None}
    found: set[str] = set()
    for operation in graph.operators:
        places_by = facts_of(operation.target).places_by
        if places_by is not None:
            for index in refs(operation.args[places_by]):
                found |= follows.get(index.name, frozenset())
        operands = [name for name in operation.operands if name not in follows and name not in fixed]
        if not operands or all(name not in kinds and not _has_inputs(name, graph) for name in operands):
            sources = frozenset().union(*(follows.get(name, frozenset()) for name in operation.operands))
            if sources:
                follows.update((name, sources) for name in operation.results if name)
    places = {path: place for place, path in enumerate(arguments.paths)}
    inputs = [kinds[name] for name in found]
    return Structure(
        frozenset(places[item.target] for item in inputs if item.kind is InputKind.USER),
        frozenset(item.target for item in inputs if item.kind is InputKind.BUFFER),
    )


def refuse_sparse_operators(graph: Graph) -> None:
    """Raise TraceError for an operator that takes or makes a sparse tensor, unless it is a product."""
    for operation in graph.operators:
        names = (*operation.operands, *(name for name in operation.results if name))
        if any(graph.specs[name].layout is not torch.strided for name in names):
            where = operation.source or f"module {operation.module or 'of the whole model'}"
            raise sparse_refusal(where, f"{operation.target} on a sparse tensor")


def _has_inputs(name: str, graph: Graph) -> bool:
    """Whether a tensor follows from any other."""
    maker = next((item for item in graph.operators if name in item.results), None)
    return maker is None or bool(maker.operands)


def may_be_edges(arguments: Arguments, model: nn.Module) -> Structure:
    """The arguments and buffers that look like edge lists."""
    return Structure(
        frozenset(place for place, tensor in enumerate(arguments.tensors) if _looks_like_edges(tensor)),
        frozenset(name for name, tensor in model.named_buffers() if _looks_like_edges(tensor)),
    )


def _looks_like_edges(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.dtype in (torch.int64, torch.int32)
        and tensor.dim() == 2
        and 2 in tensor.shape
        and _has_values(tensor)
    )


def _has_values(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Buffer) and not tensor.is_meta


class Evaluating(TorchFunctionMode):
    """Within a trace, calls on structure alone are made at once, on its values; `asked` are those of `known`
    on whose values numbers or sizes depended."""

    def __init__(self, known: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._known = {id(tensor): (tensor, frozenset((name,))) for name, tensor in known.items()}
        self._matrices: dict[int, tuple[Tensor, Entries]] = {}  # sparse ones, with what keeps the identity
        self._ordered: dict[int, Entries] = {}  # by the identity of a matrix's entries, which are kept
        self._kept: list[Entries] = []
        self._exact = ExactMatrices()
        self.asked: set[str] = set()
        self._numbers = DecidedNumbers(self._sources, self._evaluated)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if (found := self._numbers.answer(function, name, args, kwargs)) is not None:
            self.asked |= found[1]
            return found[0]
        result = self._call(function, name, args, kwargs)
        self._numbers.note(function, name, args, kwargs, result)
        return result

    def _sources(self, tensor: Tensor) -> frozenset[str] | None:
        return self._known[id(tensor)][1] if self._is_known(tensor) else None

    def _call(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors:
            return self._make(function, name, args, kwargs)
        if any(tensor.layout is not torch.strided or id(tensor) in self._matrices for tensor in tensors):
            found = product_call(name, args, kwargs, self._entries, self._multiply)
            if found is not None:
                return found
        if (made := self._learned(function, name, args, kwargs)) is not None:
            return made
        if not any(map(self._is_known, tensors)):
            return function(*args, **kwargs)
        if name in _ABOUT or (name == "__get__" and _says_shape(function)):
            return function(*args, **kwargs)
        if all(map(self._is_known, tensors)) and not any(word in name for word in DRAWS):
            sources = frozenset().union(*(self._known[id(item)][1] for item in tensors))
            done, results = self._evaluate(function, name, args, kwargs, tensors)
            if done:
                results = self._exact.follow(function, args, kwargs, results, moves=name in _MOVING)
                masked = name == "__getitem__" and any(item.dtype is torch.bool for item in tensors[1:])
                return self._keep(results, "masked_select" if masked else name, sources)
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], self._rows_of_masks(args[1]), *args[2:])
        if name == "masked_select" and self._is_known(args[1]) and args[0].shape == args[1].shape:
            return args[0][self._rows_of_masks(args[1])]
        return function(*args, **kwargs)

    def _is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor is structure; so are the integers and flags of a constant."""
        if id(tensor) not in self._known and type(tensor) is Tensor and not _rounds(tensor):
            self._known[id(tensor)] = (tensor, frozenset())
        return id(tensor) in self._known

    def _make(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Integers that follow from numbers alone are structure as well."""
        if name not in _MAKERS or any(
            isinstance(leaf, torch.SymInt) for leaf in pytree.tree_leaves((args, kwargs))
        ):
            return function(*args, **kwargs)
        with outside():
            result = function(*args, **kwargs)
        if isinstance(result, Tensor) and not _rounds(result):
            return self._keep(result, name, frozenset())
        return function(*args, **kwargs)

    def _evaluate(
        self, function: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor]
    ) -> tuple[bool, Any]:
        """Compute a call on structure alone: (True, its results), else (False, None)."""
        if name.endswith("_") and not name.endswith("__") and any(map(_rounds, tensors)):
            return False, None
        with outside():
            results = function(*args, **kwargs)
        given = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
        moves = name in _MOVING and all(item.dtype in {each.dtype for each in tensors} for item in given)
        return moves or not any(map(_rounds, given)), results

    def _keep(self, results: Any, name: str, sources: frozenset[str]) -> Any:
        leaves = pytree.tree_leaves(results)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not _is_traced(leaf):
                self._known[id(leaf)] = (leaf, sources)
        if not all(isinstance(leaf, Tensor) for leaf in leaves) or name in _SIZED:
            self.asked |= sources
        return results

    # -- sparse matrices ----------------------------------------------------------------------------

    def _entries(self, matrix: Any) -> Entries | None:
        """Entries of a sparse matrix that is structure, or whose places are."""
        if not isinstance(matrix, Tensor):
            return None
        if id(matrix) not in self._matrices and matrix.layout is not torch.strided and self._is_known(matrix):
            with outside():
                entries = replace(entries_of(self._exact.of(matrix)), dtype=matrix.dtype)
                self._matrices[id(matrix)] = (matrix, entries)
        found = self._matrices.get(id(matrix))
        return None if found is None else found[1]

    def _multiply(self, entries: Entries, x: Tensor) -> Tensor:
        known = not _is_traced(entries.values)
        if id(entries) not in self._ordered:
            with outside():
                order = torch.argsort(entries.rows, stable=True)
                is_ordered = torch.equal(order, torch.arange(len(order), device=order.device))
                rows, columns = entries.rows[order].clone(), entries.columns[order].clone()
                values = entries.values[order].clone() if known else entries.values
            for made in (order, rows, columns, *([values] if known else [])):
                self._known[id(made)] = (made, frozenset())
            if not known and not is_ordered:
                values = values.index_select(0, order)
            if known and entries.dtype not in (None, values.dtype):
                values = values.to(entries.dtype)  # traced, so that a proof has the digits
            self._ordered[id(entries)] = Entries(rows, columns, values, entries.shape)
            self._kept.append(entries)
        ready = self._ordered[id(entries)]
        made_of: Tensor = PRODUCT(ready.rows, ready.columns, ready.values, x, ready.shape[0])
        return made_of

    def _learned(self, function: Any, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """A sparse matrix whose values are traced and whose places are structure, and what it is seen as."""
        if name == "sparse_coo_tensor" and len(args) > 2 and self._is_known(args[0]) and _is_traced(args[1]):
            result: Tensor = function(*args, **kwargs)
            rows, columns = self._evaluated(lambda: tuple(args[0].unbind(0)))
            self._matrices[id(result)] = (result, Entries(rows, columns, args[1], tuple(args[2])))
            return result
        if args and _is_traced(args[0]) and id(args[0]) in self._matrices:
            before = self._matrices[id(args[0])][1]
            if name == "t" or (name == "transpose" and {args[1] % 2, args[2] % 2} == {0, 1}):
                result = function(*args, **kwargs)
                self._matrices[id(result)] = (result, before.transposed)
                return result
            if name == "coalesce":
                same: Tensor = args[0]
                return same
        return None

    @staticmethod
    def _evaluated(call: Callable[[], Any]) -> Any:
        with outside():
            return call()

    def _rows_of_masks(self, index: Any) -> Any:
        """An index with the rows that are True in place of each mask that is known."""
        items = index if isinstance(index, tuple) else (index,)
        found: list[Any] = []
        for item in items:
            if isinstance(item, Tensor) and item.dtype is torch.bool and self._is_known(item):
                with outside():
                    rows = item.nonzero(as_tuple=True)
                found += self._keep(rows, "nonzero", self._known[id(item)][1])
            else:
                found.append(item)
        return tuple(found) if isinstance(index, tuple) or len(found) != 1 else found[0]


_SIZED = frozenset(
    ["nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave"]
)


def _is_traced(value: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(value, (FakeTensor, nn.Parameter))


def _says_shape(function: Any) -> bool:
    return getattr(getattr(function, "__self__", None), "__name__", "") not in ("T", "mT", "H", "mH", "data")


def _rounds(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers that arithmetic rounds; a sparse matrix is structure all the same."""
    if tensor.layout is not torch.strided:
        return False
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def digest_of(tensor: Tensor) -> str:
    """A digest that is equal for tensors of equal shape, dtype and values alone."""
    kind = f"{tensor.dtype}{tuple(tensor.shape)}{tensor.layout}"
    found = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts_of(tensor.detach()):
        flat = part.resolve_conj().contiguous().cpu().reshape(-1).view(torch.uint8)
        found.update(flat.numpy().tobytes())
    return found.hexdigest()


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a tensor consists of: itself, or indices and values."""
    match tensor.layout:
        case torch.sparse_coo:
            return sparse_indices(tensor), sparse_values(tensor)
        case torch.sparse_csr | torch.sparse_bsr:
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        case torch.sparse_csc | torch.sparse_bsc:
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
        case _:
            return (tensor,)


@contextmanager
def holding(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which the model holds `values` as buffers of these names."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        held = own_buffers(model.get_submodule(owner))
        before.append((held, name, held[name]))
        held[name] = value
    try:
        yield
    finally:
        for held, name, value in before:
            held[name] = value
