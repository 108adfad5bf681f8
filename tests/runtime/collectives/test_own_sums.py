"""Sums by steps of messages: of any number of ranks, by every algorithm, and by gloo's messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.core.links import Link
from autopar.core.sum_schedules import SumAlgorithm, SumSchedule, schedule_of
from autopar.core.topology import Topology, TopologyKind
from autopar.cost.topology.price import best_steps
from autopar.runtime.collectives import own_sums, transport
from autopar.runtime.collectives.own_sums import sum_by_steps
from autopar.runtime.launch import worker
from autopar.runtime.launch.launch import run_function

SIZE = 37  # elements: no number of ranks cuts them evenly
RING = Topology(TopologyKind.RING, 8)
LINK = Link(latency=1e-4, bandwidth=25e6)


def sums(schedule: SumSchedule, held: Sequence[Tensor]) -> list[int]:
    """Bytes that each rank sends, the ranks being threads."""
    mail: dict[tuple[int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)
    sent = [0] * len(held)

    def exchange(me: int, sends: Sequence[tuple[int, Tensor]], slots: Sequence[tuple[int, Tensor]]) -> None:
        for to, part in sends:
            mail[me, to].put(part.clone())
        for by, slot in slots:
            slot.copy_(mail[by, me].get(timeout=10))

    def rank(me: int) -> None:
        sent[me] = sum_by_steps(held[me], schedule, me, partial(exchange, me))

    threads = [Thread(target=rank, args=(me,)) for me in range(len(held))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sent


@pytest.mark.parametrize("ranks", range(2, 10))
@pytest.mark.parametrize("algorithm", SumAlgorithm)
def test_all_ranks_have_the_sum_and_send_what_is_priced(algorithm: SumAlgorithm, ranks: int) -> None:
    schedule = schedule_of(algorithm, ranks)
    if schedule is None:
        assert algorithm is SumAlgorithm.HIERARCHICAL and ranks in (2, 3, 5, 7)
        return
    generator = torch.Generator().manual_seed(ranks)
    held = [torch.randn(SIZE * schedule.parts, generator=generator) for _ in range(ranks)]
    wanted = torch.stack(held).double().sum(0)
    counts = [0] * ranks
    for step in schedule.steps:
        for sender, _, count in step.traffic:
            counts[sender] += count * SIZE * held[0].itemsize
    assert sums(schedule, held) == counts
    torch.testing.assert_close(held[0].double(), wanted, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(each, held[0]) for each in held)  # the same bits


@pytest.mark.parametrize("size", [1, 2, SIZE])
def test_uneven_and_empty_parts(size: int) -> None:
    for algorithm in SumAlgorithm:
        if (schedule := schedule_of(algorithm, 6)) is not None:
            held = [torch.full((size,), float(rank), dtype=torch.float64) for rank in range(6)]
            sums(schedule, held)
            assert all((each == 15).all() for each in held)


def test_what_is_chosen_is_what_is_priced() -> None:
    """On a ring of slow links a ring; of few bytes what has few steps; of ranks that aren't a run nothing."""
    large = best_steps(RING, LINK, 1, tuple(range(8)), 64 << 20)
    small = best_steps(RING, LINK, 1, tuple(range(8)), 64)
    assert large is not None and small is not None
    assert len(large.steps) == 14 and len(small.steps) < 14
    assert best_steps(RING, LINK, 2, (0, 2, 4, 6), 64) is not None
    for ranks in ((0, 2), (1, 2), (0, 1, 2), (0, 0)):
        assert best_steps(RING, LINK, 1, ranks, 64) is None


def sum_on_processes() -> None:
    """On a rank: sums as gloo's, by each algorithm, two under way at the same time."""
    worker.init()
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    for algorithm in SumAlgorithm:
        schedule = schedule_of(algorithm, dist.get_world_size())
        own_sums.choose_sums(lambda ranks, nbytes, found=schedule: found)  # type: ignore[misc]
        mine = [torch.randn(50_000 + rank - rank, dtype=torch.float64) for _ in range(2)]
        wanted = [tensor.clone() for tensor in mine]
        waits = [transport.start_sum(tensor, group, later=False) for tensor in mine]
        transport.all_reduce(third := torch.ones(9000, dtype=torch.float64), group)
        for wait in waits:
            wait()
        for tensor in wanted:
            dist.all_reduce(tensor)
        assert (third == dist.get_world_size()).all()
        for tensor, theirs in zip(mine, wanted, strict=True):
            torch.testing.assert_close(tensor, theirs, rtol=1e-12, atol=1e-12)
    assert (group in own_sums._threads) == (dist.get_world_size() > 1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 5])
def test_sums_on_processes(ranks: int) -> None:
    run_function(sum_on_processes, ranks)
