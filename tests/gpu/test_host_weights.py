"""Weights in the memory of a GPU's host: pinned, stepped there, and the same numbers."""

from __future__ import annotations

import copy

import torch

from tests.gpu.test_offload import case
from tests.gpu.test_training import parallel_of


def test_weights_lie_in_pinned_memory_and_train_like_the_serial_model() -> None:
    model, batch = case()
    pair = [parallel_of(copy.deepcopy(model), batch, offload=word) for word in ("none", "state")]
    assert pair[1].plan.program.ahead  # so that copies run beside what is computed
    optimizers = [torch.optim.AdamW(side.parameters(), 1e-3) for side in pair]
    for _ in range(3):
        losses = [side(*batch) for side in pair]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert torch.allclose(*losses, rtol=1e-4)
    for item in pair[1].parameters():
        assert item.device.type == "cpu" and item.is_pinned() and item.grad.device.type == "cpu"
