"""What a pipeline needs so that it needn't be flushed between steps: stages, under 1F1B."""

from __future__ import annotations

from autopar.cluster import ClusterSpec
from autopar.core.schedule import ScheduleKind
from autopar.errors import InputError
from autopar.planning.asked.option_values import AUTO
from autopar.planning.asked.request import Request
from autopar.updates.rules import Stale, UpdateRule

_KIND = ScheduleKind.ONE_F_ONE_B


def schedule_for(rule: UpdateRule | None, said: str | None) -> str | None:
    """The schedule that a rule needs, where none is said."""
    if not isinstance(rule, Stale) or said == _KIND.value:
        return said
    if said not in (None, AUTO):
        raise _other_schedule(rule, said)
    return str(_KIND.value)


def check_stale(rule: UpdateRule | None, request: Request, cluster: ClusterSpec, islands: int | None) -> None:
    """Raise InputError for stale gradients that such a plan can't have."""
    if not isinstance(rule, Stale):
        return
    if request.pipeline_ranks < 2:
        raise InputError(
            where=f"updates={rule}",
            found="stale without stages: a plan that has no bubble to fill",
            wanted="pipeline stages, which needn't be flushed between steps then",
            remedy="name stages=2 or more, or leave updates out",
        )
    if request.schedule is not _KIND:
        raise _other_schedule(rule, "auto" if request.schedule is None else request.schedule.value)
    if request.meshes or len({group.num_devices for group in cluster.groups}) > 1:
        raise InputError(
            where=f"updates={rule}",
            found="stages that may have meshes of their own",
            wanted="one mesh for all stages, between which batches go on over a step's border",
            remedy="name one --mesh, on groups of as many devices",
        )
    if islands not in (None, 1):
        raise InputError(
            where=f"updates={rule}",
            found=f"{islands} islands",
            wanted="one pipeline over the whole cluster",
            remedy="leave islands out",
        )
    if cluster.device_type != "cpu":
        raise InputError(
            where=f"updates={rule}",
            found=f"stages on {cluster.device_type}",
            wanted="CPUs: messages over a step's border haven't been tried over NCCL",
            remedy="leave updates out",
        )


def _other_schedule(rule: Stale, name: str) -> InputError:
    return InputError(
        where=f"updates={rule}",
        found=f"schedule {name}",
        wanted=f"{_KIND.value}, the one that goes on over a step's border",
        remedy=f"write schedule={_KIND.value!r}, or leave it out",
    )
