"""The run that `tests.benchmarks.faults` disturbs: FOLDER STEPS. A small transformer, float64, with dropout.

Rank 0 writes when it started, when its imports were done, when it had a plan, and each step, into FOLDER/log.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # which torch.export imports at its first trace
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autopar

RANK = os.environ.get("RANK", "0")
IMPORTED = time.time()  # autopar's too: ranks import it before a script
WIDTH, HEADS, LAYERS, LENGTH, WORDS, BATCH = 128, 4, 8, 64, 64, 12
SAVE_EVERY = 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        wide: Tensor = F.gelu(self.up(self.norm2(x)))
        down: Tensor = self.drop(self.down(wide))
        return x + down


def write(folder: Path, **line: object) -> None:
    """Add a line to the log."""
    if RANK == "0":
        with (folder / "log").open("a") as file:
            file.write(json.dumps(line) + "\n")


def main(folder: Path, count: int) -> None:
    """Train; raise where the driver asks this rank to."""
    begun = Path("/proc/self").stat().st_ctime
    (folder / f"pid_{RANK}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    blocks = [Block() for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS)).double()
    words = torch.randint(WORDS, (40 * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(words[:, :-1], words[:, 1:])

    def loss_fn(scores: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(scores.reshape(-1, WORDS), wanted.reshape(-1))

    cluster = autopar.ClusterSpec.detect()
    parallel = autopar.parallelize(model, cluster, data[:BATCH], loss_fn=loss_fn, exact_random=True)
    planned = time.time()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(data, batch_sampler=parallel.sampler(data, seed=3))
    steps = autopar.steps(
        parallel, loader, folder=folder / "saves", optimizer=optimizer, epochs=1000, save_every=SAVE_EVERY
    )
    for number, batch in enumerate(steps):
        if not number:
            write(
                folder,
                begun=begun,
                imported=IMPORTED,
                planned=planned,
                loaded=time.time(),
                notes=parallel.plan.notes,
            )
        if (ask := folder / f"raise_{RANK}").exists():
            ask.unlink()
            raise ValueError("a fault")
        optimizer.zero_grad()
        loss = parallel(*batch)
        loss.backward()
        optimizer.step()
        write(folder, step=steps.step + 1, ranks=cluster.num_devices, loss=loss.item(), time=time.time())
        if steps.step + 1 == count:
            break


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
