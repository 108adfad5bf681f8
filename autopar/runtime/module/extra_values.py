"""What a user has saved beside a run: rank 0's, so it must be every rank's.

    extra={"ema": {"0.weight": ...}}    "0.weight" split  -->  refused: extra['ema']['0.weight']

A tensor of which each rank holds its own rows would come back as rank 0's rows on all ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.runtime.collectives.roll_call import everybody
from autopar.runtime.collectives.statements import StatementPart
from autopar.runtime.programs.agreement import compare, whole_bytes

_REMEDY = (
    "save an average of weights whole, by .full_tensor(), or keep it as a model that is saved of itself; "
    "leave out what is a rank's own"
)


def require_alike_extra(where: str, extra: Any) -> None:
    """Raise InputError on every rank for a DTensor in `extra`, and what ranks don't have alike; collective.

    Tensors that differ by a rounding become rank 0's.
    """
    values = dict(_leaves("extra", extra))
    split = [path for path, value in values.items() if isinstance(value, DTensor)]
    if told := [path for paths in everybody(split[:1]) for path in paths]:
        raise InputError(
            where=where,
            found=f"{told[0]}, a DTensor of which each rank holds a part",
            wanted="plain values and whole tensors, the same on all ranks",
            remedy=_REMEDY,
        )
    if dist.is_initialized():
        held = {path: value for path, value in values.items() if _is_sendable(value)}
        compare((StatementPart(path, _REMEDY, _stated(value)) for path, value in values.items()), held)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Everything that isn't a dict, list or tuple, by how Python reaches it."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(f"{path}[{name!r}]", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(f"{path}[{number}]", item)
    else:
        yield path, value


def _is_sendable(value: Any) -> bool:
    """Whether a value is a tensor that the world's ranks can send."""
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return isinstance(value, Tensor) and value.device.type == kind


def _stated(value: Any) -> bytes:
    """Bytes that are the same for equal values; none for what a save refuses anyway."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)} ".encode() + whole_bytes(value)
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value).encode()
    raw = BytesIO()
    with suppress(Exception):  # of the user's own classes any
        pickle.dump(value, raw)
    return raw.getvalue()
