"""What the ranks of all stages hold, known to each: dtypes, and which parameters learn.

A rank that freezes a weight of its stage is the only one to see it, but every rank plans the whole model. So
before each call ranks tell whether anything has changed on one of them, and if so, what they hold.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import InputError
from autopar.runtime.collectives import transport

State = tuple[torch.dtype, bool]  # dtype, and whether it learns


class RankStates:
    """The states of all parameters and buffers, by their names, as they were at the last `update`."""

    def __init__(self, device: torch.device) -> None:
        self.states: dict[str, State] = {}
        self._device = device

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take over what this rank and the others hold now; collective.

        Raises InputError on every rank where copies of a tied weight differ.
        """
        mine = {name: (tensor.dtype, tensor.requires_grad) for name, tensor in tensors}
        changed = torch.tensor(any(self.states.get(name) != state for name, state in mine.items()))
        changes = changed.to(self._device, torch.int32)
        assert dist.group.WORLD is not None
        transport.all_reduce(changes, dist.group.WORLD)
        if not changes:
            return
        everywhere: list[dict[str, State]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, mine)
        states: dict[str, State] = {}
        for rank, held in enumerate(everywhere):
            for name, state in held.items():
                if states.setdefault(name, state) != state:
                    raise _unlike(name, rank, state, states[name])
        self.states = states


def _unlike(name: str, rank: int, found: State, other: State) -> InputError:
    def show(state: State) -> str:
        return f"{state[0]}, {'learning' if state[1] else 'frozen'}"

    return InputError(
        where=f"{name} on rank {rank}",
        found=show(found),
        wanted=f"{show(other)}, as on another rank that holds it",
        remedy="convert and freeze parameters on all ranks alike",
    )
