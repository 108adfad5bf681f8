"""What a cluster's variables promise is kept, or refused by name."""

from __future__ import annotations

import pytest

from autopar.core.promised_world import PromisedNodes, promised_nodes, promised_rank
from autopar.errors import InputError

BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_NODELIST": "a"}


def test_a_rank_of_a_larger_world_is_known_by_torchruns_and_slurms_variables() -> None:
    assert promised_rank({"RANK": "3", "WORLD_SIZE": "8"}) == "RANK='3' of WORLD_SIZE=8"
    assert promised_rank({"RANK": "0", "WORLD_SIZE": "1"}) == ""
    assert promised_rank({"WORLD_SIZE": "8"}) == ""
    assert promised_rank(BATCH) == "", "a batch script, which starts a launcher"
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}
    assert promised_rank(BATCH | step) == "RANK='0' of WORLD_SIZE=4"


def test_nodes_are_promised_by_pet_variables() -> None:
    assert promised_nodes({}) is None
    assert promised_nodes({"PET_NPROC_PER_NODE": "4"}) == PromisedNodes(1, 4, "", "autopar")
    one = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "7"}
    assert promised_nodes(one) == PromisedNodes(2, None, "a:7", "autopar")
    other = {"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "b:8", "PET_RDZV_ID": "run"}
    assert promised_nodes(other) == PromisedNodes(3, None, "b:8", "run")


def test_promises_that_can_not_be_kept_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="PET_NNODES: found 2 nodes, and neither PET_MASTER_ADDR nor"):
        promised_nodes({"PET_NNODES": "2"})
    for text in ("two", "0", "-1", "1:", "9" * 30):
        with pytest.raises(InputError, match="PET_NPROC_PER_NODE"):
            promised_nodes({"PET_NPROC_PER_NODE": text})
