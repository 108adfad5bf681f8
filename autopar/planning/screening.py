"""What numbers of stages and micro-batches, and which meshes, would take by their estimates.

The seconds of a micro-batch of another size follow closely from those of one of M0: what launches cost stays,
and gradients as large as an embedding, the rest shrinks with its samples, and sums of gradients hide behind
what there then is. With stages M0 is about 16, or fewer where a micro-batch has fewer samples than a stage
has devices, which no batch parallelism could share; without them it is 1, as most such plans are.

K = 1 is looked at first, and of its meshes that of one axis. Where its devices do little beside computing
what they share, what other plans could spare can't be told from nothing (apart.py), and they aren't looked
at:

    step <= (1 + 3 %) of what is shared     no meshes of more axes
    step <= (1 + 10 %)                      no stages; if the model fits on one device of a node with fast
                                            links 1.1/0.9 times, and on a single node in any case

Else K is sought from stages of one node up and down, for as long as that is faster, up to the number of equal
blocks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.cluster import ClusterSpec
from autopar.core.deadline import is_over
from autopar.core.graph import Graph, InputKind
from autopar.core.mesh import Mesh
from autopar.core.offload import Offload
from autopar.core.recompute import Recompute
from autopar.core.schedule import ScheduleKind
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.host_weights import weights_of
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.stages.intervals import crossing_bytes
from autopar.errors import InputError, SolverError, TraceError
from autopar.planning.apart import IN_VAIN, Apart, margin
from autopar.planning.apart import MEASURED as NOISE
from autopar.planning.asked.ask import Limits
from autopar.planning.asked.request import Request
from autopar.planning.estimates import MeshEstimate, PipelineEstimate, bottleneck, choice_of
from autopar.planning.group_orders import pace_of, unlike_blocks
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.meshes import meshes_of
from autopar.planning.sample_costs import gather_seconds, shares_of, weight_seconds, work_of
from autopar.sharding.strategies import dims_of
from autopar.solve.choices.fold import fold
from autopar.solve.choices.memory_price import FREE, MemoryPrice
from autopar.solve.highs import SECOND
from autopar.solve.memory.offload import overlapped
from autopar.solve.memory.recompute import sparing
from autopar.solve.program.solution import Solution
from costdb.database import Database

SAMPLE = 16  # micro-batches of the graph that is screened for stages, about
TIMES = (1, 2, 4, 8)  # micro-batches per pipeline rank, about
MOST_TIMES = 16  # with stages, where all between are looked at
LEAST_TOLD_GAIN = 1e-3  # of a step: no mesh that promises less is told of
MESHES = 2  # of two axes, screened for each K; within a node one
FAST_LINK = 100e9  # bytes/s: NVLink since V100, no PCIe
ROUGH = 0.02  # gap of the assignments that are screened
SCREEN_WORK = 2 * SECOND  # of branching for one of them
SCARCE = 0.5  # of the cap: more state than that, and leaner assignments are screened too
LEANER = (1 / 16, 1.0)  # of a step's seconds, what all its bytes may cost there
GraphOf = Callable[[int], Graph]  # micro-batches -> the graph of one


def _nearest(counts: Sequence[int], wanted: float) -> int:
    return min(counts, key=lambda count: (abs(math.log(count / wanted)), count))


@dataclass(frozen=True, slots=True)
class SampledMicroBatch:
    """The graph of one of `count` micro-batches."""

    count: int
    graph: Graph


@dataclass(frozen=True, slots=True)
class ScreenedMesh:
    """The fastest assignment on a mesh, and what it and leaner ones were screened to be."""

    screened: tuple[MeshEstimate, ...]
    problem: MeshProblem
    solution: Solution

    @property
    def mesh(self) -> Mesh:
        return self.problem.mesh

    @property
    def axes(self) -> int:
        return len(self.mesh.shape)


@dataclass(slots=True)
class Screen:
    """Looks at choices of stages, micro-batches and meshes for a global batch of `batch` samples."""

    graph_of: GraphOf
    counts: Sequence[int]
    batch: int
    cluster: ClusterSpec
    request: Request
    database: Database | None
    deadline: float | None = None  # after which no more is looked at than what is there
    outputs: int = 0  # bytes beside the loss of a batch that is computed at once
    samples: dict[int, SampledMicroBatch] = field(default_factory=dict)
    fewest: int = 1  # micro-batches of which one fits, without stages, beside its state
    notes: tuple[str, ...] = ()
    left_out: dict[int, tuple[str, ...]] = field(default_factory=dict)  # meshes, by the number of stages
    model: CostModel = field(init=False)
    cap: float = field(init=False)  # bytes per device, inf without a cap
    apart: Apart = field(init=False)

    def __post_init__(self) -> None:
        self.model = CostModel.of(self.cluster, self.database)
        cap = self.request.cap(self.cluster)
        self.cap = math.inf if cap is None else cap
        self.apart = Apart(measured=self.request.measure and self.model.here)

    def choices(self, ranks: int | None) -> list[PipelineEstimate]:
        """Estimates that fit, the fastest first, then those that don't fit, the smallest first."""
        self.apart = replace(self.apart, is_roomy=ranks is None and self.is_roomy())
        found = [choice for each in self.climb(ranks) for choice in self.rated(each)]
        if not found:
            raise InputError(
                where="stages and micro-batches",
                found=f"{ranks or 'any'} stages, {', '.join(map(str, self.counts[:8]))} micro-batches",
                wanted="numbers that some schedule can run",
                remedy="choose at least as many micro-batches as stages",
            )
        best: dict[tuple[int, int], PipelineEstimate] = {}
        for choice in sorted(found, key=self.rank):
            best.setdefault((choice.ranks, choice.micro_batches), choice)
        return list(best.values())

    def choices_in_time(self, ranks: int | None) -> list[PipelineEstimate]:
        """Choices as by `choices`; none if time is over."""
        try:
            return self.choices(ranks)
        except SolverError:
            return []

    def sample(self, ranks: int) -> SampledMicroBatch:
        """The micro-batch that is screened: without stages the largest, with stages one of about SAMPLE
        samples, which the devices of one pipeline rank can share."""
        if ranks == 1:
            return self.traced(self.counts[0])
        return self.about_sample(self.cluster.stage(ranks).num_devices)

    def about_sample(self, samples: int = 1) -> SampledMicroBatch:
        """One of about SAMPLE micro-batches of `samples` or more, if there are such.

        Counts for which the model can't be traced, and larger ones, are left out: a batch norm wants more
        than one sample, and a tensor that is as long as the batch wants all of them.
        """
        while True:
            enough = [count for count in self.counts if self.batch // count >= samples]
            count = _nearest(enough or self.counts[:1], SAMPLE)
            try:
                return self.traced(count)
            except TraceError:
                fewer = [each for each in self.counts if each < count]
                if not fewer:
                    raise
                self.counts = fewer

    def traced(self, count: int) -> SampledMicroBatch:
        if count not in self.samples:
            graph = self.graph_of(count)
            self.samples[count] = SampledMicroBatch(count, graph)
        return self.samples[count]

    def rank(self, choice: PipelineEstimate) -> tuple[float, float]:
        """Its place in the order; stages are hardly ever as fast as their estimate, a step without is."""
        over = choice.nbytes if choice.nbytes > self.cap else 0.0
        return over, choice.seconds * (1.0 if choice.ranks == 1 else 1.0 + ROUGH)

    def climb(self, ranks: int | None) -> Iterator[list[MeshEstimate]]:
        """The screened meshes of `ranks` pipeline ranks, or of as many as pay."""
        if ranks and ranks > 1:
            yield self.screen(ranks)
            return
        is_simple = self.is_simple()
        yield (alone := self.unstaged())
        if ranks or is_simple or self.is_even(alone):
            return
        most = self.blocks()
        options = [each for each in self.cluster.stage_counts() if each <= most]
        middle = options.index(_nearest(options, self.cluster.nodes))
        best: tuple[float, float] | None = None
        for order in (options[middle:], options[:middle][::-1]):
            for each in order:
                if is_over(self.deadline):
                    return
                screened = alone if each == 1 else self.screen(each)
                if each > 1:
                    yield screened
                mine = self.best(screened)
                if mine is None or (best is not None and mine > best):
                    break
                best = mine

    def is_simple(self) -> bool:
        """Whether the model fits on one device of a node with fast links; then no estimate is sure enough to
        cut it into stages."""
        if self.cluster.nodes > 1 or not self.is_roomy():
            return False
        self.notes = ("the model fits on one device of a node with fast links: no stages on an estimate",)
        return True

    def is_roomy(self) -> bool:
        """Whether links within nodes are fast and each device has room for twice the model. False on CPUs and
        where operators are measured."""
        if self.apart.measured or self.cluster.device_type == "cpu":
            return False
        if self.cluster.intra.bandwidth < FAST_LINK:
            return False
        state = sum(
            item.spec.nbytes * (2 + self.request.optimizer.ratio if item.spec.requires_grad else 1)
            for item in self.sample(1).graph.inputs
            if item.kind is InputKind.PARAMETER
        )
        return state <= SCARCE * self.cap

    def unstaged(self) -> list[MeshEstimate]:
        """Estimates without stages: of the whole batch, or of parts of it if it doesn't fit as it is."""
        if len(self.counts) == 1:
            return self.screen(1)
        alone = self.screen(1, is_probe=True)
        if self.fits_at_once(alone):
            return alone
        self.about_sample()  # which of the other counts can be had
        return self.screened_in_parts(alone) or self.screen(1)

    def fits_at_once(self, alone: Sequence[MeshEstimate]) -> bool:
        """Whether a step without stages meets the cap with the fewest micro-batches, nothing recomputed or
        offloaded."""
        count = self.counts[0]
        return any(each.nbytes(None, count, each.saved_bytes) <= self.cap for each in alone)

    def screened_in_parts(self, alone: Sequence[MeshEstimate]) -> list[MeshEstimate]:
        """Estimates of the fewest micro-batches of which one fits as it is, and of half as many.

        Half as many need recomputing. Small micro-batches compute slower, and each gathers the shards again,
        which the whole batch tells nothing of.
        """
        for place, count in enumerate(self.counts):
            if all(each.saved_bytes * each.count > count * self.cap for each in alone):
                continue
            try:
                sample = self.traced(count)
            except TraceError:
                continue
            self.fewest = count
            found = self.screen(1, sample)
            if place and self.request.recompute is Recompute.AUTO and not is_over(self.deadline):
                with contextlib.suppress(TraceError):
                    fewer = self.traced(_nearest(self.counts[:place], count / 2))
                    found = [*self.screen(1, fewer), *found]
            return found
        return []

    def is_even(self, alone: Sequence[MeshEstimate]) -> bool:
        """Whether the best estimate without stages is hardly longer than each device's share of the work.
        Then stages can spare next to nothing."""
        if self.apart.measured:
            return False
        fitting = [each.seconds for each in self.rated(alone) if each.nbytes <= self.cap]
        least = min(each.work_seconds for each in alone)
        if min(fitting, default=math.inf) > least * (1 + self.apart.of_stages):
            return False
        if self.cluster.num_devices > 1:
            self.notes += (
                "no stages: without them devices do hardly more than compute what they share, by less than "
                "what predictions are off by",
            )
        return True

    def blocks(self) -> int:
        """No more stages are sought than equal blocks, if the graph is made of such, or operators."""
        sample = self.traced(_nearest(self.counts, SAMPLE))
        blocks = fold(sample.graph, dims_of(sample.graph, Mesh((1,)))).count
        return blocks if blocks > 1 else len(sample.graph.operators)

    def meshes(self, ranks: int) -> list[Mesh]:
        """Few meshes: that of one axis, and those of two whose minor axis comes closest to filling a node."""
        stage = self.cluster.stage(ranks)
        every = meshes_of(stage, self.request)
        if len({len(mesh.shape) for mesh in every}) == 1:  # as is asked for
            return every[: MESHES + 1]
        flat = [mesh for mesh in every if len(mesh.shape) == 1]
        few = [mesh for mesh in every if len(mesh.shape) == 2]
        few.sort(key=lambda mesh: abs(math.log(mesh.shape[-1] / stage.devices_per_node)))
        return [*flat, *few[: MESHES if stage.nodes > 1 else MESHES - 1]]

    def screen(
        self, ranks: int, sample: SampledMicroBatch | None = None, *, is_probe: bool = False
    ) -> list[MeshEstimate]:
        """The assignments that are looked at with so many pipeline ranks, of a `sample` of the batch; a probe
        ends with the first if that doesn't fit."""
        sample = sample or self.sample(ranks)
        request = replace(
            self.request,
            pipeline_ranks=1,
            micro_batches=sample.count if ranks == 1 else ranks * TIMES[-2],
            schedule=ScheduleKind.ONE_F_ONE_B,
            alternatives=False,
            gap=max(self.request.gap, ROUGH),
        )
        stage, hop = self.cluster.stage(ranks), self.model.hop(self.cluster, ranks)
        blocks = unlike_blocks(self.cluster, replace(request, pipeline_ranks=ranks))
        found: list[ScreenedMesh] = []
        meshes = self.meshes(ranks)
        for mesh in meshes:
            if found and (is_over(self.deadline) or self.is_flat_enough(found[0].screened)):
                break
            problem = MeshProblem(sample.graph, mesh, stage, self.model, request, None, hop, blocks)
            try:
                found.append(self.looked_at(problem, ranks, sample, leaner=not is_probe, waits=not found))
                if is_probe and not self.fits_at_once(found[0].screened):
                    break
            except SolverError:
                if not found and mesh == meshes[-1]:
                    raise
                self.notes += (f"mesh {mesh} was left out with {ranks} stages: its program takes too long",)
        return [each for one in self.simpler(found) for each in one.screened]

    def looked_at(
        self, problem: MeshProblem, ranks: int, sample: SampledMicroBatch, *, leaner: bool, waits: bool
    ) -> ScreenedMesh:
        """The fastest assignment on a mesh, and where its state takes much of the memory leaner ones."""
        fastest = self.placed(problem, FREE, waits=waits)
        if ranks == 1:
            fastest = self.hiding(problem, fastest)
        solutions, price = [fastest], fastest.seconds / max(1, fastest.peak.nbytes)
        scarce = fastest.peak.state / ranks > SCARCE * self.cap
        if leaner and scarce and not is_over(self.deadline):
            for share in LEANER if ranks == 1 else LEANER[-1:]:
                with contextlib.suppress(SolverError):
                    memory_price = MemoryPrice(state=share * price, saved=share * price)
                    solutions.append(self.placed(problem, memory_price, waits=False))
        screened = [self.screened(problem, each, ranks, sample) for each in solutions]
        return ScreenedMesh(tuple(screened), problem, fastest)

    def is_flat_enough(self, alike: Sequence[MeshEstimate]) -> bool:
        """Whether devices on one axis hardly do more than compute their share, as memory allows.

        Then no mesh of more axes can be told from that one.
        """
        fastest = alike[0]
        if len(fastest.mesh.shape) > 1 or self.apart.measured:
            return False
        best = min(self.rated(alike), key=self.rank, default=None)
        count = best.micro_batches if best else fastest.count
        is_node = self.cluster.stage(fastest.ranks).nodes == 1
        if is_node and best and best.nbytes <= self.cap:
            count = 1  # all links are alike: more axes spare memory and sums by little
        if fastest.seconds(None, count) > count * fastest.scaled(fastest.work, count) * (1 + NOISE):
            return False
        if is_node or best is None:
            return best is None or best.nbytes <= self.cap
        kinds = self.kinds(best.ranks, count)
        return best.seconds <= choice_of(alike, count, kinds, math.inf).seconds * (1 + LEAST_TOLD_GAIN)

    def place(self, placed: ScreenedMesh) -> tuple[float, float]:
        """Sort key of the best choice on a mesh."""
        return self.best(placed.screened) or (math.inf, math.inf)

    def simpler(self, found: list[ScreenedMesh]) -> list[ScreenedMesh]:
        """Without the meshes of more axes that can't be told from one of fewer."""
        fastest = min(found, key=self.place)
        for each in sorted(found, key=lambda each: (each.axes, self.place(each))):
            if each.axes >= fastest.axes:
                break
            apart = 1 + margin(fastest.solution.priced, each.solution.priced)
            if self.cluster.nodes == 1:  # alike, but for how often messages wait
                apart = max(apart, 1 + NOISE)
            (over, seconds), (least_over, least) = self.place(each), self.place(fastest)
            if over <= least_over and seconds <= least * apart:
                if least < (1 - LEAST_TOLD_GAIN) * seconds:
                    promised = f"mesh {fastest.mesh} promises {1 - least / seconds:.1%} less by estimates"
                    ranks = fastest.screened[0].ranks
                    self.left_out[ranks] = (f"{promised}, {IN_VAIN}; the gap leaves it out",)
                return [one for one in found if one.axes <= each.axes]
        return found

    def best(self, screened: Sequence[MeshEstimate]) -> tuple[float, float] | None:
        """The place in the order of the best choice among them, if there is any."""
        return min(map(self.rank, self.rated(screened)), default=None)

    def placed(self, problem: MeshProblem, memory_price: MemoryPrice, *, waits: bool = True) -> Solution:
        """An assignment of about the least seconds; much work is waited for, or raises SolverError."""
        ask = replace(problem.ask(self.request.force, bounded=False), memory_price=memory_price)
        with contextlib.suppress(*([SolverError] if waits else [])):
            return problem.solve(ask, Limits(self.deadline, work=SCREEN_WORK))
        return problem.solve(ask, Limits(self.deadline))

    def hiding(self, problem: MeshProblem, solution: Solution) -> Solution:
        """The assignment, or one that takes sums of gradients for free, if they hide and it is faster."""
        if not problem.prices.overlap or solution.priced.cost.exposed_sums:
            return solution
        ask = replace(problem.ask(self.request.force, bounded=False), multiplier=0.0)
        with contextlib.suppress(SolverError):
            found = problem.solve(ask, Limits(self.deadline, work=SCREEN_WORK))
            priced, count = PricedProgram(problem.prices, found.program), problem.request.micro_batches
            if priced.cost.of(count) < solution.priced.cost.of(count):
                return replace(found, priced=priced, seconds=priced.seconds)
        return solution

    def screened(
        self, problem: MeshProblem, solution: Solution, ranks: int, sample: SampledMicroBatch
    ) -> MeshEstimate:
        """The estimate of an assignment: its costs, and those with everything recomputed where memory is
        scarce."""
        if ranks == 1 and problem.offload is Offload.AUTO and solution.peak.state > self.cap:
            hosted = solution.priced.hosting(weights_of(problem.prices))
            solution = replace(solution, priced=hosted, held=hosted, seconds=hosted.seconds)
        priced, recompute, spared, hidden = solution.priced, 0.0, 0, 0
        prices = priced.operator_prices
        largest = solution.peak.saved * sample.count / ranks  # of the fewest micro-batches
        scarce = solution.peak.state / ranks + largest > self.cap
        if scarce and self.request.recompute is Recompute.AUTO:
            recompute, spared = sparing(priced)
        if scarce and ranks == 1 and problem.offload is Offload.AUTO:
            hidden = max(0, solution.peak.saved - overlapped(priced).peak.saved)
        launches, launch = 2 * sum(price.launches for price in prices), self.model.device.launch_seconds
        seconds, samples = [price.seconds for price in prices], self.batch // sample.count
        cost = priced.cost
        evenness = bottleneck(seconds, ranks) / sum(seconds) if sum(seconds) else 1 / ranks
        return MeshEstimate(
            ranks=ranks,
            mesh=problem.mesh,
            count=sample.count,
            samples=samples,
            cost=cost,
            work=work_of(priced),
            slowest=evenness * cost.micro_batch,
            weights=sum(price.weights for price in prices),
            hiding=priced.prices.overlap * sum(price.behind for price in prices),
            shards=shares_of(priced.graph, priced.program, samples, seconds),
            free=self.request.force is None,
            fixed=launches * launch + weight_seconds(priced, launch) + gather_seconds(priced),
            hop_bytes=self.least_crossing(priced),
            hop=self.model.hop(self.cluster, ranks),
            state_bytes=solution.peak.state,
            saved_bytes=solution.peak.saved,
            recompute_seconds=recompute,
            lean_bytes=max(0, solution.peak.saved - spared),
            hidden_bytes=hidden,
            pace=pace_of(priced),
        )

    def least_crossing(self, priced: PricedProgram) -> int:
        """Bytes at the best cut of the middle half, where most cuts lie."""
        crossing = crossing_bytes(priced)
        quarter = len(crossing) // 4
        return min(crossing[quarter : 3 * quarter + 1])

    def rated(self, screened: Sequence[MeshEstimate]) -> Iterator[PipelineEstimate]:
        """The choices on each mesh that is among them, each by the sample that comes nearest.

        None on a mesh that was left out when that sample was looked at."""
        meshes: dict[tuple[int, Mesh], dict[int, list[MeshEstimate]]] = {}
        for each in screened:
            samples = meshes.setdefault((each.ranks, each.mesh), {})
            samples.setdefault(each.count, []).append(each)
        for (ranks, _), samples in meshes.items():
            counts = sorted({each.count for each in screened if each.ranks == ranks})
            for count in self.micro_batches(ranks):
                kinds, nearest = self.kinds(ranks, count), _nearest(counts, count)
                if nearest in samples and (kinds or ranks == 1):
                    choice = choice_of(samples[nearest], count, kinds, self.cap)
                    outputs = self.outputs if ranks == count == 1 else 0
                    yield replace(choice, nbytes=choice.nbytes + outputs)

    def micro_batches(self, ranks: int) -> list[int]:
        """Without stages 1, or as many as memory asks; with stages some for each."""
        least = self.fewest if ranks == 1 else ranks
        wanted = {_nearest(self.counts, many * times) for many in {ranks, least} for times in TIMES}
        if ranks > 1:
            wanted.update(count for count in self.counts if ranks <= count <= ranks * MOST_TIMES)
        return sorted(wanted)

    def kinds(self, ranks: int, count: int) -> list[ScheduleKind]:
        """The schedules that can be run."""
        try:
            return replace(self.request, pipeline_ranks=ranks, micro_batches=count).kinds()
        except InputError:
            return []
