"""Rows that travel to the ranks that own their experts, and back: expert parallelism.

The operator is `torch.ops.autopar.experts`. Each rank of a group has some rows and some experts:

    keys of rank 0   2 0 1 2        own 0 1        sends   0 1 | 2 2        runs   0 0 1 | its own, then
    keys of rank 1   0 3 3          own 2 3        sends   0 | 3 3          runs   2 2 3 3     rank 1's

First counts travel, one for each expert, then rows, sorted by expert; each owner runs its experts, and
results go back the same way. Gradients do so in backward: of a weight they are whole on its owner, which has
seen all rows of its experts, in their serial order.

`place` is the rank's own in the group; `starts` and `stops` say which experts each place owns. Rows of
experts that no place owns stay, and give zeros: of a group of one, each rank runs its own experts on rows
that all have, and results are partial sums. `experts` is the number of all experts, and `most` the rows that
the fullest rank is expected to run, by which the call is priced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import TensorSpec
from autopar.core.operator_facts import declare
from autopar.errors import InputError
from autopar.runtime import registry
from autopar.runtime.collectives import transport
from autopar.trace.experts.routed_experts import ROUTED_EXPERTS, expert_call


def _travel(x: Tensor, sends: Sequence[int], receives: Sequence[int], group: str) -> Tensor:
    return transport.all_to_all_rows(x.contiguous(), sends, receives, group)


def _travelled(x: Tensor, sends: Sequence[int], receives: Sequence[int], group: str) -> Tensor:
    return x.new_empty((sum(receives), *x.shape[1:]))


def _note(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.sends, ctx.receives, ctx.group = inputs


def _travel_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return registry.operator("travel")(gradient, ctx.receives, ctx.sends, ctx.group), None, None, None


def _count(counts: Tensor, lengths: Sequence[int], place: int, group: str) -> Tensor:
    return transport.all_to_all_rows(counts, lengths, [lengths[place]] * len(lengths), group)


def _counted(counts: Tensor, lengths: Sequence[int], place: int, group: str) -> Tensor:
    return counts.new_empty(len(lengths) * lengths[place])


registry.functional(
    "travel",
    "(Tensor x, int[] sends, int[] receives, str group) -> Tensor",
    _travel,
    shape=_travelled,
    setup=_note,
    backward=_travel_back,
)
registry.constant(
    "expert_counts",
    "(Tensor counts, int[] lengths, int place, str group) -> Tensor",
    _count,
    shape=_counted,
)


def _experts(
    x: Tensor,
    beside: Sequence[Tensor],
    weights: Sequence[Tensor],
    keys: Tensor,
    body: str,
    dtypes: Sequence[torch.dtype],
    group: str,
    place: int,
    starts: Sequence[int],
    stops: Sequence[int],
    experts: int,
    most: int,
) -> Tensor:
    counts = _counts(keys, experts)
    spans = list(zip(starts, stops, strict=True))
    before = [0, *counts.cumsum(0).tolist()]
    order = keys.argsort(stable=True)
    sends = [before[stop] - before[start] for start, stop in spans]
    picked = torch.cat([order[before[start] : before[stop]] for start, stop in spans])
    rows = [each.index_select(0, picked) for each in (x, *beside)]
    mine = torch.cat([counts[start:stop] for start, stop in spans])
    alone, own = len(spans) == 1, stops[place] - starts[place]
    receives = sends
    if not alone:
        lengths = [stop - start for start, stop in spans]
        mine = registry.operator("expert_counts")(mine, lengths, place, group)
        receives = mine.view(len(spans), own).sum(1).tolist()
        rows = [registry.operator("travel")(each, sends, receives, group) for each in rows]
    chosen = torch.arange(own, device=keys.device).repeat(len(spans)).repeat_interleave(mine)
    made = ROUTED_EXPERTS(rows, weights, chosen, body, dtypes)
    if not alone:
        made = registry.operator("travel")(made, receives, sends, group)
    whole: Tensor = made.new_zeros((len(x), made.shape[1])).index_copy(0, picked, made)
    return whole


def _counts(keys: Tensor, experts: int) -> Tensor:
    """Rows of each expert; raises InputError for keys that name none."""
    counts = torch.bincount(keys, minlength=experts)
    if len(counts) > experts:
        raise InputError(
            where="the router of a mixture of experts",
            found=f"expert {int(keys.max())}",
            wanted=f"experts 0 to {experts - 1}",
            remedy="let the router choose among the experts that there are",
        )
    return counts


registry.composite(
    "experts",
    "(Tensor x, Tensor[] beside, Tensor[] weights, Tensor keys, str body, ScalarType[] dtypes, str group, "
    "int place, int[] starts, int[] stops, int experts, int most) -> Tensor",
    _experts,
)


def _on_owner(args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """The fullest rank's rows through its own experts."""
    x, beside, weights, keys, body, dtypes, *_, most = args
    rows = [_of_length(each, most) for each in (x, *beside)]
    return ROUTED_EXPERTS, (rows, list(weights), _of_length(keys, most), body, list(dtypes))


def _of_length(x: Any, rows: int) -> Any:
    """A spec of so many rows; anything else as it is."""
    return replace(x, shape=(rows, *x.shape[1:])) if isinstance(x, TensorSpec) else x


def result_bytes(args: Sequence[Any]) -> int:
    """Bytes of a row of the result."""
    _, local = _on_owner(args)
    result = expert_call(local).values()[-1]
    return result.shape[1] * result.dtype.itemsize


def _scratch(args: Sequence[Any]) -> tuple[int, int]:
    """Bytes beside operands and results: rows that leave and that arrive, results of both, in backward their
    gradients, and two of the body's values."""
    x, beside, *_ = args
    _, local = _on_owner(args)
    values = expert_call(local).values()
    there, here = sum(spec.nbytes for spec in local[0]), sum(spec.nbytes for spec in (x, *beside))
    back = result_bytes(args) * x.shape[0]
    inner = sum(sorted(spec.nbytes for spec in values[:-1])[-2:])
    return here + there + 2 * values[-1].nbytes + back, here + there + values[-1].nbytes + back + inner


declare(registry.operator("experts"), local_form=_on_owner, scratch=_scratch)
