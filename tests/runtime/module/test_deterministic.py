"""Two runs of one plan, from the same seeds and with deterministic algorithms, end with the same bits."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.launch.launch import run_function
from tests.pool import Pool


class Net(nn.Module):
    """A table that is read at places that repeat, a convolution, and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 12)
        self.filters, self.drop, self.head = nn.Conv1d(12, 8, 3, padding=1), nn.Dropout(0.3), nn.Linear(8, 4)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        rows = self.filters(self.table(words).transpose(1, 2))
        pooled = self.drop(torch.relu(rows)).mean(2)
        return nn.functional.cross_entropy(self.head(pooled), labels)


def train(seed: int) -> str:
    """A digest of all bits of the losses and of the parameters, after some steps."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    words, labels = torch.randint(7, (6, 10, 9)), torch.randint(4, (6, 10))
    cluster = autopar.ClusterSpec.local(2)
    example = (words[0], labels[0])
    parallel = autopar.parallelize(Net(), cluster, example, measure=False, quiet=True, force="batch")
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1, momentum=0.9)
    found = hashlib.blake2b()
    for batch in zip(words, labels, strict=True):
        optimizer.zero_grad()
        loss = parallel(*batch)
        loss.backward()
        optimizer.step()
        found.update(loss.detach().numpy().tobytes())
    for item in parallel.state_dict().values():
        found.update(item.numpy().tobytes())
    return found.hexdigest()


def two() -> tuple[str, str]:
    torch.set_num_threads(1)
    return train(3), train(4)


@pytest.mark.slow
def test_two_runs_from_one_seed_are_the_same_bit_by_bit() -> None:
    """By ranks that are forked, and by others that are launched, whose sets and dicts of hashes have other
    orders."""
    pool = Pool(2)
    try:
        first, again = pool.run(two, timeout=240), run_function(two, 2)
    finally:
        pool.close()
    assert first == again and first[0] == first[1]
    assert len({*first[0]}) == 2  # another seed is another run
