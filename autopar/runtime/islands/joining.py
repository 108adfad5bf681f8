"""Splits the ranks that a launcher has started into islands.

rank       0  1 | 2  3 | 4  5        three islands of two
island     0    | 1    | 2           to torch.distributed each is the world, with ranks 0 and 1
across     0-2-4 and 1-3-5           the same part of the model on each island
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.results.plan.plan import Plan
from autopar.runtime.islands.messages import Across
from autopar.runtime.launch import worker
from autopar.runtime.parameters.parameters import local
from autopar.torch_seams.collectives import PrefixStore
from autopar.torch_seams.islands import gloo_group
from autopar.updates.event_log import EventLog
from autopar.updates.rules import IslandRule, Server, check_islands

_PLAN = "plan"
ISLANDS = "islands"  # the option's name, in errors


@dataclass(slots=True)
class Islands:
    """The islands of a run, of which this process is on number `mine`, and the rule by which they learn."""

    rule: IslandRule
    count: int
    mine: int
    across: Across
    store: Any = field(repr=False)
    in_loop: bool = False  # of `autopar.steps`, where the rule is kept
    log: EventLog | None = None  # of a server

    @property
    def serves(self) -> bool:
        """Whether this island keeps the parameters for others, and takes no batches."""
        return isinstance(self.rule, Server) and self.mine == 0

    @property
    def learners(self) -> range:
        """The islands that take batches."""
        return range(1 if isinstance(self.rule, Server) else 0, self.count)

    @property
    def share(self) -> int:
        """The place of this island among those that take batches."""
        return max(0, self.mine - self.learners.start)

    def publish_plan(self, plan: Plan) -> None:
        """Let the other islands have island 0's plan."""
        if self.mine == 0 and dist.get_rank() == 0:
            with TemporaryDirectory() as folder:
                path = Path(folder) / "plan.json"
                plan.save(path)
                self.store.set(_PLAN, path.read_text())

    def begin(self, model: nn.Module, plan: Plan) -> None:
        """Let all islands begin with island 0's plan and values; collective over islands."""
        self.publish_plan(plan)
        self.copy_first(model)

    def copy_first(self, model: nn.Module) -> None:
        """Overwrite parameters and buffers with island 0's; collective over islands."""
        self.across.copy_first([local(item).detach() for item in (*model.parameters(), *model.buffers())])

    def plan_of_first(self) -> Plan:
        """The plan of island 0; waits for it."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            path.write_bytes(self.store.get(_PLAN))
            return Plan.load(path)

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Within, the rule is kept."""
        self.in_loop = True
        try:
            yield
        finally:
            self.in_loop = False

    def require_loop(self) -> None:
        """Raise InputError for a step that would leave this island by itself."""
        if not self.in_loop:
            raise InputError(
                where=f"a step of a model with updates={self.rule}",
                found="a call outside of autopar.steps",
                wanted="the loop that keeps the rule",
                remedy="write `for batch in autopar.steps(parallel, loader, ...):`, or call it in eval "
                "mode or under torch.no_grad()",
            )


def island_cluster(cluster: ClusterSpec, count: int | None) -> tuple[ClusterSpec, int]:
    """The cluster of one island, and their number: the nodes, or of one node the devices, if none is said.

    Raises InputError for a number that cuts the cluster unevenly, or through nodes.
    """
    if count is None:
        count = cluster.nodes if cluster.nodes > 1 else cluster.num_devices
    return cluster.stage(count, asked=ISLANDS), count


def join_islands(rule: IslandRule, cluster: ClusterSpec, count: int, timeout: timedelta) -> Islands:
    """Join this rank's island, as the world of torch.distributed, and the group across islands.

    Raises InputError where the process is in a process group already, or the launcher's ranks aren't as many.
    """
    global _worlds, _joined
    check_islands(rule, count)
    if _joined is None or not dist.is_initialized():
        _joined = _join(rule, cluster, count, timeout)
    if _joined.count != count:
        raise InputError(
            where=f"parallelize with updates={rule}",
            found=f"{count} islands, where this process is on one of {_joined.count}",
            wanted="as many for all models of a script",
            remedy=f"name {_joined.count} islands",
        )
    _worlds += 1
    return replace(_joined, rule=rule, store=PrefixStore(f"autopar/updates_{_worlds}", _joined.store))


_joined: Islands | None = None  # where the process is, once it has joined
_worlds = 0  # models that have been given islands


def _join(rule: IslandRule, cluster: ClusterSpec, count: int, timeout: timedelta) -> Islands:
    if dist.is_initialized():
        raise InputError(
            where=f"parallelize with updates={rule}",
            found="a process group that spans all islands",
            wanted="none yet: each island is a world of its own",
            remedy="leave out init_process_group; parallelize joins",
        )
    joined: list[Any] = []

    def meet(limit: timedelta) -> dict[str, Any]:
        store, rank, size = worker.launched_store(limit)
        cluster.check_world(size)
        island, place = divmod(rank, size // count)
        joined.extend((store, island, place))
        own = PrefixStore(f"autopar/island_{island}", store)
        return {"store": own, "rank": place, "world_size": size // count}

    worker.init(cluster.device_type, timeout.total_seconds(), meet=meet)
    store, island, place = joined
    group = gloo_group(f"autopar/across_{place}", store, island, count, timeout)
    device = torch.device("cuda", worker.local_rank()) if cluster.device_type == "cuda" else None
    return Islands(rule, count, island, Across(group, island, count, device), store)
