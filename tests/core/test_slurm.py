"""A task under SLURM knows what torchrun would have told it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from autopar.cluster import ClusterSpec
from autopar.core.slurm import torchrun_variables
from autopar.errors import InputError

TASK = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODELIST": "gpu[03-05,7]-x,login",
    "SLURM_JOB_ID": "40100",
}
SCRIPT = """
import torch, torch.distributed as dist
from autopar import ClusterSpec
from autopar.runtime.launch.worker import init, require_launcher
cluster = ClusterSpec.detect()
require_launcher()
init()
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print(dist.get_rank(), int(total), cluster.devices_per_node)
dist.destroy_process_group()
"""


def test_a_task_has_torchruns_variables() -> None:
    assert torchrun_variables(TASK) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu03-x",
        "MASTER_PORT": str(12_000 + 100 + 0),
    }
    found = ClusterSpec.detect(TASK)
    assert (found.nodes, found.devices_per_node) == (2, 4)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a1", "a1"),
        ("a1,b2", "a1"),
        ("n[7]", "n7"),
        ("n[1,3]", "n1"),
        ("r[2-9]c,x", "r2c"),
        ("", "127.0.0.1"),
    ],
)
def test_the_first_node_is_the_master(nodes: str, first: str) -> None:
    assert torchrun_variables(TASK | {"SLURM_NODELIST": nodes})["MASTER_ADDR"] == first


def test_a_step_goes_before_its_job_and_torchrun_and_the_user_before_both() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "b"}
    found = torchrun_variables(TASK | step | {"SLURM_STEP_ID": "1"})
    assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"]) == ("2", "2", "b")
    assert found["MASTER_PORT"] != torchrun_variables(TASK)["MASTER_PORT"]
    assert torchrun_variables(TASK | {"RANK": "0"}) == {} == torchrun_variables({"SLURM_NTASKS": "2"})
    assert "MASTER_PORT" not in torchrun_variables(TASK | {"MASTER_PORT": "99"})


def test_nodes_with_unequally_many_tasks_are_refused() -> None:
    with pytest.raises(InputError, match=r"found 4,2, wanted equally many.*ntasks-per-node"):
        torchrun_variables(TASK | {"SLURM_TASKS_PER_NODE": "4,2"})


@pytest.mark.slow
def test_tasks_of_slurm_join_one_group() -> None:
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK"))}
    job = {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", "SLURM_NODELIST": "localhost"}
    job["SLURM_JOB_ID"] = str(os.getpid())
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=outside | job | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    assert [task.communicate(timeout=60)[0] for task in tasks] == ["0 3 2\n", "1 3 2\n"]
