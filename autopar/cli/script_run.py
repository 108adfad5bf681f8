"""What `autopar run` was told, and the launch that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.planning.asked.option_environment import settle, write
from autopar.planning.asked.request import request_of
from autopar.planning.given_plan import write_plan_to_run
from autopar.runtime.launch.elastic import RESTARTS, Elastic, run_elastic
from autopar.runtime.launch.launch import Launch, launch, require_script
from autopar.runtime.launch.watch import WatchOptions


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """A script, its devices, and what is to be done after faults; seconds in `timeout` and `deadline`."""

    script: str
    arguments: Sequence[str]
    cluster: str | None
    elastic: str | None
    restarts: int | None
    devices: str | None
    timeout: float | None
    deadline: float | None

    def start(self, options: Mapping[str, Any], plan: str | None) -> int:
        """Run the script to its end; returns the number of its processes at first.

        Raises InputError for what makes no sense, here and not on every rank, and what `launch` raises.
        """
        bounds = self._bounds()
        asked, spec = settle(**options), self._spec(bounds)
        spec.check_local()
        request_of(asked, spec)
        variables = write(options)
        if plan is not None:
            _refuse_plan(bounds)
            said = [name for name, word in options.items() if word is not None]
            variables |= write_plan_to_run(plan, spec, said)
        require_script(self.script)
        watch = WatchOptions(timeout=self.timeout, deadline=self.deadline)
        job = Launch([self.script, *self.arguments], spec.num_devices, variables, watch)
        if bounds is None:
            launch(job)
        else:
            run_elastic(job, bounds)
        return spec.num_devices

    def _bounds(self) -> Elastic | None:
        """Between how many ranks the run may go on; None where it isn't started again."""
        if self.elastic is not None:
            restarts = RESTARTS if self.restarts is None else self.restarts
            return Elastic.parse(self.elastic, restarts=restarts, devices=self.devices)
        if beside := [name for name in ("restarts", "devices") if getattr(self, name) is not None]:
            raise InputError(
                where=f"--{beside[0]}",
                found="no --elastic",
                wanted="a run that is started again after faults",
                remedy="add --elastic 2:4, from two ranks to four",
            )
        return None

    def _spec(self, bounds: Elastic | None) -> ClusterSpec:
        """The cluster that was named, or local devices as --elastic says."""
        if self.cluster is None and bounds is not None:
            return ClusterSpec.local(bounds.most)
        if self.cluster is None:
            raise InputError(
                where="autopar run",
                found="Missing option '--cluster'",
                wanted="autopar run SCRIPT --cluster local:N",
                remedy="add --cluster local:2, two processes of this machine, or --elastic 2:4",
            )
        spec = ClusterSpec.parse(self.cluster)
        if bounds is not None and spec.num_devices != bounds.most:
            raise InputError(
                where="--elastic",
                found=f"at most {bounds.most} ranks on {spec.num_devices} devices",
                wanted="one rank for each device at most",
                remedy=f"write --elastic {min(bounds.least, spec.num_devices)}:{spec.num_devices}",
            )
        return spec


def _refuse_plan(bounds: Elastic | None) -> None:
    """Raise InputError for a plan beside several numbers of ranks."""
    if bounds is not None and bounds.least != bounds.most:
        raise InputError(
            where="--plan",
            found=f"a plan for one number of ranks, and --elastic {bounds.least}:{bounds.most}",
            wanted="a plan that is sought for each",
            remedy=f"leave out one, or write --elastic {bounds.most}:{bounds.most}",
        )
