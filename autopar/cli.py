"""The command line: options to calls of the API, results and errors to streams and exit codes.

    stdout   the answer: a table, or with --json exactly one object
    stderr   everything else: progress, and with --json whatever a target or a script prints

Exit codes: 0 ok, 1 a check failed, 2 bad input or infeasible, 3 no plan in time, 4 a worker failed,
130 interrupted.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console, Group, RenderableType

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.errors import AutoparError, InputError, WorkerError
from autopar.planning.options import AUTO, settle, write
from autopar.planning.request import DEFAULT_GAP
from autopar.results.draw_timeline import timeline_text, write_trace
from autopar.results.progress_bar import ProgressBar
from autopar.results.render_comparison import render_comparison
from autopar.results.render_plan import render
from autopar.results.text import WIDTH
from autopar.runtime.launch.launch import INTERRUPTED, start_script
from autopar.trace.target import load_target

app = typer.Typer(
    name="autopar",
    help="Auto-parallelization of PyTorch models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

TargetName = Annotated[
    str, typer.Argument(metavar="TARGET", help="file.py:function, which returns (model, inputs[, loss_fn]).")
]
Cluster = Annotated[str, typer.Option("--cluster", metavar="local:N|FILE.toml", help="The devices to use.")]
MeshOption = Annotated[
    str | None, typer.Option("--mesh", metavar="2x2", help="One mesh instead of all that fit.")
]
Force = Annotated[
    str | None,
    typer.Option(
        "--force",
        metavar="KIND[+KIND...]",
        help="One pure kind (batch, domain, filter, channel, pipeline), or one for each axis: batch+filter.",
    ),
]
_RECOMPUTE = typer.Option(
    "--recompute",
    metavar="none|all|auto",
    help="What to compute again in backward; auto: what a memory cap asks.",
)
_OFFLOAD = typer.Option(
    "--offload",
    metavar="none|all|auto",
    help="What waits for backward in host memory; auto: under a memory cap what hides behind compute.",
)
_SHARD_STATE = typer.Option(
    "--shard-state",
    metavar="LEVEL",
    help="What of the weights' state lies in shards: none, optimizer, gradients, weights; auto: as is best.",
)
_SCHEDULE = typer.Option(
    "--schedule", metavar="NAME", help="gpipe, 1f1b, interleaved, zb1p, zbv, dualpipev, auto."
)
_GAP = typer.Option("--gap", metavar="G", help="Relative gap at which the solver may stop.")
_OPTIMIZER = typer.Option(
    "--optimizer", metavar="NAME", help="Whose state counts: sgd, sgd-momentum, adam or adamw."
)
Stages = Annotated[
    str | None, typer.Option("--stages", metavar="K|auto", help="Pipeline ranks; 1 with --force, else auto.")
]
MicroBatches = Annotated[
    str | None,
    typer.Option(
        "--micro-batches",
        metavar="M|auto",
        help="Parts of the batch that follow each other; 1 with --force, else auto.",
    ),
]
Recompute = Annotated[str, _RECOMPUTE]
Offload = Annotated[str, _OFFLOAD]
OffloadOrNone = Annotated[str | None, _OFFLOAD]
ShardState = Annotated[str, _SHARD_STATE]
ShardStateOrNone = Annotated[str | None, _SHARD_STATE]
RecomputeOrNone = Annotated[str | None, _RECOMPUTE]
ScheduleName = Annotated[str, _SCHEDULE]
ScheduleOrNone = Annotated[str | None, _SCHEDULE]
Gap = Annotated[float, _GAP]
GapOrNone = Annotated[float | None, _GAP]
Optimizer = Annotated[str, _OPTIMIZER]
OptimizerOrNone = Annotated[str | None, _OPTIMIZER]
NoMeasure = Annotated[bool, typer.Option("--no-measure", help="Estimate what is not measured yet.")]
Memory = Annotated[str | None, typer.Option("--memory", metavar="2GiB", help="Cap per device.")]
TimeLimit = Annotated[float | None, typer.Option("--time-limit", metavar="S", help="Seconds for the solver.")]
CostDB = Annotated[str | None, typer.Option("--costdb", metavar="PATH", help="Database of measurements.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
ShowProgress = Annotated[
    bool, typer.Option("--progress", help="Show progress also where stderr is no terminal.")
]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command prints: an object, or something for a person; and how it ends."""

    document: dict[str, Any]
    text: RenderableType
    exit_code: int = 0


@app.command()
def plan(
    target: TargetName,
    cluster: Cluster,
    memory: Memory = None,
    mesh: MeshOption = None,
    force: Force = None,
    time_limit: TimeLimit = None,
    gap: Gap = DEFAULT_GAP,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    schedule: ScheduleName = AUTO,
    recompute: Recompute = "auto",
    offload: Offload = "auto",
    shard_state: ShardState = "auto",
    optimizer: Optimizer = "adam",
    costdb: CostDB = None,
    no_measure: NoMeasure = False,
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="Write the timeline of the stages.")
    ] = None,
    as_json: AsJson = False,
    progress: ShowProgress = False,
) -> Answer:
    """Find the best placement of TARGET on a cluster, and print it."""
    spec, made, bar = ClusterSpec.parse(cluster), load_target(target), ProgressBar(progress)
    with bar.shown():
        found = api.plan(
            made.model,
            spec,
            made.args,
            example_kwargs=made.kwargs,
            loss_fn=made.loss_fn,
            mesh=mesh,
            force=force,
            memory=memory,
            time_limit=time_limit,
            gap=gap,
            optimizer=optimizer,
            stages=stages,
            micro_batches=micro_batches,
            schedule=schedule,
            recompute=recompute,
            offload=offload,
            shard_state=shard_state,
            costdb=costdb,
            measure=not no_measure,
            progress=bar,
        )
    drawn = api.timeline(found) if trace or found.pipeline.is_staged else None
    if drawn is None:
        return Answer(found.as_dict(), render(found))
    if trace:
        write_trace(drawn, Path(trace))
    return Answer(found.as_dict(), Group(render(found), "", timeline_text(drawn)))


@app.command()
def verify(
    target: TargetName,
    cluster: Cluster,
    mesh: MeshOption = None,
    force: Force = None,
    steps: Annotated[int, typer.Option(help="Steps of SGD.")] = 3,
    processes: Annotated[
        bool, typer.Option("--processes", help="Real processes, not simulated ranks.")
    ] = False,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    schedule: ScheduleName = AUTO,
    recompute: Recompute = "auto",
    offload: Offload = "auto",
    shard_state: ShardState = "auto",
    memory: Memory = None,
    time_limit: TimeLimit = None,
    gap: Gap = DEFAULT_GAP,
    costdb: CostDB = None,
    as_json: AsJson = False,
) -> Answer:
    """Prove that parallel training of TARGET equals serial training, in float64."""
    report = api.verify(
        load_target(target),
        ClusterSpec.parse(cluster),
        mesh=mesh,
        force=force,
        memory=memory,
        time_limit=time_limit,
        gap=gap,
        stages=stages,
        micro_batches=micro_batches,
        schedule=schedule,
        recompute=recompute,
        offload=offload,
        shard_state=shard_state,
        costdb=costdb,
        steps=steps,
        processes=processes,
    )
    return Answer(report.as_dict(), str(report), 0 if report.passed else 1)


@app.command()
def compare(
    target: TargetName,
    cluster: Cluster,
    memory: Memory = None,
    time_limit: TimeLimit = None,
    gap: Gap = DEFAULT_GAP,
    optimizer: Optimizer = "adam",
    shard_state: ShardState = "auto",
    costdb: CostDB = None,
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
) -> Answer:
    """Put the pure strategies and the solver's plan for TARGET side by side."""
    found = api.compare(
        load_target(target),
        ClusterSpec.parse(cluster),
        memory=memory,
        time_limit=time_limit,
        gap=gap,
        optimizer=optimizer,
        shard_state=shard_state,
        costdb=costdb,
        measure=measure is not False,
        run=measure is True,
        bar=ProgressBar(progress),
    )
    return Answer(found.as_dict(), render_comparison(found))


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script that calls parallelize.")],
    cluster: Cluster,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGS]...", help="The script's own; after -- also those that are named here."
        ),
    ] = None,
    mesh: MeshOption = None,
    force: Force = None,
    memory: Memory = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    schedule: ScheduleOrNone = None,
    recompute: RecomputeOrNone = None,
    offload: OffloadOrNone = None,
    shard_state: ShardStateOrNone = None,
    optimizer: OptimizerOrNone = None,
    time_limit: TimeLimit = None,
    gap: GapOrNone = None,
    costdb: CostDB = None,
    no_measure: NoMeasure = False,
    as_json: AsJson = False,
) -> Answer:
    """Run SCRIPT on every device of a local cluster.

    The options of a plan reach parallelize() in SCRIPT wherever it doesn't
    say otherwise, by the environment variable AUTOPAR_OPTIONS. Stages and
    micro-batches need a SCRIPT that trains by train_step().
    """
    spec = ClusterSpec.parse(cluster)
    spec.check_local()
    said = {
        "mesh": mesh,
        "force": force,
        "memory": memory,
        "stages": stages,
        "micro_batches": micro_batches,
        "schedule": schedule,
        "recompute": recompute,
        "offload": offload,
        "shard_state": shard_state,
        "optimizer": optimizer,
        "time_limit": time_limit,
        "gap": gap,
        "costdb": None if costdb is None else str(Path(costdb).absolute()),
        "measure": False if no_measure else None,
    }
    api.request_of(settle(**said), spec)  # what makes no sense is told here, not by every rank
    start_script(script, spec.num_devices, arguments or (), variables=write(said))
    return Answer({"script": script, "processes": spec.num_devices, "exit_code": 0}, "")


@app.command()
def profile(
    cluster: Cluster,
    target: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help="Also measure its operators.")
    ] = None,
    mesh: MeshOption = None,
    costdb: CostDB = None,
    as_json: AsJson = False,
    progress: ShowProgress = False,
) -> Answer:
    """Measure collectives, and the operators of TARGET, on this machine."""
    spec, made = ClusterSpec.parse(cluster), load_target(target) if target else None
    found = api.profile(spec, made, mesh=mesh, costdb=costdb, bar=ProgressBar(progress))
    return Answer(found.as_dict(), str(found))


# -- streams and exit codes -----------------------------------------------------------------------------

UsageError: Any = typer.BadParameter.__bases__[0]  # of the click that this typer carries or imports


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    own = words[: words.index("--")] if "--" in words else words
    if "--json" in own:
        return _print_json(words)
    try:
        answer = _answer(words)
    except AutoparError as error:
        if isinstance(error, WorkerError) and error.traceback:
            print(error.traceback, file=sys.stderr)
        print(f"autopar: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    if answer.text:
        width = None if sys.stdout.isatty() else WIDTH
        Console(width=width, highlight=False, markup=False).print(answer.text)
    return answer.exit_code


def _print_json(words: Sequence[str]) -> int:
    with _kept_stdout() as stdout:
        try:
            answer = _answer(words)
        except AutoparError as error:
            if isinstance(error, WorkerError) and error.traceback:
                print(error.traceback, file=sys.stderr)
            answer = Answer({"error": error.as_dict()}, "", error.exit_code)
        except KeyboardInterrupt:
            stopped = AutoparError(
                where="autopar", found="an interrupt", wanted="the end of the work", remedy="start it again"
            )
            answer = Answer({"error": stopped.as_dict() | {"kind": "Interrupted"}}, "", INTERRUPTED)
        except Exception as fault:  # our own: whoever reads the object must not wait for one in vain
            traceback.print_exc()
            document = AutoparError(
                where="autopar", found=repr(fault), wanted="no fault of its own", remedy="report this"
            ).as_dict()
            answer = Answer({"error": document | {"kind": type(fault).__name__}}, "", 1)
        stdout.write(json.dumps(finite(answer.document), allow_nan=False) + "\n")
        stdout.flush()
    return answer.exit_code


def _answer(words: Sequence[str]) -> Answer:
    """The answer of the command that `words` call; typer's own complaints become InputErrors."""
    try:
        result = app(list(words), standalone_mode=False)
    except UsageError as cause:
        context = getattr(cause, "ctx", None)
        name = context.command_path if context else "autopar"
        raise InputError(
            where=name,
            found=cause.format_message().rstrip(".") or "no command",
            wanted=context.get_usage().removeprefix("Usage: ") if context else "a command and its options",
            remedy=f"see {name} --help",
        ) from cause
    except typer.Abort as cause:
        raise KeyboardInterrupt from cause
    if result == INTERRUPTED:
        raise KeyboardInterrupt
    return result if isinstance(result, Answer) else Answer({}, "")


def finite(tree: Any) -> Any:
    """`tree` for JSON: null where a number is NaN or infinite."""
    match tree:
        case dict():
            return {key: finite(value) for key, value in tree.items()}
        case list() | tuple():
            return [finite(item) for item in tree]
        case float() if not math.isfinite(tree):
            return None
        case _:
            return tree


@contextmanager
def _kept_stdout() -> Iterator[TextIO]:
    """The real stdout, while whatever else is written there, also by child processes, goes to stderr."""
    stdout = sys.stdout
    if not _is_descriptor(stdout, 1) or not _is_descriptor(sys.stderr, 2):
        with redirect_stdout(sys.stderr):  # streams that a caller has replaced have no processes
            yield stdout
        return
    stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as real:
            yield real
    finally:
        stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _is_descriptor(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (OSError, AttributeError):  # io.UnsupportedOperation is an OSError
        return False
