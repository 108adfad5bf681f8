"""Whether a plan that is there already is one for a cluster and a graph, before it is run.

file ── whole, of this version ── devices, memory ── each line of the graph ── rules that offer its strategies
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autopar.cluster import ClusterSpec
from autopar.core.fingerprint import fingerprint_of
from autopar.core.graph import Graph, InputKind
from autopar.core.program import Program
from autopar.errors import InputError
from autopar.results.plan.plan import Plan
from autopar.sharding.strategies import dims_of, is_legal, options_of
from autopar.trace.export import Traced
from autopar.trace.rewrites.losses_in_pieces import with_losses_in_pieces
from autopar.units import show_bytes


def read_plan(plan: Plan | str | Path, cluster: ClusterSpec) -> Plan:
    """The plan itself, or the one in a file; raises InputError unless it is one for the cluster."""
    where = "plan" if isinstance(plan, Plan) else f"plan {plan}"
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    if plan.devices != cluster.devices:
        raise InputError(
            where=where,
            found=f"one for {plan.devices or 'no devices'}",
            wanted=f"one for the cluster's {cluster.devices}",
            remedy="plan for this cluster",
        )
    if cluster.memory is not None and plan.peak_bytes > cluster.memory:
        raise InputError(
            where=where,
            found=f"a peak of {show_bytes(plan.peak_bytes)} a device",
            wanted=f"at most the cluster's {show_bytes(cluster.memory)}",
            remedy="plan for this cluster",
        )
    return plan


def as_planned(traced: Traced, plan: Plan) -> Traced:
    """The graph whose operators a plan decides on: as it was traced, or with its losses in pieces."""
    pieces = with_losses_in_pieces(traced.graph)
    names = {item.name for item in pieces.operators}
    return replace(traced, graph=pieces) if names == plan.program.strategies.keys() else traced


def check_fits(plan: Plan, traced: Traced) -> None:
    """Raise InputError unless a plan, which may come from a file, is one for the graph."""
    graph = as_planned(traced, plan).graph
    difference = fingerprint_of(graph).difference(plan.graph)
    if difference is not None:
        raise InputError(
            where=f"plan: {difference.where} of the model",
            found=difference.here,
            wanted=difference.planned,
            remedy="build the model, its inputs and the call as they were planned, or plan anew",
        )
    for program in plan.all_programs:
        check_program(program, graph)


def check_program(program: Program, graph: Graph) -> None:
    """Raise InputError for a program of `graph` that no rule of this version offers."""
    dims = dims_of(graph, program.mesh)
    weights = {item.name for item in graph.inputs if item.kind is InputKind.PARAMETER}
    for name in program.on_host:
        if name not in weights:
            raise InputError(
                where=f"plan: {name}",
                found="no weight, in the host's memory",
                wanted="weights there, and nothing else",
                remedy="plan anew, and change no plan files by hand",
            )
    for operator in graph.operators:
        strategy = program.strategies.get(operator.name, ())
        offered = set(strategy) <= set(options_of(operator, dims))
        if len(strategy) != len(program.mesh.shape) or not offered or not is_legal(operator, strategy, dims):
            raise InputError(
                where=f"plan: {operator.module or operator.name} ({operator.target})",
                found=f"strategy {'+'.join(map(str, strategy)) or 'none'}",
                wanted=f"one that the operator's rule offers on mesh {program.mesh}",
                remedy="plan anew, and change no plan files by hand",
            )
