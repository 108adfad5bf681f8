"""What one rank needs to run its program: the seam between rewriting and running."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.core.cutting import Cutting
from autopar.core.graph import InputKind, TensorSpec
from autopar.core.mesh import Mesh
from autopar.core.part import Part
from autopar.core.pipeline import Pipeline
from autopar.core.placement import Layout
from autopar.core.samples import Samples
from autopar.core.stage_borders import StageBorders
from autopar.core.structure import Structure
from autopar.results.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class GatherCall:
    """A registered gathering operator, by name, and its arguments after the tensor: group key, dim, blocks,
    sizes."""

    operator: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class InputPart:
    """One placeholder of the program: which tensor it takes and which part of it.

    `target` is the qualified name in the model (parameters, buffers), the constant's name, or the
    path of a user input; `aliases` are further names of a tied parameter. `sync` is the group key
    over which the parameter's gradient is summed in buckets after backward; None if the program
    itself does all that is needed. A parameter with `gathers` is gathered by them once a step, ahead of the
    program, and its gradient, once it has added up, scattered the other way round. Ranks sum in `reduce`,
    None is the gradient's own dtype. A parameter that is `on_host` lies in the host's memory.
    """

    name: str
    kind: InputKind
    target: str
    spec: TensorSpec  # of the full tensor
    layout: Layout
    part: Part
    aliases: tuple[str, ...] = ()
    mutated: bool = False
    sync: str | None = None
    gathers: tuple[GatherCall, ...] = ()
    reduce: torch.dtype | None = None
    position: int = -1  # among the call's flat tensors, for user inputs
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class PinnedLayouts:
    """Constraints on later programs: the mesh, and the layouts that tensors already have.

    `stored` are parameters and buffers, by their names in the model, `users` user inputs, by path; those that
    are `on_host` lie in the host's memory;
    `stages_of_uses` are those of each use of each parameter and buffer, where `pipeline` has stages.
    """

    mesh: Mesh
    stored: Mapping[str, Layout]
    users: Mapping[str, Layout]
    stages_of_uses: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pipeline: Pipeline = Pipeline()
    plan: Plan | None = None  # with stages on unlike meshes, whose later programs follow it
    on_host: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class OutputPart:
    """Output of a program: this rank's part, and the ranks over which parts make up the whole, None where
    each rank has the whole."""

    name: str
    spec: TensorSpec
    part: Part
    key: str | None


@dataclass(frozen=True, slots=True)
class Executable:
    """One rank's program for one kind of call.

    `module` takes the local tensors in the order of `inputs` and returns its part of each of `outputs`,
    followed by the new values of the inputs named in `writes`.
    `rebuild` makes the model's output from the outputs; `plan` prints the decision. `layers` says
    which module of the model each node of the program (by name) belongs to, for printing. `samples` are
    the rows that each rank loads where ranks pass their own; None if no input has dims. `cutting` says of
    which part of a batch it is the program, None of one that is whole; `structure` is what it is made for.

    The program of a pipeline stage takes the tensors `received` from the stage before, ahead of its
    `inputs`, and returns those `sent` to the next one, ahead of its outputs.
    """

    mesh: Mesh
    module: fx.GraphModule
    inputs: tuple[InputPart, ...]
    outputs: tuple[OutputPart, ...]
    writes: tuple[str, ...]
    rebuild: Callable[[tuple[Tensor, ...]], Any]
    groups: tuple[str, ...]  # every group key that the module or the gradient sync uses
    constants: dict[str, Tensor]
    plan: Plan
    layers: Mapping[str, str] = field(default_factory=dict)
    samples: Samples | None = None
    cutting: Cutting | None = None
    structure: Structure = Structure()
    stage: int = 0
    received: tuple[TensorSpec, ...] = ()
    sent: tuple[TensorSpec, ...] = ()
    borders: StageBorders | None = None  # with stages on unlike meshes; else a rank sends to one of its place


@dataclass(frozen=True, slots=True)
class StagedExecutable:
    """One rank's programs of the stages that it holds.

    `inputs` are those of the whole graph; `holders` says which pipeline ranks have each parameter and
    buffer that is used, by target (several have a tied weight), and `stages_of_uses` the stage of each use.
    `outputs` are the last stage's, global on every rank; of a step that is the loss alone, and `cutting` says
    how a batch is cut into micro-batches, whose losses add up. `shorter` are the stages' programs for
    micro-batches that are a sample shorter than the first, empty where all are alike.
    """

    mesh: Mesh  # of one stage
    pipeline: Pipeline
    stages: tuple[Executable, ...]
    inputs: tuple[InputPart, ...]
    holders: Mapping[str, tuple[int, ...]]
    stages_of_uses: Mapping[str, tuple[int, ...]]
    groups: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    cutting: Cutting | None
    plan: Plan
    shorter: tuple[Executable, ...] = ()
    structure: Structure = Structure()
