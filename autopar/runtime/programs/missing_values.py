"""Tensors of a model on the meta device, until somebody has written their values.

placed       floats full of NaN, integers and truth values of zeros; writes to both are counted
first call   floats without a number, others that nobody wrote to  ->  refused by name, on all ranks
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from autopar.core.graph import may_learn
from autopar.errors import InputError
from autopar.runtime.collectives.roll_call import everybody
from autopar.runtime.parameters.parameters import local
from autopar.torch_seams.tensors import version_of

_SHOWN = 3  # names in an error


class MissingValues:
    """Names of tensors that are still to be loaded, alike on all ranks."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._writes: dict[str, int] = {}

    def count(self, held: Mapping[str, Tensor]) -> None:
        """Count writes to this rank's tensors from now on."""
        self._writes = {name: _writes(held[name]) for name in self.names & held.keys()}

    def require_none(self, held: Mapping[str, Tensor]) -> None:
        """Raise InputError on every rank where one's part of a tensor has no values; collective."""
        told = everybody(sorted(self._missing(held)))
        self.names = {name for mine in told for name in mine}
        if self.names:
            names = sorted(self.names)
            raise InputError(
                where="call of the parallel module",
                found=f"{', '.join(names[:_SHOWN])}{' ...' if names[_SHOWN:] else ''} without values: "
                "on the meta device, and not loaded since",
                wanted="values of all parameters and buffers",
                remedy="load them by autopar.load_pretrained, autopar.load or load_state_dict, or write "
                "them in place, as by torch.nn.init",
            )

    def _missing(self, held: Mapping[str, Tensor]) -> Iterator[str]:
        for name, before in self._writes.items():
            mine = local(held[name]) if name in held and name in self.names else None
            if mine is None or not mine.numel():
                continue
            if _is_empty(mine) and (mine.dtype is not torch.bool or _writes(held[name]) == before):
                yield name


def placeholder(dtype: torch.dtype) -> Tensor:
    """A number that stands for each value that is missing."""
    if dtype is torch.bool:
        return torch.zeros((), dtype=dtype)
    least = math.nan if may_learn(dtype) else torch.iinfo(dtype).min or torch.iinfo(dtype).max
    return torch.tensor(least, dtype=dtype)


def _is_empty(mine: Tensor) -> bool:
    """Whether every element is the placeholder; the first one tells mostly."""
    flat = mine.detach().reshape(-1)
    mark = placeholder(mine.dtype).to(mine.device)
    return all(bool((part.isnan() if mark.isnan() else part == mark).all()) for part in (flat[:1], flat))


def _writes(tensor: Tensor) -> int:
    """Writes in place so far, which torch counts apart for a DTensor and its part."""
    return version_of(tensor) + version_of(local(tensor))
