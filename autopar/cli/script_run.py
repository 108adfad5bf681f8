"""What `autopar run` was told, and the launch that follows from it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.core.elastic_bounds import RESTARTS, Elastic
from autopar.core.promised_world import PromisedNodes, promised_nodes, promised_rank
from autopar.errors import InputError
from autopar.planning.asked.option_environment import settle, write


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
        bounds, nodes = self._bounds(), promised_nodes(os.environ)
        self._refuse_inside_a_world()
        _refuse_elastic_nodes(bounds, nodes)
        asked, spec = settle(**options), self._spec(bounds, nodes)
        from autopar.planning.asked.request import request_of
        from autopar.planning.book.background import planning_ahead
        from autopar.planning.given_plan import write_plan_to_run
        from autopar.runtime.launch import elastic as again
        from autopar.runtime.launch import launch as once
        from autopar.runtime.launch.watch import WatchOptions

        spec.check_local()
        request_of(asked, _whole(spec, nodes))
        variables = write(options)
        if plan is not None:
            _refuse_plan(bounds)
            said = [name for name, word in options.items() if word is not None]
            variables |= write_plan_to_run(plan, spec, said)
        once.require_script(self.script)
        watch = WatchOptions(timeout=self.timeout, deadline=self.deadline)
        job = once.Launch([self.script, *self.arguments], spec.num_devices, variables, watch, nodes=nodes)
        if bounds is None:
            once.launch(job)
        else:
            with planning_ahead(bounds) as book:
                again.run_elastic(replace(job, variables=variables | book), bounds)
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

    def _refuse_inside_a_world(self) -> None:
        """Raise InputError in a process that a launcher has started as a rank of more."""
        if rank := promised_rank(os.environ):
            raise InputError(
                where="autopar run",
                found=f"{rank}: a launcher has started this process as one rank",
                wanted="a process that starts all ranks of its machine",
                remedy=f"let that launcher start python {self.script}, with options in AUTOPAR_OPTIONS",
            )

    def _spec(self, bounds: Elastic | None, nodes: PromisedNodes | None) -> ClusterSpec:
        """Devices of this machine, as --cluster, --elastic or the environment say."""
        spec = self._said(bounds, nodes)
        promised = nodes.per_node if nodes is not None else None
        if promised not in (None, spec.num_devices):
            raise InputError(
                where="autopar run",
                found=f"{spec.num_devices} ranks, and PET_NPROC_PER_NODE={promised}",
                wanted="as many ranks as were promised",
                remedy=f"leave out --cluster, write local:{promised}, or unset PET_NPROC_PER_NODE",
            )
        return spec

    def _said(self, bounds: Elastic | None, nodes: PromisedNodes | None) -> ClusterSpec:
        if self.cluster is None and bounds is not None:
            return ClusterSpec.local(bounds.most)
        if self.cluster is None and nodes is not None and nodes.per_node is not None:
            return ClusterSpec.local(nodes.per_node)
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


def _refuse_elastic_nodes(bounds: Elastic | None, nodes: PromisedNodes | None) -> None:
    """Raise InputError for several nodes that are to go on with fewer."""
    if bounds is not None and nodes is not None and nodes.nodes > 1:
        raise InputError(
            where="--elastic",
            found=f"PET_NNODES={nodes.nodes}",
            wanted="ranks of one machine",
            remedy="leave it out, and start the launchers again after a fault: autopar.steps goes on",
        )


def _whole(spec: ClusterSpec, nodes: PromisedNodes | None) -> ClusterSpec:
    """The cluster of all nodes, of which `spec` is one."""
    if nodes is None or nodes.nodes == 1:
        return spec
    per_node = spec.num_devices
    world = {"WORLD_SIZE": str(nodes.nodes * per_node), "LOCAL_WORLD_SIZE": str(per_node)}
    return ClusterSpec.detect(world)
