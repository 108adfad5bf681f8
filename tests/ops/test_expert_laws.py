"""What training keeps to wherever a mixture's experts lie: on real processes, beside the serial model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.core.mesh import Mesh
from autopar.trace.experts.routed_experts import ROUTED_EXPERTS
from autopar.trace.export import trace
from tests.pool import Pool
from tests.whole_tensors import full_of

Pools = Callable[[int], Pool]
EXACT = 1e-12  # sums in another order, float64


def mixture() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two layers, whose loss balances their routers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.5,
    )  # fmt: skip
    tokens = torch.randint(0, 16, (4, 6))
    return transformers.MixtralForCausalLM(config).double(), {"input_ids": tokens, "labels": tokens}


def pins(model: nn.Module, inputs: dict[str, Tensor], way: str) -> dict[str, tuple[str, ...]]:
    graph = trace(model, (), inputs).graph
    return {item.name: (way,) for item in graph.operators if item.target is ROUTED_EXPERTS}


def parallel(way: str) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    """The serial model, its parallel double whose experts are split in one way, and a batch."""
    model, inputs = mixture()
    serial = copy.deepcopy(model)
    serial.config._experts_implementation = "eager"  # in float64, which grouped products don't know
    cluster, how = autopar.ClusterSpec.local(2), pins(model, inputs, way)
    assert len(how) == 2
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
            loss = model(**inputs).loss
            loss.backward()
            losses.append(loss.detach())
            if model is ours:
                for name, parameter in ours.named_parameters():
                    assert parameter.grad is not None and gap(parameter.grad, theirs[name].grad) < EXACT, name
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
        assert gap(losses[1], losses[0]) < EXACT and gap(norms[1], norms[0]) < EXACT
        assert norms[0] > 0.1, "nothing is clipped"
    routers = [name for name in theirs if "gate.weight" in name]
    assert len(routers) == 2 and all(float(theirs[name].grad.abs().max()) > 1e-6 for name in routers)
    for name, parameter in ours.named_parameters():
        assert gap(parameter, theirs[name]) < 1e-9, name  # Adam divides by small numbers
    state = ours.state_dict()
    assert all(gap(state[name], value) < 1e-9 for name, value in serial.state_dict().items())
    return [
        parameter.to_local().shape[0]  # type: ignore[attr-defined]
        for name, parameter in ours.named_parameters()
        if "experts" in name
    ]


@pytest.mark.parametrize("way", ["experts", "own"])
def test_experts_learn_as_in_the_serial_model_and_count_once_in_norms(way: str, pools: Pools) -> None:
    """Gradients of experts aren't summed once more, routers have theirs, and losses that balance routers are
    the whole batch's."""
    pytest.importorskip("transformers")
    assert pools(2).run(trained, way) == [[2, 2, 2, 2]] * 2
