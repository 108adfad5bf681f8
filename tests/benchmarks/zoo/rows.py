"""Which model is planned for which cluster, with which batch: 80 rows.

Batches are global: those that people train with on 8 and 64 devices, and on more if a model is planned for
more. They were chosen before anything was planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.cluster import ClusterSpec, Link
from tests.benchmarks.zoo import pictures, sequences
from tests.benchmarks.zoo.sequences import Made

NVLINK, INFINIBAND = Link(5e-6, 450e9), Link(10e-6, 50e9)  # H100s, a network card for each
NVLINK_2, ETHERNET = Link(5e-6, 150e9), Link(30e-6, 25e9 / 8)  # V100s, 25 Gbit/s between nodes


@dataclass(frozen=True, slots=True)
class Machines:
    """A cluster, and in how many seconds a model should be planned for it."""

    name: str
    spec: ClusterSpec
    seconds: float


def h100s(nodes: int, seconds: float) -> Machines:
    spec = ClusterSpec(
        nodes=nodes, devices_per_node=8, device="h100", memory="80GB", intra=NVLINK, inter=INFINIBAND
    )
    return Machines(f"{8 * nodes} h100", spec, seconds)


NODE, RACK, HALL = h100s(1, 45), h100s(8, 75), h100s(32, 120)
OLD = Machines(
    "32 v100",
    ClusterSpec(nodes=4, devices_per_node=8, device="v100", memory="32GB", intra=NVLINK_2, inter=ETHERNET),
    75,
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and its global batches on 8, 64 and 256 H100s and on 32 V100s; None where it isn't planned."""

    make: Callable[[int], Made]
    node: int
    rack: int
    hall: int | None = None
    old: int | None = None

    @property
    def name(self) -> str:
        return self.make.__name__.replace("_", "-")


MODELS = (
    Model(sequences.llama_8b, 64, 512, hall=1024),
    Model(sequences.llama_1b, 128, 512),
    Model(sequences.qwen3_4b, 64, 512, hall=1024),
    Model(sequences.qwen2_7b, 64, 512, hall=1024),
    Model(sequences.mixtral_8x7b, 64, 512, hall=1024),
    Model(sequences.gpt2_small, 128, 512, old=256),
    Model(sequences.gpt2_xl, 64, 512, hall=1024, old=256),
    Model(sequences.mamba_1b, 64, 256),
    Model(sequences.bert_base, 256, 2048, old=512),
    Model(sequences.bert_large, 256, 2048, hall=4096, old=512),
    Model(sequences.t5_large, 128, 1024, hall=2048),
    Model(sequences.whisper_large, 64, 256, hall=1024),
    Model(sequences.wav2vec_large, 64, 256),
    Model(sequences.lstm, 256, 1024, old=512),
    Model(pictures.vit_base, 512, 4096),
    Model(pictures.vit_large, 256, 2048, hall=4096),
    Model(pictures.swin_large, 256, 1024),
    Model(pictures.convnext_large, 256, 2048),
    Model(pictures.resnet_50, 256, 2048, old=1024),
    Model(pictures.resnet_152, 256, 2048, old=1024),
    Model(pictures.segformer_b5, 16, 64, old=32),
    Model(pictures.clip_large, 512, 4096),
    Model(pictures.sd_unet, 64, 512, hall=2048),
    Model(pictures.sd2_unet, 64, 512),
    Model(pictures.ddpm_unet, 64, 256),
    Model(pictures.dit_xl, 256, 1024),
    Model(pictures.unet_2d, 32, 128, old=64),
    Model(pictures.unet_3d, 16, 64, old=32),
    Model(pictures.nnunet_3d, 16, 64),
    Model(pictures.dlrm, 8192, 65536),
)


@dataclass(frozen=True, slots=True)
class Row:
    model: Model
    machines: Machines
    batch: int

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.machines.name}"

    @property
    def file(self) -> str:
        return self.name.replace(" ", "-") + ".json"


def rows() -> list[Row]:
    """All of them, those on few devices first."""
    planned = [
        Row(model, machines, batch)
        for model in MODELS
        for machines, batch in ((NODE, model.node), (RACK, model.rack), (OLD, model.old), (HALL, model.hall))
        if batch is not None
    ]
    return sorted(planned, key=lambda row: row.machines.spec.num_devices)
