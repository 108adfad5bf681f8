"""Trains, and has a fault at one moment on one rank, once: MOMENT FAULT FOLDER STAGES."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

MOMENT, FAULT, FOLDER, STAGES = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
VICTIM, STEP, STOPPED = "1", 5, 3.0
OUT_OF_REACH = 1 << 50  # bytes


def fault() -> None:
    """The fault, if it hasn't been yet."""
    mark = FOLDER / "fault"
    if os.environ["RANK"] != VICTIM or mark.exists() or MOMENT == "none":
        return
    mark.write_text(repr(time.time()))
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "launcher":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    elif FAULT == "memory":
        bytearray(OUT_OF_REACH)
    raise ValueError("a fault")


if MOMENT == "import":
    fault()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import autopar  # noqa: E402
from autopar.runtime.checkpoints import save_folders  # noqa: E402
from autopar.runtime.collectives import local_sockets, random, roll_call, transport  # noqa: E402
from autopar.runtime.module import run_state  # noqa: E402

vars(local_sockets)["STOPPED_SECONDS"] = STOPPED


def comes_before(owner: Any, name: str, when: Callable[[], bool]) -> None:
    """Have the fault come before calls of a function, at a time."""
    function = getattr(owner, name)

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        if when():
            fault()
        return function(*args, **kwargs)

    setattr(owner, name, disturbed)


def is_in(*names: str) -> bool:
    """Whether the rank is in the disturbed step, in a call of such a name."""
    current = roll_call._current
    if steps is None or steps.step < STEP or current is None or not current.is_inside:
        return False
    return current._calls[current.number].name.startswith(names)


steps: Any = None
if MOMENT == "planning":
    comes_before(random, "share_state", lambda: True)
if MOMENT == "forward":
    comes_before(transport, "_begin", lambda: is_in("forward", "train_step"))
if MOMENT == "backward":
    exchanges = iter(range(10_000))
    comes_before(
        transport, "_begin", lambda: is_in("backward") or (is_in("train_step") and next(exchanges) > 1)
    )
if MOMENT == "sums":
    comes_before(transport, "start_sum", lambda: is_in("backward", "train_step"))
    comes_before(transport, "all_reduce", lambda: is_in("backward", "train_step"))
if MOMENT == "save":
    comes_before(save_folders, "listed", lambda: steps is not None and steps.step > STEP)
if MOMENT == "load":
    comes_before(run_state, "load_tensors", lambda: True)

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).double()
generator = torch.Generator().manual_seed(1)
data = TensorDataset(*(torch.randn(96, size, generator=generator).double() for size in (8, 4)))
many = {"stages": STAGES, "micro_batches": 2} if STAGES > 1 else {"force": "batch"}
parallel = autopar.parallelize(
    model,
    autopar.ClusterSpec.detect(),
    data[:16],
    loss_fn=F.mse_loss,
    timeout=timedelta(seconds=40),
    measure=False,
    quiet=True,
    **many,
)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
if MOMENT == "optimizer":
    comes_before(optimizer, "step", lambda: steps.step >= STEP)
loader = DataLoader(data, batch_sampler=parallel.sampler(data, seed=3))
steps = autopar.steps(parallel, loader, folder=FOLDER / "saves", optimizer=optimizer, epochs=2, save_every=3)
for x, y in steps:
    if MOMENT == "between" and steps.step >= STEP:
        fault()
    optimizer.zero_grad()
    if STAGES > 1:
        loss = parallel.train_step(x, y)
    else:
        loss = parallel(x, y)
        loss.backward()
    if MOMENT in ("backward", "sums") and steps.step >= STEP:
        fault()  # a plan without sums, as of two stages
    optimizer.step()
    if os.environ["RANK"] == "0":
        print("done", steps.step + 1, os.environ["WORLD_SIZE"], repr(loss.item()), time.time(), flush=True)
    time.sleep(0.05)
