"""Means of matrices over islands by two thin factors (PowerSGD, Vogels et al. 2019).

    M Q   --mean-->  its columns made orthonormal: P
    M' P  --mean-->  Q, also for the next time

P Q' stands for the mean of M; each island keeps M - P Q', which it adds to its next M. Everything else
travels as it is, with the first of the two messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.islands.messages import Across, Mark, MeanOverIslands, NamedTensors
from autopar.updates.wires import FULL, AnyWire, LowRankWire, finite, flat_of, shaped_as


class LowRankMean:
    """The mean of tensors over islands, of matrices at low rank; keeps what it drops for the next time."""

    def __init__(self, across: Across, wire: LowRankWire) -> None:
        self.wire, self.mean = wire, MeanOverIslands(across, FULL)
        self.dropped: dict[str, Tensor] = {}
        self.right: dict[str, Tensor] = {}  # Q of the time before

    def __call__(self, named: NamedTensors, mark: Mark) -> list[Tensor]:
        """The means of the islands' tensors of these names, which they have in the same order; collective."""
        matrices = {name: self.wire.matrix(tensor, self.dropped.get(name)) for name, tensor in named}
        means = dict(
            zip(
                matrices,
                self.mean([(name, self._first(matrices, name, x)) for name, x in named], mark),
                strict=True,
            )
        )
        held = {name: matrix for name, matrix in matrices.items() if matrix is not None}
        left = {name: torch.linalg.qr(means[name]).Q for name in held}
        rights = self.mean([(name, matrix.T @ left[name]) for name, matrix in held.items()], mark)
        for (name, matrix), right in zip(held.items(), rights, strict=True):
            self.right[name] = self.wire.kept(right, matrix)
            means[name] = left[name] @ right.T
            self.dropped[name] = finite(matrix - means[name])
        return [
            shaped_as(tensor, means[name].reshape(-1).to(flat_of(tensor))) if name in held else means[name]
            for name, tensor in named
        ]

    def _first(self, matrices: Mapping[str, Tensor | None], name: str, tensor: Tensor) -> Tensor:
        """What is summed first: M Q, or the tensor itself."""
        matrix = matrices[name]
        if matrix is None:
            return tensor
        return matrix @ self.right.setdefault(name, self.wire.right(matrix))

    def state_dict(self) -> dict[str, Any]:
        """What was dropped so far, and the factors to go on with."""
        return {"dropped": dict(self.dropped), "right": dict(self.right)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was dropped."""
        self.dropped, self.right = dict(state["dropped"]), dict(state["right"])


def mean_over(across: Across, wire: AnyWire) -> MeanOverIslands | LowRankMean:
    """The mean over islands that a wire gives."""
    return LowRankMean(across, wire) if isinstance(wire, LowRankWire) else MeanOverIslands(across, wire)
