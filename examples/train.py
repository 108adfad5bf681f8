"""Train a model in parallel and serially on the same data, and compare the losses step by step.

`python SCRIPT` starts itself once for each of `NUM_PROCESSES` processes; under `autopar run` or
torchrun it uses the processes that are there. Rank 0 trains the serial model afterwards.
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
from autopar.runtime.launch import run_script

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
    parallel = train_in_parallel(task, talk=rank == 0)
    if rank:
        return 0
    torch.set_num_threads(os.cpu_count() or 1)  # the other ranks are done
    return compare(parallel, train_serially(task), task.tolerance)


def train_in_parallel(task: Task, *, talk: bool) -> list[float]:
    """The loss of each step, the same on every rank; ends the process group."""
    model = build(task)
    example = next(iter(task.batches()))
    args, kwargs = (example, None) if isinstance(example, tuple) else (None, example)
    cluster = autopar.ClusterSpec.detect()
    parallel = autopar.parallelize(model, cluster, args, example_kwargs=kwargs, loss_fn=task.loss_fn)
    if talk:
        print(parallel.plan)
    losses = train(task, parallel, lambda batch: call(parallel, batch), talk=talk)
    dist.destroy_process_group()
    return losses


def train_serially(task: Task) -> list[float]:
    """The loss of each step of the same model in this process alone."""
    model = build(task)
    print("the same, serially")
    return train(task, model, lambda batch: serial_output(task, model, batch), talk=True)


def build(task: Task) -> nn.Module:
    """The model, with the same parameters at each call."""
    torch.manual_seed(SEED)
    return task.build()


def train(task: Task, model: nn.Module, output: Callable[[Batch], Any], *, talk: bool) -> list[float]:
    """Take the task's steps of SGD; the loss of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rate, momentum=MOMENTUM)
    losses = []
    for step, batch in enumerate(islice(task.batches(), task.num_steps), start=1):
        optimizer.zero_grad()
        loss = output(batch)
        loss = getattr(loss, "loss", loss)  # a result that holds its loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if talk:
            print(f"step {step:3} of {task.num_steps}   loss {losses[-1]:.6f}", flush=True)
    return losses


def call(model: nn.Module, batch: Batch) -> Any:
    return model(*batch) if isinstance(batch, tuple) else model(**batch)


def serial_output(task: Task, model: nn.Module, batch: Batch) -> Any:
    """The model's output, or its loss if the task has a `loss_fn`."""
    if task.loss_fn is None or not isinstance(batch, tuple):
        return call(model, batch)
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
