"""Steps of three nets on this machine's GPU: the serial model and the parallel module of one device, each
eager and compiled, in bfloat16 and in turns.

python -m tests.benchmarks.gpu                       all three, some ten minutes
python -m tests.benchmarks.gpu gpt2 --seconds 20     one of them
python -m tests.benchmarks.gpu unet --device cpu --batch 1     whether it runs, without a GPU

A step is forward, backward and a fused AdamW. Predictions are of forward and backward, where operators were
measured for at most `--measure-seconds`. `pip install -e '.[zoo]'` first; resnet50 needs torchvision.
"""

from __future__ import annotations

import copy
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

import autopar
from autopar.runtime.launch import worker
from autopar.trace.call_signature import find_loss
from costdb.timing import synchronize

Inputs = dict[str, Tensor] | tuple[Tensor, ...]
Made = tuple[nn.Module, Inputs, nn.Module | None]
WARM_UPS, IN_A_ROW = 4, 3  # steps


def gpt2(batch: int) -> Made:
    """GPT-2 small, sequences of 1,024 tokens."""
    import transformers as hf

    config = hf.GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ids = torch.randint(config.vocab_size, (batch, 1024))
    return hf.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}, None


def resnet50(batch: int) -> Made:
    """ResNet-50, images of 224 x 224."""
    import torchvision

    inputs = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    return torchvision.models.resnet50(), inputs, nn.CrossEntropyLoss()


def unet(batch: int) -> Made:
    """A residual U-Net of MONAI, images of 512 x 512."""
    from monai.networks.nets import UNet

    net = UNet(2, 3, 4, channels=(64, 128, 256, 512), strides=(2, 2, 2), num_res_units=2)
    return net, (torch.randn(batch, 3, 512, 512), torch.randint(4, (batch, 512, 512))), nn.CrossEntropyLoss()


NETS = {"gpt2": (gpt2, 8), "resnet50": (resnet50, 64), "unet": (unet, 16)}


@dataclass
class Runner:
    """One way to train a net, and the seconds of its steps."""

    name: str
    module: nn.Module
    loss: Callable[[], Tensor]
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def prepare(self, device: torch.device) -> None:
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=device.type == "cuda")

        def step() -> None:
            optimizer.zero_grad()
            self.loss().backward()
            optimizer.step()

        for _ in range(WARM_UPS):
            step()
        self.step, self.device = step, device
        if device.type == "cuda":
            synchronize(device)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            synchronize(device)
            self.peak_bytes = torch.cuda.max_memory_allocated() - before

    def time(self) -> None:
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            self.step()
        synchronize(self.device)
        self.seconds.append((time.perf_counter() - start) / IN_A_ROW)


def serial(made: Made, device: torch.device, *, compiled: bool) -> Runner:
    model, inputs, loss_fn = made
    model = copy.deepcopy(model).to(device)
    run: Any = torch.compile(model) if compiled else model

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            if isinstance(inputs, dict):
                result: Tensor = run(**inputs).loss
            else:
                assert loss_fn is not None
                result = loss_fn(run(inputs[0]), *inputs[1:])
        return result

    return Runner("serial, compiled" if compiled else "serial", model, loss)


def parallel(made: Made, *, compiled: bool, measure_seconds: float) -> Runner:
    model, inputs, loss_fn = made
    module = autopar.parallelize(
        copy.deepcopy(model),
        autopar.ClusterSpec.local(1),
        None if isinstance(inputs, dict) else inputs,
        example_kwargs=inputs if isinstance(inputs, dict) else None,
        loss_fn=loss_fn,
        quiet=True,
        measure=measure_seconds > 0,
        measure_seconds=measure_seconds,
        dtype="bf16",
        compile=compiled,
    )

    def loss() -> Tensor:
        found = find_loss(module(**inputs) if isinstance(inputs, dict) else module(*inputs))
        assert found is not None
        return found

    return Runner("autopar, compiled" if compiled else "autopar", module, loss)


@contextmanager
def alone(device: str) -> Iterator[None]:
    """A world of this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    os.environ.update(where | {"RANK": "0", "WORLD_SIZE": "1"})
    worker.init("cuda" if device == "cuda" else "cpu")
    yield
    dist.destroy_process_group()


def contest(name: str, batch: int | None, device: torch.device, seconds: float, measure: float) -> str:
    """A line for each way to train the net."""
    make, usual = NETS[name]
    torch.manual_seed(0)
    model, inputs, loss_fn = make(batch or usual)
    placed: Inputs
    if isinstance(inputs, dict):
        placed = {key: value.to(device) for key, value in inputs.items()}
    else:
        placed = tuple(value.to(device) for value in inputs)
    made = model, placed, loss_fn
    runners = [serial(made, device, compiled=False), parallel(made, compiled=False, measure_seconds=measure)]
    runners += [
        serial(made, device, compiled=True),
        parallel(made, compiled=True, measure_seconds=measure),
    ]
    for runner in runners:
        runner.prepare(device)
    end = time.monotonic() + seconds
    while time.monotonic() < end or not runners[-1].seconds:
        for runner in runners:
            runner.time()
    return "\n".join(_line(name, runner, runners[index // 2 * 2]) for index, runner in enumerate(runners))


def _line(name: str, runner: Runner, beside: Runner) -> str:
    mine, theirs = statistics.median(runner.seconds), statistics.median(beside.seconds)
    words = f"{name:<9} {runner.name:<18} {1e3 * mine:8.2f} ms   {mine / theirs:5.3f} of serial"
    words += f"   {runner.peak_bytes / 1e9:6.2f} GB beside state" if runner.peak_bytes else ""
    plan = getattr(runner.module, "plan", None)
    return words + (f"   {1e3 * plan.step_seconds:8.2f} ms predicted" if plan else "")


def main(
    names: Annotated[list[str] | None, typer.Argument(help="gpt2, resnet50, unet")] = None,
    seconds: Annotated[float, typer.Option(help="for the steps of a net")] = 20.0,
    measure_seconds: Annotated[float, typer.Option(help="for the operators of a net")] = 25.0,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    batch: Annotated[int | None, typer.Option(help="samples, instead of each net's")] = None,
) -> None:
    """Steps of nets on this machine's GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("this machine has no GPU")
    with alone(device):
        for name in names or NETS:
            print(contest(name, batch, torch.device(device), seconds, measure_seconds), flush=True)


if __name__ == "__main__":
    typer.run(main)
