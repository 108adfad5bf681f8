"""SLURM's variables as torchrun's: `srun python train.py` starts a world of its tasks.

    SLURM_PROCID   SLURM_NTASKS   SLURM_LOCALID   SLURM_TASKS_PER_NODE   SLURM_NODELIST    SLURM_JOB_ID
    RANK           WORLD_SIZE     LOCAL_RANK      LOCAL_WORLD_SIZE       MASTER_ADDR       MASTER_PORT

Those of the step, SLURM_STEP_*, go before those of the job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from autopar.errors import SHOWN_CHARACTERS, InputError, cut_text

_FIRST_PORT, _PORTS = 12_000, 20_000  # below those that systems give to connections
_STEP = 7_919  # a prime, so that steps of one job that run together seldom meet on a port


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables as torchrun sets them, made from SLURM's if SLURM alone started the process; else
    none.

    Raises InputError for nodes with unequally many tasks.
    """
    world = _of_step(environment, "NUM_TASKS", "SLURM_NTASKS")
    if "RANK" in environment or "SLURM_PROCID" not in environment or not _is_count(world):
        return {}
    per_node = _tasks_per_node(environment, int(world))
    job, step = (environment.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID"))
    number = sum(int(text) * factor for text, factor in ((job, 1), (step, _STEP)) if _is_count(text))
    nodes = _of_step(environment, "NODELIST", "SLURM_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    made = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": world,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": _first_node(nodes) or "127.0.0.1",
        "MASTER_PORT": str(_FIRST_PORT + number % _PORTS),
    }
    return {name: value for name, value in made.items() if name not in environment}


def _of_step(environment: Mapping[str, str], step: str, job: str) -> str:
    return environment.get(f"SLURM_STEP_{step}") or environment.get(job, "")


def _tasks_per_node(environment: Mapping[str, str], world: int) -> int:
    """From `4(x2)`, or `4,4`, which say four on each of two nodes."""
    text = _of_step(environment, "TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or str(world)
    counts = set(re.findall(r"(\d+)(?:\(x\d+\))?", text))
    if len(counts) != 1 or not _is_count(*counts):
        raise InputError(
            where="SLURM_TASKS_PER_NODE",
            found=cut_text(text, SHOWN_CHARACTERS),
            wanted="equally many tasks on every node",
            remedy="pass --ntasks-per-node to srun or sbatch",
        )
    return int(counts.pop())


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


def _first_node(nodes: str) -> str:
    """`gpu03-x` of `gpu[03-05,07]-x,login`."""
    found = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""
