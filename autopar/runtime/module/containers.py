"""The serial model's names without its code: a tree of containers that hold the local tensors.

A container mirrors one module of the model: its children, its mode (train or eval), its parameters
and buffers under their own names and in their order, a module that appears twice appearing twice.
So everything that nn.Module does by walking a tree works as it does on the serial model, and a
container changes one thing only: state dicts hold full tensors in serial order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.execute.executable import InputPart
from autopar.runtime.parameters.parameters import gather, local


@dataclass(frozen=True, slots=True)
class Stored:
    """How a tensor of a container is stored: its part, and the key that gathers it.

    With pipeline stages only some ranks hold it: `holder` is the rank of the world that the others
    get it from, None if all hold it.
    """

    part: InputPart
    key: str | None
    device: torch.device
    holder: int | None = None

    @property
    def is_shared(self) -> bool:
        """Whether gathering it is collective."""
        return self.key is not None or self.holder is not None

    def gather(self, tensor: Tensor | None) -> Tensor:
        """The full tensor, in serial order, on all ranks; a collective. None where it is not held."""
        full = None if tensor is None else gather(tensor, self.part, self.key)
        if self.holder is None:
            assert full is not None
            return full
        dtype = [None if full is None else full.dtype]  # it may have been changed where it is held
        dist.broadcast_object_list(dtype, src=self.holder, device=self.device)
        if full is None:
            full = torch.empty(self.part.spec.shape, dtype=dtype[0], device=self.device)
        dist.broadcast(full.contiguous(), src=self.holder)
        return full


class Container(nn.Module):
    """One module of the serial model."""

    def __init__(self) -> None:
        super().__init__()
        self._stored: dict[str, Stored] = {}
        self._before_loading: tuple[Callable[..., Any], ...] = ()

    def mirror(self, module: nn.Module, seen: dict[int, Container] | None = None) -> None:
        """Grow the tree below like the one below `module`."""
        seen = {} if seen is None else seen
        seen[id(module)] = self
        self.training = module.training
        self._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                container = Container()
                container.mirror(child, seen)
            self._modules[name] = None if child is None else seen[id(child)]

    def fill(
        self,
        module: nn.Module,
        store: Callable[[str, Tensor], tuple[Tensor | None, Stored]],
    ) -> None:
        """Hold what `store(name, tensor)` makes of every tensor of `module`, each tensor once; None is
        what another stage holds."""
        made: dict[int, tuple[Tensor | None, Stored]] = {}
        containers: dict[str, Any] = dict(self.named_modules())
        for prefix, source in module.named_modules():
            container = containers[prefix]
            for kind in ("_parameters", "_buffers"):
                for name, tensor in getattr(source, kind).items():
                    if tensor is None:
                        getattr(container, kind)[name] = None
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = store(f"{prefix}.{name}" if prefix else name, tensor)
                    getattr(container, kind)[name], container._stored[name] = made[id(tensor)]

    def load_as(self, module: nn.Module) -> None:
        """Run the hooks of `module` and of those below it before loading; they live as long as it does."""
        containers: dict[str, Any] = dict(self.named_modules())
        for path, source in module.named_modules():
            containers[path]._before_loading = tuple(source._load_state_dict_pre_hooks.values())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """As nn.Module's, with full tensors: a collective over the ranks that share them.

        `keep_vars` gives the live parameters, which are DTensors.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars:
            return
        for name, stored in self._stored.items():
            if name not in self._non_persistent_buffers_set:
                destination[prefix + name] = stored.gather(destination.pop(prefix + name, None))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """As nn.Module's, with each full tensor cut to this rank's part first; before that the hooks of the
        serial module see them, which may rename those of old checkpoints."""
        for hook in self._before_loading:
            hook(state_dict, prefix, *rest)
        cut = dict(state_dict)
        for name, stored in self._stored.items():
            full = cut.get(prefix + name)
            held = self._parameters.get(name, self._buffers.get(name))
            if held is None:
                cut.pop(prefix + name, None)  # another stage's
            elif isinstance(full, Tensor) and isinstance(held, DTensor) and _is_full(full, stored):
                cut[prefix + name] = _cut(full, stored, held)
        super()._load_from_state_dict(cut, prefix, *rest)


def _is_full(value: Tensor, stored: Stored) -> bool:
    """A full tensor of the right shape; anything else is nn.Module's to take or to complain about."""
    return not isinstance(value, DTensor) and tuple(value.shape) == stored.part.spec.shape


def _cut(full: Tensor, stored: Stored, held: DTensor) -> Tensor:
    mine = stored.part.part.take(full.detach()).to(local(held)).contiguous()
    with torch.no_grad():
        return DTensor(mine, held._spec, requires_grad=False)
