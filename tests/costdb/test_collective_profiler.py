"""Collectives are measured on a real process group, with the same answer on every rank."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.core.costs import Collective
from autopar.errors import InputError
from costdb.collective_profiler import measure_collective
from costdb.database import Database
from costdb.setting import Setting

SIZES = (1_200, 12_000_000)  # whole elements for 2 and 3 ranks


def _measure(rank: int, folder: str, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    measured = [
        measure_collective(kind, nbytes, group, budget=0.05) for kind in Collective for nbytes in SIZES
    ]
    with Database.open(f"{folder}/{rank}.sqlite") as database:
        database.write_collectives(Setting.here(), measured)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_every_kind_is_measured_and_ranks_agree(size: int, tmp_path: Path) -> None:
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
    for kind in Collective:
        assert 0 < found[0][kind, SIZES[0]] < found[0][kind, SIZES[1]]


def test_one_rank_has_nothing_to_measure(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        with pytest.raises(InputError, match="two ranks"):
            measure_collective(Collective.ALL_REDUCE, 8, group)
    finally:
        dist.destroy_process_group()
