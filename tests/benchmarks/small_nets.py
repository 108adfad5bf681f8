"""Ten nets of other kinds than the examples, of which a training step takes tenths of a second on a core.

Most are unedited nets of transformers, diffusers and MONAI, made small; they draw their weights from seed 0.
Each function is a TARGET of the command line:

    autopar compare tests/benchmarks/small_nets.py:llama --cluster local:2 --measure
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import torch.nn.functional as F
import transformers as hf
from monai.networks import nets
from torch import Tensor, nn

from tests.benchmarks.wide_resnet import wide_resnet
from tests.benchmarks.zoo.pictures import noise

Made = tuple[nn.Module, Any, Any]


def _tokens(batch: int, length: int, count: int = 2000) -> Tensor:
    return torch.arange(batch * length).reshape(batch, length) * 7919 % count


def _causal(kind: type[nn.Module], config: Any, *, batch: int, length: int) -> Made:
    torch.manual_seed(0)
    ids = _tokens(batch, length)
    return kind(config), {"input_ids": ids, "labels": ids}, None


def _pictures(kind: type[nn.Module], config: Any, *, batch: int, size: int) -> Made:
    torch.manual_seed(0)
    images, labels = torch.randn(batch, 3, size, size), torch.arange(batch) % 10
    return kind(config), {"pixel_values": images, "labels": labels}, None


def llama() -> Made:
    config = hf.LlamaConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=768,
        vocab_size=2000,
        use_cache=False,
    )
    return _causal(hf.LlamaForCausalLM, config, batch=8, length=128)


def bert() -> Made:
    config = hf.BertConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        vocab_size=2000,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _causal(hf.BertForMaskedLM, config, batch=8, length=128)


def vit() -> Made:
    config = hf.ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )
    return _pictures(hf.ViTForImageClassification, config, batch=16, size=64)


def convnext() -> Made:
    config = hf.ConvNextConfig(hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], num_labels=10)
    return _pictures(hf.ConvNextForImageClassification, config, batch=8, size=96)


def resnet() -> Made:
    config = hf.ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, 256],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=10,
    )
    return _pictures(hf.ResNetForImageClassification, config, batch=16, size=96)


def bottlenecks() -> Made:
    torch.manual_seed(0)
    return (
        wide_resnet(base=16, factor=1, classes=100),
        (torch.randn(8, 3, 64, 64), torch.arange(8)),
        nn.CrossEntropyLoss(),
    )


def diffusion() -> Made:
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )
    x = torch.randn(8, 3, 32, 32)
    return model, (x, torch.arange(8), torch.randn_like(x)), noise


def volumes() -> Made:
    torch.manual_seed(0)
    model = nets.UNet(3, 1, 2, channels=(8, 16, 32, 64), strides=(2, 2, 2), num_res_units=1, norm="BATCH")
    x = torch.randn(4, 1, 32, 32, 32)
    return model, (x, (x[:, 0] > 0).long()), nn.CrossEntropyLoss()


class Tables(nn.Module):
    """A ranking net of embedding tables and two towers, as DLRM's."""

    def __init__(self, tables: int = 8, rows: int = 5000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = (tables + 1) ** 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        looked_up = [table(ids[:, place]) for place, table in enumerate(self.tables)]
        rows = torch.stack([x, *looked_up], dim=1)
        pairs = (rows @ rows.transpose(1, 2)).flatten(1)
        out: Tensor = self.top(torch.cat([x, pairs], dim=1)).squeeze(1)
        return out


def tables() -> Made:
    torch.manual_seed(0)
    ids = _tokens(2048, 8, 5000)
    clicks = (torch.arange(2048) % 2).float()
    return Tables(), (torch.randn(2048, 16), ids, clicks), F.binary_cross_entropy_with_logits


class Recurrent(nn.Module):
    """An LSTM over characters."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 200)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embedding(ids))[0]).transpose(1, 2)
        return out


def lstm() -> Made:
    torch.manual_seed(0)
    ids = _tokens(16, 64, 200)
    return Recurrent(), (ids, ids.roll(-1, 1)), nn.CrossEntropyLoss()


NETS = (llama, bert, vit, convnext, resnet, bottlenecks, diffusion, volumes, tables, lstm)
