"""What a proof says of low precision: dtypes kernel by kernel, and losses beside serial reruns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cluster import ClusterSpec
from autopar.convert.moves import EFFECTS
from autopar.core.force import Parallelism
from autopar.core.graph import Graph, Ref, map_refs
from autopar.core.precision import Precision
from autopar.core.schedule import ScheduleKind
from autopar.planning.asked.request import Request
from autopar.proof.check import check
from autopar.proof.low_precision import REORDERED, ROUNDED, LowPrecision, compare_low_precision
from autopar.proof.simulated import MEANINGS
from autopar.runtime.collectives.placement_moves import SUMMED
from autopar.runtime.saved.regather import REGATHER
from autopar.trace.export import Traced, trace
from autopar.trace.forward.autocast import Autocast
from autopar.trace.target import Target
from tests.proof.test_sum_order import needs_lstm

aten = torch.ops.aten


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.second(torch.relu(self.norm(self.first(x)))), x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.lstm(x)[0].float(), x)


def target() -> Target:
    torch.manual_seed(0)
    return Target(Net(), (torch.randn(8, 6),), {}, None, "")


def without_casts(graph: Graph) -> Graph:
    """The graph whose last product takes its operands as they were."""
    casts = {item.results[0]: item.operands[0] for item in graph.operators if item.target is aten.to.dtype}
    last = [item for item in graph.operators if item.target is aten.linear.default][-1]
    args: Any = map_refs(last.args, lambda ref: Ref(casts.get(ref.name, ref.name)))
    relu = next(item for item in graph.operators if item.target is aten.relu.default)
    widened = replace(last, args=(*args[:1], *args[1:]))
    wide = replace(relu, target=aten.to.dtype, args=(Ref(relu.operands[0]), torch.float32))
    swap = {last.name: widened, relu.name: wide}
    return replace(graph, operators=tuple(swap.get(item.name, item) for item in graph.operators))


def test_a_proof_in_low_precision_tells_dtypes_and_losses() -> None:
    request = Request(dtype=Precision.BF16, measure=False, schedule=None)
    report = check(target(), ClusterSpec.local(2), request, steps=2)
    assert report.passed and report.low is not None
    assert report.low.kernels == 5 and not report.low.different
    assert report.low.loss is not None and report.low.spread is not None and 0 < report.low.spread < 0.05
    assert "bfloat16" in str(report) and report.as_dict()["low_precision"]["dtype"] == "bfloat16"


def test_without_autocast_there_is_nothing_to_tell() -> None:
    report = check(target(), ClusterSpec.local(2), Request(measure=False, schedule=None), steps=1)
    assert report.low is None and report.passed


def test_a_cast_that_is_missing_is_found_by_its_kernel() -> None:
    case, autocast = target(), Autocast("cpu", torch.bfloat16)
    traced = trace(case.model, case.args, autocast=autocast)
    wrong: Traced = replace(traced, graph=without_casts(traced.graph))
    found = compare_low_precision(case.model, wrong, autocast, loss_fn=None, steps=1)
    assert found is not None and found.different == ("aten::addmm",) and not found.passed


@pytest.mark.parametrize(("loss", "passed"), [(0.01, True), (0.03, True), (0.04, False)])
def test_losses_may_be_as_far_as_those_of_serial_reruns(loss: float, passed: bool) -> None:
    assert LowPrecision("bfloat16", 9, (), loss, spread=0.01).passed is passed


@pytest.mark.parametrize(("loss", "passed"), [(0.004, True), (0.0078125, True), (0.01, False)])
def test_a_loss_in_low_precision_may_be_off_by_one_rounding(loss: float, passed: bool) -> None:
    found = LowPrecision("bfloat16", 9, (), loss, spread=0.0, rounding=torch.finfo(torch.bfloat16).eps)
    assert found.passed is passed and "one rounding of the loss is 7.8e-03" in str(found)


def test_one_rounding_is_that_of_the_loss() -> None:
    for forward, dtype in ((lambda z: z.mean(), torch.bfloat16), (lambda z: z.float().mean(), torch.float32)):
        model = Model(nn.Linear(8, 8), forward)
        case = Target(model, (torch.randn(4, 8),), {}, None, "")
        request = Request(dtype=Precision.BF16, measure=False, schedule=None, force=Parallelism.BATCH)
        report = check(case, ClusterSpec.local(2), request, steps=1)
        assert report.low is not None and report.low.rounding == torch.finfo(dtype).eps


class Model(nn.Module):
    """A layer, and a loss of what it gives."""

    def __init__(self, layer: nn.Module, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = layer, loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layer(x))


def test_batch_norm_of_a_split_batch_keeps_the_dtype_of_its_samples() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    case = Target(model, (torch.randn(8, 3, 8, 8), torch.randn(8, 2, 4, 4)), {}, F.mse_loss, "")
    request = Request(dtype=Precision.BF16, measure=False, schedule=None, force=Parallelism.BATCH)
    report = check(case, ClusterSpec.local(2), request, steps=1)
    assert report.passed and report.low is not None and report.low.loss is not None


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 3), (1, 2)])
def test_losses_of_stages_and_micro_batches_are_compared_too(stages: int, micro_batches: int) -> None:
    request = Request(
        dtype=Precision.BF16,
        measure=False,
        schedule=ScheduleKind.GPIPE,
        pipeline_ranks=stages,
        micro_batches=micro_batches,
    )
    report = check(target(), ClusterSpec.local(2), request, steps=2)
    assert report.passed and report.low is not None and report.low.changed == REORDERED
    assert report.low.loss is not None and report.low.spread


def test_losses_of_a_plan_that_sums_in_fewer_bits_than_said_are_farther(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def report() -> LowPrecision:
        found = check(target(), ClusterSpec.local(2), request, steps=6).low
        assert found is not None and found.loss is not None and found.spread is not None
        return found

    request = Request(dtype=Precision.BF16, measure=False, schedule=None, force=Parallelism.BATCH)
    right = report()
    meant = MEANINGS["r_to_b"]

    def coarse(calls: Any) -> list[Tensor]:
        return [item.to(torch.float8_e5m2).to(item.dtype) for item in meant(calls)]

    monkeypatch.setitem(MEANINGS, "r_to_b", coarse)
    wrong = report()
    assert right.passed and not wrong.passed


@needs_lstm
def test_where_kernels_have_one_order_weights_are_rounded_otherwise() -> None:
    torch.manual_seed(0)
    case = Target(Recurrent(), (torch.randn(4, 5, 6),), {}, None, "")
    report = check(case, ClusterSpec.local(2), Request(dtype=Precision.BF16, measure=False), steps=1)
    assert report.passed and report.low is not None and report.low.changed == ROUNDED


def test_every_move_that_a_program_can_make_is_simulated() -> None:
    """Also those of cast weights, which a proof in float64 doesn't make."""
    names = [
        name + ending + suffix
        for name in EFFECTS
        for ending in ("", *SUMMED.values())
        for suffix in ("", REGATHER)
    ]
    registered = {name for name in names if hasattr(torch.ops.autopar, name)}
    assert registered <= MEANINGS.keys() and "s_to_b_wide_regather" in registered
