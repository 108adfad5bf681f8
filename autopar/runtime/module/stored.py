"""How the parameters and buffers of a module are stored, and its state dicts in full tensors.

state_dict         DTensors of this rank  --gather-->  full tensors in serial order
load_state_dict    full tensors  --the user's own hooks-->  --cut-->  this rank's parts, in place
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autopar.runtime.execute.executable import InputPart
from autopar.runtime.parameters.parameters import gather, local


@dataclass(frozen=True, slots=True)
class Stored:
    """How a tensor of a module is stored: its part, and the key that gathers it.

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


class FullState:
    """The hooks by which the state dicts of one module hold full tensors, by the names in it."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = stored
        self._live = False

    def install(self, module: nn.Module) -> list[RemovableHandle]:
        """Register the hooks, after those that are there; loading runs them last."""
        return [
            module.register_state_dict_pre_hook(self._before_saving),
            module._register_state_dict_hook(self._after_saving),
            module._register_load_state_dict_pre_hook(self._before_loading, with_module=True),
        ]

    def _before_saving(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._live = keep_vars

    def _after_saving(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Put full tensors in the place of parts: a collective over the ranks that share them.

        With `keep_vars` the parameters themselves are given, which are DTensors.
        """
        if self._live:
            return
        for name, stored in self.stored.items():
            if name not in module._non_persistent_buffers_set:
                state[prefix + name] = stored.gather(state.get(prefix + name))

    def _before_loading(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Cut full tensors to this rank's parts."""
        for name, stored in self.stored.items():
            full = state.get(prefix + name)
            held = module._parameters.get(name, module._buffers.get(name))
            if held is None:
                state.pop(prefix + name, None)  # another stage's
            elif isinstance(full, Tensor) and isinstance(held, DTensor) and _is_full(full, stored):
                state[prefix + name] = _cut(full, stored, held)


def _is_full(value: Tensor, stored: Stored) -> bool:
    """A full tensor of the right shape; anything else is nn.Module's to take or to complain about."""
    return not isinstance(value, DTensor) and tuple(value.shape) == stored.part.spec.shape


def _cut(full: Tensor, stored: Stored, held: DTensor) -> Tensor:
    mine = stored.part.part.take(full.detach()).to(local(held)).contiguous()
    with torch.no_grad():
        return DTensor(mine, held._spec, requires_grad=False)
