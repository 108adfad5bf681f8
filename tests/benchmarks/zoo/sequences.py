"""Models of text and sound, of transformers, in bfloat16; they return their loss.

`batch` is the number of sequences. Sizes are those of the published checkpoints that the names say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import transformers as hf
from torch import Tensor, nn

Inputs: TypeAlias = dict[str, Tensor]
Loss: TypeAlias = Callable[..., Tensor]
Made: TypeAlias = tuple[nn.Module, Inputs | tuple[Tensor, ...], Loss | None]


@contextmanager
def meta(dtype: torch.dtype) -> Iterator[None]:
    """Models made here have no memory, and parameters of one dtype."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def tokens(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long, device="meta")


def causal(kind: type[nn.Module], config: Any, *, batch: int, length: int) -> Made:
    with meta(torch.bfloat16):
        model = kind(config)
    ids = tokens(batch, length)
    return model, {"input_ids": ids, "labels": ids}, None


def llama_8b(batch: int) -> Made:
    config = hf.LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )
    return causal(hf.LlamaForCausalLM, config, batch=batch, length=4096)


def llama_1b(batch: int) -> Made:
    config = hf.LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        use_cache=False,
    )
    return causal(hf.LlamaForCausalLM, config, batch=batch, length=4096)


def qwen3_4b(batch: int) -> Made:
    config = hf.Qwen3Config(
        hidden_size=2560,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=9728,
        vocab_size=151936,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return causal(hf.Qwen3ForCausalLM, config, batch=batch, length=4096)


def qwen2_7b(batch: int) -> Made:
    config = hf.Qwen2Config(
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
        vocab_size=152064,
        use_cache=False,
    )
    return causal(hf.Qwen2ForCausalLM, config, batch=batch, length=4096)


def mixtral_8x7b(batch: int) -> Made:
    config = hf.MixtralConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=32000,
        num_local_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return causal(hf.MixtralForCausalLM, config, batch=batch, length=4096)


def gpt2_small(batch: int) -> Made:
    return causal(hf.GPT2LMHeadModel, hf.GPT2Config(use_cache=False), batch=batch, length=1024)


def gpt2_xl(batch: int) -> Made:
    config = hf.GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False)
    return causal(hf.GPT2LMHeadModel, config, batch=batch, length=1024)


def mamba_1b(batch: int) -> Made:
    config = hf.Mamba2Config(
        hidden_size=2048,
        num_hidden_layers=48,
        num_heads=64,
        head_dim=64,
        state_size=128,
        n_groups=1,
        vocab_size=50288,
        use_cache=False,
    )
    return causal(hf.Mamba2ForCausalLM, config, batch=batch, length=2048)


def bert_base(batch: int) -> Made:
    return causal(hf.BertForMaskedLM, hf.BertConfig(), batch=batch, length=512)


def bert_large(batch: int) -> Made:
    config = hf.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return causal(hf.BertForMaskedLM, config, batch=batch, length=512)


def t5_large(batch: int) -> Made:
    config = hf.T5Config(
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_layers=24,
        num_decoder_layers=24,
        num_heads=16,
        decoder_start_token_id=0,
        use_cache=False,
    )
    with meta(torch.bfloat16):
        model = hf.T5ForConditionalGeneration(config)
    return model, {"input_ids": tokens(batch, 512), "labels": tokens(batch, 128)}, None


def whisper_large(batch: int) -> Made:
    config = hf.WhisperConfig(
        d_model=1280,
        encoder_layers=32,
        decoder_layers=32,
        encoder_attention_heads=20,
        decoder_attention_heads=20,
        encoder_ffn_dim=5120,
        decoder_ffn_dim=5120,
        num_mel_bins=128,
        vocab_size=51866,
        use_cache=False,
    )
    with meta(torch.bfloat16):
        model = hf.WhisperForConditionalGeneration(config)
        sound = torch.zeros(batch, 128, 3000)
    return model, {"input_features": sound, "labels": tokens(batch, 256)}, None


def wav2vec_large(batch: int) -> Made:
    """Fine-tuned by connectionist temporal classification would need lengths: here by frame classes."""
    config = hf.Wav2Vec2Config(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        conv_bias=True,
        apply_spec_augment=False,
        layerdrop=0.0,
        num_labels=512,
    )
    with meta(torch.bfloat16):
        model = hf.Wav2Vec2ForSequenceClassification(config)
        sound = torch.zeros(batch, 160000)
    return model, {"input_values": sound, "labels": tokens(batch, 1).reshape(batch)}, None


class LanguageLSTM(nn.Module):
    """Two wide recurrent layers between an embedding and a decoder."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.decode = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(ids))
        logits: Tensor = self.decode(hidden)
        return logits


def lstm(batch: int) -> Made:
    with meta(torch.bfloat16):
        model = LanguageLSTM(50000, 2048, 4)
    ids = tokens(batch, 256)
    return model, (ids, ids), next_tokens


def next_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
