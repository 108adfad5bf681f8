"""Models of images and volumes, of transformers, diffusers and MONAI, and one of tables.

Convolutional nets are float32, transformers and diffusion bfloat16. `batch` is the number of images,
volumes or rows. Sizes are those of the published checkpoints that the names say.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import torch.nn.functional as F
import transformers as hf
from monai.networks import nets
from torch import Tensor, nn

from tests.benchmarks.zoo.sequences import Made, meta, tokens

BF16, F32 = torch.bfloat16, torch.float32


def classifier(kind: type[nn.Module], config: Any, *, batch: int, size: int, dtype: torch.dtype) -> Made:
    with meta(dtype):
        model = kind(config)
        images = torch.zeros(batch, 3, size, size)
    return model, {"pixel_values": images, "labels": tokens(batch, 1).reshape(batch)}, None


def vit_base(batch: int) -> Made:
    config = hf.ViTConfig(num_labels=1000)
    return classifier(hf.ViTForImageClassification, config, batch=batch, size=224, dtype=BF16)


def vit_large(batch: int) -> Made:
    config = hf.ViTConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        num_labels=1000,
    )
    return classifier(hf.ViTForImageClassification, config, batch=batch, size=224, dtype=BF16)


def swin_large(batch: int) -> Made:
    config = hf.SwinConfig(
        embed_dim=192, depths=[2, 2, 18, 2], num_heads=[6, 12, 24, 48], drop_path_rate=0.2, num_labels=1000
    )
    return classifier(hf.SwinForImageClassification, config, batch=batch, size=224, dtype=BF16)


def convnext_large(batch: int) -> Made:
    config = hf.ConvNextConfig(
        hidden_sizes=[192, 384, 768, 1536], depths=[3, 3, 27, 3], drop_path_rate=0.2, num_labels=1000
    )
    return classifier(hf.ConvNextForImageClassification, config, batch=batch, size=224, dtype=F32)


def resnet_50(batch: int) -> Made:
    config = hf.ResNetConfig(num_labels=1000)
    return classifier(hf.ResNetForImageClassification, config, batch=batch, size=224, dtype=F32)


def resnet_152(batch: int) -> Made:
    config = hf.ResNetConfig(depths=[3, 8, 36, 3], num_labels=1000)
    return classifier(hf.ResNetForImageClassification, config, batch=batch, size=224, dtype=F32)


def segformer_b5(batch: int) -> Made:
    config = hf.SegformerConfig(
        hidden_sizes=[64, 128, 320, 512], depths=[3, 6, 40, 3], decoder_hidden_size=768, num_labels=150
    )
    with meta(F32):
        model = hf.SegformerForSemanticSegmentation(config)
        images = torch.zeros(batch, 3, 1024, 1024)
        labels = torch.zeros(batch, 1024, 1024, dtype=torch.long)
    return model, {"pixel_values": images, "labels": labels}, None


def clip_large(batch: int) -> Made:
    text = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    vision = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 14,
    }
    with meta(BF16):
        model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=768))
        images = torch.zeros(batch, 3, 224, 224)
    return model, {"input_ids": tokens(batch, 77), "pixel_values": images}, contrastive


def contrastive(output: Any) -> Tensor:
    """CLIP's loss, both ways."""
    logits = output.logits_per_text
    targets = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets)) / 2


def denoiser(model: nn.Module, inputs: tuple[Tensor, ...]) -> Made:
    """A diffusion model that predicts the noise of its first input."""
    return model, (*inputs, inputs[0]), noise


def noise(output: Any, wanted: Tensor) -> Tensor:
    return F.mse_loss(output.sample.float(), wanted.float())


def sd_unet(batch: int) -> Made:
    """Stable Diffusion 1.5's U-Net on latents of 512 x 512 pixels."""
    with meta(BF16):
        model = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
        latents, text = torch.zeros(batch, 4, 64, 64), torch.zeros(batch, 77, 768)
    return denoiser(model, (latents, tokens(batch, 1).reshape(batch), text))


def sd2_unet(batch: int) -> Made:
    """Stable Diffusion 2.1's U-Net on latents of 768 x 768 pixels."""
    with meta(BF16):
        model = diffusers.UNet2DConditionModel(
            sample_size=96,
            cross_attention_dim=1024,
            attention_head_dim=(5, 10, 20, 20),
            use_linear_projection=True,
        )
        latents, text = torch.zeros(batch, 4, 96, 96), torch.zeros(batch, 77, 1024)
    return denoiser(model, (latents, tokens(batch, 1).reshape(batch), text))


def ddpm_unet(batch: int) -> Made:
    """The U-Net of 256 x 256 pixels that denoises without a text."""
    with meta(BF16):
        model = diffusers.UNet2DModel(
            sample_size=256,
            block_out_channels=(128, 128, 256, 256, 512, 512),
            down_block_types=(*("DownBlock2D",) * 4, "AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D", *("UpBlock2D",) * 4),
        )
        images = torch.zeros(batch, 3, 256, 256)
    return denoiser(model, (images, tokens(batch, 1).reshape(batch)))


def dit_xl(batch: int) -> Made:
    """DiT-XL/2 on latents of 256 x 256 pixels."""
    with meta(BF16):
        model = diffusers.DiTTransformer2DModel(
            num_attention_heads=16, attention_head_dim=72, num_layers=28, sample_size=32
        )
        latents = torch.zeros(batch, 4, 32, 32)
    steps, classes = tokens(batch, 1).reshape(batch), tokens(batch, 1).reshape(batch)
    return denoiser(model, (latents, steps, classes))


def unet_2d(batch: int) -> Made:
    with meta(F32):
        model = nets.BasicUNet(
            spatial_dims=2, in_channels=3, out_channels=4, features=(64, 64, 128, 256, 512, 64)
        )
        images = torch.zeros(batch, 3, 512, 512)
    return model, (images, torch.zeros(batch, 512, 512, dtype=torch.long, device="meta")), F.cross_entropy


def unet_3d(batch: int) -> Made:
    with meta(F32):
        model = nets.UNet(
            spatial_dims=3,
            in_channels=4,
            out_channels=4,
            channels=(32, 64, 128, 256, 512),
            strides=(2, 2, 2, 2),
            num_res_units=2,
        )
        volumes = torch.zeros(batch, 4, 128, 128, 128)
    labels = torch.zeros(batch, 128, 128, 128, dtype=torch.long, device="meta")
    return model, (volumes, labels), F.cross_entropy


def nnunet_3d(batch: int) -> Made:
    """nnU-Net's plain 3-D net, by MONAI."""
    with meta(F32):
        model = nets.DynUNet(
            spatial_dims=3,
            in_channels=4,
            out_channels=4,
            kernel_size=[3] * 6,
            strides=[1, 2, 2, 2, 2, 2],
            upsample_kernel_size=[2] * 5,
            filters=[32, 64, 128, 256, 320, 320],
        )
        volumes = torch.zeros(batch, 4, 128, 128, 128)
    labels = torch.zeros(batch, 128, 128, 128, dtype=torch.long, device="meta")
    return model, (volumes, labels), F.cross_entropy


class Recommender(nn.Module):
    """Like DLRM: embeddings of categories and a net for numbers, their products, and a net on these."""

    pairs: Tensor

    def __init__(self, rows: int, tables: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU()
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )
        self.register_buffer("pairs", torch.zeros(pairs, dtype=torch.long), persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        looked = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        features = torch.stack([dense, *looked], dim=1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        chosen = products.index_select(1, self.pairs)
        logits: Tensor = self.top(torch.cat([dense, chosen], dim=1)).squeeze(1)
        return logits


def dlrm(batch: int) -> Made:
    with meta(F32):
        model = Recommender(1_000_000, 26, 128)
        numbers, clicks = torch.zeros(batch, 13), torch.zeros(batch)
    return model, (numbers, tokens(batch, 26), clicks), F.binary_cross_entropy_with_logits
