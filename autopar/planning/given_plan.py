"""A plan that is there already: read, held against the cluster, and told to all ranks, without a search.

Plan or file ── devices, memory ── all ranks ── each rank's graph (compiler) ── program
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from autopar.cluster import ClusterSpec
from autopar.convert.moves import canonical
from autopar.core.graph import Graph
from autopar.core.program import Program
from autopar.errors import InputError
from autopar.planning.agree import agree
from autopar.planning.asked.option_environment import read, read_plan_file
from autopar.planning.asked.options import NARROWING
from autopar.planning.graphs.fitting import check_program, read_plan
from autopar.results.plan.plan import Plan

VARIABLE = "AUTOPAR_PLAN"  # of the environment: the file of a plan
DECIDED = (*NARROWING, "reduce_dtype")  # options that a plan has decided


def plan_to_run(environment: Mapping[str, str] = os.environ) -> str | None:
    """The file of the plan that `autopar run --plan` or AUTOPAR_OPTIONS say, for a script that gives none.

    Raises InputError for options beside it in AUTOPAR_OPTIONS that the plan has decided.
    """
    if environment.get(VARIABLE):
        return environment[VARIABLE]
    path = read_plan_file(environment)
    if path is not None:
        _refuse_beside(read(environment))
    return path


def write_plan_to_run(path: str, cluster: ClusterSpec, options: Collection[str]) -> dict[str, str]:
    """The environment variable that tells a script to run the plan at `path`. Raises InputError for a file
    without a plan for the cluster, and for options that the plan has decided."""
    _refuse_beside(options)
    read_plan(path, cluster)
    return {VARIABLE: str(Path(path).absolute())}


def agree_on_plan(plan: Plan | str | Path, cluster: ClusterSpec, *, beside: Collection[str] = ()) -> Plan:
    """Rank 0's plan, or the one in its file, on every rank; collective.

    Raises InputError for a plan that isn't one for the cluster, and for options `beside` it that it has
    decided.
    """
    _refuse_beside(beside)
    return agree(lambda _: read_plan(plan, cluster), cluster)


def _refuse_beside(options: Collection[str]) -> None:
    """Raise InputError for options beside a plan, which has decided what they say."""
    decided = [name for name in DECIDED if name in options]
    if decided:
        raise InputError(
            where=f"plan and {', '.join(decided)}",
            found="both",
            wanted="a plan, which has decided that, or options by which to plan",
            remedy="leave out one of them",
        )


def as_stages_lie(plan: Plan, graph: Graph, micro_batches: int) -> Plan:
    """The plan of stages on unlike meshes for another graph of the model, whose weights lie as it says.

    Raises InputError for one with operators or outputs of its own, as nothing is planned anew.
    """
    meshes = " + ".join(map(str, plan.pipeline.meshes))
    planned = {(layer.name, layer.op, layer.module): place for place, layer in enumerate(plan.layers)}
    places = [planned.get((item.name, str(item.target), item.module), -1) for item in graph.operators]
    known = -1 not in places and places == sorted(places)
    for program in plan.programs:
        if not known or not {*graph.outputs} <= program.outputs.keys():
            raise InputError(
                where="another kind of call of the parallel module",
                found=f"stages on meshes {meshes}, and other operators or outputs than the step's that was "
                "planned",
                wanted="calls that compute the planned loss by operators of the planned step",
                remedy="give all stages one mesh, or evaluate the serial model that autopar.full gives",
            )
        check_program(program, graph)
    programs = tuple(_of_values(program, graph) for program in plan.programs)
    starts = tuple(sum(place < start for place in places) for start in plan.pipeline.starts)
    pipeline = replace(plan.pipeline, micro_batches=micro_batches, starts=starts)
    return replace(plan, program=programs[0], programs=programs, pipeline=pipeline)


def _of_values(program: Program, graph: Graph) -> Program:
    """The program with the conversions of tensors that have no gradient here, for which B is R."""
    moves = {}
    for name, path in program.moves.items():
        if name in graph.specs and not graph.specs[name].requires_grad:
            plain = [
                replace(
                    move,
                    source=canonical(move.source, differentiable=False),
                    target=canonical(move.target, differentiable=False),
                )
                for move in path
            ]
            changes = [move for move in reversed(plain) if move.source != move.target]
            path = tuple({move.target: move for move in changes}.values())
        moves[name] = path
    return replace(program, moves=moves)
