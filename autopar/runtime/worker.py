"""One rank: dies with its launcher, records its exception, joins the process group.

    python -m autopar.runtime.worker script.py arguments...

runs the script as `python script.py arguments...` would, inside the safety net of `launch`.

The errors of the other ranks ("connection closed by peer") are consequences. To name the cause,
a rank that raised stays for a moment, so that the launcher always sees one failure before the next:

    rank 1   raise ── LINGER ──> exit      the launcher sees rank 1, ends rank 0
    rank 0   all-reduce ...          raise ── LINGER ──x
"""

from __future__ import annotations

import ctypes
import io
import os
import runpy
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from autopar.errors import InputError

LAUNCHER = "AUTOPAR_LAUNCHER"  # the environment variable that holds the launcher's process id
LINGER = 1.0  # seconds; ten polls of the launcher, so that a slow one still sees who came first
PROCESS_GROUP_TIMEOUT = 600.0  # seconds; torch's own are 30 minutes for gloo and 10 for NCCL
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

DeviceKind = Literal["cpu", "cuda"]


def init(device_kind: DeviceKind = "cpu", timeout: float = PROCESS_GROUP_TIMEOUT) -> None:
    """Join the process group: gloo on CPUs, NCCL on the GPU of LOCAL_RANK; nothing if already joined.

    A collective that waits longer than `timeout` seconds for its peers raises.
    """
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        raise InputError(
            where="process group",
            found="no RANK in the environment",
            wanted="a process started by a launcher",
            remedy="start it with `autopar run SCRIPT --cluster local:4` or torchrun",
        )
    if dist.is_torchelastic_launched():
        die_with_parent(os.getppid())
    limit = timedelta(seconds=timeout)
    if device_kind == "cpu":
        dist.init_process_group("gloo", timeout=limit)
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=limit, device_id=device)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends, however it ends (Linux only)."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the kernel knew of our wish
        os.kill(os.getpid(), signal.SIGKILL)


def run(script: str) -> None:
    """Run `script` as the main program; sys.argv is its own already."""
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Run the script that the command line names; the exit code is the script's own."""
    die_with_parent(int(os.environ[LAUNCHER]))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a killed rank must not lose its last lines
    sys.argv = sys.argv[1:]
    try:
        record(run)(sys.argv[0])
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        time.sleep(LINGER)
        raise SystemExit(1) from error  # silent: the launcher prints what was recorded, once


if __name__ == "__main__":
    main()
