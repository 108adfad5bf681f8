"""Collectives are measured on a real process group, with the same answer on every rank."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
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
from costdb.collective_profiler import measure_collective
from costdb.database import Database
from costdb.setting import Setting

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
