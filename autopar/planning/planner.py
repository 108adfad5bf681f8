"""Plans the calls of one model: traces the graphs that the search needs, and searches.

    whole batch ──┬── search ──────────── stages and micro-batches are given
                  └── decide_all ──────── they are to be chosen, over the graphs of the batch's parts

Of several processes rank 0 plans, and every rank takes its plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from torch import nn

from autopar.cluster import ClusterSpec
from autopar.core.deadline import SearchWatch, after, current_watch, is_over, left, say, watched
from autopar.core.fingerprint import fingerprint_of
from autopar.core.graph import Graph
from autopar.core.loss_pieces import LossPieces
from autopar.core.uncollected import uncollected
from autopar.cost.machine.measuring import Budget, CoRunners, Progress
from autopar.errors import (
    CheckError,
    InfeasibleError,
    InputError,
    OverCapError,
    SolverError,
    TraceError,
)
from autopar.planning.agree import agree, measure_links
from autopar.planning.asked.ask import SearchMeans
from autopar.planning.asked.request import Auto, Request
from autopar.planning.book.book import book_of
from autopar.planning.book.desk import Desk
from autopar.planning.busy_neighbours import busy_neighbours, load_notes, load_of_others
from autopar.planning.graphs.fitting import as_planned
from autopar.planning.graphs.micro_batch_graphs import CallTraces, Parts, parts_of
from autopar.planning.graphs.told_graphs import PartGraphs
from autopar.planning.losses import find_form, other_form, search_form
from autopar.planning.pipeline_search import BatchGraphs, decide_all
from autopar.planning.router_loads import with_router_loads
from autopar.planning.search import MeshDecision, beside, decide, decide_first, finish
from autopar.planning.staged_step import FAR
from autopar.planning.training_notes import weight_notes
from autopar.planning.unlike_meshes import find_by_groups, find_unlike
from autopar.results.plan.plan import Plan
from autopar.rewrite.unequal_micro_batches import check_plan
from autopar.trace.call.call_signature import LossFunction, flatten_arguments
from autopar.trace.export import Traced, trace
from autopar.trace.forms.simplify import only_loss
from autopar.trace.micro_batches import split_batch
from autopar.trace.rewrites.losses_in_pieces import with_losses_in_pieces
from costdb.database import Database

STOPPED = "the search was stopped: this is the best plan until then"
FINISHING_SHARE = 0.1  # of the time limit: a decision becomes a plan that long
LEAST_FINISH_SECONDS = 1.0  # even past the time limit, for a plan that is there already but for its outputs


@dataclass(frozen=True, slots=True)
class Planner:
    """Finds plans for the calls of a model on `cluster`.

    `loss_only` says whether the model's own output leaves the program beside the loss of `loss_fn`. `timeout`
    is that of the process groups that measure links.
    """

    cluster: ClusterSpec
    request: Request
    loss_fn: LossFunction | None = None
    loss_only: bool = True
    costdb: str | None = None
    progress: Progress | None = None
    timeout: timedelta = timedelta(minutes=10)

    def find_plan(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], auto: Auto | None
    ) -> Plan:
        """The best plan of a call, whose stages and micro-batches are the request's, or to be chosen.

        No ranks run here that could measure along. All of it, tracing too, is within the time limit.
        """
        others = load_of_others() if self.request.measure else 0.0
        with (
            self.watched() as watch,
            busy_neighbours(self.cluster, wanted=self.request.measure) as co_runners,
        ):
            deadline = watch.deadline
            if auto:
                found = self.find_pipeline(model, args, kwargs, auto, co_runners)
            elif self.request.micro_batches == 1:
                graph = self.trace_step(model, args, kwargs).graph
                found = self.find(graph, self.request, co_runners, deadline=deadline)
            else:
                parts = self.parts(model, args, kwargs)
                graph = parts.traced(self.request.micro_batches).graph
                found = self.find(graph, self.request, co_runners, deadline=deadline)
                check_lengths(parts, found)
        stopped = (STOPPED,) if watch.is_stopped else ()
        busy = load_notes(others) if found.measured_share else ()
        return replace(found, notes=(*found.notes, *busy, *weight_notes(model), *stopped))

    @contextmanager
    def watched(self) -> Iterator[SearchWatch]:
        """A search within the time limit, which tells what it does; the one that is watched, if there is."""
        if (known := current_watch()) is not None:
            yield known
            return
        limit, progress = self.request.time_limit, self.progress
        tell = partial(progress, 0, 0) if progress else None
        watch = SearchWatch(after(limit and (1 - FINISHING_SHARE) * limit), tell)
        with watched(watch):
            yield watch

    @uncollected()
    def find(
        self,
        graph: Graph,
        request: Request,
        co_runners: CoRunners | None = None,
        budget: Budget | None = None,
        *,
        deadline: float | None = None,
    ) -> Plan:
        """Search, with the cost database open."""
        budget = budget or Budget(request.measure_seconds)
        if request.meshes:
            with Database.open(self.costdb) as database:
                return find_unlike(graph, self.cluster, request, SearchMeans(database, deadline=deadline))
        with Database.open(self.costdb) as database:
            means = SearchMeans(database, self.progress, co_runners, budget, deadline)
            try:
                return search_form(graph, self.cluster, request, means).plan
            except InfeasibleError as error:
                # What an OverCapError says is sought when it is read, which takes time: it is about memory.
                short = isinstance(error, OverCapError) or error.least is not None
                if short and request.training and not request.local_inputs:
                    error.add_remedy(_more_micro_batches(graph, request))
                raise

    @uncollected()
    def find_pipeline(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        auto: Auto,
        co_runners: CoRunners | None = None,
    ) -> Plan:
        """The best plan where the number of stages, of micro-batches, or both are to be chosen.

        A model that mixes samples keeps one micro-batch, unless more are asked for.
        """
        with self.watched() as watch:
            say("tracing")
            whole = self.trace_part(model, args, kwargs, 1, staged=False).graph
            alone = whole if whole.loss is None else only_loss(whole)
            traces = self.traces(model)

            def find(choice: LossPieces) -> Plan:
                form = replace(self, request=replace(self.request, loss_pieces=choice))
                graph = with_losses_in_pieces(whole) if choice is LossPieces.ALL else whole
                parts = partial(form.parts_by, traces, args, kwargs, graph)
                return form.pipeline_of(graph, parts, auto, co_runners, watch.deadline)

            if self.request.loss_pieces is not LossPieces.AUTO:
                return find(self.request.loss_pieces)
            return find_form(
                find, lambda count: other_form(alone, self.request, self.cluster, count) is not None
            )

    def pipeline_of(
        self,
        whole: Graph,
        parts_of_batch: Callable[[], Parts],
        auto: Auto,
        co_runners: CoRunners | None,
        deadline: float | None,
    ) -> Plan:
        """The best pipeline of a graph whose losses are in pieces, or are not, as is asked for."""
        ranks, micro_batches, exactly = auto
        budget = Budget(self.request.measure_seconds)
        plain = replace(self.request, pipeline_ranks=1, micro_batches=1)
        if whole.loss is None and ranks in (None, 1) and micro_batches in (None, 1):
            return self.find(whole, plain, co_runners, budget, deadline=deadline)
        first = self.first(whole, plain, auto, deadline) if deadline is not None else None
        parts = parts_of_batch()
        kept, note = _kept(parts, micro_batches, exactly=exactly)
        if ranks == 1 and (plan := self.find_unhindered(whole, plain, co_runners, budget, deadline)):
            return _noted(plan, note)

        part_graphs = PartGraphs(partial(_part_graph, parts), parts.as_one, parts.size)

        def graph_of(count: int) -> Graph:
            return self.loss_alone(whole) if count == 1 else part_graphs(count)

        at_once = whole if whole.outputs == (whole.loss,) or plain.leaves_parts(whole) else None

        def decide_from(least: int, at_once: Graph | None = None) -> MeshDecision:
            decision = decide_once(least, at_once)
            if part_graphs.stands(decision.request.micro_batches):
                return decision
            return decide_once(least, at_once)

        def decide_once(least: int, at_once: Graph | None) -> MeshDecision:
            with Database.open(self.costdb) as database:
                return decide_all(
                    BatchGraphs(graph_of, parts.size, _bytes_beside_the_loss(whole), least, at_once),
                    self.cluster,
                    self.request,
                    SearchMeans(database, self.progress, co_runners, budget, deadline),
                    ranks=ranks,
                    micro_batches=1 if kept else micro_batches,
                    first=first,
                )

        try:
            decision = self.decided(
                decide_from, at_once, whole, lambda: first or self.first(whole, plain, auto, deadline)
            )
        except InfeasibleError as error:
            if kept:
                error.add_remedy(_more_parts(parts))
            raise
        is_plain = decision.request.pipeline_ranks == decision.request.micro_batches == 1
        if is_plain and all(decision.problem.graph is not each for each in (at_once, whole)):
            fixed = kept or micro_batches is not None or parts.size == 1
            otherwise = None if fixed else partial(decide_from, 2)
            plan = self.find_again(whole, decision, plain, co_runners, budget, otherwise=otherwise)
        else:
            plan = finish(decision).plan
        if ranks in (None, len(self.cluster.groups)) and micro_batches is None and not kept:
            plan = self.or_by_groups(plan, graph_of, parts.size, deadline)
        check_lengths(parts, plan)
        return _noted(plan, note)

    def or_by_groups(
        self, plan: Plan, graph_of: Callable[[int], Graph], size: int, deadline: float | None
    ) -> Plan:
        """The plan, or that of one stage for each group of unlike devices, if that is clearly faster.

        Less than predictions are off by is not."""
        asked = self.request
        if asked.mesh or asked.force or asked.pins or not self.cluster.groups or is_over(deadline):
            return plan
        counts = [each for each in range(1, size + 1) if size % each == 0]
        with Database.open(self.costdb) as database:
            means = SearchMeans(database, deadline=deadline)
            found = find_by_groups(graph_of, counts, self.cluster, asked, means)
        return found if found and found.step_seconds * (1 + found.error) < plan.step_seconds else plan

    def decided(
        self,
        decide_from: Callable[[int, Graph | None], MeshDecision],
        at_once: Graph | None,
        whole: Graph,
        first: Callable[[], MeshDecision | None],
    ) -> MeshDecision:
        """The best step; where a batch doesn't fit at once with its outputs beside the loss, without them;
        what is `first` if nothing was found in time."""
        try:
            return decide_from(1, at_once)
        except SolverError:
            if (stands := first()) is None:
                raise
            return stands
        except InfeasibleError as error:
            if at_once is None or whole.outputs == (whole.loss,) or self.is_hopeless(error, whole):
                raise
            return decide_from(1, None)

    def first(
        self, whole: Graph, request: Request, auto: Auto, deadline: float | None
    ) -> MeshDecision | None:
        """A plan that is there when time is over, if what is asked for allows one without stages and
        micro-batches."""
        if auto.ranks not in (None, 1) or auto.micro_batches not in (None, 1):
            return None
        with Database.open(self.costdb) as database:
            return decide_first(whole, self.cluster, request, database=database, deadline=deadline)

    def find_again(
        self,
        whole: Graph,
        decision: MeshDecision,
        request: Request,
        co_runners: CoRunners | None,
        budget: Budget,
        *,
        otherwise: Callable[[], MeshDecision] | None,
    ) -> Plan:
        """The plan of the whole graph on the mesh of a decision on its loss alone; that decision's if there
        is no time for another. If outputs beside the loss don't fit, which parts of the batch don't have,
        what is decided `otherwise`."""
        seconds = None if decision.deadline is None else max(LEAST_FINISH_SECONDS, left(decision.deadline))
        request = replace(request, mesh=decision.problem.mesh, time_limit=seconds)
        try:
            return beside(self.find(whole, request, co_runners, budget), decision)
        except SolverError:
            return finish(decision).plan
        except InfeasibleError:
            if otherwise is None:
                raise
            return finish(otherwise()).plan

    def find_unhindered(
        self,
        graph: Graph,
        request: Request,
        co_runners: CoRunners | None,
        budget: Budget,
        deadline: float | None,
    ) -> Plan | None:
        """The best plan if memory makes nothing slower: several micro-batches without stages would only
        spare some."""
        with Database.open(self.costdb) as database:
            try:
                decision = decide(
                    graph,
                    self.cluster,
                    request,
                    SearchMeans(database, self.progress, co_runners, budget, deadline),
                )
            except InfeasibleError:
                return None
            return finish(decision).plan if decision.unhindered else None

    def is_hopeless(self, error: InfeasibleError, whole: Graph) -> bool:
        """Whether the least bytes known to suffice are far above the cap, even without outputs beside the
        loss."""
        cap = self.request.cap(self.cluster)
        return cap is not None and FAR * (cap + _bytes_beside_the_loss(whole)) < error.would_do < math.inf

    def agree_on_pipeline(
        self, model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], auto: Auto
    ) -> Plan:
        """The plan, and so the pipeline, that rank 0 chooses for all; collective."""
        args, kwargs = call
        if not args and not kwargs:
            raise InputError(
                where="parallelize",
                found="stages or micro-batches to be chosen, and no example of the batch",
                wanted="an example of the global batch",
                remedy="pass example_inputs, or give both numbers",
            )

        def find(asked: Request, co_runners: CoRunners) -> Plan:
            return replace(self, request=asked).find_pipeline(model, args, kwargs, auto, co_runners)

        whole = cache(partial(self.trace_part, model, args, kwargs, 1, staged=False))
        return self.agree_by(Desk(book_of(), whole, self.request, self.cluster, self.costdb, auto), find)

    def agree_by(self, desk: Desk, find: Callable[[Request, CoRunners], Plan]) -> Plan:
        """The plan of the book on every rank, or else the one that rank 0 finds; collective."""
        plan = agree(lambda _: desk.take(), self.cluster) if desk.book else None
        if plan is not None:
            return plan
        self.measure_links()
        return agree(
            lambda co_runners: desk.search(lambda asked: find(asked, co_runners)),
            self.cluster,
        )

    def agree(self, traced: Traced, request: Request) -> Plan:
        """Rank 0's plan on every rank; its error on every rank if it has none."""

        def find(asked: Request, co_runners: CoRunners) -> Plan:
            return self.find(traced.graph, asked, co_runners)

        plan = self.agree_by(Desk(book_of(), lambda: traced, request, self.cluster, self.costdb), find)
        difference = fingerprint_of(as_planned(traced, plan).graph).difference(plan.graph)
        if difference is not None:
            raise CheckError(
                where=f"rank {dist.get_rank()}: {difference.where} of the model",
                found=difference.here,
                wanted=f"{difference.planned}, as on rank 0",
                remedy="build the model and the batch alike on all ranks, in the same mode",
            )
        return plan

    def measure_links(self) -> None:
        """Measure the collectives that nobody has measured, where plans may measure; collective."""
        if self.request.measure:
            measure_links(self.cluster, self.costdb, self.timeout)

    def trace_step(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """The graph of the first micro-batch of a global batch; of a step by `train_step` the loss alone."""
        staged = self.request.pipeline_ranks > 1 or self.request.micro_batches > 1
        return self.trace_part(model, args, kwargs, self.request.micro_batches, staged=staged)

    def trace_part(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        count: int,
        *,
        staged: bool,
        place: int = 0,
    ) -> Traced:
        """Trace the graph of the first of `count` micro-batches, or of the one at `place`."""
        if count > 1:
            return self.parts(model, args, kwargs).traced(count, place)
        split_batch(None, flatten_arguments(args, kwargs).tensors, count)
        traced = self.trace_whole(model, args, kwargs)
        return traced.loss_alone() if staged else traced

    def trace_whole(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """The graph of a call as it is."""
        traced = trace(
            model,
            args,
            kwargs,
            loss_fn=self.loss_fn,
            loss_only=self.loss_only,
            static=self.request.static,
            autocast=self.request.autocast(self.cluster),
            in_pieces=self.request.in_pieces,
        )
        measures = self.request.measure and self.request.imbalance is None
        return with_router_loads(traced, model) if measures else traced

    def loss_alone(self, graph: Graph) -> Graph:
        """A traced graph with the loss for its only output."""
        alone = only_loss(graph)
        return with_losses_in_pieces(alone) if self.request.in_pieces else alone

    def traces(self, model: nn.Module) -> CallTraces:
        """The traces of calls of a model and of parts of them, with whole logits."""
        plain = replace(self, request=replace(self.request, loss_pieces=LossPieces.NONE))
        return CallTraces(partial(plain.trace_whole, model))

    def parts(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Parts:
        """The micro-batches of a call."""
        return self.parts_by(self.traces(model), args, kwargs)

    def parts_by(
        self,
        traces: CallTraces,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        whole: Graph | None = None,
    ) -> Parts:
        """The micro-batches of a call by these traces, whose graph is `whole` if it is known."""
        form = traces.form(in_pieces=self.request.in_pieces)
        alone = None if whole is None or whole.loss is None else self.loss_alone(whole)
        return parts_of(form, args, kwargs, self.request.batch_dims, whole=alone or whole)


def _part_graph(parts: Parts, count: int) -> Graph:
    """The traced graph of one of `count` parts; raises TraceError for what alone isn't computed as the batch
    is."""
    traced = parts.traced(count)
    if parts.is_exact and traced.cutting is not None and traced.cutting.change is not None:
        raise TraceError(
            where="micro-batches",
            found=f"{count} of them: {traced.cutting.change}",
            wanted="parts of the batch that are computed as it is",
            remedy="choose fewer micro-batches",
        )
    return traced.graph


def check_lengths(parts: Parts, plan: Plan) -> None:
    """Raise InputError for a plan with stages that doesn't hold for the shorter micro-batches."""
    count = plan.pipeline.micro_batches
    if plan.pipeline.is_staged and parts.size % count:
        longer, shorter = (as_planned(parts.traced(count, place), plan).graph for place in (0, -1))
        for program in plan.all_programs:
            check_plan(program, longer, shorter)


def _more_micro_batches(graph: Graph, request: Request) -> str:
    """How parts of the batch that follow each other would give memory."""
    by_steps = (
        "" if request.pipeline_ranks > 1 or request.micro_batches > 1 else ", which asks for train_step"
    )
    by_steps += "" if graph.loss is not None else " and a loss"
    return f"cut the batch into micro-batches (--micro-batches {2 * request.micro_batches}{by_steps})"


def _more_parts(parts: Parts) -> str:
    """How micro-batches, which aren't chosen for a model that mixes samples, can be had."""
    if parts.flow is None and (parts.seems_one_sample or not parts.can_be_said()):
        return "take a smaller batch, which can't be cut into micro-batches"
    if parts.flow is None:
        return "say which dims hold samples (batch_dims), and so allow micro-batches"
    return f"allow micro-batches (--micro-batches auto), although {parts.obstacle}"


def _bytes_beside_the_loss(graph: Graph) -> int:
    return sum(graph.specs[name].nbytes for name in graph.outputs if name != graph.loss)


def _noted(plan: Plan, note: str | None) -> Plan:
    return plan if note is None else replace(plan, notes=(*plan.notes, note))


def _kept(parts: Parts, micro_batches: int | None, *, exactly: bool) -> tuple[bool, str | None]:
    """Whether the number of micro-batches stays 1 where it is to be chosen, and the plan's note on that."""
    if micro_batches is not None or parts.is_exact:
        return False, None
    if parts.whole.decided_by is not None:
        return True, f"{parts.whole.decided_by}: one micro-batch, as values of the batch decide here"
    if not exactly and parts.flow is not None:
        return False, None
    way = ", unless more are asked for"
    if parts.flow is None:
        way = ", unless batch_dims says where samples are" if parts.can_be_said() else ""
        if parts.seems_one_sample:
            return True, f"dim 0 of all inputs has one element, as of one sample: one micro-batch{way}"
    return True, f"{parts.obstacle}: one micro-batch{way}"
