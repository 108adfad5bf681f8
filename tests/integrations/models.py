"""What the frameworks train in these tests: small, in float64, without random operators."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autopar

BATCH = 8
EXAMPLE = (torch.zeros(BATCH, 6, dtype=torch.float64), torch.zeros(BATCH, dtype=torch.long))


class Net(nn.Module):
    """Its loss, and its logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.hidden(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Counting(Net):
    """Its loss is of all batches that are accumulated, as the Trainer counts them."""

    accepts_loss_kwargs = True

    def forward(
        self, x: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None
    ) -> dict[str, Tensor]:
        found = super().forward(x, labels)
        if num_items_in_batch is not None:
            total = nn.functional.cross_entropy(found["logits"], labels, reduction="sum")
            found["loss"] = total / num_items_in_batch
        return found


def parallel(model: nn.Module, **options: Any) -> Any:
    """The model on all ranks, by an estimated plan."""
    cluster = autopar.ClusterSpec.local(dist.get_world_size())
    given: dict[str, Any] = {"measure": False, "quiet": True, "force": "batch"} | options
    return autopar.parallelize(model, cluster, EXAMPLE, **given)


def rows(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (count,), generator=generator))


def loader(count: int, seed: int, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(rows(count, seed), batch_size=BATCH, shuffle=shuffle)


def gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert list(ours) == list(theirs)
    return max(float((ours[name] - item).abs().max()) for name, item in theirs.items())


def beside_serial(pools: Any, train: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """What `train(folder, serial, ...)` gives in a process of its own, and on both of two ranks."""
    results = []
    for size, serial in ((1, True), (2, False)):
        with tempfile.TemporaryDirectory() as folder:
            found = pools(size).run(train, Path(folder), serial, *arguments, timeout=240)
        assert len(found) == size
        results.append(found)
    (theirs,), (first, second) = results
    assert str(first) == str(second)
    return theirs, first


@contextmanager
def launched() -> Iterator[None]:
    """Within, the environment is that of a launcher, by which frameworks know of a world."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (told | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
            if size != "1":
                patch.setenv(name, value)
        yield
