"""What a step costs the host beside the eager model: `python -m tests.benchmarks.host`.

Nets of the structure of ViT-B, ResNet-50 and GPT-2 are so narrow that only Python and torch's own calls
are timed. The eager model and autopar on one device take turns; of each pair of turns the ratio of their
CPU seconds counts, and the median of all pairs is printed.

python -m tests.benchmarks.host --compiled    the same, both compiled
python -m tests.benchmarks.host --two    the same on two processes, beside DistributedDataParallel, and with
                                         weights in shards beside FSDP2, in float32 and in bfloat16

Batch norms of DistributedDataParallel are each rank's own: torch's SyncBatchNorm, which sums as autopar does,
takes no tensors of CPUs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.runtime.launch.launch import run_function

PAIRS = 40
WARM = 5  # steps before anything is timed


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = (
            item.view(n, t, self.heads, c // self.heads).transpose(1, 2)
            for item in self.qkv(self.norm_1(x)).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, c))
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return x


class ViT(nn.Module):
    """12 blocks on patches."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(torch.zeros(1, 4, width))
        self.blocks = nn.Sequential(*(Block(width, 2, causal=False) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.positions
        return F.cross_entropy(self.head(self.norm(self.blocks(x)).mean(1)), y)


class GPT(nn.Module):
    """12 causal blocks whose head is tied to the embedding."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, width), nn.Embedding(4, width)
        self.blocks = nn.Sequential(*(Block(width, 2, causal=True) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 16, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        logits = self.head(self.norm(self.blocks(h)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


class Bottleneck(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, width: int, *, is_first: bool) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = (
            nn.Conv2d(width, 2, 1, bias=False),
            nn.Conv2d(2, 2, 3, padding=1, bias=False),
        )
        self.conv_3 = nn.Conv2d(2, width, 1, bias=False)
        self.norm_1, self.norm_2, self.norm_3 = nn.BatchNorm2d(2), nn.BatchNorm2d(2), nn.BatchNorm2d(width)
        self.skip = (
            nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width))
            if is_first
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        y = self.norm_3(self.conv_3(F.relu(self.norm_2(self.conv_2(y)))))
        return F.relu(y + self.skip(x))


class ResNet(nn.Module):
    """16 bottlenecks in four groups."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            *(Bottleneck(width, is_first=number == 0) for count in (3, 4, 6, 3) for number in range(count))
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "ViT": (ViT, lambda: (torch.randn(2, 3, 8, 8), torch.tensor([1, 2]))),
    "ResNet": (ResNet, lambda: (torch.randn(2, 3, 4, 4), torch.tensor([1, 2]))),
    "GPT": (GPT, lambda: (torch.randint(0, 16, (2, 4)),)),
}


def _forward(model: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            model(*inputs)

    return run


def _backward(model: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], None]:
    parameters = list(model.parameters())

    def run() -> None:
        for item in parameters:
            item.grad = None
        model(*inputs).backward()

    return run


def _step(model: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)

    def run() -> None:
        optimizer.zero_grad()
        model(*inputs).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return run


KINDS: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Callable[[], None]]] = {
    "forward": _forward,
    "forward and backward": _backward,
    "step, clipped, fused AdamW": partial(_step, fused=True),
    "step, clipped, foreach AdamW": partial(_step, foreach=True),
}


def ratios(*, compiled: bool = False) -> list[tuple[str, str, float, float]]:
    """The net, what is done, milliseconds of eager training, and autopar's as a multiple."""
    torch.set_num_threads(1)
    rows = []
    for name, (make, example) in NETS.items():
        torch.manual_seed(0)
        inputs, eager = example(), make()
        options: dict[str, Any] = {"measure": False, "quiet": True, "compile": compiled}
        ours = autopar.parallelize(make(), autopar.ClusterSpec.local(1), inputs, **options)
        if compiled:
            eager.compile()
        for kind, prepare in KINDS.items():
            rows.append((name, kind, *_ratio(prepare(eager, inputs), prepare(ours, inputs))))
    return rows


def ratios_compiled() -> list[tuple[str, str, float, float]]:
    """The same of compiled models."""
    return ratios(compiled=True)


def ratios_of_two() -> list[tuple[str, str, float, float]]:
    """The same on two ranks: milliseconds of torch's own way, and autopar's as a multiple."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for name, (make, example) in NETS.items():
        torch.manual_seed(0)
        inputs = example()
        mine = tuple(item[dist.get_rank() :][:1] for item in inputs)
        for way, (wrap, pairs) in WAYS.items():
            theirs, ours = wrap(make()), _parallel(make(), inputs, way)
            for kind in list(KINDS)[1:]:
                both = KINDS[kind](theirs, mine), KINDS[kind](ours, inputs)
                rows.append((name, f"{kind}, {way}", *_ratio(*both, pairs)))
    return rows


def _parallel(model: nn.Module, inputs: tuple[Tensor, ...], way: str) -> nn.Module:
    state: Any = "none" if way == "DDP" else "weights"
    cluster = autopar.ClusterSpec.local(2)
    dtype: Any = "bf16" if way == LOW else "fp32"
    options = {"force": "batch", "shard_state": state, "dtype": dtype, "measure": False, "quiet": True}
    return autopar.parallelize(model, cluster, inputs, **options)


def _sharded(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    policy = MixedPrecisionPolicy(dtype, torch.float32)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


LOW = "FSDP2, bf16"


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], int]] = {
    "DDP": (DistributedDataParallel, PAIRS),
    "FSDP2": (_sharded, 6),  # of which each takes longer
    LOW: (partial(_sharded, dtype=torch.bfloat16), 6),
}


def _ratio(one: Callable[[], None], other: Callable[[], None], pairs: int = PAIRS) -> tuple[float, float]:
    for _ in range(WARM):
        one()
        other()
    timed = [(_seconds(one), _seconds(other)) for _ in range(pairs)]
    return 1e3 * median(first for first, _ in timed), median(second / first for first, second in timed)


def _seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    """Print a table."""
    two, one = "--two" in sys.argv, ratios_compiled if "--compiled" in sys.argv else ratios
    words = ("torch", "two processes") if two else ("eager", "one process")
    table = Table("net", "", f"{words[0]}, ms", f"autopar / {words[0]}", title=f"Host time, {words[1]}")
    for name, kind, theirs, ratio in run_function(ratios_of_two, 2)[0] if two else run_function(one, 1)[0]:
        table.add_row(name, kind, f"{theirs:.2f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    from tests.benchmarks.host import main as imported  # ranks know it by its module

    imported()
