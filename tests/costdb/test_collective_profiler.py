"""Collectives are measured on a real process group, with the same answer on every rank."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.core.costs import Collective
from autopar.errors import InputError
from costdb import collective_profiler
from costdb.collective_profiler import ROUNDS, Exchange, measure_collective, measure_in_rounds
from costdb.database import Database
from costdb.setting import Setting
from tests.pool import Pool

Pools = Callable[[int], Pool]
SIZES = (7_200, 7_200_000)  # whole elements for 2 and 3 ranks, which exchange whole ones of theirs

BANDWIDTH = 1e8  # bytes/s of a collective's largest tensor


class Link(TorchDispatchMode):
    """A clock that moves by the bytes that collectives carry."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.nbytes += max(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))

    def perf_counter(self) -> float:
        return self.nbytes / BANDWIDTH


def _measure(rank: int, folder: str, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    with Link() as link:
        collective_profiler.time = link  # type: ignore[assignment]  # in a process of its own
        measured = [
            measure_collective(kind, nbytes, group, budget=0.005) for kind in Collective for nbytes in SIZES
        ]
    with Database.open(f"{folder}/{rank}.sqlite") as database:
        database.write_collectives(Setting.here(), measured)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_every_kind_takes_as_long_as_its_bytes_and_ranks_agree(size: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_measure, args=(rank, str(tmp_path), size)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * size
    found = []
    for rank in range(size):
        with Database.open(tmp_path / f"{rank}.sqlite") as database:
            (setting,) = database.settings()
            found.append({(each.kind, each.nbytes): each.seconds for each in database.collectives(setting)})
    assert all(other == found[0] for other in found)
    assert set(found[0]) == {(kind, nbytes) for kind in Collective for nbytes in SIZES}
    for (kind, nbytes), seconds in found[0].items():
        carried = nbytes // size if kind is Collective.ALL_TO_ALL else nbytes
        assert seconds == pytest.approx(carried / BANDWIDTH)


def test_one_rank_has_nothing_to_measure(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        with pytest.raises(InputError, match="two ranks"):
            measure_collective(Collective.ALL_REDUCE, 8, group)
    finally:
        dist.destroy_process_group()


# -- in rounds ---------------------------------------------------------------------------------------


class Turns:
    """A clock that an exchange moves by the seconds of its rank, and what was done meanwhile."""

    def __init__(self, rank: int) -> None:
        self.rank, self.now, self.done = rank, 0.0, ""

    def perf_counter(self) -> float:
        return self.now

    def note(self, what: str, seconds: float = 0.0) -> None:
        self.done += what
        self.now += seconds

    def exchange(self, name: str, seconds: tuple[float, float] | None) -> Exchange:
        """One that takes so many seconds on either rank; None that this rank has no part in it."""
        group = dist.group.WORLD
        assert group is not None
        run = None if seconds is None else lambda: self.note(name, seconds[self.rank])
        return Exchange(Collective.SEND_RECV, 8, group, 1, run, lambda: self.note("!"))


def _in_turns() -> tuple[str, list[float], list[int]]:
    turns, real = Turns(dist.get_rank()), collective_profiler.time
    collective_profiler.time = turns  # type: ignore[assignment]
    others = None if turns.rank else (0.5, 0.5)
    every = [turns.exchange("a", (0.25, 0.125)), turns.exchange("b", (0.5, 2.0)), turns.exchange("c", others)]
    try:
        found = measure_in_rounds(every, lambda: turns.note(".", 100.0), budget=1.0)
    finally:
        collective_profiler.time = real
    return turns.done, [item.seconds for item in found], [item.runs for item in found]


def test_between_exchanges_there_is_work_and_the_last_rank_waits_for_nobody(pools: Pools) -> None:
    first, second = pools(2).run(_in_turns)
    assert first[1:] == second[1:] == ([0.125, 0.5, 0.5], [4, 3, 3])
    assert first[0].startswith(2 * ".!a.!b.!c"), "to warm up"
    assert first[0].count(".!b") == 2 + 3 and first[0].count(".!a") == 2 + 4
    assert second[0] == first[0].replace("c", "")


def _many() -> list[int]:
    turns, real = Turns(dist.get_rank()), collective_profiler.time
    collective_profiler.time = turns  # type: ignore[assignment]
    try:
        found = measure_in_rounds([turns.exchange("a", (1e-6, 1e-6))], lambda: None, budget=1.0)
    finally:
        collective_profiler.time = real
    return [item.runs for item in found]


def test_short_exchanges_take_part_in_every_round(pools: Pools) -> None:
    assert pools(2).run(_many) == [[ROUNDS]] * 2
