"""Ranks meet in a store of torch.distributed, tell their facts, add up a number, time links, and compute.

    rank 0   facts ──┐                     ┌── sum over all ── 0 <-> 1, 0 <-> first rank of each other node
    rank 1   facts ──┼── store, until all ─┤
    rank 2   facts ──┘   are there or time ┘
                         is up

A rank that doesn't come is named by those that do; nothing here waits longer than `MEETING_SECONDS` for
another rank. What fails is a text, not an exception: the other findings stand.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from autopar.cluster import ClusterSpec, Link
from autopar.doctor.rank_facts import RankFacts, facts_here
from autopar.errors import cut_text
from autopar.torch_seams.collectives import PrefixStore, Store, TCPStore

MEETING_SECONDS = 15.0  # in which all ranks must have come, and in which a message must arrive
SMALL, LARGE = 16, 8 << 20  # bytes of the messages that give latency and bandwidth
ROUNDS = {SMALL: 30, LARGE: 5}
RATE_SECONDS = 0.5  # several periods of a quota of a core's time
PRODUCT_ROWS = {"cpu": 256, "cuda": 4096}  # of a square matrix
MOST_TIMED_NODES = 8  # whose links to the first node are timed


@dataclass(frozen=True, slots=True)
class TimedLink:
    """Time of a message between two ranks; `between` says whether they are on different nodes."""

    ranks: tuple[int, int]
    between: bool
    link: Link


@dataclass(frozen=True, slots=True)
class Meeting:
    """One rank's view of the meeting: facts of ranks that came, timed links (on rank 0), and failures."""

    rank: int
    seconds: float
    facts: tuple[RankFacts, ...]
    missing: tuple[int, ...] = ()
    links: tuple[TimedLink, ...] = ()
    rates: tuple[float, ...] = ()  # products a second of each rank, all at the same time
    backend: str = ""
    failed: str = ""


def meet(cluster: ClusterSpec, seconds: float = MEETING_SECONDS) -> Meeting:
    """One rank's part; its place in the world is what a launcher's variables say."""
    start, rank, world = time.monotonic(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "nccl" if cluster.device_type == "cuda" and torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    facts = facts_here(rank)
    try:
        store = PrefixStore("autopar doctor", _store(rank, world, seconds))
        store.set(str(rank), facts.as_text())
    except (RuntimeError, OSError, ValueError, KeyError) as cause:
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        failed = f"the store at {where} can't be reached: {_words(cause)}"
        return Meeting(rank, time.monotonic() - start, (facts,), failed=failed)
    come = {other: _facts_of(other, store, start + seconds) for other in range(world)}
    known = tuple(each for each in come.values() if each is not None)
    missing = tuple(other for other, each in come.items() if each is None)
    took = time.monotonic() - start
    if missing:
        return Meeting(rank, took, known, missing, backend=backend)
    try:
        links, rates = _connected(store, (rank, world), cluster, backend, seconds)
    except (RuntimeError, OSError, ValueError) as cause:
        return Meeting(rank, took, known, backend=backend, failed=f"{backend}: {_words(cause)}")
    return Meeting(rank, took, known, links=links, rates=rates, backend=backend)


def _store(rank: int, world: int, seconds: float) -> Store:
    """The launcher's store, or one that rank 0 opens; it waits for no rank but that."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        is_master=rank == 0 and not agents,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _facts_of(rank: int, store: Store, deadline: float) -> RankFacts | None:
    left = deadline - time.monotonic()
    try:
        if left > 0:
            store.wait([str(rank)], timedelta(seconds=left))
        elif not store.check([str(rank)]):
            return None
        return RankFacts.from_text(store.get(str(rank)))
    except (RuntimeError, OSError, ValueError):
        return None


def _words(cause: BaseException) -> str:
    """The first line of what torch says."""
    return cut_text((str(cause).strip().splitlines() or [type(cause).__name__])[0], 160)


def _connected(
    store: Store, place: tuple[int, int], cluster: ClusterSpec, backend: str, seconds: float
) -> tuple[tuple[TimedLink, ...], tuple[float, ...]]:
    """The links of rank 0, timed after a sum over all ranks has been right, and how fast ranks compute."""
    rank, world = place
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    try:
        device = torch.device("cuda" if backend == "nccl" else "cpu")
        total = torch.full((1,), float(rank), device=device)
        dist.all_reduce(total)
        if total.item() != world * (world - 1) / 2:
            raise ValueError(f"a sum of ranks is {total.item():g}, and not {world * (world - 1) / 2:g}")
        pairs = pairs_of(world, cluster.devices_per_node)
        timed = [TimedLink(pair, between, _timed(pair, device)) for pair, between in pairs if rank in pair]
        dist.all_reduce(total)  # no rank leaves, and none computes, while another one measures
        rates = _gathered(products_a_second(device), world, device)
        return tuple(timed) if rank == 0 else (), rates
    finally:
        dist.destroy_process_group()


def products_a_second(device: torch.device) -> float:
    """Products of square matrices, by the clock: also of a process that gets a part of a core's time."""
    size = PRODUCT_ROWS[device.type]
    matrix, count = torch.randn(size, size, device=device), 0
    matrix @ matrix
    start = time.perf_counter()
    while time.perf_counter() - start < RATE_SECONDS:
        (matrix @ matrix).sum().item()
        count += 1
    return count / (time.perf_counter() - start)


def _gathered(rate: float, world: int, device: torch.device) -> tuple[float, ...]:
    rates = torch.zeros(world, dtype=torch.float64, device=device)
    dist.all_gather_into_tensor(rates, torch.tensor([rate], dtype=torch.float64, device=device))
    return tuple(rates.tolist())


def pairs_of(world: int, per_node: int) -> list[tuple[tuple[int, int], bool]]:
    """Rank 0 with its neighbour, and with the first rank of each other node: the last say True."""
    inside = [((0, 1), False)] if min(world, per_node) > 1 else []
    return inside + [((0, first), True) for first in range(per_node, world, per_node)][: MOST_TIMED_NODES - 1]


def _timed(pair: tuple[int, int], device: torch.device) -> Link:
    """The link between two ranks, by half of what a message and its answer take."""
    first = dist.get_rank() == pair[0]
    peer = pair[1] if first else pair[0]
    times = {}
    for nbytes in (SMALL, LARGE):
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        times[nbytes] = _half_of_round(partial(_exchange, tensor, peer, first), ROUNDS[nbytes])
    latency = times[SMALL]
    return Link(latency, (LARGE - SMALL) / max(times[LARGE] - latency, 1e-9))


def _half_of_round(run: Callable[[], Any], rounds: int) -> float:
    run()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append((time.perf_counter() - start) / 2)
    return statistics.median(seconds)


def _exchange(tensor: torch.Tensor, peer: int, first: bool) -> None:
    for sends in (first, not first):
        if sends:
            dist.send(tensor, peer)
        else:
            dist.recv(tensor, peer)
    if tensor.is_cuda:
        torch.cuda.synchronize()
