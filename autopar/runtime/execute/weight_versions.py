"""Weights of batches that are under way, beside those that the optimizer steps.

    call t            newest W(t), this batch's W(t-1), the next one's W(t)
    optimizer.step    newest W(t+1); the other two stay

Batches take turns: one copy is that of even ones, the other of odd ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.parameters.parameters import local, twin_of

Find = Callable[[str], Callable[[], Any]]


class WeightVersions:
    """Two copies of what learns on this rank; `turn` is that of the next batch."""

    def __init__(self) -> None:
        self.turn = 0
        self._copies: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self._find: dict[str, Callable[[], Any]] = {}
        self._loaded: Mapping[str, Tensor] = {}

    def finder(self, turn: int, find: Find) -> Find:
        """Like `find`, of that turn's copies; what doesn't learn has none."""

        def find_copy(target: str) -> Callable[[], Any]:
            newest = find(target)
            tensor = newest()
            if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
                return newest
            self._find[target] = newest
            if target not in self._copies[turn]:
                copied = self._copies[turn][target] = twin_of(tensor)
                if turn == self.turn and target in self._loaded:
                    _copy(copied, self._loaded[target])
            return lambda: self._copies[turn][target]

        return find_copy

    def begin(self) -> None:
        """Take the first batch's gradient at the weights that were loaded, or else at those of now."""
        for target, copied in self._copies[self.turn].items():
            newest = local(self._find[target]())
            _copy(copied, self._loaded.get(target, newest))

    def end(self) -> None:
        """Forget what was loaded: another loop begins at the weights of then."""
        self._loaded = {}

    def next_turn(self) -> int:
        """Begin a step: its turn. The weights of now are those of the batch after it."""
        turn, self.turn, self._loaded = self.turn, 1 - self.turn, {}
        for target, copied in self._copies[self.turn].items():
            _copy(copied, local(self._find[target]()))
        return turn

    def state_dict(self) -> dict[str, Tensor]:
        """The weights at which the next batch's gradient is taken."""
        return {target: local(copied).detach() for target, copied in self._copies[self.turn].items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the first batch's gradient of the loop that begins at these."""
        self._loaded = state


@torch.no_grad()
def _copy(copied: Tensor, values: Tensor) -> None:
    local(copied).copy_(values)
