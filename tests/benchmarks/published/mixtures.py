"""Published rows of mixtures of experts under several splits, each row's split planned and priced.

python -m tests.benchmarks.published.mixtures FILE.csv
python -m tests.benchmarks.published.mixtures FILE.csv --layers 2 --json

The rows say little of how they were run; what they don't say is assumed:

    2 x 8 H100    50 GB/s a device between nodes, 20 layers of 256 experts with 512 channels, 8 chosen,
                  ordinary attention; a sequence of 1,024 a device
    8 B200        48 layers of 128 experts with 768 channels, 8 chosen; a sequence of 8,192 a device
    all           bfloat16, Adam, routers balanced by force, no pipeline; gathers of weights start early with
                  --overlap, else are waited for

So rows of one job are compared with each other, and not by their seconds. Rows with stages, with tensors
split inside of layers, in fp8 or under a skewed router are kept apart.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import transformers as hf
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from autopar.cluster import ClusterSpec, Link
from autopar.core.force import Parallelism
from autopar.core.gathering import ShardState
from autopar.core.mesh import Mesh
from autopar.errors import InputError
from autopar.planning.asked.request import Request
from autopar.planning.planner import Planner
from autopar.trace.experts.routed_experts import ROUTED_EXPERTS
from autopar.trace.export import trace
from tests.benchmarks.zoo.sequences import causal

H100S = ClusterSpec(
    nodes=2,
    devices_per_node=8,
    device="h100",
    memory="80GB",
    intra=Link(5e-6, 450e9),
    inter=Link(10e-6, 50e9),
)
B200S = ClusterSpec(devices_per_node=8, device="b200", memory="180GB", intra=Link(5e-6, 900e9))
VOCABULARY, WIDTH, CHOSEN = 151936, 2048, 8


@dataclass(frozen=True, slots=True)
class MixtureJob:
    """A model and cluster of the file, and the splits that are priced: mesh, factors of experts, state."""

    cluster: ClusterSpec
    layers: int
    experts: int
    channels: int
    length: int
    sequences: int
    splits: dict[str, tuple[Mesh, tuple[str, ...], ShardState]]

    @property
    def tokens(self) -> int:
        return self.length * self.sequences


JOBS = {
    "Qwen3.6-35B-A3B 20 layers": MixtureJob(
        H100S,
        20,
        256,
        512,
        1024,
        16,
        {
            "ZeRO-3 TP1 EP1": (Mesh((16,)), ("t",), ShardState.WEIGHTS),
            "ZeRO-1 TP1 DP16 EP8": (Mesh((2, 8)), ("t", "experts"), ShardState.OPTIMIZER),
        },
    ),
    "Qwen3-30B-A3B": MixtureJob(
        B200S,
        48,
        128,
        768,
        8192,
        8,
        {
            "FSDP8 EP1 (another stack)": (Mesh((8,)), ("t",), ShardState.WEIGHTS),
            "PP1 DP2 EP4": (Mesh((2, 4)), ("t", "experts"), ShardState.OPTIMIZER),
            "PP1 DP1 EP8": (Mesh((8,)), ("experts",), ShardState.OPTIMIZER),
        },
    ),
}


@dataclass(frozen=True, slots=True)
class MixtureRow:
    """Tokens a second of a device, as published."""

    model: str
    split: str
    published: float


@dataclass(frozen=True, slots=True)
class PricedRow:
    """A row beside what its plan predicts, each against the first row of its job."""

    row: MixtureRow
    predicted: float
    published_ratio: float
    predicted_ratio: float


def read(path: Path) -> list[MixtureRow]:
    """The rows whose split is priced here; raises InputError for a file of something else."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [
                MixtureRow(row["model"], row["split"], float(row["figure"]))
                for row in csv.DictReader(file)
                if row["model"] in JOBS and row["split"] in JOBS[row["model"]].splits
            ]
    except (OSError, KeyError, ValueError) as cause:
        raise InputError(
            where=str(path),
            found=f"{type(cause).__name__}: {cause}",
            wanted="model,cluster,sequence,global_batch,split,figure,unit,peak_gib,note",
            remedy="give the published table",
        ) from cause
    return rows


def model_of(job: MixtureJob, layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = hf.Qwen3MoeConfig(
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=job.channels,
        num_experts=job.experts,
        num_experts_per_tok=CHOSEN,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    model, inputs, _ = causal(hf.Qwen3MoeForCausalLM, config, batch=job.sequences, length=job.length)
    assert isinstance(inputs, dict)
    return model, inputs


def predicted(job: MixtureJob, split: str, layers: int, *, overlap: bool) -> float:
    """Tokens a second of a device, by the plan whose experts are split so; batch alone is forced elsewhere
    where experts aren't split."""
    mesh, way, state = job.splits[split]
    model, inputs = model_of(job, layers)
    graph = trace(model, (), inputs).graph
    request = Request(
        mesh=mesh,
        pins={item.name: way for item in graph.operators if item.target is ROUTED_EXPERTS},
        force=None if "experts" in way else Parallelism.BATCH,
        shard_state=state,
        imbalance=1.0,
        overlap=overlap,
        measure=False,
        alternatives=False,
    )
    plan = Planner(job.cluster, request).find_plan(model, (), inputs, None)
    return job.tokens / job.cluster.num_devices / plan.step_seconds


def priced(
    rows: Sequence[MixtureRow], layers: int | None = None, *, overlap: bool = False
) -> Iterator[PricedRow]:
    """The rows of each job with what is predicted of them; all layers, unless so many are said."""
    first: dict[str, tuple[float, float]] = {}
    for row in rows:
        job = JOBS[row.model]
        found = predicted(job, row.split, layers or job.layers, overlap=overlap)
        published, ours = first.setdefault(row.model, (row.published, found))
        yield PricedRow(row, found, row.published / published, found / ours)


def main(
    path: Annotated[Path, typer.Argument(help="The published table.")],
    layers: Annotated[int | None, typer.Option(min=1, help="Of each model; all without.")] = None,
    overlap: Annotated[bool, typer.Option(help="Gathers of weights start early.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As data.")] = False,
) -> None:
    """Price the published splits of mixtures of experts."""
    found = list(priced(read(path), layers, overlap=overlap))
    if as_json:
        print(json.dumps([asdict(each) for each in found]))
        return
    table = Table("model", "split", "published", "predicted", "ratio, published", "predicted ratio")
    for each in found:
        row, ratios = each.row, (each.published_ratio, each.predicted_ratio)
        numbers = (f"{row.published:,.0f}", f"{each.predicted:,.0f}", *(f"{ratio:.2f}" for ratio in ratios))
        table.add_row(row.model, row.split, *numbers)
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
