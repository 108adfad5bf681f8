"""Slips that broke experts elsewhere: each is made in the programs here, and the proofs notice it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.core.force import Parallelism
from autopar.core.mesh import Mesh
from autopar.ops.reduction import Mean
from autopar.proof.operators import error, strategies
from autopar.sharding.rule import Handle, Sample, Site
from autopar.trace.experts.body import CALL, PRODUCT, BodyStep, BodyValue, write_body
from autopar.trace.experts.routed_experts import ROUTED_EXPERTS
from autopar.trace.experts.sent_rows import KEYS_OF_COUNTS
from tests.ops.test_expert_forms import CHOSEN, EXPERTS, Loop, proved

aten = torch.ops.aten
EXACT = 1e-9
WAYS = ("experts", "own")
Calls = Callable[..., Handle]
Slip = Callable[[Calls, Any, tuple[Any, ...]], Handle]


def worst(ways: Sequence[str] = WAYS) -> float:
    """The largest error of experts on two and three ranks, of rows that are scaled by their shares."""
    scaled = BodyStep(CALL, (5, 1), target=aten.mul.Tensor, args=(BodyValue(5), BodyValue(1)))
    steps = [BodyStep(PRODUCT, (0, 2)), BodyStep(PRODUCT, (4, 3)), scaled]
    rows = [torch.randn(9, 3), torch.rand(9, 1)]
    weights = [torch.randn(4, 3, 5), torch.randn(4, 5, 2)]
    keys = torch.tensor([3, 0, 2, 2, 1, 3, 0, 2, 0])
    sample = Sample(ROUTED_EXPERTS, (rows, weights, keys, write_body(steps), []))
    found = [
        error(one, dims, strategy)
        for ranks in (2, 3)
        for one, dims, strategy in strategies(sample, Mesh((ranks,)))
        if strategy[0].factor in ways
    ]
    assert len(found) == 2 * len(ways)
    return max(found)


def summed_twice(call: Calls, target: Any, args: tuple[Any, ...]) -> Handle:
    """The gradient of an expert is twice what it is."""
    if target is not ROUTED_EXPERTS:
        return call(target, *args)
    rows, weights, *rest = args
    doubled = [call(aten.mul.Scalar, each, 2.0) for each in weights]
    fixed = [call(aten.detach.default, each) for each in weights]
    twice = [call(aten.sub.Tensor, *pair) for pair in zip(doubled, fixed, strict=True)]
    return call(target, rows, twice, *rest)


def without_router(call: Calls, target: Any, args: tuple[Any, ...]) -> Handle:
    """The shares of the router get no gradient."""
    if target is not ROUTED_EXPERTS:
        return call(target, *args)
    (x, shares), *rest = args
    return call(target, [x, call(aten.detach.default, shares)], *rest)


def by_expert_alone(call: Calls, target: Any, args: tuple[Any, ...]) -> Handle:
    """Rows that come are taken to lie by expert, not by the rank that sent them."""
    made = call(target, *args)
    return call(aten.sort.default, made)[0] if target is KEYS_OF_COUNTS else made  # type: ignore[index]


def in_order_of_experts(call: Calls, target: Any, args: tuple[Any, ...]) -> Handle:
    """Results are put back in the order of experts, not where their rows came from."""
    if target is not aten.index_copy.default:
        return call(target, *args)
    whole, dim, places, made = args
    return call(target, whole, dim, call(aten.sort.default, places)[0], made)  # type: ignore[index]


@pytest.mark.parametrize(
    ("slip", "ways"),
    [
        (summed_twice, WAYS),
        (without_router, WAYS),
        (by_expert_alone, ("experts",)),
        (in_order_of_experts, WAYS),
    ],
)
def test_a_slip_in_the_program_of_experts_is_noticed(
    slip: Slip, ways: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    assert worst() < EXACT
    call = Site.call

    def slipped(self: Site, target: Any, *args: Any, **kwargs: Any) -> Handle:
        return slip(lambda *each: call(self, *each, **kwargs), target, args)

    monkeypatch.setattr(Site, "call", slipped)
    for way in ways:
        assert worst([way]) > 1e-3


class BalancedLoop(Loop):
    """With a loss that balances the router, on every row."""

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x.flatten(0, -2)).softmax(-1)
        busy = nn.functional.one_hot(shares.topk(CHOSEN, -1)[1], EXPERTS).to(x.dtype).mean((0, 1))
        return super().forward(x) + EXPERTS * (busy * shares.mean(0)).sum()


def test_a_balancing_loss_of_a_part_of_the_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proved(BalancedLoop, 4, Parallelism.BATCH).passed

    def of_parts(self: Mean, site: Site) -> Sequence[Any]:
        return (site.call(aten.mul.Scalar, site.local_call(), 1 / site.dims.mesh.num_devices),)

    monkeypatch.setattr(Mean, "lower", of_parts)
    assert not proved(BalancedLoop, 4, Parallelism.BATCH).passed
