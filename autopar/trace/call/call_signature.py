"""How a model is called: nested arguments to a flat list of tensors, flat results back to a structure.

Tensors are the leaves that vary; everything else (None, ints, strings, flags) is part of the call's
identity: another value asks for another graph.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Distribution

from autopar.errors import InputError, TraceError
from autopar.torch_seams import pytree
from autopar.trace.reads.reachable_state import filled_cells

LossFunction = Callable[..., torch.Tensor]
PLAIN = (torch.Tensor, int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands where flat tensor number `index` was."""

    index: int


@dataclass(frozen=True, slots=True)
class Arguments:
    """One call: its tensors, and `key`, everything else about it."""

    tensors: tuple[torch.Tensor, ...]
    paths: tuple[str, ...]
    constants: tuple[Any, ...]
    structure: pytree.TreeSpec

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal keys share a traced graph."""
        return self.key_for([tuple(tensor.shape) for tensor in self.tensors])

    def key_for(self, shapes: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
        """The key of such a call with tensors of these shapes."""
        specs = tuple((shape, tensor.dtype) for shape, tensor in zip(shapes, self.tensors, strict=True))
        return (str(self.structure), tuple(map(state_of, self.constants)), specs)

    def rebuild(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The (args, kwargs) of the call with `tensors` in the tensors' places."""
        leaves = [tensors[leaf.index] if isinstance(leaf, Leaf) else leaf for leaf in self.constants]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return tuple(args), dict(kwargs)


def split_inputs(
    inputs: Any, kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of examples given as a tuple, a list, a dict or one tensor."""
    named = dict(kwargs or {})
    match inputs:
        case None:
            return (), named
        case tuple() | list():
            return tuple(inputs), named
        case Mapping():
            return (), {**inputs, **named}
        case _:
            return (inputs,), named


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Split a call into its tensors and its constants.

    Raises InputError for an object that holds tensors: a graph would keep those of the first call; and for
    sparse and nested tensors.
    """
    paths, structure = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    tensors: list[torch.Tensor] = []
    names: list[str] = []
    constants: list[Any] = []
    for path, leaf in paths:
        if isinstance(leaf, torch.Tensor):
            constants.append(Leaf(len(tensors)))
            tensors.append(leaf)
            names.append(_argument_name(path))
        else:
            _refuse_tensors_in(leaf, _argument_name(path))
            constants.append(leaf)
    refuse_sparse((f"argument {name}", tensor) for name, tensor in zip(names, tensors, strict=True))
    return Arguments(tuple(tensors), tuple(names), tuple(constants), structure)


def require_values(call: Arguments, but: Collection[int] = ()) -> None:
    """Raise InputError for tensors of a call that hold no values, `but` at these places."""
    pairs = enumerate(zip(call.paths, call.tensors, strict=True))
    bad = [path for place, (path, tensor) in pairs if tensor.is_meta and place not in but]
    if bad:
        raise InputError(
            where="call of the parallel module",
            found=f"input {bad[0]} on the meta device, without values",
            wanted='tensors with values; of inputs="local" a graph that is known may be without',
            remedy="pass the tensor itself, as it was prepared",
        )


def refuse_sparse(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise InputError for those of the named tensors that are nested, or sparse but no plain matrices."""
    found = {name: said for name, tensor in tensors if (said := _odd_layout(tensor)) is not None}
    if found:
        raise InputError(
            where=", ".join(found),
            found=", ".join(f"a {layout} tensor" for layout in found.values()),
            wanted="dense tensors, which plans can cut, or sparse_coo or sparse_csr matrices of numbers",
            remedy="take its to_dense() or to_sparse_csr(), or of a nested one "
            "torch.nested.to_padded_tensor(tensor, padding)",
        )


def _odd_layout(tensor: torch.Tensor) -> str | None:
    """Oddity of a tensor's layout; None for plain matrices, sparse ones included."""
    layout, kind = _layout(tensor), type(tensor)
    if kind.__module__.startswith("torch_geometric"):
        return f"{kind.__name__} (by as_tensor() a plain one)"
    if layout == "strided":
        return None
    plain = layout in ("sparse_coo", "sparse_csr") and tensor.dim() == 2
    if plain and (tensor.requires_grad or isinstance(tensor, nn.Parameter)):
        return f"{layout} that learns: make it in forward of values that do,"
    if plain and tensor.dense_dim() > 0:
        return f"hybrid {layout}"
    return None if plain else layout if tensor.dim() == 2 else f"{layout} {tensor.dim()}-dim"


def _layout(tensor: torch.Tensor) -> str:
    return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")


def _refuse_tensors_in(leaf: Any, name: str) -> None:
    if holds_tensors(leaf):
        raise InputError(
            where=f"argument {name}",
            found=f"a {type(leaf).__name__} that holds tensors or arrays",
            wanted="tensors, or tuples, lists, dicts and named tuples of them",
            remedy="pass its tensors themselves; a dataclass may be told by torch.export.register_dataclass",
        )


def refuse_changed(arguments: Arguments, before: Sequence[Any], after: Any) -> None:
    """Raise TraceError where forward has changed a list or dict that it was passed, of leaves `before`."""
    leaves, structure = pytree.tree_flatten(after)
    if structure != arguments.structure or any(map(operator.is_not, leaves, before)):
        raise TraceError(
            where="the arguments of forward",
            found="a list or dict into which forward puts something, which a program doesn't",
            wanted="results that forward returns",
            remedy="let forward return them, or call it without what it fills",
        )


def refuse_reshaped(arguments: Arguments, after: Sequence[torch.Tensor]) -> None:
    """Raise TraceError where forward has changed the shape of an input itself, as by `unsqueeze_`."""
    for path, given, now in zip(arguments.paths, arguments.tensors, after, strict=True):
        if given.shape != now.shape:
            raise TraceError(
                where=f"input {path}",
                found=f"a forward that makes its shape {list(now.shape)} in place, of {list(given.shape)}",
                wanted="inputs that stay as they are",
                remedy="let forward take a view of it: x = x.unsqueeze(0), not x.unsqueeze_(0)",
            )


def refuse_filled(arguments: Arguments) -> None:
    """Raise InputError for an argument into which forward has put tensors, as into a cache of keys."""
    for constant in arguments.constants:
        if holds_tensors(constant):
            raise InputError(
                where=f"an argument of {type(constant).__name__}",
                found="an object into which forward puts tensors, which exist inside the program alone",
                wanted="results that forward returns",
                remedy="call without it (use_cache=False)",
            )


def holds_tensors(value: Any) -> bool:
    """Whether an object's fields hold a tensor or an array, at any depth.

    Python modules that it names aren't searched.
    """
    todo, seen = [value], dict[int, Any]()
    while todo:
        item = todo.pop()
        if isinstance(item, (torch.Tensor, np.ndarray)):
            return True
        if isinstance(item, (*PLAIN, type, types.ModuleType)) or id(item) in seen:
            continue
        seen[id(item)] = item
        names = [*getattr(item, "__dict__", ()), *getattr(type(item), "__slots__", ())]
        todo += [getattr(item, name, None) for name in names]
        todo += _parts(item)
    return False


def _parts(value: Any) -> list[Any]:
    """Elements of a list, dict or the like, each of which may hold it again; any other value itself."""
    whole = iter((False,))
    return pytree.tree_leaves(value, is_leaf=lambda _: next(whole, True))


def state_of(value: Any, above: tuple[int, ...] = ()) -> Hashable:
    """A hashable value of an argument without tensors, equal for equal ones.

    It holds the argument's fields at any depth, of functions the code and what they close over, of others the
    object.
    """
    if id(value) in above:
        return "again"
    inside = (*above, id(value))
    match value:
        case Leaf() | type() | Enum() | types.ModuleType():
            return value
        case float() | int() | complex() | str() | bytes() | None | torch.dtype() | torch.device():
            return type(value), repr(value)
        case dict():
            return type(value), tuple((state_of(key), state_of(item, inside)) for key, item in value.items())
        case list() | tuple():
            return type(value), tuple(state_of(item, inside) for item in value)
        case set() | frozenset():
            return type(value), frozenset(state_of(item, inside) for item in value)
        case types.FunctionType():
            held = (filled_cells(value), value.__defaults__, value.__kwdefaults__)
            cells = tuple(state_of(cell.cell_contents, inside) for cell in held[0])
            return value.__code__, cells, state_of(held[1], inside), state_of(held[2], inside)
        case functools.partial():
            return tuple(state_of(item, inside) for item in (value.func, value.args, value.keywords))
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names = dict.fromkeys(
        [*getattr(value, "__dict__", ()), *(name for name in slots if hasattr(value, name))]
    )
    if names:
        return type(value), tuple((name, state_of(getattr(value, name, None), inside)) for name in names)
    return (type(value), repr(value)) if _is_said(type(value)) else _Itself(value)


def _is_said(kind: Any) -> bool:
    """Whether instances print what they are, and not only where."""
    return kind.__repr__ is not object.__repr__


@dataclass(frozen=True, slots=True, eq=False)
class _Itself:
    """An object that says nothing, equal to itself alone; held, so that no other takes its address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _argument_name(path: tuple[Any, ...]) -> str:
    which, *rest = (str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
    return "_".join(rest) if which == "1" else "_".join(["input", *rest])


@dataclass(frozen=True, slots=True)
class Results:
    """The structure of a model's output; `dropped` names fields that hold no plain data."""

    constants: tuple[Any, ...]
    structure: pytree.TreeSpec
    dropped: tuple[str, ...]

    def rebuild(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The model's output with `tensors` in the tensors' places."""
        leaves = [tensors[leaf.index] if isinstance(leaf, Leaf) else leaf for leaf in self.constants]
        return pytree.tree_unflatten(leaves, self.structure)


LOSS_ALONE = Results((Leaf(0),), pytree.tree_structure(0), ())  # of a step: one tensor


def flatten_results(output: Any) -> tuple[tuple[torch.Tensor, ...], Results]:
    """The tensors of an output, and its structure, with dataclasses (so are Hugging Face's) at any depth."""
    paths, structure = pytree.tree_flatten_with_path(_opened(output))
    tensors: list[torch.Tensor] = []
    constants: list[Any] = []
    dropped: list[str] = []
    for path, leaf in paths:
        if isinstance(leaf, torch.Tensor):
            constants.append(Leaf(len(tensors)))
            tensors.append(leaf)
        elif isinstance(leaf, PLAIN):
            constants.append(leaf)
        elif isinstance(leaf, Distribution):
            raise _returns_distribution(pytree.keystr(path), type(leaf).__name__)
        else:
            constants.append(None)
            dropped.append(f"{pytree.keystr(path) or 'output'} ({type(leaf).__name__})")
    return tuple(tensors), Results(tuple(constants), structure, tuple(dropped))


def _returns_distribution(path: str, kind: str) -> TraceError:
    return TraceError(
        where=f"output{path} ({kind})",
        found="a distribution, whose tensors exist inside the program alone",
        wanted="the tensors that it is made of",
        remedy="return these and make it of them after the call, or use it in forward or loss_fn",
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    """Stands where a dataclass was, in a tree that torch flattens; unflattened, it is a dataclass again."""

    kind: type
    state: dict[str, Any]

    @property
    def context(self) -> tuple[type, tuple[str, ...]]:
        return self.kind, tuple(self.state)


def _opened(tree: Any) -> Any:
    """`tree` with its dataclasses opened, at any depth."""
    return pytree.tree_map(
        lambda leaf: _open(leaf) if _is_dataclass(leaf) else leaf, tree, is_leaf=_is_dataclass
    )


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _open(value: Any) -> _Opened:
    """All that an instance holds, also beside its fields; of a dict, as Hugging Face's are, what makes it."""
    fields = dataclasses.fields(value)
    if isinstance(value, dict):
        names = [item.name for item in fields if item.init]
    else:
        names = [*(item.name for item in fields), *getattr(value, "__dict__", ())]
    return _Opened(
        type(value), {name: _opened(getattr(value, name)) for name in names if hasattr(value, name)}
    )


def _close(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    """The instance, made as copy.copy makes one: __post_init__ has done its work in forward."""
    kind, names = context
    state = dict(zip(names, values, strict=True))
    if issubclass(kind, dict):
        return kind(**state)
    made = object.__new__(kind)
    for name, value in state.items():
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(
    _Opened,
    lambda opened: ([*opened.state.values()], opened.context),
    _close,
    flatten_with_keys_fn=lambda opened: (
        [(pytree.GetAttrKey(name), value) for name, value in opened.state.items()],
        opened.context,
    ),
)


def find_loss(output: Any) -> torch.Tensor | None:
    """The scalar that is the output, or that it holds as `.loss` or `["loss"]`."""
    loss = output if isinstance(output, torch.Tensor) else _named_loss(output)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.dtype.is_floating_point:
        return loss
    return None


def loss_notes(output: Any, *, is_loss: bool) -> tuple[str, ...]:
    """A note on a loss that backward can't start from: the output itself or what it holds by that name."""
    loss = output if is_loss and isinstance(output, torch.Tensor) else _named_loss(output)
    if not isinstance(loss, torch.Tensor) or find_loss(loss) is not None:
        return ()
    if loss.numel() != 1:
        found, instead = f"{' x '.join(map(str, loss.shape))} numbers", "return their mean or their sum"
    else:
        found, instead = f"of {str(loss.dtype).removeprefix('torch.')}", "return one of floating point"
    return (f"the loss is {found}, from which backward() doesn't start: {instead}",)


def _named_loss(output: Any) -> Any:
    if isinstance(output, dict):
        return output.get("loss")
    return getattr(output, "loss", None)


def split_for_loss(
    model: nn.Module, loss_fn: LossFunction | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...], dict[str, Any]]:
    """Split arguments into the model's and those of `loss_fn(output, ...)`.

    `loss_fn` takes the last positional arguments, as many as it requires after the output, and the keyword
    arguments that the model's forward does not know.
    """
    if loss_fn is None:
        return args, kwargs, (), {}
    ours, theirs = _by_names(model, kwargs)
    wanted = len(_positional(loss_fn, theirs))
    if wanted > len(args) or leaves_out_loss(model, loss_fn, args, kwargs):
        raise InputError(
            where=f"loss_fn {getattr(loss_fn, '__name__', type(loss_fn).__name__)}",
            found=f"{len(args)} positional inputs",
            wanted=f"at least {wanted} for loss_fn beside the model's own",
            remedy="pass the targets after the model's inputs; once a parallel module has parameters, a call "
            "without them gives the model's output",
        )
    cut = len(args) - wanted
    return args[:cut], ours, args[cut:], theirs


def leaves_out_loss(
    model: nn.Module, loss_fn: LossFunction | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a call gives the model all required arguments, and none to `loss_fn`.

    Then the model would miss an argument if the loss took its own.
    """
    if loss_fn is None:
        return False
    ours, theirs = _by_names(model, kwargs)
    wanted = _positional(loss_fn, theirs)
    if not wanted or theirs or not _takes(model, args, ours):
        return False
    return len(wanted) > len(args) or not _takes(model, args[: len(args) - len(wanted)], ours)


def _by_names(model: nn.Module, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments that the model's forward knows, and the loss's."""
    accepts, any_keyword = _parameters(model.forward)
    ours = {key: value for key, value in kwargs.items() if any_keyword or key in accepts}
    return ours, {key: value for key, value in kwargs.items() if key not in ours}


def _positional(loss_fn: LossFunction, named: Iterable[str]) -> list[str]:
    """Required arguments of a loss after the output, by position where they aren't `named`."""
    given = set(named)
    return [name for name in _required(loss_fn)[1:] if name not in given]


def _takes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the model's forward accepts these arguments."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _parameters(function: Callable[..., Any]) -> tuple[set[str], bool]:
    parameters = inspect.signature(function).parameters.values()
    return {item.name for item in parameters}, any(item.kind is item.VAR_KEYWORD for item in parameters)


def _required(loss_fn: LossFunction) -> list[str]:
    """The names of the positional parameters that have no default."""
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature: (output, target) is what torch's losses take
        return ["output", "target"]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [item.name for item in parameters if item.kind in positional and item.default is item.empty]
