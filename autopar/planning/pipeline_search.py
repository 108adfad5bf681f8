"""How many stages and micro-batches: compared by estimates, then planned.

    screen      for some K a few meshes, on the graph of M0 micro-batches       -> t, E, bytes
    estimate    for every K and M, from t, E and bytes                          -> an order
    plan        the first few in that order, each on its own graph              -> the best

Tracing a model and solving a mesh take seconds, there are hundreds of choices, and the seconds of a
micro-batch of another size follow closely from those of M0: what launches cost stays, and gradients as large
as an embedding, the rest shrinks with its samples. M0 is about 16, or fewer where a micro-batch has fewer
samples than a stage has devices, which no batch parallelism could share. So the choice of K and M rests on
estimates; the plan says so. K is sought from stages of one node up and down, for as long as that is faster,
up to the number of equal blocks; K = 1 is always among the choices; the simplest that fits is planned
whatever its estimate is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

from autopar.cluster import ClusterSpec
from autopar.core.graph import Graph, InputKind
from autopar.core.mesh import Mesh
from autopar.core.offload import Offload
from autopar.core.placement import Shard
from autopar.core.program import Program
from autopar.core.recompute import Recompute
from autopar.core.schedule import ScheduleKind
from autopar.cost.machine.measuring import Budget, CoRunners, Progress
from autopar.cost.machine.model import CostModel
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.stages.intervals import crossing_bytes
from autopar.errors import AutoparError, InfeasibleError, InputError, OverCapError, SolverError, TraceError
from autopar.planning.apart import IN_VAIN, Apart, complexity, margin
from autopar.planning.apart import MEASURED as NOISE
from autopar.planning.ask import Limits
from autopar.planning.estimates import Choice, Screened, bottleneck
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.request import Request
from autopar.planning.search import Decision, decide
from autopar.sharding.strategies import dims_of
from autopar.solve.deadline import after, is_over, left
from autopar.solve.highs import SECOND
from autopar.solve.memory.offload import overlapped
from autopar.solve.memory.recompute import sparing
from autopar.solve.placement.fold import fold
from autopar.solve.placement.memory_price import FREE, MemoryPrice
from autopar.solve.placement.search import Solution
from costdb.database import Database

SAMPLE = 16  # micro-batches of the graph that is screened, about
TIMES = (1, 2, 4, 8)  # micro-batches per pipeline rank, about
MOST_TIMES = 16  # with stages, where all between are looked at
SAME = 1e-3  # of a step: no mesh that promises less is told of
MESHES = 2  # screened for each K
PLANNED = 3  # pairs of K and M that are planned
PER_RANKS = 2  # of them with one K
# So many times as fast as its estimate a plan may turn out where operators are measured: estimates rest on
# some that are and on some that aren't. Of the benchmark of hosts one without stages took 472 ms, not 645.
MEASURED = 1.5
FAST_LINK = 100e9  # bytes/s: NVLink since V100, no PCIe
SCREENED = 0.4  # of the time limit, at most, in which choices are compared
ROUGH = 0.02  # gap of the placements that are screened
SCREEN_WORK = 6 * SECOND  # of branching for one of them
SCARCE = 0.5  # of the cap: more state than that, and a leaner placement is screened too
GraphOf = Callable[[int], Graph]  # micro-batches -> the graph of one
Placed: TypeAlias = tuple[Screened, MeshProblem, Solution]


def decide_all(
    graph_of: GraphOf,
    batch: int,
    cluster: ClusterSpec,
    request: Request,
    *,
    stages: int | None = None,
    micro_batches: int | None = None,
    database: Database | None = None,
    progress: Progress | None = None,
    co_runners: CoRunners | None = None,
    budget: Budget | None = None,
    deadline: float | None = None,
    outputs: int = 0,
    least: int = 1,
    at_once: Graph | None = None,
) -> Decision:
    """The best step for a global batch of `batch` samples; `stages` (pipeline ranks), `micro_batches` and
    `request.schedule` are chosen where they are None. The request's own numbers of both don't count.

    `graph_of(m)` is the graph of one of m micro-batches; it is called once for each m that is looked at, of
    `least` or more. Only a batch that is computed at once, by one stage, has `outputs` bytes beside its loss;
    `at_once` is its graph with them, if it is to be planned with them.
    Raises InputError if nothing that is asked for can be run, InfeasibleError, with the least memory that
    would do, if no plan was found that meets the cap, SolverError if none was found in time.
    """
    graph_of = lru_cache(maxsize=None)(graph_of)
    budget = budget or Budget(request.measure_seconds)
    deadline = after(request.time_limit) if deadline is None else deadline
    counts = [micro_batches] if micro_batches else [each for each in _divisors(batch) if each >= least]
    screening = None if deadline is None else after(SCREENED * max(0.0, left(deadline)))
    screen = _Screen(graph_of, counts, batch, cluster, request, database, screening, outputs)
    choices = screen.choices(stages)
    room = MEASURED if request.measure and screen.model.here else 1.0
    found: list[Decision] = []
    failures: list[AutoparError] = []
    apart = Apart(measured=request.measure and screen.model.here)
    few = _few(choices, apart, screen.cap)
    simplest = min((each for each in few if each.nbytes <= screen.cap), key=complexity, default=None)
    for choice in few:
        fastest = min((apart.limit(choice, each) for each in found), default=math.inf)
        if choice is not simplest and choice.seconds >= room * fastest:
            continue  # plans are hardly faster than their estimates
        if found and is_over(deadline):
            break
        asked = replace(request, pipeline_ranks=choice.ranks, micro_batches=choice.micro_batches)
        if asked.mesh is None:
            asked = replace(asked, mesh=choice.mesh)
        try:
            is_plain = choice.ranks == choice.micro_batches == 1
            graph = at_once if at_once and is_plain else graph_of(choice.micro_batches)
            found.append(
                decide(
                    graph,
                    cluster,
                    asked,
                    database=database,
                    progress=progress,
                    co_runners=co_runners,
                    budget=budget,
                    cutoff=fastest,
                    deadline=deadline,
                )
            )
        except (InfeasibleError, InputError, SolverError, TraceError) as error:
            failures.append(error)  # InputError: so few samples that a pin can't be had
    if not found:
        raise _least(failures, len(few))
    best = apart.simplest(found)
    note = f"stages and micro-batches are the best of {len(choices)} choices by estimates"
    others = [each for each in found if each.step.seconds < best.step.seconds]
    notes = note, *screen.notes, *screen.left_out.get(best.request.pipeline_ranks, ())
    return replace(best, notes=notes, passed=tuple(apart.passed(each, best) for each in others))


def _least(failures: Sequence[AutoparError], count: int) -> AutoparError:
    """The error of the choice with which least memory is known to do, among so many."""
    error = min(failures, key=_would_do)
    if not isinstance(error, InfeasibleError) or count == 1:
        return error

    def tell() -> InfeasibleError:
        if error.least is None:
            return error
        return InfeasibleError(
            where=f"{error.where}, the leanest of {count} choices of stages and micro-batches",
            found=error.found,
            wanted=error.wanted,
            remedy=error.remedy,
            least=error.least,
        )

    return OverCapError(tell, known=error.would_do)


def _would_do(error: AutoparError) -> tuple[bool, float]:
    infeasible = isinstance(error, InfeasibleError)
    return not infeasible, error.would_do if isinstance(error, InfeasibleError) else math.inf


def _few(choices: Sequence[Choice], apart: Apart, cap: float) -> list[Choice]:
    """Chooses what to look at: the first ones, the first without stages, and the simplest. Not too many of
    the first have one K; the simplest are those that can't be told from the first."""
    taken: list[Choice] = []
    for choice in choices:
        alike = [each for each in taken if each.ranks == choice.ranks]
        if len(taken) < PLANNED and len(alike) < PER_RANKS or choice.ranks == 1 and not alike:
            taken.append(choice)
    fitting = [each for each in choices if each.nbytes <= cap]
    alike = [each for each in fitting if each.seconds <= apart.limit(each, fitting[0])]
    simplest = min(alike, key=complexity, default=taken[0])
    return taken if simplest in taken else [*taken, simplest]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _nearest(counts: Sequence[int], wanted: int) -> int:
    return min(counts, key=lambda count: (abs(math.log(count / wanted)), count))


@dataclass(frozen=True, slots=True)
class _Sample:
    """The graph of one of `count` micro-batches."""

    count: int
    graph: Graph


@dataclass(slots=True)
class _Screen:
    graph_of: GraphOf
    counts: Sequence[int]
    batch: int
    cluster: ClusterSpec
    request: Request
    database: Database | None
    deadline: float | None = None  # after which no more is looked at than what is there
    outputs: int = 0  # bytes beside the loss of a batch that is computed at once
    samples: dict[int, _Sample] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left_out: dict[int, tuple[str, ...]] = field(default_factory=dict)  # meshes, by the number of stages
    model: CostModel = field(init=False)
    cap: float = field(init=False)  # bytes per device, inf without a cap

    def __post_init__(self) -> None:
        self.model = CostModel.of(self.cluster, self.database)
        cap = self.request.memory if self.request.memory is not None else self.cluster.memory
        self.cap = math.inf if cap is None else cap

    def choices(self, ranks: int | None) -> list[Choice]:
        """What fits by its estimate, the fastest first, then what doesn't, the smallest first."""
        self.about_sample()
        found = [choice for each in self.climb(ranks) for choice in self.rated(each)]
        if not found:
            raise InputError(
                where="stages and micro-batches",
                found=f"{ranks or 'any'} stages, {', '.join(map(str, self.counts[:8]))} micro-batches",
                wanted="numbers that some schedule can run",
                remedy="choose at least as many micro-batches as stages",
            )
        best: dict[tuple[int, int], Choice] = {}
        for choice in sorted(found, key=self.rank):
            best.setdefault((choice.ranks, choice.micro_batches), choice)
        return list(best.values())

    def sample(self, ranks: int) -> _Sample:
        """What is screened for stages on as many devices as `ranks` pipeline ranks leave to each."""
        return self.about_sample(self.cluster.stage(ranks).num_devices)

    def about_sample(self, samples: int = 1) -> _Sample:
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

    def traced(self, count: int) -> _Sample:
        if count not in self.samples:
            graph = self.graph_of(count)
            self.samples[count] = _Sample(count, graph)
        return self.samples[count]

    def rank(self, choice: Choice) -> tuple[float, float]:
        """Its place in the order; stages are hardly ever as fast as their estimate, a step without is."""
        over = choice.nbytes if choice.nbytes > self.cap else 0.0
        return over, choice.seconds * (1.0 if choice.ranks == 1 else 1.0 + ROUGH)

    def climb(self, ranks: int | None) -> Iterator[list[Screened]]:
        """The screened meshes of `ranks` pipeline ranks, or of as many as pay."""
        if ranks:
            yield self.screen(ranks)
            return
        most = self.blocks()
        options = [each for each in self.cluster.stage_counts() if each <= most]
        if self.is_simple():
            yield self.screen(1)
            return
        middle = options.index(_nearest(options, self.cluster.nodes))
        seen = set[int]()
        best: tuple[float, float] | None = None
        for order in (options[middle:], options[:middle][::-1]):
            for each in order:
                if seen and is_over(self.deadline):
                    return
                screened = self.screen(each)
                seen.add(each)
                yield screened
                mine = self.best(screened)
                if mine is None or (best is not None and mine > best):
                    break
                best = mine
        if 1 not in seen:
            yield self.screen(1)

    def is_simple(self) -> bool:
        """Whether a node has fast links and each of its devices room for twice the model: there no estimate
        is sure enough to cut it into stages."""
        if self.request.measure and self.model.here or self.cluster.nodes > 1:
            return False
        if self.cluster.device_type == "cpu" or self.cluster.intra.bandwidth < FAST_LINK:
            return False
        sample = self.traced(_nearest(self.counts, SAMPLE))
        state = sum(
            item.spec.nbytes * (2 + self.request.optimizer.ratio if item.spec.requires_grad else 1)
            for item in sample.graph.inputs
            if item.kind is InputKind.PARAMETER
        )
        if state > SCARCE * self.cap:
            return False
        self.notes = ("the model fits on one device of a node with fast links: no stages on an estimate",)
        return True

    def blocks(self) -> int:
        """No more stages are sought than equal blocks, if the graph is made of such, or operators."""
        sample = self.traced(_nearest(self.counts, SAMPLE))
        blocks = fold(sample.graph, dims_of(sample.graph, Mesh((1,)))).count
        return blocks if blocks > 1 else len(sample.graph.operators)

    def meshes(self, ranks: int) -> list[Mesh]:
        """Few meshes: those of one or two axes whose minor axis comes closest to filling a node."""
        if self.request.mesh is not None:
            return [self.request.mesh]
        stage = self.cluster.stage(ranks)
        few = [mesh for mesh in stage.meshes() if len(mesh.shape) <= MESHES]
        return sorted(few, key=lambda mesh: abs(math.log(mesh.shape[-1] / stage.devices_per_node)))[:MESHES]

    def screen(self, ranks: int) -> list[Screened]:
        request = replace(
            self.request,
            pipeline_ranks=1,
            micro_batches=ranks * TIMES[-2],
            schedule=ScheduleKind.ONE_F_ONE_B,
            alternatives=False,
            gap=max(self.request.gap, ROUGH),
        )
        stage, hop = self.cluster.stage(ranks), self.model.hop(self.cluster, ranks)
        sample = self.sample(ranks)
        found: list[Placed] = []
        for mesh in self.meshes(ranks):
            if found and is_over(self.deadline):
                break
            problem = MeshProblem(sample.graph, mesh, stage, self.model, request, None, hop)
            try:
                solution = self.placed(problem, FREE, waits=not found)
            except SolverError:
                self.notes += (f"mesh {mesh} was left out with {ranks} stages: its program takes too long",)
                continue
            found.append((self.screened(problem, solution, ranks, sample), problem, solution))
        found = self.simpler(found)
        _, problem, solution = min(found, key=self.place)
        if solution.peak.state / ranks > SCARCE * self.cap and not is_over(self.deadline):
            price = solution.seconds / max(1, solution.peak.nbytes)
            solution = self.placed(problem, MemoryPrice(state=price, saved=price))
            return [*(each for each, _, _ in found), self.screened(problem, solution, ranks, sample)]
        return [each for each, _, _ in found]

    def place(self, placed: Placed) -> tuple[float, float]:
        """Where the best choice on a mesh is in the order."""
        return self.best([placed[0]]) or (math.inf, math.inf)

    def simpler(self, found: list[Placed]) -> list[Placed]:
        """Without the meshes of more axes that can't be told from one of fewer."""
        fastest = min(found, key=self.place)
        _, problem, solution = fastest
        for each in sorted(found, key=lambda each: (len(each[1].mesh.shape), self.place(each))):
            other = each[1].mesh, each[2].program
            if len(other[0].shape) >= len(problem.mesh.shape):
                break
            apart = 1 + margin(solution.priced, other[1])
            if self.cluster.nodes == 1:  # alike, but for how often messages wait
                apart = max(apart, 1 + NOISE)
            (over, seconds), (least_over, least) = self.place(each), self.place(fastest)
            if over <= least_over and seconds <= least * apart:
                if least < (1 - SAME) * seconds:
                    promised = f"mesh {problem.mesh} promises {1 - least / seconds:.1%} less by estimates"
                    self.left_out[fastest[0].ranks] = (f"{promised}, {IN_VAIN}; the gap leaves it out",)
                return [one for one in found if len(one[1].mesh.shape) <= len(other[0].shape)]
        return found

    def best(self, screened: Sequence[Screened]) -> tuple[float, float] | None:
        """The place in the order of the best choice among them, if there is any."""
        return min(map(self.rank, self.rated(screened)), default=None)

    def placed(self, problem: MeshProblem, memory_price: MemoryPrice, *, waits: bool = True) -> Solution:
        """A placement of about the least seconds; much work is waited for, or raises SolverError."""
        ask = replace(problem.ask(self.request.force, bounded=False), memory_price=memory_price)
        with contextlib.suppress(*([SolverError] if waits else [])):
            return problem.solve(ask, Limits(self.deadline, work=SCREEN_WORK))
        return problem.solve(ask, Limits(self.deadline))

    def screened(self, problem: MeshProblem, solution: Solution, ranks: int, sample: _Sample) -> Screened:
        """What a placement costs, and what it costs and keeps if all is recomputed where memory asks."""
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
        return Screened(
            ranks=ranks,
            mesh=problem.mesh,
            count=sample.count,
            samples=samples,
            cost=cost,
            slowest=evenness * cost.micro_batch,
            weights=sum(price.weights for price in prices),
            shards=_shards(priced.graph, priced.program, samples, seconds),
            free=self.request.force is None,
            fixed=launches * launch + _weight_seconds(priced, launch),
            hop_bytes=self.least_crossing(priced),
            hop=self.model.hop(self.cluster, ranks),
            state_bytes=solution.peak.state,
            saved_bytes=solution.peak.saved,
            recompute_seconds=recompute,
            lean_bytes=max(0, solution.peak.saved - spared),
            hidden_bytes=hidden,
        )

    def least_crossing(self, priced: PricedProgram) -> int:
        """Bytes at the best cut of the middle half, where most cuts lie."""
        crossing = crossing_bytes(priced)
        quarter = len(crossing) // 4
        return min(crossing[quarter : 3 * quarter + 1])

    def rated(self, screened: Sequence[Screened]) -> Iterator[Choice]:
        for each in screened:
            for count in self.micro_batches(each.ranks):
                kinds = self.kinds(each.ranks, count)
                if kinds or each.ranks == 1:
                    choice = each.choice(count, kinds, self.cap)
                    outputs = self.outputs if each.ranks == count == 1 else 0
                    yield replace(choice, nbytes=choice.nbytes + outputs)

    def micro_batches(self, ranks: int) -> list[int]:
        """Without stages 1, or as many as memory asks; with stages some for each."""
        wanted = {_nearest(self.counts, ranks * times) for times in TIMES}
        if ranks > 1:
            wanted.update(count for count in self.counts if ranks <= count <= ranks * MOST_TIMES)
        return sorted(wanted)

    def kinds(self, ranks: int, count: int) -> list[ScheduleKind]:
        """The schedules that can be run."""
        try:
            return replace(self.request, pipeline_ranks=ranks, micro_batches=count).kinds()
        except InputError:
            return []


def _weight_seconds(priced: PricedProgram, launch: float) -> float:
    """Seconds, but for launches, of gradients as large as an embedding, whatever the samples are.

    Of what an operator without products writes and reads for them, its weights are one part and its results
    the other."""
    seconds, nbytes, specs = 0.0, priced.prices.local_bytes, priced.graph.specs
    for item, price in zip(priced.graph.operators, priced.operator_prices, strict=True):
        if price.weights and not price.flops:
            strategy = priced.program.strategies[item.name]
            weights = sum(
                nbytes(name, tuple(option.operands[place] for option in strategy))
                for place, name in enumerate(item.operands)
                if specs[name].requires_grad
            )
            results = sum(
                nbytes(name, tuple(option.results[place] for option in strategy))
                for place, name in enumerate(item.results)
                if name
            )
            moved = max(0.0, price.weights - price.launches * launch)
            seconds += moved * weights / max(1, weights + results)
    return seconds


def _shards(graph: Graph, program: Program, samples: int, seconds: Sequence[float]) -> dict[int, float]:
    """Among how many devices the samples are split, and for which part of the operators' seconds."""
    found: dict[int, float] = {}
    for item, each in zip(graph.operators, seconds, strict=True):
        result, devices = item.results[0], 1
        if result is not None and graph.specs[result].shape[:1] == (samples,):
            for option, size in zip(program.strategies[item.name], program.mesh.shape, strict=True):
                devices *= size if option.results[0] == Shard(0) else 1
        found[devices] = found.get(devices, 0.0) + each
    total = sum(found.values())
    return {devices: each / total for devices, each in found.items()} if total else {1: 1.0}
