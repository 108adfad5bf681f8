"""Mixtures of transformers, as they come, with their experts on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism
from autopar.planning.asked.request import Request
from autopar.proof.check import check
from autopar.trace.target import Target
from costdb.database import Database

COMMON: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "experts_implementation": "grouped_mm",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True},
    "Qwen2Moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
    },
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0},
    "GptOss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
    },
    "DeepseekV3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}


class Loss(nn.Module):
    """The loss of a language model whose labels are its own words."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "checkpoints"), [*((name, False) for name in FAMILIES), ("Qwen3Moe", True)]
)
def test_a_family_has_its_experts_on_several_ranks(family: str, checkpoints: bool) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**COMMON | FAMILIES[family])
    made = getattr(transformers, f"{family}ForCausalLM")(config).train()
    if checkpoints:
        made.gradient_checkpointing_enable()
    model = Loss(made)
    request = Request(measure=False, alternatives=False, force=Parallelism.EXPERTS)
    target = Target(model, (torch.randint(0, 50, (4, 7)),), {}, None, "")
    with Database.in_memory(autopar.__file__) as database:
        report = check(target, ClusterSpec.local(2), request, steps=2, processes=False, database=database)
    assert report.passed, report
    ways = {layer.strategy for layer in report.plan.layers if "routed_experts" in layer.op}
    assert ways and all(way[0] in ("experts", "experts.k", "own") for way in ways), ways
