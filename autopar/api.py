"""The doors: `plan` decides, `parallelize` decides and runs, `verify` proves, `compare` puts side by side.

trace       nn.Module -> graph of ATen operators          trace/
annotate    measured costs of every strategy               cost/
solve       integer program over all assignments           solve/, planning/
rewrite     local operators and collectives of a rank      rewrite/
run         parameters outside, local leaves inside        runtime/

Their options are declared in planning/asked/options.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Unpack

from autopar.core.uncollected import uncollected

with uncollected():  # collections while torch and all rooms are imported take a quarter of that
    import torch.distributed as dist
    from torch import nn

    import autopar.ops
    import autopar.runtime.collectives.placement_moves  # noqa: F401  (with the rules, what programs call)
    from autopar.cluster import ClusterSpec
    from autopar.comparing.measured import ContestJob, run_rows
    from autopar.comparing.profile import Profile, ProgressDisplay
    from autopar.comparing.profile import profile as measure_profile
    from autopar.comparing.strategies import Comparer
    from autopar.compiler import Compiler
    from autopar.core.mesh import Mesh
    from autopar.core.outputs import Outputs
    from autopar.core.timeline import Timeline
    from autopar.cost.machine.measuring import Progress
    from autopar.cost.topology.price import chosen_sums
    from autopar.errors import InputError
    from autopar.explaining.asked import AskedPlan
    from autopar.explaining.explain import explained
    from autopar.explaining.frontier import FRONTIER_SECONDS, frontier
    from autopar.integrations import stock
    from autopar.planning.agree import kinds_of_ranks
    from autopar.planning.asked.option_environment import settle, settle_beside_plan
    from autopar.planning.asked.options import (
        COMPARE,
        PARALLELIZE,
        PLAN,
        PROFILE,
        VERIFY,
        CompareOptions,
        Options,
        OutputReach,
        PlanOptions,
        Reach,
        VerifyOptions,
        documented,
        is_local,
        read_outputs,
    )
    from autopar.planning.asked.request import check_cluster, check_overlap, check_timeout, request_of
    from autopar.planning.asked.stale_options import check_stale, schedule_for
    from autopar.planning.busy_neighbours import busy_neighbours
    from autopar.planning.given_plan import DECIDED, agree_on_plan, plan_to_run
    from autopar.planning.planner import Planner
    from autopar.proof.changes import MOST_CHANGES
    from autopar.proof.check import Report, check, check_compiled, check_input, check_updates
    from autopar.proof.updates import UpdatesReport
    from autopar.results.comparison.comparison import Comparison
    from autopar.results.comparison.measured_steps import MeasuredSteps, read_measured
    from autopar.results.explanation.explanation import Explanation
    from autopar.results.plan.announce import Announcer
    from autopar.results.plan.plan import Plan
    from autopar.results.plan.plan_subject import subject_of
    from autopar.results.progress.notebook_bar import notebook_bar, notebook_bar_of_workers
    from autopar.results.progress.progress_bar import ProgressBar, ProgressLines
    from autopar.results.report.page import PageSupplements, WrittenPage, write_page
    from autopar.rewrite.render import describe
    from autopar.runtime.collectives import random
    from autopar.runtime.collectives.own_sums import choose_sums
    from autopar.runtime.compiled.compiler import check_compiler
    from autopar.runtime.islands.joining import Islands, island_cluster, join_islands
    from autopar.runtime.launch import worker
    from autopar.runtime.module.parallel_module import ParallelModule, runner_of
    from autopar.runtime.module.stale_steps import StaleSteps
    from autopar.runtime.tree import serial_model
    from autopar.schedules.fill_bubbles import order_of
    from autopar.schedules.one_stage import one_stage
    from autopar.schedules.simulate import simulate
    from autopar.trace.call.call_signature import LossFunction, split_inputs
    from autopar.trace.target import Target, check_target, load_target
    from autopar.updates.rules import Stale, UpdateRule, read_updates
    from costdb.database import Database

TIMEOUT = timedelta(minutes=10)


@documented(PLAN)
def plan(
    model: nn.Module,
    cluster: ClusterSpec,
    example_inputs: Any = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    frontier_seconds: float | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Find the best plan for `model` on `cluster`; no process group is needed.

    `example_inputs` is the global batch: a tuple of positional arguments, a dict of keyword
    arguments, or one tensor; with `loss_fn` the arguments that it takes after the output come last.
    With `frontier_seconds` lower and lower memory caps are solved for so long, and the plan says what less
    memory would cost.

    Raises InfeasibleError, SolverError, TraceError or InputError, also for what `parallelize` refuses.
    """
    asked = Options(PLAN, **options)
    serial_model.check(model)
    request, auto = request_of(asked, cluster)
    args, kwargs = split_inputs(example_inputs, example_kwargs)
    with notebook_bar(progress) as shown:
        planner = Planner(cluster, request, loss_fn, costdb=asked.costdb, progress=shown)
        found = planner.find_plan(model, args, kwargs, auto)
        found = replace(found, subject=subject_of(model, args, kwargs, asked.said))
        if not frontier_seconds:
            return found
        said = {name: value for name, value in options.items() if value is not None}
        target = Target(model, args, dict(kwargs), loss_fn, "model")
        around = frontier(AskedPlan(target, cluster, said, shown), found, seconds=frontier_seconds)
        return replace(found, frontier=around)


@documented(PLAN)
def explain(
    target: Target | str,
    cluster: ClusterSpec,
    layer: str | None = None,
    *,
    what_if: str | Sequence[str] = (),
    seconds: float | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> Explanation:
    """Why the plan of `target` is as it is: what other ways would cost, and what binds.

    `target` is "file.py:function", as on the command line, or a model with example inputs. Every other way to
    split `layer` (a layer's or an operator's name), or else the dearest ones, is pinned and solved again.
    `what_if` are other circumstances, such as "memory=40GB", "devices=8" or "batch=64,devices=8". Where no
    plan meets the memory cap the explanation says what to change, each change planned. What is solved beside
    the plan takes about so many `seconds`, 60 or the plan's own by default; what is left then
    says so.

    Raises what `plan` raises otherwise.
    """
    PLAN.check(options)
    check_cluster(cluster)
    made = load_target(target) if isinstance(target, str) else check_target("explain", target)
    serial_model.check(made.model)
    said = {name: value for name, value in options.items() if value is not None}
    circumstances = [what_if] if isinstance(what_if, str) else what_if
    with notebook_bar(progress) as shown:
        return explained(AskedPlan(made, cluster, said, shown), layer, circumstances, seconds=seconds)


@documented(PARALLELIZE)
def parallelize(
    model: nn.Module,
    cluster_spec: ClusterSpec,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    exact_random: bool = False,
    timeout: timedelta = TIMEOUT,
    inputs: Reach = "global",
    outputs: OutputReach = "auto",
    plan: Plan | str | Path | None = None,
    updates: UpdateRule | str | None = None,
    islands: int | None = None,
    quiet: bool = False,
    **options: Unpack[PlanOptions],
) -> ParallelModule:
    """The model as a module that runs on the whole cluster; call it on every rank alike.

    With examples it plans at once, otherwise at the first call; until then its parameters cannot be
    read. Rank 0 plans (and measures what is missing), the others receive the plan, and all continue
    with rank 0's parameters and random state. With `loss_fn` calling the module returns the loss; once
    planned, calling it without what the loss takes returns the model's output.
    `exact_random` draws the serial dropout masks, whole, on every rank: for proofs. What a plan notes, rank 0
    prints once to stderr, unless `quiet`.

    With `plan`, a Plan or the file of one (`Plan.save`, `autopar plan --output`), nothing is searched: the
    first call must be the one that was planned, with gradients and the same shapes, on as many devices. Where
    a script gives none, it is the one of `autopar run --plan`.

    An option that the script leaves open (None) is what `autopar run` was told, as in
    `autopar run SCRIPT --cluster local:4 --stages 2`, by the environment variable AUTOPAR_OPTIONS, which
    holds a JSON object of options by name; or else the default below: one stage and one micro-batch,
    whatever is forced, since a loop that calls backward needs both.

    Every rank passes the global batch, or with `inputs="local"` the samples that it needs alone:
    `parallel.samples` says which, `parallel.sampler(dataset)` gives a DataLoader their indices. The
    examples are of the global batch all the same; other global batches are prepared by `prepare`. A rank
    loads the rows that its program takes of any input: where the plan gathers the output for the loss,
    that takes all targets, and every rank loads all samples.

    Outputs and losses are global on every rank. In training, what a model returns beside its own loss lies in
    parts until a torch function touches it, which gathers it: a collective, so touch it on every rank. After
    backward from the loss an output that nobody has touched is gone. With `outputs="global"` all are gathered
    in the program. With `outputs="local"` the plan leaves each output,
    but a scalar loss, as it lies: replicated over an axis, or in parts, of which the module returns
    this rank's; `parallel.output_parts` says which. A loss that is computed from a part is a part
    itself: the global loss is the sum of the local ones over the ranks that hold different parts. So
    divide by the global number of samples where the loss is a mean,

        loss = F.cross_entropy(parallel(x), y, reduction="sum") / global_batch_size

    and run backward from it on every rank; ranks that hold the same part must compute the same.

    With `updates` the cluster is cut into `islands`, its nodes by default, or of one node its devices, which
    learn together by that rule in `autopar.steps` (docs/updates.md). An island is a world of its own to
    torch.distributed, with a plan of its own; the examples are of an island's batch.

    Raises InputError outside a launcher, or where the world is not the cluster.
    """
    PARALLELIZE.check(options)
    check_cluster(cluster_spec)
    check_timeout(timeout)
    local_inputs, leaving = is_local(inputs), read_outputs(outputs)
    planned = example_inputs is not None or example_kwargs is not None
    if local_inputs and not planned:
        raise InputError(
            where='parallelize with inputs="local"',
            found="no example inputs",
            wanted="an example of the global batch, from which each rank's samples follow",
            remedy="pass example_inputs, on every rank those of a whole batch",
        )
    worker.require_launcher()
    joined = None
    rule = read_updates(updates)
    if rule is not None and not isinstance(rule, Stale):
        if not planned:
            raise _unplanned(rule)
        whole_cluster = cluster_spec
        cluster_spec, count = island_cluster(whole_cluster, islands)
        joined = join_islands(rule, whole_cluster, count, timeout)
        if joined.mine:  # all islands run island 0's plan
            plan = joined.plan_of_first()
            options = {name: word for name, word in options.items() if name not in DECIDED}  # type: ignore[assignment]
    worker.init(cluster_spec.device_type, timeout.total_seconds())
    cluster_spec.check_world(dist.get_world_size())
    if cluster_spec.groups:
        cluster_spec.check_kinds(kinds_of_ranks(cluster_spec.device_type))
    plan = plan_to_run() if plan is None else plan
    beside = [name for name, word in options.items() if word is not None]
    given = None if plan is None else agree_on_plan(plan, cluster_spec, beside=beside)
    if given is None:
        options["schedule"] = schedule_for(rule, options.get("schedule"))
    asked = settle(**options) if given is None else settle_beside_plan(**options)
    request, auto = request_of(asked, cluster_spec)
    if request.compile:
        check_compiler(cluster_spec.device_type)
    request = replace(request, local_inputs=local_inputs, outputs=leaving)
    compiler = Compiler(
        cluster_spec,
        request,
        loss_fn,
        costdb=asked.costdb,
        exact_random=exact_random,
        timeout=timeout,
        progress=None if quiet else ProgressLines.begun(),
        announce=None if quiet else Announcer(),
    )
    choose_sums(chosen_sums(cluster_spec))
    random.share_state()
    call = split_inputs(example_inputs, example_kwargs)
    decided = compiler.agree_on_pipeline(model, call, auto) if auto and given is None else given
    if decided is not None:
        request = request.settled(decided)
        compiler = replace(compiler, request=request, plan=decided, plan_binds=given is not None)
    check_overlap(request)
    check_stale(rule, request, cluster_spec, islands)
    by_steps = request.pipeline_ranks > 1 or request.micro_batches > 1
    if local_inputs and by_steps:
        raise InputError(
            where='parallelize with inputs="local"',
            found=f"{request.pipeline_ranks} stages and {request.micro_batches} micro-batches",
            wanted="one of each: train_step takes the whole batch on every rank",
            remedy='leave them out, or pass inputs="global"',
        )
    parallel = ParallelModule(
        model,
        compiler,
        describe=describe,
        device=compiler.device(),
        timeout=timeout,
        by_steps=by_steps,
        exact_random=exact_random,
        local_inputs=local_inputs,
        local_outputs=leaving is Outputs.LOCAL,
        quiet=quiet,
    )
    if request.compile:
        parallel.compile()
    stock.recognise()
    if planned:
        args, kwargs = call
        parallel.prepare(*args, **kwargs)
    _begin(parallel, rule, joined)
    return parallel


def _begin(parallel: ParallelModule, rule: UpdateRule | None, joined: Islands | None) -> None:
    """Let the module's steps follow the rule."""
    if joined is not None:
        joined.begin(parallel, parallel.plan)
        runner_of(parallel).islands = joined
    if isinstance(rule, Stale):
        runner_of(parallel).stale = StaleSteps(rule)


def _unplanned(rule: UpdateRule) -> InputError:
    return InputError(
        where=f"parallelize with updates={rule}",
        found="no example inputs",
        wanted="an example of an island's batch, so that all islands have one plan",
        remedy="pass example_inputs",
    )


@documented(VERIFY)
def verify(
    target: Target,
    cluster: ClusterSpec,
    *,
    steps: int = 3,
    processes: bool = False,
    changes: int = MOST_CHANGES,
    updates: UpdateRule | str | None = None,
    islands: int | None = None,
    **options: Unpack[VerifyOptions],
) -> Report | UpdatesReport:
    """Prove the plan of `target` against eager serial training in float64, over `steps` steps of SGD.

    On simulated ranks, or with `processes` on real ones. The plan may rest on estimates, so nothing is
    measured. Where that holds, and without stages and micro-batches, up to `changes` numbers and flags that
    forward reads are changed one by one, as many others, and some modes, each with a step beside eager
    training.

    With `updates` that rule is run on processes, on `islands` of the cluster, and proved against its
    reference in one process: a server's events are replayed. `stale(1)` is proved as plans are, on the whole
    cluster.
    """
    asked = Options(VERIFY, **options)
    check_target("verify", target)
    rule = read_updates(updates)
    if rule is not None and not isinstance(rule, Stale):
        part, count = island_cluster(cluster, islands)
        request, _ = request_of(Options(VERIFY, **{"stages": 1, "micro_batches": 1, **options}), part)
        with Database.open(asked.costdb) as database:
            return check_updates(target, cluster, rule, count, request, part, steps=steps, database=database)
    options["schedule"] = schedule_for(rule, options.get("schedule"))
    asked = Options(VERIFY, **options)
    request, auto = request_of(asked, cluster)
    check_compiled(request, cluster, processes=processes)
    decided = None
    if auto:
        check_input(
            target,
            cluster,
            steps=steps,
            processes=processes,
            micro_batches=auto.micro_batches or 1,
            batch_dims=request.batch_dims,
            static=request.static,
        )
        planner = Planner(
            cluster, replace(request, outputs=Outputs.GLOBAL), target.loss_fn, costdb=asked.costdb
        )
        decided = planner.find_pipeline(target.model, target.args, target.kwargs, auto)
        request = request.settled(decided)
    check_overlap(request)
    check_stale(rule, request, cluster, islands)
    with Database.open(asked.costdb) as database:
        return check(
            target,
            cluster,
            request,
            steps=steps,
            processes=processes,
            database=database,
            plan=decided,
            asked=asked.micro_batches is not None,
            changes=changes,
            rule=rule if isinstance(rule, Stale) else None,
        )


@documented(COMPARE)
def compare(
    target: Target | str,
    cluster: ClusterSpec,
    *,
    run: bool = False,
    bar: ProgressDisplay | None = None,
    **options: Unpack[CompareOptions],
) -> Comparison:
    """Every pure strategy, batch with filter, batch with domain, and the solver's own plan, side by side.

    `target` is "file.py:function", as on the command line, or a model with example inputs; without
    `run` it may be on the meta device, and no process group is needed. With `run` every row that fits
    takes some training steps, with `optimizer`, on real processes of this machine, and the comparison
    says how well that agrees. `time_limit` is that of each row.

    Raises what `plan` raises if no row fits, and with `run` InputError for another cluster than this
    machine, WorkerError.
    """
    asked = Options(COMPARE, **options)
    request, _ = request_of(asked, cluster)
    made = load_target(target) if isinstance(target, str) else check_target("compare", target)
    serial_model.check(made.model)
    with notebook_bar_of_workers(bar) as shown:
        if run:
            return run_rows(
                ContestJob(made.source, cluster, request, asked.optimizer, asked.costdb, shown), made
            )
        with (
            Database.open(asked.costdb) as database,
            shown.shown() if shown else nullcontext(),
            busy_neighbours(cluster, wanted=request.measure) as co_runners,
        ):
            return Comparer(made, cluster, request, database, shown, co_runners).compare()


@documented(PROFILE)
def profile(
    cluster: ClusterSpec,
    target: Target | None = None,
    *,
    mesh: Mesh | str | None = None,
    dtype: str | None = None,
    costdb: str | None = None,
    bar: ProgressDisplay | None = None,
) -> Profile:
    """Measure the collectives of `cluster`, which must be local, and the operator calls of `target`.

    Progress is shown by `bar`, or else by one of a notebook, or by lines on stderr.
    """
    if target is not None:
        check_target("profile", target)
    request, _ = request_of(Options(PROFILE, mesh=mesh, dtype=dtype), cluster)
    with Database.open(costdb) as database, notebook_bar_of_workers(bar) as shown:
        return measure_profile(cluster, database, target=target, request=request, bar=shown or ProgressBar())


@documented(PLAN)
def report(
    source: Plan | nn.Module | Target | str | Path,
    cluster: ClusterSpec | None = None,
    example_inputs: Any = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    output: str | Path = "report.html",
    measured: Comparison | str | Path | None = None,
    frontier_seconds: float | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> WrittenPage:
    """Write a plan as one page of HTML, which needs no network.

    `source` is a plan, or the file of one (PLAN.json); or what is planned first, for `cluster` and with
    `options`: a model with its example, or "file.py:function". Then the page also shows what less memory
    would cost, by plans that are solved for `frontier_seconds`, 30 by default; of a plan it does where that
    was found with it. `measured` is a comparison
    with `run=True`, or the file of one: then it shows predicted beside measured steps.

    Raises what `plan` raises, and InputError where the page can't be written.
    """
    steps = MeasuredSteps.of(measured) if isinstance(measured, Comparison) else None
    if isinstance(measured, str | Path):
        steps = read_measured(measured)
    said = {name: value for name, value in options.items() if value is not None}
    if isinstance(source, Plan) or (isinstance(source, str | Path) and str(source).endswith(".json")):
        _refuse_beside_plan(cluster=cluster, frontier_seconds=frontier_seconds, **said)
        found = source if isinstance(source, Plan) else Plan.load(source)
        return write_page(found, Path(output), PageSupplements(_timeline_of(found), found.frontier, steps))
    if isinstance(source, nn.Module):
        args, kwargs = split_inputs(example_inputs, example_kwargs)
        source = Target(source, args, dict(kwargs), loss_fn, "model")
    made = load_target(str(source)) if isinstance(source, str | Path) else check_target("report", source)
    PLAN.check(said)
    check_cluster(cluster)
    assert cluster is not None
    serial_model.check(made.model)
    seconds = FRONTIER_SECONDS if frontier_seconds is None else frontier_seconds
    with notebook_bar(progress) as shown:
        asked = AskedPlan(made, cluster, said, shown)
        found = asked.plan(alternatives=True)
        around = frontier(asked, found, seconds=seconds) if seconds > 0 else None
    return write_page(found, Path(output), PageSupplements(_timeline_of(found), around, steps))


def _refuse_beside_plan(**said: Any) -> None:
    """Raise InputError for what only a search takes beside a plan that is given."""
    if names := [name for name, value in said.items() if value is not None]:
        raise InputError(
            where=f"report: {names[0]}",
            found="a plan, for which nothing is planned",
            wanted="the plan alone",
            remedy="leave it out, or pass the model",
        )


def _timeline_of(plan: Plan) -> Timeline | None:
    """The timeline of a plan, if it says what happens when."""
    return timeline(plan) if plan.moments or plan.stage_costs else None


def timeline(plan: Plan) -> Timeline:
    """The step of a plan over time, from the plan's seconds and bytes: with stages as its schedule runs it.

    It is that of kernels: where a plan notes that the host is the limit, the step takes longer.

    `timeline_text` draws it and `write_trace` writes it for a trace viewer (autopar.results); its
    `schedule` prints the order of each rank. Raises InputError for a plan without stages that was saved
    before plans said what happens when.
    """
    pipeline = plan.pipeline
    if pipeline.is_staged:
        return simulate(order_of(pipeline), plan.stage_costs)
    if not plan.moments:
        raise InputError(
            where="timeline",
            found="a plan without stages that doesn't say what happens when",
            wanted="one of this version",
            remedy="plan again",
        )
    names = [layer.module or layer.name for layer in plan.layers]
    return one_stage(plan.moments, pipeline.micro_batches, names=names)
