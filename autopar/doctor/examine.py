"""The whole examination: this process by itself, then the ranks of a cluster.

no cluster                       this process
ranks of this machine            started here, one for each device
a rank that a launcher started   meets the others: srun autopar doctor, torchrun ... -m autopar doctor
other machines                   named, with how to start the doctor there
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from autopar.cluster import ClusterSpec
from autopar.core.slurm import torchrun_variables
from autopar.doctor.installation import installation
from autopar.doctor.judgement import as_dicts, of_machines, of_meeting
from autopar.doctor.meeting import MEETING_SECONDS, Meeting, meet
from autopar.doctor.rank_facts import facts_here
from autopar.errors import AutoparError, InputError
from autopar.results.explanation.examination import Examination, Finding, warn, wrong
from autopar.runtime.launch.launch import run_function

STARTING = 45.0  # seconds more than the meeting's, in which processes of this machine start and end


def examine(
    cluster: ClusterSpec | None = None, *, costdb: str | None = None, seconds: float = MEETING_SECONDS
) -> Examination | None:
    """Examine this process, and the ranks of `cluster`; under a launcher None on all ranks but the first that
    can tell: rank 0, or one that doesn't reach it.

    A rank that doesn't come within `seconds` is a finding. Raises InputError where the launcher's world isn't
    the cluster.
    """
    os.environ.update(torchrun_variables(os.environ))
    if "RANK" in os.environ:
        cluster = cluster or ClusterSpec.detect()
        cluster.check_world(int(os.environ["WORLD_SIZE"]))
        return _examined(meet(cluster, seconds), cluster, costdb)
    if cluster is None:
        machine = tuple(of_machines([facts_here()], ClusterSpec.local(1)))
        return Examination((*installation(costdb), *machine))
    try:
        cluster.check_local()
        meeting = run_function(meet, cluster.num_devices, cluster, seconds, timeout=seconds + STARTING)[0]
    except AutoparError as error:
        finding = _elsewhere(error) if isinstance(error, InputError) else _not_started(error)
        return Examination((*installation(costdb), finding))
    return _examined(meeting, cluster, costdb)


def _examined(meeting: Meeting, cluster: ClusterSpec, costdb: str | None) -> Examination | None:
    if meeting.rank and not meeting.failed:
        return None
    return Examination(tuple(_findings(meeting, cluster, costdb)), as_dicts(meeting.facts))


def _findings(meeting: Meeting, cluster: ClusterSpec, costdb: str | None) -> Iterator[Finding]:
    yield from installation(costdb)
    yield from of_machines(meeting.facts, cluster)
    yield from of_meeting(meeting, cluster)


def _elsewhere(error: InputError) -> Finding:
    return warn(
        "ranks",
        f"not started: the cluster has {error.found}",
        "start it there: srun autopar doctor --cluster FILE.toml, or on every node "
        "torchrun --nnodes N --nproc-per-node M --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
        "-m autopar doctor --cluster FILE.toml",
    )


def _not_started(error: AutoparError) -> Finding:
    return wrong("ranks", f"{error.where}: {error.found}", error.remedy)
