"""What every operator of `autopar.runtime` means, on the list of all ranks in one process.

Plain differentiable torch, written independently of the operators that it proves. Autograd through
it gives the gradients: the *sum over ranks* of the leaf gradients of a Replicate or Broadcast
tensor is its gradient, when a Replicate loss is seeded 1/n on each rank and a Partial loss 1.
Read so, all-reduces are sums and moves that do nothing are identities; no rule for a backward is
written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import CheckError, RuleError
from autopar.runtime.collectives.grouped_moves import GROUPED, TOGETHER
from autopar.runtime.collectives.placement_moves import SUMMED
from autopar.runtime.collectives.started_fetches import FETCH_AHEAD
from autopar.runtime.collectives.started_moves import HALVED, START, WAIT
from autopar.runtime.saved.regather import REGATHER
from autopar.torch_seams.schemas import schema_of

Call = tuple[tuple[Any, ...], dict[str, Any]]
Arguments = Mapping[str, Any]  # by the names of the schema


def simulate(target: Any, calls: Sequence[Call]) -> list[Any]:
    """The results of the registered operator `target` on all ranks of one group: tensors, or lists of them.

    `calls` are the ranks' positional and keyword arguments, in group order.
    """
    schema = schema_of(target)
    meaning = MEANINGS.get(schema.name.removeprefix("autopar::"))
    if meaning is None:
        raise RuleError(
            where="simulated ranks",
            found=schema.name,
            wanted=f"one of {', '.join(MEANINGS)}",
            remedy="give the operator a meaning in autopar/proof/simulated.py",
        )
    names = [argument.name for argument in schema.arguments]
    return meaning([dict(zip(names, args, strict=False)) | kwargs for args, kwargs in calls])


# The moves from or to Replicate, and the move that their gradient makes in a program; the others'
# gradients are what autograd finds.
TRANSPOSED = {
    "p_to_r": "r_to_b",
    "r_to_b": "p_to_r",
    "s_to_r": "r_to_s",
    "s_to_r_regather": "r_to_s",
    "r_to_s": "s_to_r",
    "r_to_p": "b_to_r",
    "b_to_r": "r_to_p",
    **{"r_to_b" + ending: "p_to_r" for ending in SUMMED.values()},
}


REPLICATED = {"merged_attention"}  # operators, no moves, that give what is Replicate


class _Shared(torch.autograd.Function):
    """A Replicate result, each rank's whole gradient of which is one and the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


class _Typed(torch.autograd.Function):
    """A move whose gradient is the transposed move: that of a Replicate tensor is whole on each rank."""

    @staticmethod
    def forward(ctx: Any, target: Any, calls: Sequence[Call], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.move, ctx.rest = schema_of(target).name.removeprefix("autopar::"), [call[0][1:] for call in calls]
        return tuple(item.clone() for item in simulate(target, calls))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = getattr(torch.ops.autopar, TRANSPOSED[ctx.move]).default
        calls: list[Call] = [((item, *rest), {}) for item, rest in zip(gradients, ctx.rest, strict=True)]
        return (None, None, *simulate(back, calls))


def simulate_typed(target: Any, calls: Sequence[Call]) -> list[Any]:
    """Like `simulate`, with gradients as programs carry them: a Replicate result is seeded with its
    whole gradient on every rank, and every rank's gradient of a Replicate tensor is whole.

    Only so does P -> R where P -> B is meant, or a Replicate operand left unconverted, show.
    """
    name = schema_of(target).name.removeprefix("autopar::")
    shared: Any = _Shared.apply
    if name in REPLICATED:
        return [shared(result, len(calls)) for result in simulate(target, calls)]
    if name.startswith("s_to_r" + TOGETHER):
        return [[shared(each, len(calls)) for each in results] for results in simulate(target, calls)]
    if name not in TRANSPOSED:
        return simulate(target, calls)
    apply: Any = _Typed.apply  # ships without types
    return list(apply(target, calls, *(call[0][0] for call in calls)))


def _tensors(ranks: Sequence[Arguments]) -> list[Tensor]:
    return [rank["x"] for rank in ranks]


def _sum_everywhere(ranks: Sequence[Arguments]) -> list[Tensor]:
    total = torch.stack(_tensors(ranks)).sum(0, dtype=ranks[0]["x"].dtype)
    return [total for _ in ranks]


def _max_everywhere(ranks: Sequence[Arguments]) -> list[Tensor]:
    largest = torch.stack([x.detach() for x in _tensors(ranks)]).amax(0)
    return [largest for _ in ranks]


def _unchanged(ranks: Sequence[Arguments]) -> list[Tensor]:
    return _tensors(ranks)


def _waited(ranks: Sequence[Arguments]) -> list[Tensor]:
    return [rank["handle"] for rank in ranks]


def _first_only(ranks: Sequence[Arguments]) -> list[Tensor]:
    first, *others = _tensors(ranks)
    return [first, *(torch.zeros_like(x) for x in others)]


def _join(parts: Sequence[Tensor], dim: int, blocks: int) -> Tensor:
    """The full tensor: block after block, in each block the parts in order."""
    chunks = [part.chunk(blocks, dim) if part.shape[dim] else [part] * blocks for part in parts]
    return torch.cat([chunk[block] for block in range(blocks) for chunk in chunks], dim)


def _select(full: Tensor, dim: int, blocks: int, first: int, stop: int) -> Tensor:
    """Rows [first, stop) of every block."""
    length = full.shape[dim] // blocks
    rows = [block * length + row for block in range(blocks) for row in range(first, stop)]
    return full.index_select(dim, torch.tensor(rows, dtype=torch.int64, device=full.device))


def _split(full: Tensor, dim: int, blocks: int, sizes: Sequence[int]) -> list[Tensor]:
    stops = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    pairs = zip(sizes, stops, strict=True)
    return [_select(full, dim, blocks, stop - size, stop) for size, stop in pairs]


def _gather(ranks: Sequence[Arguments]) -> list[Tensor]:
    full = _join(_tensors(ranks), ranks[0]["dim"], ranks[0]["blocks"])
    return [full for _ in ranks]


def _scatter_sum(ranks: Sequence[Arguments]) -> list[Tensor]:
    total, one = torch.stack(_tensors(ranks)).sum(0, dtype=ranks[0]["x"].dtype), ranks[0]
    return _split(total, one["dim"], one["blocks"], one["sizes"])


def _slice(ranks: Sequence[Arguments]) -> list[Tensor]:
    return [
        _split(rank["x"], rank["dim"], rank["blocks"], rank["sizes"])[index]
        for index, rank in enumerate(ranks)
    ]


def _zero_pad(ranks: Sequence[Arguments]) -> list[Tensor]:
    """Each rank's part among zeros in the place of the others'."""
    parts, dim, blocks = _tensors(ranks), ranks[0]["dim"], ranks[0]["blocks"]
    return [
        _join([x if index == me else torch.zeros_like(x) for index, x in enumerate(parts)], dim, blocks)
        for me in range(len(parts))
    ]


def _resplit(ranks: Sequence[Arguments]) -> list[Tensor]:
    one = ranks[0]
    full = _join(_tensors(ranks), one["dim_from"], one["blocks_from"])
    return _split(full, one["dim_to"], one["blocks_to"], one["sizes_to"])


def _exchange(ranks: Sequence[Arguments]) -> list[Tensor]:
    """Every window out of the full tensor, with `fill` for the rows before 0 and past the end."""
    one, windows = ranks[0], list(zip(ranks[0]["starts"], ranks[0]["stops"], strict=True))
    dim, blocks, length = one["dim"], one["blocks"], one["owned"][-1]
    full = _join(_tensors(ranks), dim, blocks)
    before, after = max(0, -min(one["starts"])), max(0, max(one["stops"]) - length)
    shape = list(full.shape)

    def filled(rows: int) -> Tensor:
        return full.new_full([*shape[:dim], rows, *shape[dim + 1 :]], one["fill"])

    blocked = full.chunk(blocks, dim)
    padded = torch.cat([part for block in blocked for part in (filled(before), block, filled(after))], dim)
    return [_select(padded, dim, blocks, start + before, stop + before) for start, stop in windows]


def _needed_rows(ranks: Sequence[Arguments]) -> list[Tensor]:
    """Each rank's own rows, then those that the others pick for it, by owner."""
    picked = [torch.split(rank["x"].index_select(0, rank["rows"]), list(rank["sends"])) for rank in ranks]
    return [torch.cat([rank["x"], *(parts[me] for parts in picked)]) for me, rank in enumerate(ranks)]


def _convolution(ranks: Sequence[Arguments]) -> list[Tensor]:
    """Each rank's whole window through the plain operator, which pads nothing on that dim."""
    windows = _exchange([{**rank, "blocks": 1, "fill": 0.0} for rank in ranks])
    return [
        _convolved(window, rank, index)
        for index, (window, rank) in enumerate(zip(windows, ranks, strict=True))
    ]


def _convolved(window: Tensor, rank: Arguments, index: int) -> Tensor:
    at, dim = rank["dim"] - 2, rank["dim"]
    padding, extra = list(rank["padding"]), list(rank["output_padding"])
    padding[at] = extra[at] = 0
    stride, dilation = rank["stride"], rank["dilation"]
    how = (stride, padding, dilation, rank["transposed"], extra, rank["groups"])
    y: Tensor = torch.convolution(window, rank["weight"], rank["bias"], *how)
    if not rank["transposed"]:
        return y
    # Row 0 of y is where the window's first row begins to add; the rank's outputs begin at its own's.
    skipped = (rank["owned"][index] - rank["starts"][index]) * stride[at] + rank["padding"][at]
    spread = (rank["x"].shape[dim] - 1) * stride[at] + dilation[at] * (rank["weight"].shape[dim] - 1) + 1
    return y.narrow(dim, skipped, spread - 2 * rank["padding"][at] + rank["output_padding"][at])


def _ring_attention(ranks: Sequence[Arguments]) -> list[Tensor]:
    """Each rank's queries with all keys, under a mask that is written out."""
    key, value = (torch.cat([rank[name] for rank in ranks], -2) for name in ("key", "value"))
    return [_attended(rank, key, value) for rank in ranks]


def _merged_attention(ranks: Sequence[Arguments]) -> list[Tensor]:
    """All keys for each rank, which has the same queries as the others."""
    return _ring_attention([dict(rank) | {"place": 0, "starts": [rank["first"]]} for rank in ranks])


def _attended(rank: Arguments, key: Tensor, value: Tensor) -> Tensor:
    query, first = rank["query"], rank["starts"][rank["place"]]
    rows = torch.arange(first, first + query.shape[-2], device=query.device)
    after = torch.arange(key.shape[-2], device=query.device) - rows.unsqueeze(-1)  # of a key, from the row on
    seen = torch.ones_like(after, dtype=torch.bool)
    if rank["before"] is not None:
        seen &= after >= -rank["before"]
    if rank["after"] is not None:
        seen &= after <= rank["after"]
    groups = query.shape[-3] // key.shape[-3]
    key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    mask = rank["mask"]
    if mask is not None:  # by torch's kernel: its backward of rows that are hidden as a whole is its own
        mask = mask & seen if mask.dtype is torch.bool else mask
        return F.scaled_dot_product_attention(query, key, value, mask, scale=rank["scale"])
    scores = (query @ key.mT * rank["scale"]).masked_fill(~seen, -torch.inf)
    attended: Tensor = torch._safe_softmax(scores, -1) @ value
    return attended


def _expert_counts(ranks: Sequence[Arguments]) -> list[Tensor]:
    """For each rank the numbers of rows that all send to its experts."""
    sent = [torch.split(rank["sent"], list(rank["lengths"])) for rank in ranks]
    return [torch.cat([each[me] for each in sent]) for me in range(len(ranks))]


def _travel(ranks: Sequence[Arguments]) -> list[Tensor]:
    """Rows to the ranks that own their experts, or back from these."""
    moved = [_rows_between(rank) for rank in ranks]
    parts = [
        torch.split(rank["x"], [there if rank["back"] else here for here, there in zip(*each, strict=True)])
        for rank, each in zip(ranks, moved, strict=True)
    ]
    return [torch.cat([each[me] for each in parts]) for me in range(len(ranks))]


def _rows_between(rank: Arguments) -> tuple[list[int], list[int]]:
    """The rows that a rank sends to each other, and gets of each."""
    lengths = list(rank["lengths"])
    got = rank["got"].chunk(len(lengths))
    return [int(each.sum()) for each in rank["sent"].split(lengths)], [int(each.sum()) for each in got]


def _batch_norm(ranks: Sequence[Arguments]) -> list[Tensor]:
    """Serial batch norm of all samples; each rank's own weight and bias; buffers updated once."""
    xs, one = _tensors(ranks), ranks[0]
    by_channel = [x.transpose(0, 1).flatten(1) for x in xs]  # (C, N * pixels)
    full = torch.cat(by_channel, dim=1)
    if full.shape[1] != one["count"]:
        raise CheckError(
            where="autopar::batch_norm",
            found=f"count {one['count']}",
            wanted=f"{full.shape[1]}, the number of elements of a channel over all ranks",
            remedy="compute count from the global shape",
        )
    mean, var = _copy(one["running_mean"]), _copy(one["running_var"])
    normal = F.batch_norm(
        full.unsqueeze(0), mean, var, training=True, momentum=one["momentum"], eps=one["eps"]
    )
    for rank in ranks:
        for buffer, new in ((rank["running_mean"], mean), (rank["running_var"], var)):
            if new is not None:
                buffer.copy_(new)
    parts = torch.split(normal.squeeze(0), [part.shape[1] for part in by_channel], 1)
    return [_affine(part, rank) for part, rank in zip(parts, ranks, strict=True)]


def _affine(normal: Tensor, rank: Arguments) -> Tensor:
    """Scale and shift, and go back from (C, N * pixels) to the shape of the rank's x."""
    x, weight, bias = rank["x"], rank["weight"], rank["bias"]
    y = normal if weight is None else normal * weight.unsqueeze(1)
    y = y if bias is None else y + bias.unsqueeze(1)
    return y.reshape(x.transpose(0, 1).shape).transpose(0, 1).to(x.dtype)  # weights may have more bits


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _gather_together(ranks: Sequence[Arguments]) -> list[Any]:
    """What each weight of a list is when it is gathered by itself."""
    one, count = ranks[0], len(ranks)
    fulls = [
        _join([rank["xs"][index] for rank in ranks], dim, blocks)
        for index, (dim, blocks) in enumerate(zip(one["dims"], one["blocks"], strict=True))
    ]
    return [fulls] * count


def _handles(ranks: Sequence[Arguments]) -> list[Any]:
    """A list of one for each rank, in which nothing is read."""
    return [[rank["xs"][0].new_zeros(1)] for rank in ranks]


def _waited_together(ranks: Sequence[Arguments]) -> list[Any]:
    """The gather of what comes behind the handle."""
    return _gather_together([{**rank, "xs": rank["xs"][1:]} for rank in ranks])


MEANINGS: dict[str, Callable[[Sequence[Arguments]], list[Any]]] = {
    "p_to_r": _sum_everywhere,
    "p_to_b": _sum_everywhere,
    "r_to_b": _unchanged,
    "b_to_r": _unchanged,
    "r_to_p": _first_only,
    "b_to_p": _first_only,
    "s_to_r": _gather,
    "s_to_b": _gather,
    "s_to_r_regather": _gather,
    "s_to_b_regather": _gather,
    "start_p_to_r": _sum_everywhere,
    "start_p_to_b": _sum_everywhere,
    "start_r_to_b": _unchanged,
    "wait_p_to_r": _waited,
    "wait_p_to_b": _waited,
    "wait_r_to_b": _waited,
    "fetch_regather": _unchanged,  # the host's memory is any
    START + FETCH_AHEAD: _unchanged,
    WAIT + FETCH_AHEAD: _waited,
    "late_gradient": _unchanged,
    "late_linear": lambda ranks: [F.linear(*rank.values()) for rank in ranks],
    "late_convolution": lambda ranks: [torch.convolution(*rank.values()) for rank in ranks],
    "p_to_s": _scatter_sum,
    "r_to_s": _slice,
    "b_to_s": _slice,
    "s_to_p": _zero_pad,
    "s_to_s": _resplit,
    "exchange": _exchange,
    "needed_rows": _needed_rows,
    "max_reduce": _max_everywhere,
    "convolution": _convolution,
    "batch_norm": _batch_norm,
    "ring_attention": _ring_attention,
    "merged_attention": _merged_attention,
    "expert_counts": _expert_counts,
    "travel": _travel,
    **{"r_to_b" + ending: _unchanged for ending in SUMMED.values()},
    **{"s_to_b" + ending + suffix: _gather for ending in SUMMED.values() for suffix in ("", REGATHER)},
    **{
        name + TOGETHER + suffix: _gather_together
        for name in ("s_to_r", "s_to_b", *("s_to_b" + ending for ending in SUMMED.values()))
        for suffix in ("", REGATHER)
    },
    **{START + name: _gather for name in HALVED},  # of a move in two halves the first does all
    **{WAIT + name: _waited for name in HALVED},
    **{START + name: _handles for name in GROUPED},  # and of several moves the second
    **{WAIT + name: _waited_together for name in GROUPED},
}
