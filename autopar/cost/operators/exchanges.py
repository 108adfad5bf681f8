"""Seconds of copies and exchanges on one mesh of one cluster.

Collectives are priced by kind, size and the slowest link of their group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.cluster import ClusterSpec, Link
from autopar.convert.moves import MoveAction
from autopar.core.costs import Collective
from autopar.core.graph import TensorSpec
from autopar.core.mesh import Mesh, parse_key
from autopar.cost.machine import collectives, nccl
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.halo_convolution import foreign
from autopar.cost.operators.ring_attention import hops, swaps
from autopar.cost.topology import price as topology_price
from autopar.runtime.collectives.merged_attention import merged_bytes

_COLLECTIVE = {
    MoveAction.ALL_REDUCE: Collective.ALL_REDUCE,
    MoveAction.ALL_GATHER: Collective.ALL_GATHER,
    MoveAction.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
    MoveAction.ALL_TO_ALL: Collective.ALL_TO_ALL,
}
# A part that is taken, or laid among zeros: of few numbers 30 to 50 us in a step.
LOCAL_MOVE_LAUNCHES = 16
# A rule's Python code that cuts, exchanges and adds rows or sums, each way: of convolutions and batch norms
# of a few numbers over two processes 0.2 to 0.3 ms, where a launch took 2.2 us. A GPU's kernels count alone.
INNER_LAUNCHES = {"cpu": 100, "cuda": 6}


class Exchanges:
    """Prices of exchanges among the devices of a mesh."""

    def __init__(self, cluster: ClusterSpec, mesh: Mesh, model: CostModel) -> None:
        self.cluster, self.mesh, self.model, self.device = cluster, mesh, model, model.device
        self._links: dict[tuple[int, ...], tuple[Link, int]] = {}  # and nodes spanned
        of = {axis: (mesh.shares_of(axis), cluster.link(mesh, axis)) for axis in mesh.axes}
        self.are_equal = len(set(of.values())) == 1 and len(mesh.axes) > 1
        first: dict[object, int] = {}
        self._alike = [
            first.setdefault((of[axis], cluster.nodes_of(mesh, (axis,))), axis) for axis in mesh.axes
        ]

    def alike(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """For an axis the first one of as many devices on the same links: exchanges on both cost the same."""
        return axes if len(axes) > 1 else (self._alike[axes[0]],)

    def action(self, action: MoveAction, nbytes: int, axes: tuple[int, ...]) -> float:
        """Seconds of one way of a move."""
        match action:
            case MoveAction.NOTHING:
                return 0.0
            case MoveAction.SLICE:  # only the part is read and written
                part = math.ceil(nbytes / self.mesh.shape[axes[0]])
                return self.copy(part) + self.host(LOCAL_MOVE_LAUNCHES)
            case MoveAction.COPY:
                return self.copy(nbytes) + self.host(LOCAL_MOVE_LAUNCHES)
            case MoveAction.ALL_REDUCE:  # of a copy: others may read the terms
                return self.copy(nbytes) + self.collective(Collective.ALL_REDUCE, nbytes, axes)
            case _:
                return self.collective(_COLLECTIVE[action], nbytes, axes)

    def host(self, launches: int) -> float:
        """Seconds of the host's own work, worth so many launches; a GPU's runs ahead."""
        return launches * self.device.launch_seconds if self.device.kind == "cpu" else 0.0

    def copy(self, nbytes: int) -> float:
        return self.device.launch_seconds + 2 * nbytes / self.device.bandwidth

    def collective(self, kind: Collective, nbytes: int, axes: Sequence[int]) -> float:
        size = math.prod(self.mesh.shape[axis] for axis in axes)
        key = tuple(axes)
        if key not in self._links:
            slowest = max(axes, key=lambda axis: self.cluster.nodes_of(self.mesh, (axis,)))
            self._links[key] = self.cluster.link(self.mesh, slowest), self.cluster.nodes_of(self.mesh, key)
        link, nodes = self._links[key]
        # A GPU copies much faster than its links send.
        copy_rate = self.device.bandwidth if self.device.kind == "cpu" else math.inf
        estimate = None
        if self.cluster.topology and self.cluster.inter and nodes > 1 and self._are_runs(key, nodes):
            there = topology_price.NodeGroup(
                self.cluster.topology, nodes, size // nodes, self.cluster.intra, self.cluster.inter
            )
            estimate = topology_price.seconds(kind, nbytes, there)
            estimate += collectives.copied(kind, nbytes, size) / copy_rate
        elif self.device.kernels:
            group = nccl.RankGroup(size, nodes, self.cluster.intra, self.cluster.inter)
            estimate = nccl.seconds(kind, nbytes, group)
        found = self.model.collectives.cost(
            kind, nbytes, size, link, nodes=nodes, copy_rate=copy_rate, estimate=estimate
        )
        return found.seconds

    def _are_runs(self, axes: tuple[int, ...], nodes: int) -> bool:
        """Whether each group along `axes` lies on a run of `nodes` nodes, of those that the topology is cut
        into: of other groups the price is the link's."""
        assert self.cluster.topology is not None
        per_node, run = self.cluster.devices_per_node, range(nodes)
        return self.cluster.topology.nodes % nodes == 0 and all(
            {rank // per_node - first * nodes for rank in group} == set(run)
            for group in self.mesh.groups(axes)
            for first in [min(group) // per_node // nodes]
        )

    # -- inside of operators --------------------------------------------------------------------------

    def inner(
        self, target: str, args: Sequence[Any], spec: TensorSpec, *, training: bool
    ) -> tuple[float, float]:
        """Seconds of communication inside an operator, forward and backward: halos, and sums of
        statistics."""
        name = target.split(".")[1] if "::" not in target else target.split("::")[1].split(".")[0]
        backward, around = training and spec.requires_grad, self._around()
        match name:
            case "exchange":
                key, dim, _, owned, starts, stops, _ = args
                copy = 2 * spec.nbytes / self.device.bandwidth  # of its own rows
                seconds = around + copy + self._halo(key, spec, dim, owned, starts, stops)
            case "needed_rows":
                key, _, sends, receives = args
                seconds = self._needed_rows(key, spec, sends, receives)
            case "convolution":
                _, _, key, owned, starts, stops, dim, *_ = args
                seconds = around + self._halo(key, spec, dim, owned, starts, stops)
            case "ring_attention":
                return self._ring(args, spec, backward=backward)
            case "merged_attention":
                most, added = merged_bytes(spec, args[1])
                axes = parse_key(args[3])[1]
                sums = sum(self.collective(Collective.ALL_REDUCE, nbytes, axes) for nbytes in (most, added))
                return around + sums + self.copy(added), 0.0
            case "expert_counts":
                lengths, _, group = args
                size = spec.nbytes * len(lengths)
                seconds = self.collective(Collective.ALL_TO_ALL, size, parse_key(group)[1])
            case "travel":
                *_, lengths, _, rows, group = args
                most = max(rows, spec.shape[0]) * (spec.nbytes // max(1, spec.shape[0]))
                axes = parse_key(group)[1]
                seconds = around + self.collective(Collective.ALL_TO_ALL, most * len(lengths), axes)
            case "s_to_b":  # a row of each rank
                group, dim, _, sizes = args[:4]
                nbytes = spec.nbytes // max(1, spec.shape[dim]) * sum(sizes)
                seconds = self.collective(Collective.ALL_GATHER, nbytes, parse_key(group)[1])
            case "batch_norm":
                key = next(item for item in args if isinstance(item, str))
                number = max(4, spec.dtype.itemsize)  # bytes: statistics of halves are floats
                sums = 3 * spec.shape[1] * number
                seconds = around + self.collective(Collective.ALL_REDUCE, sums, parse_key(key)[1])
            case _:
                axes, backward = parse_key(args[0])[1], backward and name == "p_to_b"
                seconds = self.collective(Collective.ALL_REDUCE, spec.nbytes, axes) + self.copy(spec.nbytes)
        return seconds, seconds if backward else 0.0

    def _around(self) -> float:
        return INNER_LAUNCHES[self.device.kind] * self.device.launch_seconds

    def _ring(self, args: Sequence[Any], query: TensorSpec, *, backward: bool) -> tuple[float, float]:
        """What hops of keys, and of their gradients, take longer than the blocks beside which they travel.

        A CPU's transfers keep its cores busy: beside them it computes nothing.
        """
        seconds = [self._around(), self._around() if backward else 0.0]
        axes = parse_key(args[3])[1]
        for nbytes, calls in hops(query, args):
            hop = self.collective(Collective.SEND_RECV, nbytes, axes) if nbytes else 0.0
            costs = [self.model.cost(call) for call in calls] if self.device.kind != "cpu" else []
            seconds[0] += max(0.0, hop - sum(cost.forward_seconds for cost in costs))
            if backward:
                seconds[1] += max(0.0, 2 * hop - sum(cost.backward_seconds for cost in costs))
        for swapped in swaps(query, args):
            for way, nbytes in enumerate(swapped[: 1 + backward]):
                seconds[way] += self.collective(Collective.SEND_RECV, nbytes, axes) if nbytes else 0.0
        return seconds[0], seconds[1]

    def _needed_rows(
        self, key: str, spec: TensorSpec, sends: Sequence[int], receives: Sequence[int]
    ) -> float:
        """An exchange of rows that a graph names, one way: a message to and from each peer, and copies of the
        rank's own rows and of those that it sends."""
        row, axes = spec.nbytes // max(1, spec.shape[0]), parse_key(key)[1]
        messages = [max(pair) * row for pair in zip(sends, receives, strict=True) if any(pair)]
        seconds = sum(self.collective(Collective.SEND_RECV, nbytes, axes) for nbytes in messages)
        copied = spec.nbytes + (sum(sends) + sum(receives)) * row
        return self._around() + 2 * copied / self.device.bandwidth + seconds

    def _halo(self, key: str, spec: TensorSpec, dim: int, *rows: Sequence[int]) -> float:
        """Seconds of the slowest rank's rows from others, one message from each side; `rows` says which ranks
        own and need."""
        axes = parse_key(key)[1]
        row = spec.nbytes // max(1, spec.shape[dim])
        worst = max(foreign(*rows))
        return self.collective(Collective.SEND_RECV, worst * row, axes) if worst else 0.0
