"""Rows that travel to the ranks that own their experts, and back: expert parallelism.

    rank 0, owns 0 1      keys 2 0 1 2      sent  1 1 | 2 0      got  1 1 of its own, 1 0 of rank 1
    rank 1, owns 2 3      keys 0 3 3        sent  1 0 | 0 2      got  2 0 of rank 0, 0 2 of its own

First `torch.ops.autopar.expert_counts` exchanges numbers of rows, one for each expert, so that all know what
comes; then `torch.ops.autopar.travel` moves rows, sorted by expert, and later what experts made of them,
`back`. Gradients travel the other way: of a weight they are whole on its owner, which has seen all rows of
its experts.

`lengths` says how many experts each rank of the group owns, `place` which is this one. `rows` are those that
the result is expected to have, by which it is priced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import registry
from autopar.runtime.collectives import transport


def _count(sent: Tensor, lengths: Sequence[int], place: int, group: str) -> Tensor:
    return transport.all_to_all_rows(sent, lengths, [lengths[place]] * len(lengths), group)


def _counted(sent: Tensor, lengths: Sequence[int], place: int, group: str) -> Tensor:
    return sent.new_empty(len(lengths) * lengths[place])


def _travel(
    x: Tensor, sent: Tensor, got: Tensor, lengths: Sequence[int], back: bool, rows: int, group: str
) -> Tensor:
    sums = [*(each.sum() for each in torch.split(sent, list(lengths))), *got.view(len(lengths), -1).sum(1)]
    counts = torch.stack(sums).tolist()  # a GPU's host waits once
    leaving, coming = counts[: len(lengths)], counts[len(lengths) :]
    sends, receives = (coming, leaving) if back else (leaving, coming)
    return transport.all_to_all_rows(x.contiguous(), sends, receives, group)


def _travelled(
    x: Tensor, sent: Tensor, got: Tensor, lengths: Sequence[int], back: bool, rows: int, group: str
) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


def _note(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, sent, got, ctx.lengths, ctx.back, _, ctx.group = inputs
    ctx.rows = len(x)
    ctx.save_for_backward(sent, got)


def _return(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    sent, got = ctx.saved_tensors
    how = ctx.lengths, not ctx.back, ctx.rows, ctx.group
    return registry.eager("travel")(gradient, sent, got, *how), *(None for _ in range(6))


registry.constant(
    "expert_counts",
    "(Tensor sent, int[] lengths, int place, str group) -> Tensor",
    _count,
    shape=_counted,
)
registry.functional(
    "travel",
    "(Tensor x, Tensor sent, Tensor got, int[] lengths, bool back, int rows, str group) -> Tensor",
    _travel,
    shape=_travelled,
    setup=_note,
    backward=_return,
)
