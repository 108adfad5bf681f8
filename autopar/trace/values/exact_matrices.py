"""Sparse matrices that follow from others, in as many digits as a proof has.

    A, float32, passed  ----- A @ A -----  float32, as eager has it, for sizes and numbers that are asked for
                        '-- the same in float64, of which the graph's constant is a cast

What is made dense of such a matrix is a cast as well, and is traced: folding keeps both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopar.torch_seams import pytree
from autopar.torch_seams.modes import without_functions, without_modes

_ROUNDED = (torch.float32, torch.float16, torch.bfloat16)


class ExactMatrices:
    """The matrices that were computed, and what these are in float64."""

    def __init__(self) -> None:
        self._raised: dict[int, tuple[Tensor, Tensor]] = {}  # with what keeps the identity

    def of(self, matrix: Tensor) -> Tensor:
        """A matrix in as many digits as there are."""
        found = self._raised.get(id(matrix))
        return matrix if found is None else found[1]

    def follow(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Any,
        *,
        moves: bool,
    ) -> Any:
        """The results of a call: matrices are known exactly from here on, and dense numbers are casts."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        follows = any(id(tensor) in self._raised for tensor in tensors)
        leaves, form = pytree.tree_flatten(results)
        rounded = [isinstance(leaf, Tensor) and leaf.dtype in _ROUNDED for leaf in leaves]
        if not any(rounded) or not (follows or (not moves and any(map(_is_sparse, tensors)))):
            return results
        args, kwargs = pytree.tree_map(self._raise, (args, kwargs))
        with outside():
            exact = pytree.tree_leaves(function(*args, **kwargs))
        for place, (leaf, raised) in enumerate(zip(leaves, exact, strict=True)):
            if rounded[place] and _is_sparse(leaf):
                self._raised[id(leaf)] = (leaf, raised)
            elif rounded[place]:
                leaves[place] = raised.to(leaf.dtype)
        return pytree.tree_unflatten(leaves, form)

    def _raise(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dtype in _ROUNDED:
            with outside():
                return self.of(leaf).double()
        return torch.float64 if isinstance(leaf, torch.dtype) and leaf in _ROUNDED else leaf


def _is_sparse(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided


@contextmanager
def outside() -> Iterator[None]:
    """Leave the trace: nothing is recorded, and tensors have values."""
    with without_modes(), without_functions(), torch.no_grad():
        yield
