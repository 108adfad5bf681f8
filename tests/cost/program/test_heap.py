"""What becomes of gradients in memory: a CPU keeps its buckets from step to step, a GPU makes them anew."""

from __future__ import annotations

import pytest
import torch

from autopar.cost.program.heap import GradientSums, Heap
from autopar.cost.program.tape import Weight

NBYTES = 6 * 2**20  # alone on a CPU


@pytest.mark.parametrize(
    "device, nbytes, begun, most, ended",
    [
        ("cpu", 8, 16, 16 + 16, 16),
        ("cuda", 8, 0, 16 + 16, 16),
        ("cpu", NBYTES, 0, 2 * NBYTES, 2 * NBYTES),
        ("cuda", NBYTES, 0, 4 * NBYTES, 2 * NBYTES),
    ],
)
def test_a_bucket_lies_beside_its_gradients_when_it_is_put_together(
    device: str, nbytes: int, begun: int, most: int, ended: int
) -> None:
    heap = Heap()
    weights = [Weight(name, place, nbytes, torch.float32, "a@2") for place, name in enumerate("vw")]
    sums = GradientSums(heap, weights, adding=False, device=device)
    sums.begin()
    assert heap.now == begun
    for weight in reversed(weights):
        heap.hold(weight.name, nbytes)
        sums.arrive(weight, weight.name)
    assert (heap.most, heap.now) == (most, ended)
