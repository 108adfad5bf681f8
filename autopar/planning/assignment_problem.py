"""One mesh's problem: the best assignment of a whole graph on it, whatever is asked of the step.

Each assignment is solved once. With stages all have the same mesh and share one assignment, in which a memory
cap may have its part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from autopar.cluster import ClusterSpec, Link
from autopar.core.deadline import left
from autopar.core.force import Force
from autopar.core.graph import Graph, InputKind
from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.offload import Offload
from autopar.core.pipeline import stages_per_rank
from autopar.core.placement import B, R
from autopar.core.schedule import Schedule
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.fused_groups import FusedGroups, OperatorTraffic, find_groups
from autopar.cost.operators.prices import Prices
from autopar.planning.asked.ask import UNLIMITED, Ask, Limits
from autopar.planning.asked.request import Request
from autopar.planning.known_cuts import KnownCuts
from autopar.planning.out_of_core import before_hiding, check_room, coming_ahead, most_hidden, out_of_core
from autopar.planning.refusals import check_force, stageable
from autopar.schedules.in_flight import scheduled
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import dims_of
from autopar.solve.assignment.goal import Effort, Goal
from autopar.solve.assignment.symmetry import choose_named
from autopar.solve.assignment.written_programs import WrittenPrograms
from autopar.solve.choices.fold import Folding, fold
from autopar.solve.choices.memory_price import FREE
from autopar.solve.choices.space import Borders, Space, build_space
from autopar.solve.program.solution import Solution, UnbeatenError, completed
from autopar.solve.stages.step import step_weight

LONG_GRAPH_OPERATORS = 1000  # that are unlike


@dataclass(slots=True)
class AssignmentProblem:
    """One mesh's problem; each assignment that is asked for is solved once."""

    graph: Graph
    mesh: Mesh
    cluster: ClusterSpec
    model: CostModel
    request: Request
    cap: int | None
    hop: Link
    blocks: tuple[ClusterSpec, ...] = ()  # of each pipeline rank, where devices are unlike

    def __post_init__(self) -> None:
        request = self.request
        self.schedules = [
            scheduled(kind, request.pipeline_ranks, stages_per_rank(kind), request.micro_batches)
            for kind in stageable(self.graph, request)
        ]
        self.dims = dims_of(self.graph, self.mesh, self.request.imbalance)
        self.groups = find_groups(self.graph) if request.compile else None
        self.prices = self.plain_prices()
        pins, stored, on_host = self.request.pins, self.request.stored, self.prices.on_host
        self.folding = fold(self.graph, self.dims, pins, self.roles, stored, on_host)

    dims: Dims = dataclasses.field(init=False)
    groups: FusedGroups | None = dataclasses.field(init=False)
    prices: Prices = dataclasses.field(init=False)
    folding: Folding = dataclasses.field(init=False)
    schedules: list[Schedule] = dataclasses.field(init=False)
    first: Solution | None = None  # one that meets the cap
    places: tuple[int, ...] | None = None  # where stages may begin or end; None for the planner's own
    spaces: dict[Force | None, Space] = dataclasses.field(default_factory=dict)
    solved: dict[Ask, Solution] = dataclasses.field(default_factory=dict)
    known_cuts: KnownCuts = dataclasses.field(default_factory=KnownCuts)
    priced_programs: WrittenPrograms = dataclasses.field(
        default_factory=WrittenPrograms
    )  # for prices of bytes

    @property
    def roles(self) -> Mapping[str, OperatorTraffic] | None:
        """Each operator's part in fused groups, where programs are compiled; else None."""
        return self.groups.members if self.groups else None

    @property
    def is_long(self) -> bool:
        """Whether there are so many unlike operators that planning takes most of a minute."""
        return len(set(self.folding.class_of.values())) >= LONG_GRAPH_OPERATORS

    def plain_prices(self) -> Prices:
        """The prices, without multipliers."""
        return Prices(
            self.graph,
            self.dims,
            self.cluster,
            self.model,
            training=self.request.training,
            optimizer=self.request.optimizer,
            step_weight=step_weight(self.request.pipeline_ranks, self.request.micro_batches),
            micro_batches=self.request.micro_batches,
            accumulates=self.request.training and self.request.micro_batches > 1,
            early=self.request.overlap and self.request.training and self.request.pipeline_ranks == 1,
            reduce=self.request.reduce_dtype,
            groups=self.groups,
            ranks=self.blocks,
            on_host=self.on_host,
        )

    @property
    def on_host(self) -> frozenset[str]:
        """The weights that lie in the host's memory whatever the assignment."""
        weights = (item for item in self.graph.inputs if item.kind is InputKind.PARAMETER)
        if (lie := self.request.on_host) is not None:
            return frozenset(item.name for item in weights if item.target in lie)
        is_asked = self.request.offload is Offload.STATE
        return frozenset(item.name for item in weights if is_asked)

    def row_prices(self, multiplier: float, late: float = 0.0) -> Prices:
        """The prices under multipliers, together at most 1, of what hides: by them no assignment costs more
        than its step."""
        theta = self.prices.overlap
        if not self.prices.early:
            return self.prices.under(shown=multiplier, credit=multiplier * theta * self.prices.step_weight)
        return self.prices.under(
            shown=multiplier,
            compute_credit=multiplier * theta,
            late_credit=late * theta,
            late_shown=multiplier + late,
        )

    def ask(self, force: Force | None = None, *, cap: int | None = None, bounded: bool = True) -> Ask:
        """Ask for an assignment with parts recomputed as the request says."""
        return Ask(force, cap, recompute=self.request.recompute, bounded=bounded)

    @property
    def offload(self) -> Offload:
        """What activations may wait in host memory: none where there is no backward or no host link."""
        may = self.request.training and self.cluster.host is not None
        asked = Offload.AUTO if self.request.offload is Offload.STATE else self.request.offload
        return asked if may else Offload.NONE

    def solve(
        self, ask: Ask, limits: Limits = UNLIMITED, programs: WrittenPrograms | None = None
    ) -> Solution:
        """The best assignment of the whole graph; see `choose`."""
        for proven in (True, False)[: 1 if ask.bounded else 2]:
            if (known := dataclasses.replace(ask, bounded=proven)) in self.solved:
                return self.solved[known]
        if ask.cap is not None:
            free = self.ask(ask.force, bounded=ask.bounded)
            free = dataclasses.replace(free, multiplier=ask.multiplier, late=ask.late)
            fastest = self.solve(free, limits, programs)
            if fastest.peak.nbytes <= ask.cap:
                return fastest
        found = self.chosen(ask, limits, programs)
        if ask.cap is not None and found.program.on_host != fastest.program.on_host:
            found = dataclasses.replace(found, bound=min(found.bound, fastest.bound), status="gap_limit")
        if ask.multiplier is None:
            found = dataclasses.replace(found, bound=found.bound - self.most_hidden(found.bound))
        self.solved[ask] = found
        return found

    def chosen(self, ask: Ask, limits: Limits, programs: WrittenPrograms | None) -> Solution:
        """The best assignment by the costs that are asked for; where none fits, with weights on the host."""
        prices = self.prices if ask.multiplier is None else self.row_prices(ask.multiplier, ask.late)
        assign = partial(self.assigned, ask, limits, programs)
        alone = self.request.pipeline_ranks == 1 and self.request.on_host is None
        if ask.cap is None or not alone or self.offload is not Offload.AUTO or prices.on_host:
            found = assign(prices)
            if self.request.on_host is None:
                check_room(found.priced)
            bound = found.bound - most_hidden(prices, found.bound)
            return dataclasses.replace(coming_ahead(found, ask.cap), bound=bound)
        complete = partial(completed, cap=ask.cap, recompute=ask.recompute, offload=self.offload)
        return out_of_core(assign, prices, ask.cap, complete)

    def assigned(
        self, ask: Ask, limits: Limits, programs: WrittenPrograms | None, prices: Prices
    ) -> Solution:
        """The best assignment by these prices, or the first one if that is better."""
        alone, count = self.request.pipeline_ranks == 1, self.request.micro_batches
        cutoff = limits.cutoff / count if ask.bounded and alone else math.inf
        first = self.first if ask.cap is not None and ask.force == self.request.force else None
        if first is not None and ask.multiplier is not None:
            priced = first.priced.at(prices)
            first = dataclasses.replace(first, priced=priced, seconds=priced.seconds)
        known = cutoff if first is None else min(cutoff, first.seconds)
        cutoff, known = before_hiding(prices, cutoff), before_hiding(prices, known)
        try:
            found = choose_named(
                self.graph,
                prices,
                self.space(ask.force),
                self.folding,
                Goal(
                    ask.cap,
                    self.request.gap,
                    ask.memory_price,
                    ask.bounded,
                    ask.recompute,
                    self.offload if alone else Offload.NONE,
                    cutoff,
                    known if ask.cap is not None else math.inf,
                ),
                Effort(
                    None if limits.deadline is None else max(0.1, left(limits.deadline)),
                    limits.work,
                    brief=ask.multiplier is not None and ask.multiplier < 1.0,
                ),
                programs if ask.memory_price == FREE else self.priced_programs,
            )
        except UnbeatenError as error:
            if first is None:
                raise
            return dataclasses.replace(first, bound=min(error.bound, first.seconds))
        if first is not None and first.seconds < found.seconds:
            return dataclasses.replace(first, bound=min(found.bound, first.seconds))
        return found

    def most_hidden(self, bound: float) -> float:
        """Seconds of an assignment that sums of gradients may overlap, at most.

        They are those of all weights that require gradients over all axes, or the overlap's part of the least
        that an assignment takes.
        """
        prices, mesh = self.prices, self.mesh
        if not prices.overlap:
            return 0.0
        if prices.early:
            return prices.overlap * bound
        whole = (R,) * len(mesh.shape)
        sums = sum(
            prices.gradient_sync(item.name, Move(axis, whole, (*whole[:axis], B, *whole[axis + 1 :])))
            for item in self.graph.inputs
            if item.kind is InputKind.PARAMETER and item.spec.requires_grad
            for axis in mesh.axes
            if mesh.shape[axis] > 1
        )
        return prices.step_weight * min(sums, prices.overlap * bound)

    def space(self, force: Force | None) -> Space:
        """The strategies and layouts to choose from; made once."""
        if force not in self.spaces:
            if force is not None:
                check_force(self.graph, self.prices, force)
            self.spaces[force] = build_space(
                self.graph,
                self.prices,
                self.folding,
                force=force,
                pins=self.request.pins if force is self.request.force else None,
                borders=Borders(
                    self.request.stored,
                    self.request.local_inputs,
                    self.request.user_layouts,
                    self.request.leaves_parts(self.graph),
                    self.request.shard_state,
                ),
            )
        return self.spaces[force]
