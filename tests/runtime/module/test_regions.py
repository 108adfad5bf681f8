"""A rank reads its region of an input, and nothing else of a file that is mapped into memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool

Pools = Callable[[int], Pool]
SHAPE = (1, 1, 256, 64, 128)  # 16 MiB of float64: the kernel maps pages of 2 MiB where it can


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv3d(2, 1, 3, padding=1)).double()


def parallel(**options: Any) -> ParallelModule:
    cluster = ClusterSpec.local(dist.get_world_size())
    example = torch.zeros(SHAPE, dtype=torch.float64)
    model: ParallelModule = autopar.parallelize(
        make(), cluster, (example, example), loss_fn=F.mse_loss, measure=False, quiet=True, **options
    )
    return model


def mapped(path: Path) -> Tensor:
    return torch.from_numpy(numpy.memmap(path, dtype=numpy.float64, mode="c", shape=SHAPE))


def resident(path: Path) -> int:
    """Bytes of the file that this process has in its own pages."""
    text = Path("/proc/self/smaps").read_text()
    sections = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text)
    pages = [re.search(r"^Rss: +(\d+) kB", item, re.MULTILINE) for item in sections if str(path) in item]
    return sum(int(item[1]) << 10 for item in pages if item)


def _read(path: Path) -> tuple[int, list[tuple[int, int]], float, float]:
    """Bytes of the file that a rank reads, its region, and the losses of both ways to pass the input."""
    model = parallel(inputs="local", force="domain", mesh="4")
    x = mapped(path)
    target = torch.zeros(SHAPE, dtype=torch.float64)
    loss = model(x, target)
    loss.backward()
    read = resident(path)
    region = model.region("input_0")
    filled = torch.full(SHAPE, torch.nan, dtype=torch.float64)
    filled[region] = x[region]
    return read, [(item.start, item.stop) for item in region], loss.item(), model(filled, target).item()


@pytest.mark.slow
def test_each_rank_reads_its_part_of_a_mapped_volume_alone(pools: Pools, tmp_path: Path) -> None:
    path = tmp_path / "volume"
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x.numpy().tofile(path)
    expected = F.mse_loss(make()(x), torch.zeros(SHAPE, dtype=torch.float64)).item()
    ranks = pools(4).run(_read, path)
    for rank, (read, region, loss, again) in enumerate(ranks):
        assert region == [(0, 1), (0, 1), (64 * rank, 64 * (rank + 1)), (0, 64), (0, 128)]
        assert x.nbytes // 4 <= read <= 1.1 * x.nbytes / 4
        assert loss == pytest.approx(expected, rel=1e-12) and again == loss


def _regions() -> list[list[tuple[int, int]]]:
    pairs = []
    cases: tuple[dict[str, Any], ...] = (
        {"force": "batch", "inputs": "local"},
        {"force": "batch", "micro_batches": 2},
        {"stages": 2},
    )
    for options in cases:
        x = torch.zeros(8, 4)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        cluster = ClusterSpec.local(2)
        model: ParallelModule = autopar.parallelize(
            net, cluster, (x, x), loss_fn=F.mse_loss, measure=False, quiet=True, **options
        )
        with pytest.raises(InputError, match=r"region of the parallel module: found input z, wanted one of"):
            model.region("z")
        pairs.append([(item.start, item.stop) for item in model.region("input_0")])
    return pairs


def test_regions_are_of_samples_of_whole_steps_and_of_own_stages(pools: Pools) -> None:
    (first, many, staged), (second, same, none) = pools(2).run(_regions)
    assert first == [(0, 4), (0, 4)] and second == [(4, 8), (0, 4)]
    assert many == same == staged == [(0, 8), (0, 4)] and none == []
