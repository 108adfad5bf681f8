"""Seconds of moves, sums and updates of tensors on one mesh of one cluster, and bytes of their parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from autopar.cluster import ClusterSpec
from autopar.convert.moves import MoveAction, MoveEffect, effect
from autopar.convert.network import (
    Alike,
    Network,
    Numbers,
    PlacementChange,
    Placements,
    Seconds,
    UnpricedNetwork,
    paths,
    priced,
)
from autopar.core.costs import ADAM, Collective, DeviceModel, OptimizerState
from autopar.core.graph import Graph, InputKind
from autopar.core.move import Move
from autopar.core.placement import Layout
from autopar.core.precision import Precision
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.exchanges import Exchanges
from autopar.cost.operators.fused_groups import FusedGroups
from autopar.cost.operators.known_prices import PriceCache, known_prices
from autopar.runtime.parameters.gradient_buckets import bucket_sizes
from autopar.sharding.atoms import Dims
from autopar.sharding.local_sizes import LocalSizes

# What a parameter that learns costs a CPU a step beside its bytes, as launches, of which one took 1.9 us: a
# plain one in the optimizer, one of a parallel module also in its leaf's hook, and until its gradient is
# delivered and let go of. Those of five nets took 5 to 25 us and 65 to 170. A GPU's host runs ahead.
PARAMETER_LAUNCHES = {False: 10, True: 46}
# Tensors that an optimizer reads or writes on a CPU, by how many it keeps of each weight: in one pass that is
# fused, as of parallel modules, each of its own twice; one operator after the other as torch does by itself.
LOOP_PASSES = {0: 3, 1: 8, 2: 19}
# Bytes a second that an optimizer reads and writes of weights in the memory of a GPU's host: torch's fused
# AdamW of 50 million float32, 32 bytes of each, took 80 ms on two cores; hosts of GPUs have more.
HOST_STEP_BANDWIDTH = 20e9


UNCAPPED = 1 << 60  # bytes: more than a device has
MOST_SIZES = 256  # lists of layouts that are remembered


class MoveTraits(NamedTuple):
    """Traits of a tensor on which its moves' seconds depend: a gradient's sum has `wide` times its bytes, and
    one `inside` a fused group is written and read around a move."""

    requires_grad: bool
    weight: bool
    wide: float
    inside: bool


@dataclass(slots=True)
class TensorPrices:
    """Costs of one graph's tensors on one mesh; filled on demand and remembered.

    The graph is that of one micro-batch. `step_weight` is what a second that is spent once a step counts
    against one that every micro-batch spends: 1 without micro-batches. `training` counts backward passes.
    """

    graph: Graph
    dims: Dims
    cluster: ClusterSpec
    model: CostModel
    training: bool = True
    optimizer: OptimizerState = ADAM
    step_weight: float = 1.0
    micro_batches: int = 1
    accumulates: bool = False  # whether gradients of several micro-batches add up
    shown: float = 1.0  # of gradient sums in buckets, a multiplier
    credit: float = 0.0  # of the backward seconds of operators, behind which such sums hide
    early: bool = False  # whether gathers and sums of activations start early, too
    compute_credit: float = 0.0  # then of all seconds of operators; `shown` is of gathers, too
    late_credit: float = 0.0  # and of those of gradients of weights, which may be late
    late_shown: float = 1.0  # of exchanges of activations' gradients
    reduce: Precision = Precision.FP32  # what gradients of cast weights are summed in
    groups: FusedGroups | None = None  # of a compiled program
    ranks: tuple[ClusterSpec, ...] = ()  # of each pipeline rank the part that holds it, where they are unlike
    on_host: frozenset[str] = frozenset()  # weights that lie in the host's memory
    _bytes: dict[tuple[str, Layout], int] = field(default_factory=dict)
    _moves: dict[Any, tuple[float, float]] = field(default_factory=dict)
    _known: PriceCache | None = None
    _networks: dict[Any, Network] = field(default_factory=dict)  # under multipliers
    _exchanges: Exchanges = field(init=False)
    _parameters: frozenset[str] = field(init=False)
    _constants: frozenset[str] = field(init=False)
    _reduced: frozenset[str] = field(init=False)  # tensors whose gradients are summed in `reduce`
    _weights: frozenset[str] = field(init=False)  # the parameters and what is made of them alone

    def __post_init__(self) -> None:
        self._exchanges = Exchanges(self.cluster, self.dims.mesh, self.model)
        self._parameters, self._constants = (
            frozenset(item.name for item in self.graph.inputs if item.kind is kind)
            for kind in (InputKind.PARAMETER, InputKind.CONSTANT)
        )
        weights = set(self._parameters)
        for item in self.graph.operators:
            if item.operands and weights.issuperset(item.operands):
                weights.update(name for name in item.results if name)
        self._weights = frozenset(weights)
        self._reduced = self.graph.cast_weights
        if self.reduce is not Precision.FP32:
            self._reduced |= self.graph.cast_alone

    @property
    def device(self) -> DeviceModel:
        return self.model.device

    @property
    def room(self) -> tuple[int, ...]:
        """Bytes that the devices of each pipeline rank have beside those of the smallest."""
        memories = [math.inf if part.memory is None else part.memory for part in self.ranks]
        least = min(memories, default=0)
        return tuple(0 if memory == least else int(min(memory - least, UNCAPPED)) for memory in memories)

    @property
    def overlap(self) -> float:
        """The part of a backward pass that sums of gradients may hide behind. A compiled one gives all
        gradients when it ends."""
        if self.groups:
            return 0.0
        return self.device.kernels.overlap if self.device.kernels and self.training else 0.0

    @property
    def known(self) -> PriceCache:
        """Prices of equal operators and tensors of other graphs on this mesh, without multipliers."""
        if self._known is None:
            mesh, among = self.dims.mesh, self.dims.among
            self._known = known_prices(self.cluster, mesh, self.model, training=self.training, among=among)
        return self._known

    # -- moves --------------------------------------------------------------------------------------

    def move(self, name: str, move: Move) -> float:
        """Seconds of a conversion, forward and backward."""
        return sum(self.move_parts(name, move))

    def move_parts(self, name: str, move: Move) -> tuple[float, float]:
        """Seconds of a conversion in the forward and in the backward pass."""
        nbytes = max(self.local_bytes(name, move.source), self.local_bytes(name, move.target))
        return self._change(PlacementChange(move.axes, *move.placements), nbytes, self._traits(name))

    def widening(self, name: str) -> float:
        """Ratio of the bytes of a tensor's summed gradient to its own."""
        return self.reduce.nbytes / self.graph.specs[name].dtype.itemsize if name in self._reduced else 1.0

    def summed_bytes(self, name: str, layout: Layout) -> int:
        """Bytes of the largest rank's part of a gradient, in the dtype in which it is summed over ranks."""
        return round(self.widening(name) * self.local_bytes(name, layout))

    def _traits(self, name: str) -> MoveTraits:
        inside = self.groups is not None and name in self.groups.inside
        return MoveTraits(self._requires_grad(name), name in self._parameters, self.widening(name), inside)

    def _change(self, change: PlacementChange, nbytes: int, traits: MoveTraits) -> tuple[float, float]:
        """Seconds of a change of placement, forward and backward, of a tensor whose larger part, before or
        after, has `nbytes`."""
        what, axes = change.effect, self._exchanges.alike(change.axes)
        key = what.name, axes, nbytes, traits
        if key not in self._moves:
            ahead, back = self._passes(what, axes, nbytes, traits)
            self._moves[key] = self._shown(what.name, ahead, back, weight=traits.weight)
        return self._moves[key]

    def _passes(
        self, what: MoveEffect, axes: tuple[int, ...], nbytes: int, traits: MoveTraits
    ) -> tuple[float, float]:
        copy, action = self._exchanges.copy, self._exchanges.action
        full = nbytes * (self.dims.mesh.shape[axes[0]] if what.name == "s_to_s" else 1)
        wide = traits.wide if what.name in ("r_to_b", "s_to_b") else 1.0
        fresh = self._fresh(full) if traits.weight and what.forward is MoveAction.ALL_GATHER else 0.0
        ahead, back = fresh + action(what.forward, full, axes), 0.0
        if traits.inside and what.forward is not MoveAction.NOTHING:
            ahead += copy(nbytes)
        if traits.requires_grad:
            back = fresh + action(what.backward, round(wide * full), axes)
            back += 2 * copy(full) if wide != 1 else 0.0  # to another dtype and back
            if traits.inside and what.backward is not MoveAction.NOTHING:
                back += copy(nbytes)
        return ahead, back

    def _shown(self, move: str, ahead: float, back: float, *, weight: bool) -> tuple[float, float]:
        """Seconds of a move, of what may start early as much as is shown: of weights gathers and scatters, of
        activations the exchange in backward."""
        if not self.early:
            return ahead, back
        if weight and move in ("s_to_b", "s_to_r"):
            return self.shown * ahead, self.shown * back
        return ahead, (1.0 if weight or move not in ("r_to_b", "s_to_b") else self.late_shown) * back

    def _requires_grad(self, name: str) -> bool:
        return self.training and self.graph.specs[name].requires_grad

    def network(
        self, name: str, placements: Placements, *, alike: Alike = (), fixed: Set[Layout] = frozenset()
    ) -> Network:
        """The tensor's moves between all layouts of `placements` that are legal, or `fixed`, with seconds;
        a weight's as of every micro-batch. Made once for all tensors that are cut alike."""
        key = self.kind(name), placements, alike, fixed
        weight = name in self._parameters
        usual = self.shown == self.late_shown == 1.0 or not (weight or self.early)
        networks = self.known.networks if usual else self._networks
        if key not in networks and not usual and not self.early and key in self.known.networks:
            networks[key] = self.known.networks[key].scaled(self.shown)
        if key not in networks:
            sizes = _sizes_of(placements)
            legal = sizes.legal(self.dims, name).tolist()
            good = [yes or layout in fixed for yes, layout in zip(legal, sizes.layouts, strict=True)]
            found = paths(placements, alike, tuple(good))
            nbytes = sizes.nbytes(self.dims, name, found.numbers)
            networks[key] = priced(found, *self._changes(self._traits(name), nbytes, found))
        return networks[key]

    def kind(self, name: str) -> Any:
        """A key that is equal for tensors whose layouts have the same parts and whose moves cost the same."""
        spec, atoms = self.graph.specs[name], self.dims.atoms
        cuts = tuple(
            self.dims.way_of_cutting(atoms.components[name, dim, atom])
            for dim, lengths in enumerate(atoms.of[name])
            for atom in range(len(lengths))
        )
        return spec, atoms.of[name], cuts, self._traits(name)

    def _changes(
        self, traits: MoveTraits, nbytes: Numbers, network: UnpricedNetwork
    ) -> tuple[Seconds, Seconds]:
        """Seconds of all moves of a network whose layouts have so many bytes, and those before the loss."""
        different, codes = np.unique(nbytes, return_inverse=True)
        larger = np.maximum(codes[network.source], codes[network.target])
        first: dict[object, int] = {}  # the first kind of those that cost the same
        alike = [
            first.setdefault((change.effect.name, self._exchanges.alike(change.axes)), kind)
            for kind, change in enumerate(network.kinds)
        ]
        kinds = np.array(alike, dtype=np.intp)[network.kind]
        places, back = np.unique(kinds * len(different) + larger, return_inverse=True)
        seconds = np.array(
            [
                self._whole_change(network.kinds[kind], int(different[code]), traits)
                for kind, code in (divmod(place, len(different)) for place in places.tolist())
            ]
        ).reshape(-1, 2)
        return seconds[back, 0], seconds[back, 1]

    def _fresh(self, nbytes: int) -> float:
        """Seconds to touch fresh pages of a weight that has no memory of its own; 0 on a GPU.

        With glibc's default settings fresh pages for 16.8 MB took 12 ms, and none with raised thresholds; a
        copy takes 3. A GPU's memory is torch's, which keeps it.
        """
        return self._exchanges.copy(nbytes) if self.device.kind == "cpu" else 0.0

    def host_copy(self, nbytes: int) -> float:
        """Seconds of a copy between the device and its host."""
        if self.cluster.host is not None:
            return self.cluster.host.seconds(nbytes)
        return self._exchanges.copy(nbytes) + self._fresh(nbytes)

    def weight_move(self, name: str, move: Move, *, leads: bool) -> float:
        """A weight's conversion as it counts beside what each micro-batch does; those that lead from where
        the weight is stored are made once a step."""
        seconds = self.gradient_sync(name, move)
        return self.step_weight * seconds if leads and name not in self.on_host else seconds

    def gradient_sync(self, name: str, move: Move) -> float:
        """Seconds of a weight's conversion: its all-reduce is that of a bucket, or of a gradient where it
        lies."""
        if effect(move).name != "r_to_b":
            return self.move(name, move)
        change, traits = PlacementChange(move.axes, *move.placements), self._traits(name)
        return self._whole_change(change, self.local_bytes(name, move.source), traits._replace(weight=True))[
            0
        ]

    def _whole_change(self, change: PlacementChange, nbytes: int, traits: MoveTraits) -> tuple[float, float]:
        """Seconds of a change of placement, and those of them before the loss; a weight's all-reduce is that
        of a bucket."""
        ahead, back = self._change(change, nbytes, traits)
        if traits.weight and traits.requires_grad and change.effect.name == "r_to_b":
            return self._in_buckets(nbytes, change.axes, traits.wide), ahead
        return ahead + back, ahead

    def _in_buckets(self, nbytes: int, axes: tuple[int, ...], wide: float) -> float:
        """Seconds of a gradient's all-reduce, by itself or in a bucket, whichever is less; summed are `wide`
        times its bytes."""
        sizes = bucket_sizes(self.device.kind, math.prod(self.dims.mesh.shape[axis] for axis in axes))
        sent, copies = round(wide * nbytes), self._exchanges.copy(nbytes) if wide != 1 else 0.0
        alone = self._exchanges.collective(Collective.ALL_REDUCE, sent, axes) + 2 * copies
        if sent >= sizes.alone:
            return self.shown * alone
        share = sent / sizes.full
        shared = self._exchanges.collective(Collective.ALL_REDUCE, sizes.full, axes) * share
        return self.shown * min(
            self._exchanges.copy(sent) + alone, shared + self._laid_together(nbytes, share) + copies
        )

    def _laid_together(self, nbytes: int, share: float) -> float:
        """Seconds of a gradient's copy into a bucket, of which it has a `share`; a GPU makes all at once."""
        launches = 1.0 if self.device.kind == "cpu" else share
        return launches * self.device.launch_seconds + 2 * nbytes / self.device.bandwidth

    def together(self, moves: Mapping[str, Move]) -> dict[str, tuple[float, float]]:
        """Seconds of weights' gathers as one, forward and backward, by the share of each: one latency, and
        copies side by side."""
        sizes = {name: self.local_bytes(name, move.target) for name, move in moves.items()}
        first, total = next(iter(moves)), sum(sizes.values())
        axes, fresh = self._exchanges.alike(moves[first].axes), self._fresh(total)
        ahead = fresh + self._exchanges.action(MoveAction.ALL_GATHER, total, axes)
        wide, is_summed = round(self.widening(first) * total), effect(moves[first]).name == "s_to_b"
        scatter = fresh + self._exchanges.action(MoveAction.REDUCE_SCATTER, wide, axes)
        found = {}
        for name, nbytes in sizes.items():
            share = nbytes / total if total else 0.0
            laid = self._laid_together(nbytes, share)
            alone = self._exchanges.action(MoveAction.SLICE, nbytes, axes)
            back = share * scatter + laid if is_summed else alone
            parts = share * ahead + laid, back if self._requires_grad(name) else 0.0
            found[name] = self._shown(effect(moves[first]).name, *parts, weight=True)
        return found

    # -- state ----------------------------------------------------------------------------------------

    def local_bytes(self, name: str, layout: Layout) -> int:
        """Bytes of the largest rank's part of a tensor."""
        key = name, layout
        if key not in self._bytes:
            shape = self.dims.local_shape(name, layout, self.dims.largest(name, layout))
            self._bytes[key] = math.prod(shape) * self.graph.specs[name].dtype.itemsize
        return self._bytes[key]

    def state_bytes(self, name: str, layout: Layout) -> int:
        """Bytes on the device of a parameter with its gradient and optimizer state."""
        return 0 if name in self.on_host else self.owned_bytes(name, layout)

    def owned_bytes(self, name: str, layout: Layout) -> int:
        """Bytes of a parameter with gradient and optimizer state, anywhere; frozen ones have neither."""
        nbytes = self.local_bytes(name, layout)
        if not self._requires_grad(name):
            return nbytes
        return round(nbytes * (2 + self.optimizer.ratio)) + self.optimizer.fixed

    def update(self, name: str, layout: Layout) -> float:
        """Seconds of the optimizer's step on a parameter: its tensors are read and written, and the host gets
        at it."""
        if not self._requires_grad(name):
            return 0.0
        is_parallel = self.dims.mesh.num_devices > 1
        moved = 2 * self.owned_bytes(name, layout)
        kept = round(self.optimizer.ratio)
        is_alone = not is_parallel and name not in self.on_host  # torch's own loop, not a parallel module's
        if self.device.kind == "cpu" and is_alone and kept in LOOP_PASSES:
            moved = LOOP_PASSES[kept] * self.local_bytes(name, layout)
        is_away = name in self.on_host and self.device.kind != "cpu"
        bandwidth = HOST_STEP_BANDWIDTH if is_away else self.device.bandwidth
        seconds = moved / bandwidth + self._exchanges.host(PARAMETER_LAUNCHES[is_parallel])
        return self.model.slowdown * seconds


@lru_cache(maxsize=MOST_SIZES)
def _sizes_of(placements: Placements) -> LocalSizes:
    """All layouts of these placements, and what all tensors have in common of how they split one."""
    return LocalSizes(placements)
