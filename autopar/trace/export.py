"""nn.Module -> Graph, by torch.export at the pre-dispatch ATen level.

What an exported graph hides is made plain here, once, so that no later pass meets it: in-place
operators become functional ones, writes to buffers become the graph's `writes` (so do new tensors in
their places), tied parameters become one input, regions without gradient and checkpointed ones are
inlined, guards and assertions are dropped (the wrapper checks its inputs itself).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.core.cutting import Count, Cutting
from autopar.core.fingerprint import fingerprint_of
from autopar.core.graph import Graph, may_learn
from autopar.core.structure import Structure
from autopar.core.uncollected import uncollected
from autopar.errors import AutoparError, InputError, TraceError, ValuesAskedError
from autopar.torch_seams.tracing import modules_themselves, without_torchs_words
from autopar.trace import flat_model
from autopar.trace.backwards.custom_backwards import caught
from autopar.trace.backwards.taken_gradients import TakenGradients, followed
from autopar.trace.call.call_signature import (
    LOSS_ALONE,
    Arguments,
    LossFunction,
    Results,
    flatten_arguments,
    refuse_filled,
    refuse_sparse,
)
from autopar.trace.call.user_source import all_of_forward
from autopar.trace.experts.fused_experts import with_routed_experts
from autopar.trace.experts.looped_experts import with_looped_experts
from autopar.trace.flat_model import FlatModel, ForwardFindings, TracedCall
from autopar.trace.forms.simplify import only_loss, without_dead_code
from autopar.trace.forward.autocast import OFF, Autocast, autocast_set, traced_as, tracing_under
from autopar.trace.forward.checkpoint_regions import inlined, written_again
from autopar.trace.forward.devices import beside, devices_of, on_one_device
from autopar.trace.forward.foreign_random import without_draws
from autopar.trace.forward.inference_mode import counting_writes, outside_inference_mode
from autopar.trace.forward.refusals import FORWARD, refusal
from autopar.trace.forward.torch_checks import traceable
from autopar.trace.reads.attribute_reads import current
from autopar.trace.rewrites.constant_folding import folded
from autopar.trace.rewrites.grouped_heads import with_grouped_heads
from autopar.trace.rewrites.known_masks import with_known_masks
from autopar.trace.rewrites.losses_in_pieces import with_losses_in_pieces
from autopar.trace.rewrites.routed_products import with_routed_products
from autopar.trace.state.eager_answers import NOTE, Answers
from autopar.trace.state.module_state import (
    Attributes,
    attributes_of,
    check_cached,
)
from autopar.trace.state.shared_memory import ModelMemory, stale
from autopar.trace.values.asked_inputs import Sources
from autopar.trace.values.structure import (
    OwnNames,
    asked_of,
    edge_lists,
    may_be_edges,
    own_names,
    parts_of,
    refuse_sparse_operators,
    said_structure,
    sparse_structure,
)
from autopar.trace.write.graph_builder import GraphBuilder

# Every call of a fake tensor looks this up: found while autopar is imported, it is there for all threads.
_FOUND_EARLY = torch.ops.prims.device_put.default


@dataclass(frozen=True, slots=True)
class Traced:
    """A graph and how to call it: `arguments` of the example call, `results` of the output.

    Of a micro-batch `cutting` says how the batch was cut. Its graph gives then what adds up to the batch's
    loss; the model's own loss of it divides that by its `own` count, or, `by_numbers`, by its own length.
    """

    graph: Graph
    arguments: Arguments
    results: Results
    cutting: Cutting | None = None
    own: Count | None = None
    by_numbers: bool = False
    structure: Structure = Structure()
    evaluates: bool = False  # whether integers of constants were evaluated
    asked: Structure = Structure()  # the part of it on whose values Python numbers or sizes depend
    once: tuple[str, ...] = ()  # what forward has changed outside of the model
    in_pieces: bool = False  # whether last products and their losses are

    def loss_alone(self) -> Traced:
        """A copy with the loss for its only output, as a step by `train_step` has it.

        Raises InputError if there is none.
        """
        alone = replace(self, graph=only_loss(self.graph), results=LOSS_ALONE)
        return alone.with_pieces() if self.in_pieces else alone

    def with_pieces(self) -> Traced:
        """A copy whose last products and their losses are in pieces."""
        return replace(self, graph=with_losses_in_pieces(self.graph), in_pieces=True)


@uncollected()
@outside_inference_mode()
def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    loss_only: bool = True,
    static: Sequence[str] = (),
    autocast: Autocast | None = None,
    in_pieces: bool = False,
) -> Traced:
    """Trace `model(*args, **kwargs)` in its present mode (train or eval).

    With `loss_fn` the loss is inside the graph; `loss_only` says whether the model's own output
    leaves the graph beside it. What tensors a loss that is a module holds are constants of the graph, and so
    is structure: what is named `static`, and edge lists.
    `autocast` is the state around the call, for the kind of device that the program runs on; without it the
    state that CPUs are in now. `in_pieces` are losses whose logits nobody else reads, if it is true.
    Raises TraceError naming the user's line, and InputError for a loss that learns and for tensors that are
    sparse or nested.
    """
    check_dense(model)
    _check_names(model)
    known, arguments = ModelMemory(model), flatten_arguments(args, kwargs or {})
    arguments = replace(arguments, tensors=counting_writes(arguments.tensors))
    _check_loss(model, loss_fn, known)
    autocast = autocast or Autocast.now("cpu")
    # Inputs on the meta device can't be asked what eager training would ask them.
    answers = Answers(eager=not any(tensor.is_meta for tensor in arguments.tensors))
    call = TracedCall(model, arguments, loss_fn, loss_only, autocast, known, answers, TakenGradients())
    trace_as = partial(_trace, call)
    own = own_names(model, loss_fn, arguments)
    said = said_structure(static, model, arguments, own) | sparse_structure(model, arguments)
    decisions = current().decisions
    count = len(decisions)
    try:
        traced = _with_structure(trace_as, model, arguments, said, own)
    except TraceError as error:
        if not (answers.eager and answers.asked):
            raise
        del decisions[count:]
        answers.eager = False
        try:
            traced = _with_structure(trace_as, model, arguments, said, own)
        except TraceError:
            raise error from error.__cause__
    if known.met_in(traced.graph):
        traced = trace_as(structure=traced.structure, evaluates=traced.evaluates, by_name=True)
        if (met := known.met_in(traced.graph)) is not None:
            raise stale(*met)
    if traced.once:
        again = trace_as(structure=traced.structure, evaluates=traced.evaluates)
        if fingerprint_of(again.graph) != fingerprint_of(traced.graph):
            raise _does_otherwise(traced.once[0])
    return traced.with_pieces() if in_pieces else traced


def _does_otherwise(where: str) -> TraceError:
    return TraceError(
        where=where,
        found="a forward that changes it, and does otherwise at its next call",
        wanted="the same operators at every call",
        remedy="call the model once before it is planned, or keep what changes in a buffer",
    )


def _with_structure(
    trace_as: Callable[..., Traced], model: nn.Module, arguments: Arguments, said: Structure, own: OwnNames
) -> Traced:
    """Trace with what is said to be structure and what is seen to be: edge lists.

    What is refused with these is what is in the way; without any it is what was refused before."""
    try:
        traced = trace_as(structure=said, evaluates=bool(said))
    except ValuesAskedError as error:
        seen = may_be_edges(arguments, model)
        try:
            traced = trace_as(structure=said | seen, evaluates=True)
        except TraceError as second:
            refused = second if seen else error
            if isinstance(refused, ValuesAskedError):
                _name_way_out(refused, arguments, said | seen, own)
            raise refused from refused.__cause__
        if not seen <= traced.asked | said:
            traced = trace_as(structure=said | traced.asked, evaluates=True)
    more = edge_lists(traced.graph, arguments)
    has_sparse = any(spec.layout is not torch.strided for spec in traced.graph.specs.values())
    if not more <= traced.structure or (has_sparse and not traced.evaluates):
        traced = trace_as(structure=traced.structure | more, evaluates=True)
    refuse_sparse_operators(traced.graph)
    return traced


def _name_way_out(error: ValuesAskedError, arguments: Arguments, tried: Structure, own: OwnNames) -> None:
    """Tell how inputs at fault become structure, if all are integers or flags beside what was tried."""
    given = {path: (place, arguments.tensors[place]) for place, path in enumerate(arguments.paths)}
    whole = [
        own.get(path, path)
        for path, (place, tensor) in given.items()
        if not may_learn(tensor.dtype) and tensor.dim() and place not in tried.users
        if path in error.inputs and (path in own or error.where.startswith("the loss"))
    ]
    if whole and len(whole) == len(error.inputs):
        names = ", ".join(f'"{name}"' for name in whole)
        error.add_remedy(f"say static=({names},) if that is a graph's structure, the same at each call")


def _trace(call: TracedCall, **options: Any) -> Traced:
    """Trace once, and again by the parts of operators if forward is then found to take gradients."""
    count = len(current().decisions)
    if not call.taken.found:
        try:
            traced = _trace_once(call, **options)
        except AutoparError:
            if not call.taken.found:
                raise
        if not call.taken.found:
            return traced
        del current().decisions[count:]
    with followed():
        return _trace_once(call, **options)


def _trace_once(call: TracedCall, *, structure: Structure, evaluates: bool, by_name: bool = False) -> Traced:
    """Trace once with this `structure`, if any; where it `evaluates`, so are integers of constants.
    With `by_name` what is known of the model's memory is taken for what the model holds by its name."""
    seen: list[ForwardFindings] = []  # torch.export undoes what forward does to attributes
    parts, notes, blamed = [FORWARD], list[str](), [Sources()]
    flat = FlatModel(
        call,
        structure=structure,
        evaluates=evaluates,
        by_name=by_name,
        record=seen.append,
        enter=parts.append,
        blame=blamed.append,
    )
    model, arguments = call.model, call.arguments
    devices = devices_of(model, arguments)
    traced = tuple(
        beside(item, devices) for place, item in enumerate(arguments.tensors) if place not in structure.users
    )
    device = traced_as(devices[0].type)
    held = Attributes(module for module in flat.modules() if module is not flat)
    try:
        with (
            inlined() as again,
            all_of_forward(str(flat_model.__file__)),
            modules_themselves(),
            caught(model),
            traceable(notes),
            without_torchs_words(),
            warnings.catch_warnings(),
            tracing_under(call.autocast, device),
        ):
            warnings.filterwarnings(
                "ignore", "The tensor attribute.* assigned during export"
            )  # see module_state
            export = partial(torch.export.export, flat, _distinct(traced), strict=False)
            exported = without_draws(partial(on_one_device, export, devices))
    except AutoparError:
        raise
    except Exception as cause:  # torch.export raises anything that the user's forward raises
        refused = refusal(cause, parts[-1])
        if isinstance(refused, ValuesAskedError):
            refused.inputs = frozenset(arguments.paths[place] for place in blamed[-1])
        raise refused from cause
    finally:
        held.restore()
    refuse_filled(arguments)
    results, loss_index, cached, left, decided_by, _ = seen[-1]
    once = tuple(name for item in seen for name in item.once)
    builder = GraphBuilder(
        model,
        arguments,
        exported,
        known=call.known,
        autocast=call.autocast,
        traced_on=device,
        structure=structure.users,
    )
    with autocast_set(OFF):
        graph = written_again(builder.build(loss_index=loss_index, dropped=results.dropped), again)
    for node in exported.graph.nodes:
        node.meta.clear()  # what torch holds on to may be a constant as large as a graph
    count = len(graph.outputs) - len(cached)
    if cached:
        check_cached(model, graph, graph.outputs[count:], cached)
        graph = without_dead_code(replace(graph, outputs=graph.outputs[:count]))
    notes += [*graph.notes, *left, *([NOTE] if call.answers.asked and not call.answers.eager else ())]
    asked, values = asked_of(structure, flat.evaluating, arguments), [*flat.values.values()]
    flat.let_go()
    nbytes = sum(part.nbytes for tensor in values for part in parts_of(tensor))
    graph = replace(graph, notes=tuple(notes), decided_by=decided_by, beside=nbytes)
    graph = with_looped_experts(with_grouped_heads(with_known_masks(graph)), builder.kept.returned)
    graph = with_routed_products(folded(graph))
    graph = with_routed_experts(graph)
    return Traced(graph, arguments, results, structure=structure, asked=asked, evaluates=evaluates, once=once)


def _check_loss(model: nn.Module, loss_fn: LossFunction | None, known: ModelMemory) -> None:
    """Raise InputError for parameters that only the loss has: no optimizer of the model would see them."""
    if not isinstance(loss_fn, nn.Module):
        return
    own = [(key, item) for key, item in loss_fn.named_parameters() if known.name_of(item) is None]
    found = [key for key, item in own if item.requires_grad]
    if found:
        raise InputError(
            where=f"loss_fn {type(loss_fn).__name__}",
            found=f"parameters that learn: {', '.join(found)}",
            wanted="all of them in the model, where optimizers and checkpoints find them",
            remedy="let the model hold this loss and return it, or freeze them by requires_grad_(False)",
        )


def check_dense(model: nn.Module) -> None:
    """Raise InputError for sparse and nested tensors that the model holds."""
    plain = [(path, held.value) for path, held in attributes_of(model).items()]
    refuse_sparse(
        (f"{kind} {path}", tensor)
        for kind, tensors in (
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
            ("attribute", plain),
        )
        for path, tensor in tensors
        if isinstance(tensor, torch.Tensor)
    )


def _check_names(model: nn.Module) -> None:
    """Raise InputError for a root that names parameters otherwise than its modules do, as wrappers may."""
    named = {id(item): name for name, item in model.named_parameters()}
    held = {id(item): name for name, item in nn.Module.named_parameters(model)}
    found = next((key for key in held if named.get(key) != held[key]), None)
    if found is not None:
        raise InputError(
            where=f"the model, a {type(model).__name__}",
            found=f"{named.get(found, 'no name')} for its parameter {held[found]}",
            wanted="the names that its modules have",
            remedy="pass the module that it wraps, or wrap modules below it (apply_activation_checkpointing)",
        )


def _distinct(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Each tensor as an object of its own: of one that is passed twice, export would know one input only,
    and a later call may pass two."""
    seen: set[int] = set()
    own: list[torch.Tensor] = []
    for tensor in tensors:
        again = id(tensor) in seen
        seen.add(id(tensor))
        own.append(tensor.detach().requires_grad_(tensor.requires_grad) if again else tensor)
    return tuple(own)
