"""Sums between machines by messages of our own, where a cluster file says how their links are laid.

    sum of x     steps of messages (core/sum_schedules.py) ──> parts are added, or put in their place

What is chosen is the algorithm that costs least on those links. A thread for each group runs its sums, one
after the other and beside compute, as gloo's would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from autopar.core.sum_schedules import SumSchedule

SUM_TAG = 2  # of these messages, beside others of a group
Choose = Callable[[tuple[int, ...], int], SumSchedule | None]
Exchange = Callable[[Sequence[tuple[int, Tensor]], Sequence[tuple[int, Tensor]]], None]

_choose: Choose | None = None
_threads: WeakKeyDictionary[ProcessGroup, ThreadPoolExecutor] = WeakKeyDictionary()


def choose_sums(choose: Choose | None) -> None:
    """Let sums of so many bytes over ranks of the world run as `choose` says; None leaves them to gloo."""
    global _choose
    _choose = choose


def chosen(x: Tensor, group: ProcessGroup) -> SumSchedule | None:
    """The steps by which this sum is to run, if not by gloo."""
    if _choose is None or not x.is_cpu or dist.get_backend(group) != dist.Backend.GLOO:
        return None
    return _choose(tuple(dist.get_process_group_ranks(group)), x.nbytes)


def start_own_sum(x: Tensor, schedule: SumSchedule, group: ProcessGroup) -> Future[int]:
    """Begin to sum the contiguous `x` over the group, in place; bytes that this rank sends."""
    if group not in _threads:
        _threads[group] = ThreadPoolExecutor(1, "autopar sums")
    exchange = partial(_exchange_messages, group)
    return _threads[group].submit(sum_by_steps, x, schedule, group.rank(), exchange)


@torch.no_grad()
def sum_by_steps(x: Tensor, schedule: SumSchedule, me: int, exchange: Exchange) -> int:
    """Sum the contiguous `x` over ranks, in place; returns the bytes that rank `me` sends.

    `exchange` sends tensors to ranks, and receives from ranks into others.
    """
    parts, sent = x.view(-1).tensor_split(schedule.parts), 0
    for step in schedule.steps:
        out = [(to, _joined(parts, step.parts_of(me, to))) for by, to, _ in step.traffic if by == me]
        into = [(by, [parts[at] for at in step.parts_of(by, me)]) for by, to, _ in step.traffic if to == me]
        slots = [(by, x.new_empty(sum(part.numel() for part in each))) for by, each in into]
        exchange([item for item in out if item[1].numel()], [item for item in slots if item[1].numel()])
        sent += sum(tensor.nbytes for _, tensor in out)
        for (_, mine), (_, slot) in zip(into, slots, strict=True):
            for part, theirs in zip(mine, slot.split([part.numel() for part in mine]), strict=True):
                part.add_(theirs) if step.adds else part.copy_(theirs)
    return sent


def _joined(parts: Sequence[Tensor], numbers: Iterable[int]) -> Tensor:
    """Parts one after the other."""
    found = [parts[at] for at in numbers]
    return found[0] if len(found) == 1 else torch.cat(found)


def _exchange_messages(
    group: ProcessGroup, sends: Sequence[tuple[int, Tensor]], slots: Sequence[tuple[int, Tensor]]
) -> None:
    works = [dist.irecv(slot, group=group, group_src=by, tag=SUM_TAG) for by, slot in slots]
    works += [dist.isend(part, group=group, group_dst=to, tag=SUM_TAG) for to, part in sends]
    for work in works:
        assert work is not None
        work.wait()
