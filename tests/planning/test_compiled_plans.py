"""What is asked to be compiled is planned as what compiled programs cost and hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.planning.asked.option_environment import VARIABLE, settle_beside_plan
from autopar.results.plan.plan import Plan

# On such links a sum of the norm's gradients takes 0.16 ms. Half of the chain's operators take 0.5 ms if they
# run one by one, and 0.05 ms if they are fused.
CLUSTER = ClusterSpec(devices_per_node=2, device="H100", intra=Link(1e-6, 1e11))


class Chain(nn.Module):
    """A norm whose weights are half as large as the batch, and many pointwise operators."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4_000_000, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for _ in range(10):
            x = torch.sin(x) * 2.0
        return x.sum()


def planned(*, compile: bool) -> Plan:
    with torch.device("meta"):
        model, batch = Chain(), torch.empty(2, 4_000_000)
    return autopar.plan(
        model, CLUSTER, (batch,), compile=compile, stages=1, micro_batches=1, shard_state="none"
    )


def test_the_plan_follows_from_what_is_fused() -> None:
    eager, compiled = (planned(compile=each) for each in (False, True))
    assert compiled.step_seconds < eager.step_seconds / 2
    assert compiled.peak_bytes < eager.peak_bytes
    assert {layer.strategy for layer in compiled.layers} != {layer.strategy for layer in eager.layers}
    assert any(strategy != (None,) for strategy in {layer.strategy for layer in eager.layers})
    assert all(layer.strategy == (None,) for layer in compiled.layers)


def test_beside_a_plan_the_environment_still_says_whether_to_compile() -> None:
    environment = {VARIABLE: '{"compile": true, "stages": 2}'}
    found = settle_beside_plan(environment)
    assert found.compile and found.stages == 1


def test_a_compiled_backward_gives_all_gradients_at_its_end() -> None:
    """Beside buckets of as many bytes; otherwise those of one bucket wait for each other."""
    with torch.device("meta"):
        model, batch = (
            nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(20))),
            torch.empty(8, 1000),
        )
    cluster = ClusterSpec.local(2)
    eager, compiled = (
        autopar.plan(
            model, cluster, (batch,), compile=each, force="batch", stages=1, micro_batches=1, measure=False
        )
        for each in (False, True)
    )
    assert 40e6 < compiled.peak_bytes - eager.peak_bytes < 80e6
