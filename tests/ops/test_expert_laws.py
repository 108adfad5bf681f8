"""What training keeps to wherever a mixture's experts lie: on real processes, beside the serial model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.core.mesh import Mesh
from autopar.trace.experts.routed_experts import ROUTED_EXPERTS
from autopar.trace.export import trace
from tests.pool import Pool
from tests.whole_tensors import full_of

Pools = Callable[[int], Pool]
EXPERTS, WIDTH, HIDDEN = 4, 8, 6
EXACT = 1e-12  # sums in another order, float64


class Balanced(nn.Module):
    """Two of four gated experts for each row, and a loss that balances their router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        multiply = torch.ops.transformers.grouped_mm_fallback  # also in float64
        shares = self.gate(x).softmax(-1)
        top, chosen = shares.topk(2, -1)
        keys, order = chosen.reshape(-1).sort()
        ends = torch.histc(keys.to(x.dtype), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
        one, other = multiply(x[order // 2], self.up, ends).chunk(2, -1)
        made = multiply(nn.functional.silu(one) * other, self.down, ends)
        made = made * top.reshape(-1)[order].unsqueeze(1)
        y = torch.zeros_like(x).index_add(0, order // 2, made)
        busy = nn.functional.one_hot(chosen, EXPERTS).to(x.dtype).mean((0, 1))
        return (x + y).square().mean() + EXPERTS * (busy * shares.mean(0)).sum()


def mixture() -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers.integrations.moe  # noqa: F401  (defines the product)

    torch.manual_seed(0)
    return Balanced().double(), {"x": torch.randn(12, WIDTH, dtype=torch.float64)}


def pins(model: nn.Module, inputs: dict[str, Tensor], way: str) -> dict[str, tuple[str, ...]]:
    graph = trace(model, (), inputs).graph
    return {item.name: (way,) for item in graph.operators if item.target is ROUTED_EXPERTS}


def parallel(way: str) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    """The serial model, its parallel double whose experts are split in one way, and a batch."""
    model, inputs = mixture()
    serial = copy.deepcopy(model)
    cluster, how = autopar.ClusterSpec.local(2), pins(model, inputs, way)
    assert len(how) == 1
    ours = autopar.parallelize(model, cluster, inputs, force=how, mesh=Mesh((2,)), measure=False)
    return serial, ours, inputs


def gap(ours: Tensor, theirs: Tensor) -> float:
    return float((full_of(ours).detach() - theirs.detach()).abs().max())


def trained(way: str) -> list[int]:
    """Three steps with clipping; experts of this rank for each weight of experts."""
    serial, ours, inputs = parallel(way)
    pair = [(model, torch.optim.AdamW(model.parameters(), lr=1e-3)) for model in (serial, ours)]
    theirs = dict(serial.named_parameters())
    for _ in range(3):
        losses, norms = [], []
        for model, optimizer in pair:
            optimizer.zero_grad()
            losses.append(model(**inputs))
            losses[-1].backward()
        for name, parameter in ours.named_parameters():
            assert parameter.grad is not None and gap(parameter.grad, theirs[name].grad) < EXACT, name
        for model, optimizer in pair:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
        assert gap(losses[1], losses[0]) < EXACT and gap(norms[1], norms[0]) < EXACT
        assert norms[0] > 0.1, "nothing is clipped"
    routers = [name for name in theirs if "gate" in name]
    assert len(routers) == 1 and all(float(theirs[name].grad.abs().max()) > 1e-6 for name in routers)
    for name, parameter in ours.named_parameters():
        assert gap(parameter, theirs[name]) < 1e-9, name  # Adam divides by small numbers
    state = ours.state_dict()
    assert all(gap(state[name], value) < 1e-9 for name, value in serial.state_dict().items())
    return [
        parameter.to_local().shape[0]  # type: ignore[attr-defined]
        for name, parameter in ours.named_parameters()
        if "gate" not in name
    ]


@pytest.mark.parametrize("way", ["experts", "own"])
def test_experts_learn_as_in_the_serial_model_and_count_once_in_norms(way: str, pools: Pools) -> None:
    """Gradients of experts aren't summed once more, routers have theirs, and losses that balance routers are
    the whole batch's."""
    pytest.importorskip("transformers")
    assert pools(2).run(trained, way) == [[2, 2]] * 2


def misses_experts() -> bool:
    """Whether training differs where clipping takes the norm of parameters that are whole alone."""
    clip = nn.utils.clip_grad_norm_

    def clipped(parameters: Iterable[Tensor], limit: float) -> Tensor:
        whole = [
            each
            for each in parameters
            if not isinstance(each, DTensor) or each.to_local().shape == each.shape
        ]
        return clip(whole, limit)

    with patch.object(nn.utils, "clip_grad_norm_", clipped), pytest.raises(AssertionError):
        trained("experts")
    return True


def test_a_norm_that_misses_experts_is_noticed(pools: Pools) -> None:
    pytest.importorskip("transformers")
    assert pools(2).run(misses_experts) == [True] * 2
