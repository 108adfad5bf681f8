"""Ranks and nodes that a cluster's own variables promise, to `autopar run` and to a process that is a rank.

PET_NNODES   PET_NPROC_PER_NODE   PET_MASTER_ADDR, PET_MASTER_PORT or PET_RDZV_ENDPOINT   PET_RDZV_ID
for a launcher on each node, as torchrun reads them (Kubeflow sets them)
RANK         WORLD_SIZE           or SLURM's of a step
for each rank: a launcher has started it already
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.core.slurm import torchrun_variables
from autopar.errors import InputError, show_value

RENDEZVOUS_PORT = 29_400  # torchrun's own default


@dataclass(frozen=True, slots=True)
class PromisedNodes:
    """Nodes on which a launcher each starts `per_node` ranks, None where that isn't said."""

    nodes: int
    per_node: int | None
    endpoint: str
    run_id: str


def promised_rank(environment: Mapping[str, str]) -> str:
    """Words for the rank of a larger world that this process is; empty where it is none."""
    known = {**environment, **_of_step(environment)}
    world = known.get("WORLD_SIZE", "")
    if "RANK" in known and world.isdecimal() and int(world) > 1:
        return f"RANK={show_value(known['RANK'])} of WORLD_SIZE={world}"
    return ""


def _of_step(environment: Mapping[str, str]) -> dict[str, str]:
    """SLURM's variables as torchrun's in a task of srun; none in a batch's script, which has them too."""
    return torchrun_variables(environment) if "SLURM_STEP_ID" in environment else {}


def promised_nodes(environment: Mapping[str, str]) -> PromisedNodes | None:
    """Nodes that PET_* variables promise a launcher; None where there are none.

    Raises InputError for numbers that are none, and for several nodes without a place to meet.
    """
    if not {"PET_NNODES", "PET_NPROC_PER_NODE"} & environment.keys():
        return None
    nodes = _count(environment, "PET_NNODES") or 1
    address = environment.get("PET_MASTER_ADDR", "")
    port = environment.get("PET_MASTER_PORT", str(RENDEZVOUS_PORT))
    endpoint = environment.get("PET_RDZV_ENDPOINT") or (f"{address}:{port}" if address else "")
    if nodes > 1 and not endpoint:
        raise InputError(
            where="PET_NNODES",
            found=f"{nodes} nodes, and neither PET_MASTER_ADDR nor PET_RDZV_ENDPOINT",
            wanted="the address of the first node, where launchers meet",
            remedy="set PET_RDZV_ENDPOINT=node0:29400 on all nodes",
        )
    run_id = environment.get("PET_RDZV_ID", "autopar")
    return PromisedNodes(nodes, _count(environment, "PET_NPROC_PER_NODE"), endpoint, run_id)


def _count(environment: Mapping[str, str], name: str) -> int | None:
    """A number of variables; of a range, as 1:4, the most."""
    text = environment.get(name, "")
    last = text.rpartition(":")[2]
    if not text or text in ("auto", "cpu", "gpu"):
        return None
    if not last.isdecimal() or not 0 < int(last) < 10**6:
        raise InputError(
            where=name, found=show_value(text), wanted="a number", remedy="set it as torchrun takes it"
        )
    return int(last)
