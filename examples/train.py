"""Train a model in parallel and serially on the same data, and compare the losses step by step.

`python SCRIPT` starts itself once for each of `NUM_PROCESSES` processes; under `autopar run` or
torchrun it uses the processes that are there. Rank 0 trains the serial model afterwards. Every step is a
`train_step`, so that options decide how it runs:

    autopar run examples/characters.py --cluster local:4 --stages 2 --micro-batches 4 --schedule zb1p
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.runtime.launch.launch import run_script

Batch = tuple[Tensor, ...] | dict[str, Tensor]

NUM_PROCESSES = 4
SEED = 0
MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class Task:
    """What to train. `loss_fn(output, *rest)` takes the inputs that the model's forward leaves over;
    without it the output is the loss or holds it as `.loss`."""

    build: Callable[[], nn.Module]
    batches: Callable[[], Iterable[Batch]]
    num_steps: int
    rate: float
    tolerance: float  # largest difference between a parallel and a serial loss
    loss_fn: Callable[..., Tensor] | None = None


def main(script: str, task: Task) -> int:
    """Train on every rank; the exit code is 0 if parallel and serial losses agree."""
    if "RANK" not in os.environ:
        return run_script(script, NUM_PROCESSES)
    rank = int(os.environ["RANK"])
    parallel, micro_batches = train_in_parallel(task, talk=rank == 0)
    if rank:
        return 0
    torch.set_num_threads(os.cpu_count() or 1)  # the other ranks are done
    return compare(parallel, train_serially(task, micro_batches), task.tolerance)


def train_in_parallel(task: Task, *, talk: bool) -> tuple[list[float], int]:
    """The loss of each step, the same on every rank, and the micro-batches of a step; ends the process
    group."""
    model = build(task)
    example = next(iter(task.batches()))
    args, kwargs = (example, None) if isinstance(example, tuple) else (None, example)
    cluster = autopar.ClusterSpec.detect()
    parallel = autopar.parallelize(model, cluster, args, example_kwargs=kwargs, loss_fn=task.loss_fn)
    if talk:
        print(parallel.plan)
    losses = train(task, parallel, lambda batch: call(parallel.train_step, batch), talk=talk)
    dist.destroy_process_group()
    return losses, parallel.plan.pipeline.micro_batches


def train_serially(task: Task, micro_batches: int = 1) -> list[float]:
    """The loss of each step of the same model in this process alone."""
    model = build(task)
    print("the same, serially")
    return train(task, model, lambda batch: serial_step(task, model, batch, micro_batches), talk=True)


def build(task: Task) -> nn.Module:
    """The model, with the same parameters at each call."""
    torch.manual_seed(SEED)
    return task.build()


def train(task: Task, model: nn.Module, step: Callable[[Batch], Tensor], *, talk: bool) -> list[float]:
    """Take the task's steps of SGD, `step` doing forward and backward; the loss of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rate, momentum=MOMENTUM)
    losses = []
    for number, batch in enumerate(islice(task.batches(), task.num_steps), start=1):
        optimizer.zero_grad()
        losses.append(step(batch).item())
        optimizer.step()
        if talk:
            print(f"step {number:3} of {task.num_steps}   loss {losses[-1]:.6f}", flush=True)
    return losses


def call(function: Callable[..., Any], batch: Batch) -> Any:
    return function(*batch) if isinstance(batch, tuple) else function(**batch)


def serial_step(task: Task, model: nn.Module, batch: Batch, micro_batches: int) -> Tensor:
    """Forward and backward of the batch, part after part; its mean loss."""
    tensors = batch if isinstance(batch, tuple) else tuple(batch.values())
    total = torch.zeros(())
    for part in zip(*(tensor.tensor_split(micro_batches) for tensor in tensors), strict=True):
        share = len(part[0]) / len(tensors[0])
        micro_batch = part if isinstance(batch, tuple) else dict(zip(batch, part, strict=True))
        loss = serial_loss(task, model, micro_batch) * share
        loss.backward()
        total += loss.detach()
    return total


def serial_loss(task: Task, model: nn.Module, batch: Batch) -> Tensor:
    """The model's loss, by the task's `loss_fn` if it has one."""
    if task.loss_fn is None or not isinstance(batch, tuple):
        output = call(model, batch)
        loss: Tensor = getattr(output, "loss", output)  # a result may hold its loss
        return loss
    taken = len(inspect.signature(model.forward).parameters)
    return task.loss_fn(model(*batch[:taken]), *batch[taken:])


def compare(parallel: list[float], serial: list[float], tolerance: float) -> int:
    """Print the losses side by side; 0 if they agree within `tolerance`, else 1."""
    differences = [abs(a - b) for a, b in zip(parallel, serial, strict=True)]
    print("\nstep   parallel     serial   difference")
    for step, row in enumerate(zip(parallel, serial, differences, strict=True), start=1):
        print("{:4} {:10.6f} {:10.6f} {:12.1e}".format(step, *row))
    worst = max(differences, key=lambda number: (math.isnan(number), number))
    agree = worst <= tolerance
    verdict = "agrees with" if agree else "DIFFERS from"
    print(f"parallel training {verdict} serial: {worst:.1e} at most, {tolerance:.0e} allowed")
    return 0 if agree else 1
