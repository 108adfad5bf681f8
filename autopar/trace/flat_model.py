"""A model as a function of flat tensors to flat tensors, as torch.export takes it.

The loss is inside. What forward leaves in the model, or outside, is undone, and told beside its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.core.structure import Structure
from autopar.errors import InputError, TraceError, cut_text
from autopar.torch_seams import pytree
from autopar.trace.backwards.taken_gradients import TakenGradients
from autopar.trace.call.call_signature import (
    Arguments,
    LossFunction,
    Results,
    find_loss,
    flatten_results,
    loss_notes,
    refuse_changed,
    refuse_reshaped,
    split_for_loss,
)
from autopar.trace.forward.autocast import Autocast
from autopar.trace.forward.constant_regions import ConstantRegions
from autopar.trace.forward.data_writes import end_forward
from autopar.trace.forward.devices import devices_of
from autopar.trace.forward.refusals import FORWARD
from autopar.trace.reads.attribute_reads import Reads, current
from autopar.trace.reads.numbers import Number, require_none
from autopar.trace.state.eager_answers import Answers, heard
from autopar.trace.state.left_outside import Outside
from autopar.trace.state.module_state import NewState, attributes_of, buffers_of, left_in, write_back
from autopar.trace.state.shared_memory import ByName, ModelMemory, OthersLearn, held_by_name
from autopar.trace.values.asked_inputs import AskedInputs, Sources
from autopar.trace.values.input_values import InputValues
from autopar.trace.values.structure import Evaluating, holding


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call that is traced, and what is known of its model's memory; its forward's answers and the gradients
    that it takes are noted in turn."""

    model: nn.Module
    arguments: Arguments
    loss_fn: LossFunction | None
    loss_only: bool
    autocast: Autocast
    known: ModelMemory
    answers: Answers
    taken: TakenGradients


class ForwardFindings(NamedTuple):
    """Findings of forward beside its tensors: the loss's position, refusals of tensors that it leaves
    somewhere, notes of a plan on that, a line where values of inputs decide, and changes that it makes once
    outside."""

    results: Results
    loss_index: int | None
    cached: tuple[TraceError, ...]
    notes: tuple[str, ...]
    decided_by: str | None
    once: tuple[str, ...]


class FlatModel(nn.Module):
    """The model as a function of flat tensors to flat tensors, the loss first."""

    def __init__(
        self,
        call: TracedCall,
        *,
        structure: Structure,
        evaluates: bool,
        by_name: bool,
        record: Callable[[ForwardFindings], None],
        enter: Callable[[str], None],
        blame: Callable[[Sources], None],
    ) -> None:
        super().__init__()
        self.call = call
        self.constant = structure.users
        self.values = values_of(call.model, call.arguments, structure)
        self.fixed = {name: self.values[name] for name in structure.buffers}
        self.evaluating = Evaluating(self.values) if evaluates else nullcontext()
        self.model, self.loss_fn = call.model, call.loss_fn  # whose tensors are this module's
        self.by_name = by_name
        self.record, self.enter, self.blame = record, enter, blame
        self.training = call.model.training

    def let_go(self) -> None:
        """Keep the loss alone, which is guarded as long as a program is there."""
        del self.call, self.values, self.fixed, self.evaluating

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(tensors)
        paths = enumerate(self.call.arguments.paths)
        whole = [self.values[path] if place in self.constant else next(rest) for place, path in paths]
        fakes = {place: fake for place, fake in enumerate(whole) if place not in self.constant}
        with holding(self.model, self.fixed), (asked := AskedInputs(fakes)), self.evaluating:
            try:
                return self._forward(whole, fakes)
            except Exception as cause:
                self.blame(asked.at_fault(cause))
                raise

    def _forward(self, whole: list[torch.Tensor], fakes: dict[int, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        called = self.call.arguments.rebuild(tuple(whole))
        passed = pytree.tree_leaves(called)
        buffers, attributes, made = buffers_of(self.model), attributes_of(self.model), NewState(self.model)
        reads = current()
        reads.loss = self.loss_fn
        reads.roots = (self.model, self.loss_fn, *self.call.arguments.constants)
        reads.see(*reads.roots)
        own = {id(value) for module in self.model.modules() for value in vars(module).values()}
        passed_objects = (item for item in self.call.arguments.constants if not isinstance(item, Number))
        own |= {id(getattr(item, "__dict__", None)) for item in passed_objects}  # by refuse_filled
        outside = Outside(reads.reachable, own)
        try:
            output = self._output(called, fakes, reads)
            refuse_changed(self.call.arguments, passed, called)
            refuse_reshaped(self.call.arguments, whole)
            beside = [*made.check(), *outside.left(reads.has)]
        finally:
            outside.restore()
            made.restore()
        leaves, results = flatten_results(output)
        found = find_loss(output)
        place = next((i for i, leaf in enumerate(leaves) if leaf is found), None)
        left = left_in(self.model, attributes, reads)
        reads.left, reads.inside = left.values, tuple(outside.inside)
        require_none("a number that forward returns or leaves", results.constants, [*left.values.values()])
        line = next((item.line for item in reads.decisions if item.of_values), None)
        notes = (*left.notes, *loss_notes(output, is_loss=self.loss_fn is not None))
        cached = [*left.cached, *beside]
        end_forward([*leaves, *(item.tensor for item in cached)])
        refusals = tuple(item.refusal for item in cached)
        self.record(ForwardFindings(results, place, refusals, notes, line, tuple(outside.once)))
        write_back(buffers)
        return (*leaves, *(item.tensor for item in cached))

    def _output(
        self, called: tuple[tuple[Any, ...], dict[str, Any]], fakes: dict[int, torch.Tensor], reads: Reads
    ) -> Any:
        """Output of the model for a call, its loss, or both."""
        args, kwargs, loss_args, loss_kwargs = split_for_loss(self.model, self.loss_fn, *called)
        by_name = (
            ByName(self.call.known, held_by_name(self.model))
            if self.by_name
            else OthersLearn(self.call.known)
        )
        self.enter(FORWARD)
        model, given = self.model, self.call.arguments.tensors  # read before reads are recorded
        values = InputValues(fakes, given, reads)
        with reads.on(), by_name, values, heard(self.call.answers), self.call.taken, ConstantRegions():
            output = model(*args, **kwargs)
        if self.loss_fn is None:
            return output
        self.enter(f"the loss {_name(self.loss_fn)}")
        with reads.on(), by_name, values, heard(self.call.answers), self.call.taken, ConstantRegions():
            loss = self.loss_fn(output, *loss_args, **loss_kwargs)
        _check_loss_result(self.loss_fn, loss)
        return loss if self.call.loss_only else {"loss": loss, "output": output}


def values_of(model: nn.Module, arguments: Arguments, structure: Structure) -> dict[str, torch.Tensor]:
    """Copies of what is structure, by path or name: a program keeps them, whatever becomes of the tensors."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    users = {arguments.paths[place]: arguments.tensors[place] for place in sorted(structure.users)}
    named = users | {name: buffers[name] for name in sorted(structure.buffers)}
    _require_values(named)
    where = devices_of(model, arguments)[0]
    where = torch.device("cpu") if where.type == "meta" else where
    return {name: tensor.detach().to(where, copy=True) for name, tensor in named.items()}


def _require_values(named: Mapping[str, torch.Tensor]) -> None:
    """Raise InputError for structure on the meta device, or that learns."""
    bad = [name for name, tensor in named.items() if tensor.is_meta or tensor.requires_grad]
    if bad:
        raise InputError(
            where=f"structure {bad[0]}",
            found="a tensor that learns" if not named[bad[0]].is_meta else "a tensor without values",
            wanted="the values of the graph, on which the plan depends",
            remedy="pass the real tensor, detached",
        )


def _name(loss_fn: LossFunction) -> str:
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)


def _check_loss_result(loss_fn: LossFunction, loss: object) -> None:
    """Raise InputError for a loss that gives nothing to start backward from."""
    if not flatten_results(loss)[0]:
        shown = "a number" if isinstance(loss, (int, float, torch.SymFloat, torch.SymInt)) else repr(loss)
        raise InputError(
            where=f"loss_fn {_name(loss_fn)}",
            found=f"{cut_text(shown, 100)} as its result",
            wanted="a tensor, from which backward starts",
            remedy="return the loss itself, without .item() or float()",
        )
