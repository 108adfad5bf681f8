"""From a model to one rank's executable: trace, search, rewrite, defer the gradient sums.

Rank 0 plans and sends the plan; every rank rewrites its own program from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.core.fingerprint import fingerprint_of
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.outputs import Outputs
from autopar.core.uncollected import uncollected
from autopar.errors import InputError
from autopar.planning.asked.request import Request
from autopar.planning.given_plan import as_stages_lie
from autopar.planning.graphs.fitting import as_planned, check_fits
from autopar.planning.graphs.known_plans import kept, resized
from autopar.planning.losses import as_known, other_form
from autopar.planning.planner import Planner
from autopar.results.plan.announce import Announcer
from autopar.results.plan.plan import Plan
from autopar.rewrite.build import build, build_stages
from autopar.rewrite.overlap import room_of, starts
from autopar.rewrite.unequal_micro_batches import check_plan, check_programs
from autopar.runtime.collectives.random import drawing_apart
from autopar.runtime.executable import Executable, PinnedLayouts, StagedExecutable
from autopar.sharding.sample_dims import samples_elsewhere
from autopar.sharding.strategies import dims_of
from autopar.trace.call.call_signature import leaves_out_loss
from autopar.trace.export import Traced
from autopar.trace.forms.simplify import with_masks_by_dims, without_gradients
from autopar.trace.reads.numbers import require_known
from autopar.units import show_bytes


@dataclass(frozen=True, slots=True)
class Compiler(Planner):
    """Plans the calls of one parallel module, and makes their executables.

    `plan` is the plan of the first call, if it is one of its graph; with `plan_binds` another first call is
    refused, otherwise it is planned like any. With `traced` the plan is one of that graph, whatever the
    model; `shorter` is then the graph of shorter micro-batches, and exact masks of any graph are drawn in the
    order of dims, as in proofs. Rank 0 tells `announce` what its plans note.
    """

    exact_random: bool = False
    plan: Plan | None = None
    plan_binds: bool = False
    traced: Traced | None = None
    shorter: Traced | None = None
    announce: Announcer | None = None

    @uncollected()
    def __call__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        training: bool,
        pinned: PinnedLayouts | None,
        step: bool = False,
        place: int = 0,
        known: Sequence[Plan] = (),
    ) -> Executable | StagedExecutable:
        """Compile the program of this rank for one kind of call; collective.

        A plan that is `known` is kept for a graph that differs from its own in numbers or sizes alone.
        """
        request = self._request(pinned, training=training, step=step)
        if self.traced is not None and pinned is None:
            traced = self.traced
        elif place and self.shorter is not None:
            traced = self.shorter
        elif step:
            count, staged = request.micro_batches, request.pipeline_ranks > 1 or request.micro_batches > 1
            traced = self.trace_part(model, args, kwargs, count, staged=staged, place=place)
        else:
            traced = self.trace_call(model, args, kwargs, first=pinned is None)
        if self.traced is not None:
            traced = replace(traced, graph=with_masks_by_dims(traced.graph))
        if request.local_inputs:
            check_rows(traced.graph)
            check_undecided(traced.graph)
        if not training:
            traced = replace(traced, graph=without_gradients(traced.graph))
        traced = as_known(traced, known)
        plan = self.there_already(traced, known, pinned, request)
        rank, device = dist.get_rank(), self.device()
        if plan is None:
            require_known()
            # Who measures draws; what the user draws next is alike on all ranks.
            with drawing_apart(device):
                plan = resized(traced.graph, known, self.cluster, request) or self.agree(traced, request)
        traced = as_planned(traced, plan)
        if self.announce is not None and rank == 0:
            self.announce(plan.notes)
        if not plan.pipeline.is_staged:
            room = room_of(request.cap(self.cluster), plan.peak_bytes) if request.overlap else 0.0
            whole = build(traced, plan, rank=rank, device=device, exact_random=self.exact_random, room=room)
            self.tell_of_overlap(request, whole, room)
            return whole
        made = build_stages(traced, plan, rank=rank, device=device, exact_random=self.exact_random)
        if not step:
            return made
        shorter = self.trace_shorter(model, args, kwargs, traced, plan, training=training)
        if shorter is None:
            return made
        rest = build_stages(shorter, plan, rank=rank, device=device, exact_random=self.exact_random)
        check_programs(made, rest)
        return replace(made, shorter=rest.stages)

    def tell_of_overlap(self, request: Request, made: Executable, room: float) -> None:
        """Note where exchanges were to start early, and none does for want of memory."""
        wanted = request.overlap and not math.isinf(room) and not starts(made.module.graph)
        if self.announce is None or dist.get_rank() or not wanted:
            return
        cap, peak = request.cap(self.cluster) or 0, made.plan.peak_bytes
        self.announce([early_note(cap, peak, room)])

    def given(self, traced: Traced) -> Plan | None:
        """The plan that is there already, if it is for this graph; raises InputError if it has to be."""
        if self.plan is None or self.traced is not None:
            return self.plan
        here = fingerprint_of(as_planned(traced, self.plan).graph)
        if not self.plan_binds and here.difference(self.plan.graph) is not None:
            return None
        check_fits(self.plan, traced)  # it may come from a file
        return self.plan

    def there_already(
        self, traced: Traced, known: Sequence[Plan], pinned: PinnedLayouts | None, request: Request
    ) -> Plan | None:
        """A plan that needs no search: a given one, that of stages on unlike meshes, or a known one."""
        if pinned is None:
            return self.given(traced) or self.kept(traced, known)
        if pinned.plan is not None:
            return as_stages_lie(pinned.plan, traced.graph, request.micro_batches)
        return self.kept(traced, known)

    def kept(self, traced: Traced, known: Sequence[Plan]) -> Plan | None:
        """A known plan of the graph, or of it with its losses in pieces, but for numbers."""
        pieces = other_form(traced.graph, self.request, self.cluster)
        return kept(traced.graph, known) or (kept(pieces, known) if pieces is not None else None)

    def _request(self, pinned: PinnedLayouts | None, *, training: bool, step: bool) -> Request:
        """Request to the search for one kind of call."""
        request = replace(self.request, training=training)
        if pinned is not None:
            request = replace(
                request,
                mesh=pinned.mesh,
                stored=pinned.stored,
                user_layouts=pinned.users,
                on_host=pinned.on_host,
            )
        if pinned is not None and pinned.pipeline.is_staged:
            request = replace(
                request,
                stages_of_uses=pinned.stages_of_uses,
                schedule=pinned.pipeline.schedule,
                hosts=pinned.pipeline.hosts,
            )
            return request if step else replace(request, micro_batches=1, relay=True, outputs=Outputs.GLOBAL)
        return request if step else replace(request, micro_batches=1, pipeline_ranks=1)

    def trace_call(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, first: bool
    ) -> Traced:
        """The graph of a call that is no step; one after the first that leaves out what `loss_fn` requires is
        of the model alone."""
        alone = not first and leaves_out_loss(model, self.loss_fn, args, kwargs)
        return (replace(self, loss_fn=None) if alone else self).trace_whole(model, args, kwargs)

    def trace_shorter(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        traced: Traced,
        plan: Plan,
        *,
        training: bool = True,
    ) -> Traced | None:
        """The graph of the shorter micro-batches, None where all are of the length of `traced`, the first;
        raises InputError where `plan`, which has stages, doesn't hold for it."""
        count = plan.pipeline.micro_batches
        if not plan.pipeline.is_staged or traced.cutting is None or traced.cutting.size % count == 0:
            return None
        shorter = self.shorter or self.trace_part(model, args, kwargs, count, staged=True, place=-1)
        if not training:
            shorter = replace(shorter, graph=without_gradients(shorter.graph))
        shorter = as_planned(shorter, plan)
        for program in plan.all_programs:
            check_plan(program, traced.graph, shorter.graph)
        return shorter

    def device(self) -> torch.device:
        if self.cluster.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def early_note(cap: int, peak: int, room: float) -> str:
    """A note that a plan's peak leaves no room under the cap for exchanges that start early."""
    left, each = (show_bytes(max(0, int(nbytes))) for nbytes in (cap - peak, room))
    return (
        f"overlap: no exchange starts early, as the plan's peak of {show_bytes(peak)} leaves {left} of the "
        f"cap of {show_bytes(cap)}, {each} for each kind of exchange: raise --memory, or leave out --overlap"
    )


def check_rows(graph: Graph) -> None:
    """Raise InputError for a graph whose samples aren't the rows of its first input. Ranks load some of
    those with local inputs."""
    found = samples_elsewhere(graph, dims_of(graph, Mesh((1,))))
    if found is not None:
        item, dim = found
        raise InputError(
            where='parallelize with inputs="local"',
            found=f"samples in dim {dim} of {item.target} {list(item.spec.shape)}",
            wanted="samples in dim 0 of the first input, of whose rows each rank loads some",
            remedy='pass samples first (batch_first=True), or every rank the whole batch by inputs="global"',
        )


def check_undecided(graph: Graph) -> None:
    """Raise InputError where values of a batch decide what is computed: ranks know their own alone."""
    if graph.decided_by is not None:
        raise InputError(
            where=graph.decided_by,
            found='values of the batch that decide what is computed, with inputs="local"',
            wanted="a program for all samples, of which each rank passes some",
            remedy='pass the whole batch on every rank (inputs="global"), or decide before the call',
        )
