"""Dropout of every kind draws the serial masks where asked to, and drops the same channels in all parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.graph import Ref
from autopar.core.mesh import Mesh
from autopar.ops.dropout import Dropout
from tests.forced_programs import force_factors
from tests.pool import Pool
from tests.proof.models import Script
from tests.proof.plans import dims_of, prove
from tests.runtime.collectives.test_random import prepared
from tests.sharding.test_sample_independence import mixing

aten = torch.ops.aten
Pools = Callable[[int], Pool]

KINDS = [
    pytest.param(lambda x, p: F.dropout1d(x, p), id="channels"),
    pytest.param(lambda x, p: F.alpha_dropout(x, p, training=True), id="self-normalising"),
    pytest.param(lambda x, p: F.feature_alpha_dropout(x, p, training=True), id="channels, self-normalising"),
]


@pytest.mark.parametrize("target", Dropout.targets, ids=str)
@pytest.mark.parametrize("factor", ["-", "d0", "d1", "d2"])
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_the_exact_mask_is_the_serial_one_in_every_split(target: Any, factor: str, p: float) -> None:
    s = Script()
    turned = s.call(aten.permute.default, Ref(s.user(4, 5, 6)), [2, 0, 1])
    dropped = s.call(target, Ref(turned), p, True)
    model = s.model(dropped)
    dims = dims_of(model, Mesh((2,)))
    assert prove(model, force_factors(model.graph, dims, {dropped: factor}), dims)[0] < 1e-9


@pytest.mark.parametrize("drop", KINDS)
def test_samples_draw_each_for_itself(drop: Callable[[Tensor, float], Tensor]) -> None:
    assert mixing(lambda _, x: drop(x.reshape(6, 2, 4), 0.5).mean()) is None


class Channels(nn.Module):
    """An image whose channels are dropped, and a self-normalising part; 12 rows may lie on several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Conv2d(2, 8, 1), nn.Dropout2d(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.first(x).square() + 1)


def _dropped(kind: str) -> Tensor:
    """The output, whole, of a rank's program with masks of the ranks' own."""
    ours = prepared(Channels(), kind, torch.ones(4, 2, 12, 3))
    return ours(torch.ones(4, 2, 12, 3)).detach()


@pytest.mark.parametrize("kind", ["batch", "height", "filter"])
def test_parts_of_a_channel_are_dropped_alike_and_channels_each_for_itself(pools: Pools, kind: str) -> None:
    output, other = pools(2).run(_dropped, kind)
    assert torch.equal(output, other)
    kept = output != 0
    assert torch.equal(kept, kept[:, :, :1, :1].expand_as(kept))
    of_channels = kept[:, :, 0, 0]
    halves = {"batch": of_channels.chunk(2), "filter": of_channels.chunk(2, dim=1)}.get(kind, ())
    assert 0 < of_channels.sum() < of_channels.numel() and not (halves and torch.equal(*halves))
