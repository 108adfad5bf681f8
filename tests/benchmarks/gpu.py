"""Steps of five nets on this machine's GPU: the serial model and the parallel module of one device, each
eager and compiled, in bfloat16 and in turns.

python -m tests.benchmarks.gpu                       all five, some ten minutes
python -m tests.benchmarks.gpu gpt2 --seconds 20     one of them
python -m tests.benchmarks.gpu unet --device cpu --batch 1     whether it runs, without a GPU

A step is forward, backward and a fused AdamW; forward and backward are timed by themselves as well. What is
predicted are these: by operators measured here for at most `--measure-seconds`, and as for one device of that
kind which nobody has at hand, by its file in costdb/devices or, where there is none, its data sheet.
`pip install -e '.[zoo]'` first; resnet50 needs torchvision.
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
from autopar.cluster import gpu_kind
from autopar.runtime.launch import worker
from autopar.trace.call.call_signature import find_loss
from costdb.timing import synchronize

Inputs = dict[str, Tensor] | tuple[Tensor, ...]
Made = tuple[nn.Module, Inputs, nn.Module | None]
WARM_UPS, IN_A_ROW = 4, 3  # steps
CLASSES = "single_label_classification"


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


def llama(batch: int) -> Made:
    """Four layers of a Llama of width 2,048 whose keys and values are shared by four heads, 2,048 tokens."""
    import transformers as hf

    config = hf.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        use_cache=False,
    )
    ids = torch.randint(config.vocab_size, (batch, 2048))
    return hf.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}, None


def vit(batch: int) -> Made:
    """ViT-B/16 of images of 224 x 224."""
    import transformers as hf

    config = hf.ViTConfig(
        num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, problem_type=CLASSES
    )
    inputs = {"pixel_values": torch.randn(batch, 3, 224, 224), "labels": torch.randint(1000, (batch,))}
    return hf.ViTForImageClassification(config), inputs, None


NETS = {
    "gpt2": (gpt2, 8),
    "llama": (llama, 8),
    "vit": (vit, 64),
    "resnet50": (resnet50, 64),
    "unet": (unet, 16),
}


@dataclass
class Runner:
    """One way to train a net, and the seconds of its steps and of their forward and backward."""

    name: str
    module: nn.Module
    loss: Callable[[], Tensor]
    seconds: list[float] = field(default_factory=list)
    learn_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def prepare(self, device: torch.device) -> None:
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=device.type == "cuda")

        def learn() -> None:
            optimizer.zero_grad()
            self.loss().backward()

        def step() -> None:
            learn()
            optimizer.step()

        for _ in range(WARM_UPS):
            step()
        self.learn, self.step, self.device = learn, step, device
        if device.type == "cuda":
            synchronize(device)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            synchronize(device)
            self.peak_bytes = torch.cuda.max_memory_allocated() - before

    def time(self) -> None:
        self.seconds.append(self._seconds_of(self.step))
        self.learn_seconds.append(self._seconds_of(self.learn))

    def _seconds_of(self, work: Callable[[], None]) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            work()
        synchronize(self.device)
        return (time.perf_counter() - start) / IN_A_ROW


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


def predicted(made: Made, *, compiled: bool) -> float:
    """Forward and backward as planned for one device of this GPU's kind that isn't at hand."""
    model, inputs, loss_fn = made
    kind = gpu_kind(torch.cuda.get_device_name())
    cluster = autopar.ClusterSpec(devices_per_node=1, device=kind)
    plan = autopar.plan(
        copy.deepcopy(model),
        cluster,
        None if isinstance(inputs, dict) else inputs,
        example_kwargs=inputs if isinstance(inputs, dict) else None,
        loss_fn=loss_fn,
        measure=False,
        dtype="bf16",
        compile=compiled,
    )
    return plan.step_seconds


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
    lines = [_line(name, runner, runners[index // 2 * 2]) for index, runner in enumerate(runners)]
    if device.type == "cuda":
        for index, compiled in ((1, False), (3, True)):
            lines[index] += f", {1e3 * predicted(made, compiled=compiled):.2f} ms as of a described device"
    return "\n".join(lines)


def _line(name: str, runner: Runner, beside: Runner) -> str:
    mine, theirs = statistics.median(runner.seconds), statistics.median(beside.seconds)
    words = f"{name:<9} {runner.name:<18} {1e3 * mine:8.2f} ms   {mine / theirs:5.3f} of serial"
    words += f"   forward and backward {1e3 * statistics.median(runner.learn_seconds):8.2f} ms"
    words += f"   {runner.peak_bytes / 1e9:6.2f} GB beside state" if runner.peak_bytes else ""
    plan = getattr(runner.module, "plan", None)
    if plan:
        beside_state = (plan.peak_bytes - plan.state_bytes) / 1e9
        words += f"   predicted: {beside_state:.2f} GB, {1e3 * plan.step_seconds:.2f} ms"
    return words


def main(
    names: Annotated[list[str] | None, typer.Argument(help=", ".join(NETS))] = None,
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
