"""Whether a compiler is there, and what can't be compiled."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

from torch import fx

from autopar.core.pipeline import Pipeline
from autopar.core.schedule import SPLIT_BACKWARD
from autopar.errors import InputError
from autopar.runtime.collectives.random import is_draw
from autopar.runtime.saved.host_weights import is_fetch
from autopar.runtime.saved.offload import moves


def check_compiler(device_type: str) -> None:
    """Raise InputError where torch.compile has nothing to compile with: C++ for CPUs, Triton for GPUs."""
    if device_type == "cpu":
        named = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        found = None if shutil.which(named) else f"no C++ compiler {named}"
        wanted = "one, by which torch.compile makes code for CPUs"
        remedy = "install g++, or say where a compiler is by the environment variable CXX"
    else:
        found = None if importlib.util.find_spec("triton") else "no Triton"
        wanted = "it, by which torch.compile makes code for GPUs"
        remedy = "install triton"
    if found:
        raise InputError(
            where="compile", found=found, wanted=wanted, remedy=f"{remedy}; or leave out compile"
        )


def check_pipeline(pipeline: Pipeline) -> None:
    """Raise InputError for a schedule whose stages can't be compiled."""
    if pipeline.is_staged and pipeline.schedule in SPLIT_BACKWARD:
        raise InputError(
            where="compile",
            found=f"the schedule {pipeline.schedule.value}, which runs each backward in two halves",
            wanted="one that doesn't: a compiled backward is one piece",
            remedy="plan with --schedule 1f1b, gpipe or interleaved, or leave out compile",
        )


def check_program(program: fx.GraphModule) -> None:
    """Raise InputError for a program that can't be compiled."""
    if moves(program.graph):
        raise InputError(
            where="compile",
            found="a plan that offloads activations",
            wanted="one that keeps them, or computes them again: a compiled program saves in one piece",
            remedy="plan with --offload none, or leave out compile",
        )
    if any(map(is_fetch, program.graph.nodes)):
        raise InputError(
            where="compile",
            found="a plan whose weights lie in the host's memory",
            wanted="one that keeps them on the device, in whose memory a compiled program reads them",
            remedy="plan with --offload none, or leave out compile",
        )
    drawn = [str(node.target) for node in _drawing(program)]
    if len(drawn) > 1:
        raise InputError(
            where="compile",
            found=f"several draws on gathered operands: {', '.join(sorted(set(drawn)))}",
            wanted="at most one, as the compiler may turn them around, on each rank otherwise",
            remedy="draw by dropout, or leave out compile",
        )


def _drawing(program: fx.GraphModule) -> list[fx.Node]:
    """Draws whose order is not kept, in a program whose ranks have to draw alike."""
    graphs = [module.graph for module in program.modules() if isinstance(module, fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    spaces = [getattr(node.target, "namespace", "") for node in nodes]
    if "autopar" not in spaces:
        return []
    return [node for node, space in zip(nodes, spaces, strict=True) if space != "autopar" and is_draw(node)]
