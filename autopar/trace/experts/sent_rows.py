"""Which rows go to which experts, as tensors: numbers that are known at run time alone.

    keys 2 0 1 2, experts 0 1 | 2 3        sent 1 1 | 2 0        picked 1 2 | 0 3        by expert, in order

Without values, as where a program is written or priced, they are as long as is expected: `rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import InputError
from autopar.trace.forms.sparse_products import NAMESPACE

_custom_op: Any = torch.library.custom_op  # ships without types


def _rows_to_send(
    keys: Tensor, experts: int, starts: Sequence[int], stops: Sequence[int], rows: int
) -> tuple[Tensor, Tensor]:
    counts = torch.bincount(keys, minlength=experts)
    if len(counts) > experts:
        raise InputError(
            where="the router of a mixture of experts",
            found=f"expert {int(keys.max())}",
            wanted=f"experts 0 to {experts - 1}",
            remedy="let the router choose among the experts that there are",
        )
    before = [0, *counts.cumsum(0).tolist()]
    order, spans = keys.argsort(stable=True), list(zip(starts, stops, strict=True))
    sent = torch.cat([counts[start:stop] for start, stop in spans])
    return sent, torch.cat([order[before[start] : before[stop]] for start, stop in spans])


def _keys_of_counts(counts: Tensor, places: int, rows: int) -> Tensor:
    own = torch.arange(len(counts) // places, device=counts.device)
    return own.repeat(places).repeat_interleave(counts)


_send = _custom_op(
    f"{NAMESPACE}::rows_to_send",
    _rows_to_send,
    mutates_args=(),
    schema="(Tensor keys, int experts, int[] starts, int[] stops, int rows) -> (Tensor, Tensor)",
)
_keys = _custom_op(
    f"{NAMESPACE}::keys_of_counts",
    _keys_of_counts,
    mutates_args=(),
    schema="(Tensor counts, int places, int rows) -> Tensor",
)
_send.register_fake(
    lambda keys, experts, starts, stops, rows: (
        keys.new_empty(sum(stops) - sum(starts)),
        keys.new_empty(rows),
    )
)
_keys.register_fake(lambda counts, places, rows: counts.new_empty(rows))
ROWS_TO_SEND: Any = torch.ops.autopar_graphs.rows_to_send.default
KEYS_OF_COUNTS: Any = torch.ops.autopar_graphs.keys_of_counts.default
