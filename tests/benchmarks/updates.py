"""Rules of update on four hosts behind slow links, beside steps without any exchange.

python -m tests.benchmarks.updates                    as root; 200 Mbit/s
python -m tests.benchmarks.updates --rate 50mbit --steps 200

Network namespaces of this machine are the hosts, with one process and one thread each; they share its cores.
Every rule trains the same net on the same samples; bytes are those that one host sends. With each rule the
loss after as many steps, and after as many seconds as the slowest rule had for its first tenth.
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.cluster import ClusterSpec
from autopar.runtime.module.parallel_module import runner_of
from tests.benchmarks.namespaces import hosts, run_on_hosts

HOSTS, BATCH, WIDTH, CLASSES = 4, 64, 1024, 16
RULES = (  # local steps alone are the first
    "every({most})",
    "summed",
    "every(50, outer='nesterov')",
    "every(50, parts=5, delay=2, outer='nesterov')",
    "summed(wire='top1%')",
    "every(50, outer='nesterov', wire='top1%')",
    "gossip(exponential)",
)


@dataclass(frozen=True, slots=True)
class RuleFigures:
    """Figures of one rule: seconds of all steps, bytes that this host sent, the loss after each step."""

    rule: str
    seconds: tuple[float, ...]
    sent: int
    losses: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Steps a second."""
        return len(self.seconds) / sum(self.seconds)

    def loss_after(self, seconds: float) -> float:
        """The loss of the step that was under way then, a mean over five."""
        passed = 0.0
        for place, step in enumerate(self.seconds):
            passed += step
            if passed >= seconds:
                return sum(self.losses[max(0, place - 4) : place + 1]) / min(5, place + 1)
        return sum(self.losses[-5:]) / 5


def samples() -> TensorDataset:
    """Rows whose classes a net of random weights gives."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(HOSTS * BATCH * 32, 64, generator=generator)
    teacher = torch.randn(64, CLASSES, generator=generator)
    return TensorDataset(x, (x @ teacher + (x**2) @ teacher.roll(1, 0)).argmax(1))


def net() -> nn.Module:
    """A net of 4 million weights, 17 MB."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, WIDTH), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def train(rules: tuple[str, ...], steps: int, folder: str) -> list[RuleFigures]:
    """On a host: each rule in turn."""
    torch.set_num_threads(1)
    return [_train(rule, steps, Path(folder) / str(place)) for place, rule in enumerate(rules)]


def _train(rule: str, steps: int, folder: Path) -> RuleFigures:
    data = samples()
    parallel = autopar.parallelize(
        net(),
        ClusterSpec.local(HOSTS),
        (torch.zeros(BATCH, 64), torch.zeros(BATCH, dtype=torch.long)),
        loss_fn=F.cross_entropy,
        updates=rule,
        measure=False,
        quiet=True,
    )
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(data, batch_sampler=parallel.sampler(data))
    islands = runner_of(parallel).islands
    assert islands is not None
    seconds, losses = list[float](), list[float]()
    epochs = math.ceil(steps / len(loader))
    sent, begin = islands.across.sent, time.perf_counter()
    for x, y in autopar.steps(
        parallel, loader, folder=folder, optimizer=optimizer, epochs=epochs, save_every=10**9
    ):
        if losses:
            seconds.append(time.perf_counter() - begin)
            begin = time.perf_counter()
        if len(losses) == steps:
            break
        optimizer.zero_grad()
        loss = parallel(x, y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return RuleFigures(rule, tuple(seconds), islands.across.sent - sent, tuple(losses))


def table(figures: list[RuleFigures], rate: str) -> Table:
    """What each rule gives, beside local steps alone and steps of the whole batch."""
    alone, whole = figures[:2]
    limit = sum(whole.seconds) / 10
    found = Table(
        "rule",
        "steps/s",
        "of local steps'",
        "MB sent a step",
        "bytes of summed's",
        "loss at the end",
        f"loss after {limit:.0f} s",
        title=f"{HOSTS} hosts, links {rate}, {len(alone.seconds)} steps",
    )
    for item in figures:
        found.add_row(
            "local steps alone" if item is alone else item.rule,
            f"{item.rate:.2f}",
            f"{item.rate / alone.rate:.2f}",
            f"{item.sent / len(item.seconds) / 1e6:.2f}",
            f"1/{whole.sent / item.sent:.0f}" if item.sent else "0",
            f"{sum(item.losses[-5:]) / 5:.3f}",
            f"{item.loss_after(limit):.3f}",
        )
    return found


def main(
    rate: Annotated[str, typer.Option(help="of each host's link, as tc takes it")] = "200mbit",
    steps: Annotated[int, typer.Option(min=10, help="of each rule")] = 101,
) -> None:
    """Make the hosts, train there by each rule, and print the table."""
    from tests.benchmarks.updates import train  # by the name under which hosts import it

    rules = tuple(rule.format(most=10**6) for rule in RULES)
    with tempfile.TemporaryDirectory() as folder, hosts(HOSTS, rate=rate) as made:
        Console(width=140).print(table(run_on_hosts(train, made, rules, steps, folder)[0], rate))


if __name__ == "__main__":
    typer.run(main)
