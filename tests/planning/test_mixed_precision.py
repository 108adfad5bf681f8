"""Plans in low precision: casts before gathers, sums of gradients in float32, faster and smaller."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import api
from autopar.cluster import ClusterSpec, Link
from autopar.core.gathering import Gathering
from autopar.core.graph import InputKind
from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.placement import B, R
from autopar.core.precision import Precision
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.prices import Prices
from autopar.errors import InfeasibleError, InputError
from autopar.planning.asked.options import PLAN, Options
from autopar.planning.asked.request import request_of
from autopar.results.plan.plan import Plan
from autopar.rewrite.rank_program import rewrite
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.trace.export import trace
from autopar.trace.forward.autocast import Autocast
from tests.deep_net import Deep

FAST = Link(latency=5e-6, bandwidth=450e9)
GPUS = ClusterSpec(nodes=1, devices_per_node=2, device="h100", memory="80GB", intra=FAST, inter=FAST)


class Net(nn.Module):
    """Two products with a norm between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.norm(self.up(x))), y)


def planned(dtype: str, **options: object) -> tuple[Plan, nn.Module, tuple[Tensor, Tensor]]:
    with torch.device("meta"):
        net, batch = Net(4096), (torch.randn(8192, 4096), torch.randn(8192, 4096))
    plan = api.plan(
        net, GPUS, batch, dtype=dtype, mesh="2", stages=1, micro_batches=1, measure=False, **options
    )
    return plan, net, batch


def test_weights_are_cast_before_they_are_gathered() -> None:
    plan, net, batch = planned("bf16", force="batch", shard_state="gradients")
    graph = trace(net, batch, autocast=Autocast("cuda", torch.bfloat16)).graph
    weights = {item.name for item in graph.inputs if item.kind is InputKind.PARAMETER}
    matrices = {name for name in graph.cast_weights if len(graph.specs[name].shape) == 2}
    assert len(matrices) == 2
    assert all([str(move) for move in plan.program.moves[name]] for name in matrices)
    large = {name for name in weights if len(graph.specs[name].shape) == 2}
    assert not any(plan.program.moves.get(name) for name in large)
    dims = Dims(graph, find_atoms(graph), plan.mesh)
    called = [str(node.target) for node in rewrite(graph, plan.program, dims, rank=0).graph.nodes]
    assert called.count("autopar.s_to_b_wide.default") >= len(matrices)


def test_low_precision_is_faster_and_takes_less() -> None:
    fp32, bf16 = (planned(dtype, force="batch")[0] for dtype in ("fp32", "bf16"))
    assert bf16.step_seconds < fp32.step_seconds / 3  # 67 and 989 TFLOP/s
    assert bf16.state_bytes == fp32.state_bytes and bf16.peak_bytes < fp32.peak_bytes


def test_bfloat16_on_gpus_that_lack_it_is_refused_with_what_they_have() -> None:
    old = replace(GPUS, device="v100")
    with pytest.raises(InputError, match="--dtype: found bf16 on v100.*--dtype fp16.*GradScaler"):
        request_of(Options(PLAN, dtype="bf16"), old)
    for cluster, dtype in ((old, "fp16"), (old, "fp32"), (GPUS, "bf16"), (ClusterSpec.local(2), "bf16")):
        assert request_of(Options(PLAN, dtype=dtype), cluster)[0].dtype is Precision(dtype)


def test_weights_and_biases_that_are_cast_are_known() -> None:
    plain = trace(Net(8), (torch.randn(4, 8), torch.randn(4, 8)), autocast=Autocast("cpu", torch.bfloat16))
    assert {plain.graph.specs[name].dtype for name in plain.graph.cast_weights} == {torch.bfloat16}
    assert len(plain.graph.cast_weights) == 4  # weights and biases of both products


SHARDED = ("gradients", "weights")  # of which the first keeps full copies until backward


def deep(layers: int = 4, **options: object) -> Plan:
    """Of two micro-batches, whose gradients are there from the first backward on."""
    with torch.device("meta"):
        net, batch = Deep(layers, 4096), (torch.randn(64, 4096),)
    options = {"dtype": "bf16", "mesh": "2", "stages": 1, "micro_batches": 2, "measure": False, **options}
    return api.plan(net, GPUS, batch, **options)


def regathered(plan: Plan) -> int:
    return sum(way is Gathering.REGATHER for way in plan.program.gatherings.values())


def test_full_copies_of_cast_weights_need_not_stay() -> None:
    """Each further layer holds half of its matrix in bfloat16, and no longer all of it."""
    kept, again = ([deep(n, force="batch", shard_state=level) for n in (4, 6)] for level in SHARDED)
    assert [regathered(plan) for plan in (*kept, *again)] == [0, 0, 4, 6]
    growth = [(more.peak_bytes - less.peak_bytes) / 2 for less, more in (kept, again)]
    assert growth[0] - growth[1] == pytest.approx(4096 * 4096, rel=0.02)


def test_cast_weights_are_gathered_again_where_memory_is_short() -> None:
    free = deep(8, force="batch", shard_state="auto")
    least = deep(8, force="batch", shard_state="weights").peak_bytes
    tight = deep(8, force="batch", shard_state="auto", memory=f"{int(least * 1.02)}B")
    assert regathered(free) == 0 and tight.peak_bytes <= least * 1.02
    assert regathered(tight) > 0 and tight.step_seconds > free.step_seconds


def test_gradients_of_cast_weights_may_be_summed_in_half_the_bytes(tmp_path: Path) -> None:
    single, half = (
        planned("bf16", force="batch", shard_state="weights", reduce_dtype=word)[0]
        for word in ("fp32", "bf16")
    )
    assert half.parts.communication < 0.75 * single.parts.communication  # gathers are as they were
    assert "gradients of 4 cast weights are summed over ranks in bf16" in half.notes
    assert not any("summed" in note for note in single.notes)
    half.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").program.reduce is Precision.BF16


@pytest.mark.parametrize(("width", "share"), [(64, 0.55), (2048, 0.55)])  # in a bucket, and alone
def test_sums_in_buckets_are_priced_by_what_is_sent(width: int, share: float) -> None:
    net, batch = Net(width), (torch.randn(8, width), torch.randn(8, width))
    graph = trace(net, batch, autocast=Autocast("cuda", torch.bfloat16)).graph
    assert graph.cast_alone == {"up_weight", "up_bias", "down_weight", "down_bias"}
    slow = Link(latency=1e-9, bandwidth=1e8)
    cluster = replace(GPUS, intra=slow, inter=slow)
    dims, model = Dims(graph, find_atoms(graph), Mesh((2,))), CostModel.of(cluster, None)
    sums = [
        Prices(graph, dims, cluster, model, reduce=each).gradient_sync("up_weight", Move(0, (R,), (B,)))
        for each in (Precision.BF16, Precision.FP32)
    ]
    assert sums[0] < share * sums[1]


def test_without_casts_the_plan_says_that_sums_stay_as_they_are() -> None:
    plan = planned("fp32", force="batch", reduce_dtype="bf16")[0]
    assert "no weight is cast: gradients are summed in their own dtype, not in bf16" in plan.notes
    assert plan.step_seconds == planned("fp32", force="batch")[0].step_seconds


@pytest.mark.long
def test_a_model_may_fit_in_low_precision_alone() -> None:
    """Whatever is sharded and recomputed: beside weights in float32 there are activations in bfloat16."""
    eight = replace(GPUS, devices_per_node=8)
    with torch.device("meta"):
        net, batch = Deep(4, 1024), (torch.randn(65536, 1024),)

    def fitted(dtype: str) -> Plan:
        return api.plan(
            net, eight, batch, dtype=dtype, mesh="8", stages=1, micro_batches=1, measure=False, memory="467MB"
        )

    with pytest.raises(InfeasibleError, match="found 467 MB per device, wanted at least"):
        fitted("fp32")
    assert fitted("bf16").peak_bytes <= 467e6
