"""How near predictions of one process come to its timed steps and its peak, eager and compiled.

python -m tests.benchmarks.compiled                    five nets, some ten minutes
python -m tests.benchmarks.compiled digits residual    those alone

Operators and fused groups are measured; a step is forward, backward and SGD with momentum, timed in turns by
the processor's clock, eager and compiled in one run. Peaks are of what is allocated, scratch of kernels too.
One thread; let the machine do nothing else meanwhile.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.comparing.measured_peak import grown_bytes
from autopar.runtime.launch import worker
from autopar.runtime.launch.launch import run_function
from autopar.runtime.parameters.parameters import local
from examples import characters
from tests.benchmarks import compiled  # by its name, for the other process
from tests.benchmarks.cases import Subject, _split, _step, characters_16, crops, digits_256
from tests.benchmarks.contest import Contestant, compete

ROUNDS = 11
WAYS = {"eager": False, "compiled": True}


class Residual(nn.Module):
    """Two convolutions and their norms, beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.last(self.second(F.relu(self.norm(self.first(x))))) + x)


def block() -> Subject:
    """A GPT block of width 256."""
    model = characters.Block(256, 4, 0.1)
    return Subject(model, (torch.randn(8, 256, 256), torch.randn(8, 256, 256)), F.mse_loss)


def residual() -> Subject:
    """A residual block of 64 channels."""
    return Subject(Residual(64), (torch.randn(16, 64, 32, 32), torch.randn(16, 64, 32, 32)), F.mse_loss)


NETS: dict[str, Callable[[], Subject]] = {
    "characters": characters_16,
    "digits": digits_256,
    "photographs": lambda: crops(2),
    "block": block,
    "residual": residual,
}


def run(name: str, costdb: str) -> dict[str, tuple[float, float]]:
    """Predicted by measured, for each way: seconds, and bytes at the peak."""
    torch.set_num_threads(1)
    worker.init("cpu")
    contestants, peaks, predicted = dict[str, Contestant](), dict[str, float](), dict[str, float]()
    for way, is_compiled in WAYS.items():
        torch.manual_seed(0)
        subject = NETS[name]()
        args, kwargs = _split(subject.inputs)
        parallel = autopar.parallelize(
            subject.model,
            ClusterSpec.local(1),
            args or None,
            example_kwargs=kwargs or None,
            loss_fn=subject.loss_fn,
            optimizer="sgd-momentum",
            costdb=costdb,
            compile=is_compiled,
            quiet=True,
        )
        assert parallel.plan is not None
        step = _step(parallel, Subject(parallel, subject.inputs))
        contestants[way] = Contestant(step, predicted=parallel.plan.step_seconds)
        predicted[way] = parallel.plan.step_seconds
        for _ in range(2):
            step()
        peaks[way] = parallel.plan.peak_bytes / (grown_bytes(step) + _held(parallel, args))
    timed = compete(contestants, rounds=ROUNDS, keep=tuple(contestants), budget=0)
    return {way: (predicted[way] / median(timed.cpu_seconds[way]), peaks[way]) for way in WAYS}


def _held(parallel: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Bytes that are there between steps: the module with its momenta, and the batch."""
    tensors = [local(each) for each in (*parallel.parameters(), *parallel.buffers())]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return 2 * sum(storages.values()) + sum(each.untyped_storage().nbytes() for each in inputs)


def main(names: Annotated[list[str] | None, typer.Argument(help=", ".join(NETS))] = None) -> None:
    """Predicted by measured steps and peaks, net by net."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names or NETS:
            found = run_function(compiled.run, 1, name, str(Path(folder, f"{name}.sqlite")))[0]
            words = [f"{way} {step:.2f}, {peak:.2f}" for way, (step, peak) in found.items()]
            print(f"{name}: {'; '.join(words)}", flush=True)


if __name__ == "__main__":
    typer.run(main)
