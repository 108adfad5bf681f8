"""Language models of transformers whose sequence is split are the serial ones, keys gathered or in a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.mesh import Mesh
from autopar.planning.asked.request import Request
from autopar.proof.check import Report, check
from autopar.trace.target import Target
from costdb.database import Database

transformers = pytest.importorskip("transformers")
ATTENTION = "scaled_dot_product_attention"
WORDS, LENGTH = 48, 12


def llama(**more: Any) -> nn.Module:
    config = transformers.LlamaConfig(**_sizes(), num_key_value_heads=2, **more)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def mistral() -> nn.Module:
    config = transformers.MistralConfig(**_sizes(), num_key_value_heads=2, sliding_window=5)
    model: nn.Module = transformers.MistralForCausalLM(config)
    return model


def gpt2() -> nn.Module:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=1, n_head=4, n_positions=LENGTH, use_cache=False, **drops
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def bert() -> nn.Module:
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    model: nn.Module = transformers.BertForMaskedLM(transformers.BertConfig(**_sizes(), **drops))
    return model


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "use_cache": False,
    }


def mean_logits(output: Any) -> Tensor:
    return output.logits.square().mean()  # type: ignore[no-any-return]


def proved(make: Callable[[], nn.Module], ranks: int, way: list[str], **request: Any) -> Report:
    torch.manual_seed(0)
    model, tokens = make().train(), torch.randint(WORDS, (2, LENGTH))
    target = Target(model, (), {"input_ids": tokens}, mean_logits, "")
    asked = Request(measure=False, alternatives=False, pins={ATTENTION: way}, **request)
    with Database.in_memory(autopar.__file__) as database:
        return check(target, ClusterSpec.local(ranks), asked, steps=2, processes=False, database=database)


def way_of(report: Report) -> tuple[str | None, ...]:
    (layer,) = (layer for layer in report.plan.layers if layer.name == ATTENTION)
    return layer.strategy


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("make", [llama, gpt2, bert])
def test_a_ring_is_serial(make: Callable[[], nn.Module], ranks: int) -> None:
    report = proved(make, ranks, ["ring"])
    assert report.passed and way_of(report) == ("ring",), report


@pytest.mark.parametrize("make", [llama, mistral])
def test_gathered_keys_are_serial(make: Callable[[], nn.Module]) -> None:
    report = proved(make, 3, ["q"])
    assert report.passed and way_of(report) == ("q",), report


@pytest.mark.parametrize("way", [["b0", "ring"], ["ring", "b1"], ["ring", "q"]])
def test_a_ring_goes_with_samples_heads_and_gathered_keys(way: list[str]) -> None:
    report = proved(llama, 4, way, mesh=Mesh((2, 2)))
    assert report.passed and way_of(report) == tuple(way), report
