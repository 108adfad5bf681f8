"""The commands: each turns its words into one call of the API, and the result into what is printed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from autopar import __version__
from autopar.cli.command import CommandOutput, taking
from autopar.cli.interrupts import stops_search
from autopar.cli.script_run import ScriptRun
from autopar.cluster import ClusterSpec
from autopar.errors import (
    CheckError,
    InfeasibleError,
    InputError,
)
from autopar.planning.asked.options import COMPARE, OPTIONS, PARALLELIZE, PLAN, PROFILE, VERIFY
from autopar.torch_seams.torch_version import check_torch
from autopar.units import parse_bytes

if TYPE_CHECKING:
    from autopar.results.plan.plan import Plan

# Commands import what needs torch when they run: help and bad words are told without it.

app = typer.Typer(
    name="autopar",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

TargetName = Annotated[
    str, typer.Argument(metavar="TARGET", help="file.py:function, which returns (model, inputs[, loss_fn]).")
]
Cluster = Annotated[str, typer.Option("--cluster", metavar="local:N|FILE.toml", help="The devices to use.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
ShowProgress = Annotated[
    bool, typer.Option("--progress", help="Show progress also where stderr is no terminal.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"autopar {__version__}")
        raise typer.Exit


@app.callback()
def autopar(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Auto-parallelization of PyTorch models."""


DrawSchedule = Annotated[
    bool, typer.Option("--draw-schedule", help="Draw what each pipeline rank does over the step.")
]
TraceFile = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="Write the step over time, for trace viewers.")
]


@app.command()
@taking(PLAN)
def plan(
    target: TargetName,
    cluster: Cluster,
    trace: TraceFile = None,
    draw_schedule: DrawSchedule = False,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Save the plan, for parallelize(plan=FILE)."),
    ] = None,
    frontier: Annotated[
        float | None,
        typer.Option("--frontier", metavar="S", help="Seconds to find what less memory would cost, too."),
    ] = None,
    as_json: AsJson = False,
    progress: ShowProgress = False,
    **options: Any,
) -> CommandOutput:
    """Find the best plan for TARGET on a cluster, and print it.

    A cluster local:1-8, or FILE.toml:8-64, is a range: the best plan on more and more devices.
    """
    from autopar.comparing.device_ranges import clusters_of, is_range

    specs = clusters_of(cluster) if is_range(cluster) else [ClusterSpec.parse(cluster)]
    _check_seconds("--frontier", frontier)
    from autopar import api
    from autopar.comparing.scaling import scale
    from autopar.results.comparison.render_scaling import render_scaling
    from autopar.results.progress.progress_bar import ProgressBar
    from autopar.trace.target import load_target

    made, bar = load_target(target), ProgressBar(progress)

    def planned(spec: ClusterSpec) -> Plan:
        return api.plan(
            made.model,
            spec,
            made.args,
            example_kwargs=made.kwargs,
            loss_fn=made.loss_fn,
            frontier_seconds=frontier,
            progress=bar,
            **options,
        )

    if is_range(cluster):
        _refuse_for_range(output=output, trace=trace, frontier=frontier)
        with bar.shown():
            table = scale(specs, planned)
        return CommandOutput(table.as_dict(), render_scaling(table))
    with bar.shown(), stops_search():
        found = planned(specs[0])
    if output:
        found.save(output)
    _write_trace(found, trace)
    return _shown(found, schedule=draw_schedule)


def _write_trace(found: Plan, path: str | None) -> None:
    """Write the step of a plan over time, if a file is named."""
    if path is not None:
        from autopar import api
        from autopar.results.plan.draw_timeline import write_trace

        write_trace(api.timeline(found), Path(path))


def _refuse_for_range(**said: str | float | None) -> None:
    """Raise InputError for what is of one plan, where there is one for each number of devices."""
    if names := [name for name, value in said.items() if value is not None]:
        raise InputError(
            where=f"--{names[0]}",
            found="a range of devices, which has many plans",
            wanted="one plan",
            remedy="plan again for the number of devices that you choose",
        )


def _shown(found: Plan, *, schedule: bool) -> CommandOutput:
    """A plan, and with `schedule` the picture of its stages if it has any."""
    from autopar.results.plan.draw_timeline import timeline_text
    from autopar.results.plan.render_plan import render

    if not (schedule and found.pipeline.is_staged):
        return CommandOutput(found.as_dict(), render(found))
    from autopar import api  # which takes seconds to import

    return CommandOutput(found.as_dict(), Group(render(found), "", timeline_text(api.timeline(found))))


PlanFile = Annotated[
    str | None, typer.Argument(metavar="PLAN.json", help="A plan that `autopar plan --output` saved.")
]


@app.command()
def show(
    plan: PlanFile = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of plan files instead.")
    ] = False,
    trace: TraceFile = None,
    draw_schedule: DrawSchedule = False,
    as_json: AsJson = False,
) -> CommandOutput:
    """Print a saved plan."""
    from autopar.results.files.schema import schema_of
    from autopar.results.plan.plan import Plan

    if schema:
        if not as_json:
            print(json.dumps(schema_of(Plan), indent=1))  # by print, which breaks no long line
        return CommandOutput(schema_of(Plan), "")
    if plan is None:
        raise InputError(
            where="autopar show",
            found="no plan",
            wanted="PLAN.json, or --schema",
            remedy="save one by autopar plan TARGET --cluster local:4 --output plan.json",
        )
    found = Plan.load(plan)
    _write_trace(found, trace)
    return _shown(found, schedule=draw_schedule)


@app.command()
@taking(PLAN, shown=False)
def report(
    source: Annotated[
        str, typer.Argument(metavar="TARGET|PLAN.json", help="What to plan, or a plan that is saved.")
    ],
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="local:N|FILE.toml", help="The devices to plan for.")
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page.")
    ] = "report.html",
    measured: Annotated[
        str | None,
        typer.Option(
            "--measured",
            metavar="FILE",
            help="Show beside it what compare --measure --json printed.",
        ),
    ] = None,
    frontier: Annotated[
        float | None,
        typer.Option(
            "--frontier", metavar="S", help="Seconds to find what less memory would cost; 30, 0 for none."
        ),
    ] = None,
    as_json: AsJson = False,
    progress: ShowProgress = False,
    **options: Any,
) -> CommandOutput:
    """Write a plan as one page of HTML, which needs no network."""
    said = {name: value for name, value in options.items() if value is not None}
    if source.endswith(".json"):
        _refuse_beside(cluster=cluster, frontier=frontier, **said)
    elif cluster is None:
        raise InputError(
            where="autopar report",
            found="a target without a cluster",
            wanted="the devices to plan for, or a plan that is saved as PLAN.json",
            remedy=f"write autopar report {source} --cluster local:4",
        )
    spec = None if cluster is None else ClusterSpec.parse(cluster)
    _check_seconds("--frontier", frontier or None)
    from autopar import api
    from autopar.results.progress.progress_bar import ProgressBar
    from autopar.units import show_bytes

    bar = ProgressBar(progress)
    with bar.shown():
        written = api.report(
            source,
            spec,
            output=output,
            measured=measured,
            frontier_seconds=frontier,
            progress=bar,
            **said,
        )
    return CommandOutput(written.as_dict(), f"{output}: {show_bytes(written.nbytes)}")


def _refuse_beside(**said: Any) -> None:
    """Raise InputError for options of a search beside a plan that is saved."""
    if names := [name for name, value in said.items() if value is not None]:
        name = names[0]
        flag = f"no-{name}" if name in OPTIONS and OPTIONS[name].without else name
        raise InputError(
            where=f"--{flag.replace('_', '-')}",
            found="a saved plan, for which nothing is planned",
            wanted="the plan alone",
            remedy="leave the option out, or name the target",
        )


@app.command()
def diff(
    before: Annotated[str, typer.Argument(metavar="A.json", help="A saved plan.")],
    after: Annotated[str, typer.Argument(metavar="B.json", help="Another one.")],
    as_json: AsJson = False,
) -> CommandOutput:
    """Print what differs between two saved plans."""
    from autopar.results.difference.difference import difference
    from autopar.results.difference.render_difference import render_difference
    from autopar.results.plan.plan import Plan

    names = Path(before).name, Path(after).name
    found = difference(
        Plan.load(before), Plan.load(after), names=names if names[0] != names[1] else (before, after)
    )
    return CommandOutput(found.as_dict(), render_difference(found))


@app.command()
@taking(PLAN)
def explain(
    target: TargetName,
    cluster: Cluster,
    layer: Annotated[
        str | None,
        typer.Argument(metavar="[LAYER]", help="A layer of the plan; the dearest ones by default."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if", metavar="memory=40GB|devices=8|batch=64", help="Plan under other circumstances, too."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            metavar="S",
            help="For what is solved beside the plan; 60, or the plan's own, if more.",
        ),
    ] = None,
    as_json: AsJson = False,
    progress: ShowProgress = False,
    **options: Any,
) -> CommandOutput:
    """Explain the plan of TARGET: what each other way would cost, and what binds."""
    _check_seconds("--seconds", seconds)
    spec = ClusterSpec.parse(cluster)
    from autopar import api
    from autopar.results.explanation.render_explanation import render_explanation
    from autopar.results.progress.progress_bar import ProgressBar
    from autopar.trace.target import load_target

    made, bar = load_target(target), ProgressBar(progress)
    with bar.shown():
        found = api.explain(
            made, spec, layer, what_if=what_if or (), seconds=seconds, progress=bar, **options
        )
    exit_code = 0 if found.plan else InfeasibleError.exit_code
    return CommandOutput(found.as_dict(), render_explanation(found), exit_code)


@app.command()
@taking(VERIFY)
def verify(
    target: TargetName,
    cluster: Cluster,
    steps: Annotated[int, typer.Option(help="Steps of SGD.")] = 3,
    processes: Annotated[
        bool, typer.Option("--processes", help="Real processes, not simulated ranks.")
    ] = False,
    changes: Annotated[
        int, typer.Option(help="Numbers and flags that forward reads and that are changed, one by one.")
    ] = 6,
    updates: Annotated[
        str | None,
        typer.Option(metavar="RULE", help='Prove a rule of updates, as "every(50)", on islands.'),
    ] = None,
    islands: Annotated[int | None, typer.Option(help="Parts of the cluster that learn by it.")] = None,
    as_json: AsJson = False,
    **options: Any,
) -> CommandOutput:
    """Prove that parallel training of TARGET equals serial training, in float64."""
    spec = ClusterSpec.parse(cluster)
    from autopar import api
    from autopar.trace.target import load_target

    report = api.verify(
        load_target(target),
        spec,
        steps=steps,
        processes=processes,
        changes=changes,
        updates=updates,
        islands=islands,
        **options,
    )
    return CommandOutput(report.as_dict(), str(report), 0 if report.passed else 1)


@app.command()
@taking(COMPARE, without="measure")
def compare(
    target: TargetName,
    cluster: Cluster,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Run all rows on this machine / estimate what is not measured yet.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    progress: ShowProgress = False,
    **options: Any,
) -> CommandOutput:
    """Put the pure strategies and the solver's plan for TARGET side by side."""
    spec = ClusterSpec.parse(cluster)
    from autopar import api
    from autopar.results.comparison.render_comparison import render_comparison
    from autopar.results.progress.progress_bar import ProgressBar
    from autopar.trace.target import load_target

    found = api.compare(
        load_target(target),
        spec,
        measure=measure is not False,
        run=measure is True,
        bar=ProgressBar(progress),
        **options,
    )
    return CommandOutput(found.as_dict(), render_comparison(found))


@app.command(context_settings={"ignore_unknown_options": True})
@taking(PARALLELIZE, shown=False)
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script that calls parallelize.")],
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="local:N|FILE.toml", help="The devices to use.")
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGS]...", help="The script's own; after -- also those that are named here."
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option("--plan", metavar="PLAN.json", help="Run this plan, without a search."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="S", help="Seconds after which all ranks are ended, with exit code 4."),
    ] = None,
    elastic: Annotated[
        str | None,
        typer.Option(
            "--elastic",
            metavar="MIN:MAX",
            help="Start again after faults, on so many ranks as are there; from the saves of SCRIPT.",
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(metavar="N", help="Most restarts in a row without a new step; 10."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Prints how many devices there are now, for --elastic."),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="Seconds without a step after which ranks are ended, once there was one."
        ),
    ] = None,
    as_json: AsJson = False,
    **options: Any,
) -> CommandOutput:
    """Run SCRIPT on every device of a local cluster.

    The options of a plan reach parallelize() in SCRIPT wherever it doesn't
    say otherwise, by the environment variable AUTOPAR_OPTIONS. Stages and
    micro-batches need a SCRIPT that trains by train_step().
    """
    if options["costdb"] is not None:
        options["costdb"] = str(Path(options["costdb"]).absolute())
    _check_seconds("--timeout", timeout)
    _check_seconds("--deadline", deadline)
    said = ScriptRun(script, arguments or (), cluster, elastic, restarts, devices, timeout, deadline)
    processes = said.start(options, plan)
    return CommandOutput({"script": script, "processes": processes, "exit_code": 0}, "")


def _check_seconds(flag: str, seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < math.inf:
        raise InputError(
            where=flag, found=f"{seconds:g} s", wanted="more than 0 s", remedy=f"write {flag} 3600"
        )


@app.command()
@taking(PROFILE)
def profile(
    cluster: Cluster,
    target: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help="Also measure its operators.")
    ] = None,
    as_json: AsJson = False,
    progress: ShowProgress = False,
    **options: Any,
) -> CommandOutput:
    """Measure collectives, and the operators of TARGET, on this machine."""
    spec = ClusterSpec.parse(cluster)
    from autopar import api
    from autopar.results.progress.progress_bar import ProgressBar
    from autopar.trace.target import load_target

    made = load_target(target) if target else None
    found = api.profile(spec, made, bar=ProgressBar(progress), **options)
    return CommandOutput(found.as_dict(), str(found))


@app.command()
def topology(
    cluster: Cluster,
    size: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="What each node sums.")] = "100MB",
    as_json: AsJson = False,
) -> CommandOutput:
    """Put algorithms of sums between nodes side by side, on the links as they are laid."""
    spec, nbytes = ClusterSpec.parse(cluster), parse_bytes(size, where="--bytes")
    check_torch()
    from autopar.comparing.topology_sums import sum_times
    from autopar.results.comparison.sum_times import render_sum_times

    found = sum_times(spec, nbytes)
    return CommandOutput(found.as_dict(), render_sum_times(found))


@app.command()
def doctor(
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="local:N|FILE.toml", help="Also start, or meet, its ranks."),
    ] = None,
    costdb: Annotated[str | None, typer.Option(metavar="FILE", help=OPTIONS["costdb"].help)] = None,
    as_json: AsJson = False,
) -> CommandOutput:
    """Examine the installation, and the machines and links of a cluster.

    For several nodes start it on all of them, by srun or torchrun -m autopar doctor.
    """
    spec = None if cluster is None else ClusterSpec.parse(cluster)
    check_torch()
    from autopar.doctor.examine import examine
    from autopar.results.explanation.render_examination import render_examination

    found = examine(spec, costdb=costdb)
    if found is None:  # another rank tells
        return CommandOutput({"rank": int(os.environ["RANK"])}, "")
    return CommandOutput(
        found.as_dict(), render_examination(found), 0 if found.passed else CheckError.exit_code
    )
