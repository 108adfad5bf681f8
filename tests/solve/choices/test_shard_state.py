"""`--shard-state`: what of the weights' state lies in shards, on simulated ranks as on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.gathering import ShardState
from autopar.core.graph import InputKind
from autopar.core.move import Move
from autopar.core.placement import B, P, Shard
from autopar.errors import InfeasibleError, InputError
from autopar.results.plan.plan import Plan
from autopar.solve.choices.shard_state import gathering_notes
from autopar.trace.export import trace
from autopar.trace.target import Target


class Net(nn.Module):
    """Convolution, batch norm, and linear layers, the bias of the last of which has one element."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.hidden, self.last = nn.Linear(4 * 4 * 4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x))).flatten(1)
        out: Tensor = self.last(torch.tanh(self.hidden(x)))
        return out


def net() -> Target:
    torch.manual_seed(0)
    return Target(Net(), (torch.randn(8, 2, 4, 4), torch.randn(8, 1)), {}, F.mse_loss, "")


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "batch": (2, {"force": "batch"}),
    "batch x filter": (4, {"mesh": "2x2", "force": "batch+filter"}),
    "recomputed": (4, {"mesh": "2x2", "force": "batch", "recompute": "all"}),
    "micro-batches": (2, {"force": "batch", "micro_batches": 2}),
    "stages": (4, {"mesh": "2", "force": "batch", "stages": 2, "micro_batches": 2, "schedule": "zb1p"}),
}
WORDS = {
    ShardState.OPTIMIZER: "gathered once a step",
    ShardState.GRADIENTS: "kept from forward to backward",
    ShardState.WEIGHTS: "gathered again in backward",
}


def in_shards(plan: Plan) -> set[str]:
    """The weights that lie in shards on all axes."""
    traced = trace(net().model, net().args[:1])
    layouts = {item.target: plan.program.inputs.get(item.name, ()) for item in traced.graph.inputs}
    kinds = {item.target for item in traced.graph.inputs if item.kind is InputKind.PARAMETER}
    return {name for name in kinds if all(isinstance(place, Shard) for place in layouts[name])}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("level", WORDS, ids=lambda level: level.value)
def test_a_level_that_is_forced_holds_for_all_weights_and_trains_as_one_device(
    level: ShardState, run: str
) -> None:
    devices, options = RUNS[run]
    cluster = ClusterSpec.local(devices)
    report = autopar.api.verify(net(), cluster, shard_state=level.value, steps=2, changes=0, **options)
    assert report.passed, str(report)
    assert any(f"7 {WORDS[level]}" in note for note in report.plan.notes), report.plan.notes
    assert any("long dims: last.bias" in note for note in report.plan.notes)
    names = {name for name, _ in Net().named_parameters()}
    assert in_shards(report.plan) == names - {"last.bias"}


def test_none_gathers_no_weight() -> None:
    for options in ({"force": "batch"}, {}):
        plan = planned("none", **options)
        assert not any("s_to_b" in line or "s_to_r" in line for line in plan.conversions if "weight" in line)
        assert not any("shards" in note for note in plan.notes)


class Deep(nn.Module):
    """Weights beside which all else is small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def planned(level: str, **options: Any) -> Plan:
    x = torch.randn(16, 256)
    return autopar.plan(
        Deep(),
        ClusterSpec.local(4),
        (x,),
        **{"mesh": "4", "stages": 1, "micro_batches": 1, "measure": False, "shard_state": level} | options,
    )


def test_each_level_takes_less_memory_than_the_one_before() -> None:
    peaks = [
        planned(level, force="batch").peak_bytes for level in ("none", "optimizer", "gradients", "weights")
    ]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4


@pytest.mark.slow
def test_under_a_cap_weights_are_gathered_again_where_nothing_else_fits() -> None:
    kept, again = (planned(level, force="batch") for level in ("gradients", "weights"))
    cap = (kept.peak_bytes + again.peak_bytes) // 2
    plan = planned("auto", force="batch", memory=cap)
    assert any("gathered again in backward" in note for note in plan.notes)
    assert plan.peak_bytes <= cap and plan.step_seconds <= again.step_seconds
    with pytest.raises(InfeasibleError, match=f"{again.peak_bytes} bytes"):
        planned("weights", force="batch", memory=again.peak_bytes - 1)


def test_gathering_once_pays_with_many_micro_batches() -> None:
    plan = planned("auto", force="batch", micro_batches=4)
    kept, once = (planned(level, force="batch", micro_batches=4) for level in ("gradients", "optimizer"))
    assert once.step_seconds < kept.step_seconds
    assert plan.step_seconds <= once.step_seconds


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(InputError, match="--shard-state: found 'zero'"):
        planned("zero")


def test_a_gather_by_zero_padding_and_a_sum_is_counted_too() -> None:
    report = autopar.api.verify(
        net(), ClusterSpec.local(2), shard_state="gradients", force="batch", steps=1, changes=0
    )
    program = report.plan.program
    graph = trace(net().model, net().args[:1]).graph
    weight = next(item.name for item in graph.inputs if item.target == "hidden.weight")
    stored = program.inputs[weight]
    padded = (Move(0, stored, (P,)), Move(0, (P,), (B,)))
    disguised = replace(program, moves={weight: padded}, together=())
    assert gathering_notes(graph, disguised) == ["weights stored in shards: 1 kept from forward to backward"]
