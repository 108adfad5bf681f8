"""Gradients of cast weights, summed over ranks in the dtype that is asked for."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.runtime.collectives import transport
from tests.pool import Pool
from tests.whole_tensors import full_of

Pools = Callable[[int], Pool]
WIDTH = 24
TOLERANCE = 0.03  # of the largest gradient of a weight: of the products, as much as of the sums


class Net(nn.Module):
    """Weights that are cast, those of a norm, which aren't, and one that is used both ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(WIDTH, 40), nn.LayerNorm(40), nn.Linear(40, WIDTH)
        self.both = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.down(torch.tanh(self.norm(self.up(x))))
        return F.mse_loss((h @ self.both).float() + self.both.diagonal(), y)


def _recorded(sent: Counter[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point() and tensor.numel() > 1:
            sent[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
        return function(tensor, *args, **kwargs)

    return record


def _gradients(options: dict[str, Any]) -> tuple[dict[str, int], float]:
    """Numbers that are summed, by dtype, and how far gradients are from the serial ones under autocast."""
    serial, batch = Net(), (torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    cluster = autopar.ClusterSpec.local(dist.get_world_size())
    options = {"dtype": "bf16", "measure": False, "quiet": True, **options}
    ours = autopar.parallelize(copy.deepcopy(serial), cluster, batch, **options)
    sent: Counter[Any] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((dist, "all_reduce"), (transport, "all_reduce"), (transport, "reduce_scatter")):
            patch.setattr(module, name, _recorded(sent, getattr(module, name)))
        if options.get("micro_batches", 1) > 1:
            ours.train_step(*batch)
        else:
            ours(*batch).backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = serial(*batch)
    loss.backward()
    wanted = {name: item.grad for name, item in serial.named_parameters()}
    found = {name: item.grad for name, item in ours.named_parameters() if item.numel()}
    assert all(item.dtype == torch.float32 for item in found.values())
    gaps = [
        float((full_of(found[name]) - each).abs().max() / each.abs().max())
        for name, each in wanted.items()
        if name in found and found[name] is not None
    ]
    return dict(sent), max(gaps, default=0.0)


CAST = 2 * WIDTH * 40 + 40 + WIDTH  # numbers of weights that are cast alone
OTHERS = 2 * 40 + WIDTH * WIDTH


@pytest.mark.parametrize(
    "more",
    [
        {"stages": 1},
        pytest.param({"stages": 1, "micro_batches": 2}, marks=pytest.mark.long),
        pytest.param({"stages": 2, "micro_batches": 2, "mesh": "2"}, marks=pytest.mark.long),
    ],
    ids=["whole", "micro-batches", "stages"],
)
@pytest.mark.parametrize("shard_state", ["none", "gradients", "weights"])
def test_gradients_of_cast_weights_are_summed_in_the_dtype_that_is_asked_for(
    shard_state: str, more: dict[str, Any], pools: Pools
) -> None:
    options = {"force": "batch", "shard_state": shard_state, **more}
    for word in ("fp32", "bf16"):
        ranks = pools(2 * more["stages"]).run(_gradients, options | {"reduce_dtype": word})
        assert 0 < max(gap for _, gap in ranks) < TOLERANCE
        assert any(sent.get("bfloat16") for sent, _ in ranks) is (word == "bf16")
        if word == "bf16" and shard_state == "none" and len(more) == 1:
            assert all(sent == {"bfloat16": CAST, "float32": OTHERS} for sent, _ in ranks)


def test_what_is_cast_to_half_may_be_summed_in_bfloat16(pools: Pools) -> None:
    options = {"force": "batch", "shard_state": "none", "dtype": "fp16", "reduce_dtype": "bf16"}
    for sent, gap in pools(2).run(_gradients, options):
        assert sent == {"bfloat16": CAST, "float32": OTHERS} and gap < TOLERANCE
