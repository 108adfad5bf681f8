"""Parameters and buffers that a forward or a loss gets at by other ways than the model.

    self.helper.weight is self.a.weight     the tensor itself    the same input of the graph
    self.helper.first = self.a.weight[:3]   a part of it         refused: a constant that no step would change
    weight.detach().numpy()                 its memory           refused, too

A tensor that parallelize has replaced is known by what it was: the model's modules hold another one now.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from autopar.core.graph import Graph, GraphInput, InputKind
from autopar.errors import TraceError
from autopar.torch_seams import pytree
from autopar.torch_seams.fakes import FakeTensor
from autopar.torch_seams.modes import without_functions
from autopar.trace.forward.forward_error import ForwardError


@dataclass(frozen=True, slots=True)
class _Range:
    """Where a tensor's storage lies, as long as it does, and the `name` that the model has for it."""

    name: str
    storage: StorageWeakRef
    start: int
    stop: int

    def meets(self, start: int, stop: int) -> bool:
        return start < self.stop and self.start < stop and not self.storage.expired()


class Memory:
    """The parameters and buffers of a model by name: the objects themselves, and the memory they lie in."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        named = list(named)
        self._objects = {id(tensor): (name, weakref.ref(tensor)) for name, tensor in reversed(named)}
        self._ranges = [
            _Range(f"{_kind(tensor)} {name}", StorageWeakRef(tensor.untyped_storage()), *_addresses(tensor))
            for name, tensor in named
            if _has_memory(tensor)
        ]

    def name_of(self, tensor: Tensor) -> str | None:
        """The first name of this very object."""
        name, known = self._objects.get(id(tensor), ("", None))
        return name if known is not None and known() is tensor else None

    def met_by(self, tensor: Tensor) -> str | None:
        """Name of a tensor of the model with which `tensor` shares memory; None if there is none."""
        if not _has_memory(tensor):
            return None
        addresses = _addresses(tensor)
        return next((item.name for item in self._ranges if item.meets(*addresses)), None)


def memory_of(model: nn.Module) -> Memory:
    """The memory of all tensors that modules of `model` hold."""
    return Memory(
        (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    )


_earlier: ContextVar[Memory | None] = ContextVar("what the traced model held before", default=None)


@contextmanager
def replacing(memory: Memory) -> Iterator[None]:
    """Trace within models whose modules held this `memory` before."""
    token = _earlier.set(memory)
    try:
        yield
    finally:
        _earlier.reset(token)


class ModelMemory:
    """Tensors that a model holds, or held before, as its trace begins."""

    def __init__(self, model: nn.Module) -> None:
        self._memories = [item for item in (memory_of(model), _earlier.get()) if item is not None]

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of the parameter or buffer that this object is, or was."""
        return next((name for item in self._memories if (name := item.name_of(tensor))), None)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is the model's, or lies in the memory of one of its tensors."""
        return any(item.name_of(tensor) or item.met_by(tensor) for item in self._memories)

    def _met_by(self, item: GraphInput) -> str | None:
        if item.kind is not InputKind.CONSTANT or item.value is None:
            return None
        return next((name for known in self._memories if (name := known.met_by(item.value))), None)

    def met_in(self, graph: Graph) -> tuple[str, str] | None:
        """A line that uses a constant in the memory of one of these tensors, and that tensor."""
        for item in graph.inputs:
            if (name := self._met_by(item)) is not None:
                users = (operator for operator in graph.operators if item.name in operator.operands)
                user = next(users, None)
                if user is not None or item.name in graph.outputs:
                    return getattr(user, "source", "") or f"constant {item.target}", name
        return None


def stale(where: str, name: str) -> TraceError:
    """The error for a part of a parameter or buffer that is reached by another way than the model."""
    return TraceError(
        where=where,
        found=f"a tensor in the memory of {name}, such as a view or .detach(), that something else holds",
        wanted="tensors that a step of the parallel module changes, too",
        remedy=f"read {name.partition(' ')[2]} from its module in forward, and take the view there",
    )


class ByName(TorchFunctionMode):
    """Context in which torch's functions take each of the `known` tensors for what is `held` by its name
    now."""

    def __init__(self, known: ModelMemory, held: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._known, self._held = known, held

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._held_now, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _held_now(self, tensor: Tensor) -> Tensor:
        return self._held.get(self._known.name_of(tensor) or "", tensor)


class OthersLearn(TorchFunctionMode):
    """Context in which what requires gradients and isn't `known` as the model's is refused where these would
    flow."""

    def __init__(self, known: ModelMemory) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad and torch.is_grad_enabled():
            for tensor in pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and self._is_anothers(tensor):
                    raise ForwardError(
                        f"a tensor {list(tensor.shape)} that requires gradients and isn't the model's",
                        "parameters that the model holds, where optimizers and programs find them",
                        "let the model hold it (register_parameter, nn.ModuleList for a list of modules), or "
                        "take its .detach()",
                    )
        return result

    def _is_anothers(self, tensor: Tensor) -> bool:
        with without_functions():
            return tensor.requires_grad and not isinstance(tensor, FakeTensor) and not self._known.has(tensor)


def held_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that modules hold at this moment of a trace."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _kind(tensor: Tensor) -> str:
    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def _has_memory(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) or type(tensor).__base__ is nn.Parameter
    return (
        plain
        and not isinstance(tensor, FakeTensor)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.untyped_storage().nbytes() > 0
    )


def _addresses(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
