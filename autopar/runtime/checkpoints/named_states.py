"""State dicts by names, as `torch.distributed.checkpoint.state_dict` gives and takes them.

get_model_state_dict, get_optimizer_state_dict    chunks in serial order, or full tensors if asked for
set_model_state_dict, set_optimizer_state_dict    either, from any plan or the serial model

Torch's functions all come to the same four of its own, which know what was asked for. For models with
parallel modules in them these are ours: torch's would look for names on one rank that other stages have,
and lay full tensors by chunks. Everything else is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.errors import InputError
from autopar.runtime.checkpoints.optimizer_states import NAMES, PARAMETERS, Member, Slots, serial_groups
from autopar.runtime.checkpoints.optimizer_values import mapped
from autopar.runtime.collectives.roll_call import collective
from autopar.runtime.optimizers.optimizers import state_only
from autopar.runtime.tree.stored import sharded_state
from autopar.runtime.tree.user_tree import UserTree, placed_trees
from autopar.torch_seams.replaced import Wrap
from autopar.torch_seams.state_dicts import (
    flattened,
    gathered,
    init_state,
    model_loaded,
    model_saved,
    optimizers_loaded,
    optimizers_saved,
)


def speak_by_names() -> None:
    """Make torch's functions for state dicts by names accept parallel modules from now on."""
    model_saved.wrap(_instead(_get_model))
    model_loaded.wrap(_instead(_set_model))
    optimizers_saved.wrap(_instead(_get_optimizers))
    optimizers_loaded.wrap(_instead(_set_optimizers))


def _instead(ours: Any) -> Wrap:
    """A function that is ours for models with parallel modules, and theirs for all others."""

    def wrap(theirs: Callable[..., Any]) -> Callable[..., Any]:
        def function(model: nn.Module, *arguments: Any, info: Any = None) -> Any:
            arguments = arguments if info is None else (*arguments, info)
            naming = Naming.of(model)
            if not naming.prefixes:
                return theirs(model, *arguments)
            with torch.no_grad():
                return ours(theirs, naming, model, *arguments)

        return function

    return wrap


@dataclass(frozen=True, slots=True)
class Naming:
    """Names that a model gives to tensors of the parallel modules in it, or of the one around it.

    `prefixes` are, for each tree, the prefix that the model's names have in addition, and the one that they
    lack.
    """

    prefixes: Mapping[int, tuple[str, str]]
    trees: Sequence[UserTree]

    @staticmethod
    def of(model: nn.Module) -> Naming:
        """The naming of this model."""
        paths = {id(module): path for path, module in model.named_modules()}
        prefixes, trees = {}, []
        for tree in placed_trees():
            below = {id(module): path for path, module in tree.root.named_modules()}
            if id(tree.root) in paths:
                prefixes[tree.number] = (_dotted(paths[id(tree.root)]), "")
            elif id(model) in below:
                prefixes[tree.number] = ("", _dotted(below[id(model)]))
            else:
                continue
            trees.append(tree)
        return Naming(prefixes, trees)

    def names(self, number: int, name: str) -> list[str]:
        """All names of a tree's tensor in the model, its first one ahead; none where it isn't there."""
        tree = next((tree for tree in self.trees if tree.number == number), None)
        if tree is None:
            return []
        more, less = self.prefixes[number]
        stored = tree.stored[name]
        tied = [known for known, other in tree.stored.items() if other is stored]
        return [more + known.removeprefix(less) for known in tied if known.startswith(less)]

    def together(self, what: str) -> AbstractContextManager[None]:
        """Around what is collective where anything is shared."""
        is_shared = any(stored.is_shared for tree in self.trees for stored in tree.stored.values())
        return collective(what) if is_shared else nullcontext()

    @property
    def device(self) -> torch.device:
        """Device on which the parallel modules run."""
        return next(stored.device for tree in self.trees for stored in tree.stored.values())


def _dotted(path: str) -> str:
    return f"{path}." if path else ""


# -- models -------------------------------------------------------------------------------------


def _get_model(theirs: Callable[..., Any], naming: Naming, model: nn.Module, info: Any) -> Any:
    with naming.together("get_model_state_dict"), sharded_state(not info.full_state_dict):
        return theirs(model, info)


def _set_model(
    theirs: Callable[..., Any],
    naming: Naming,
    model: nn.Module,
    state: dict[str, Any],
    info: Any,
) -> Any:
    if not info.handle_model and not info.broadcast_from_rank0:
        return theirs(model, state, info)
    scope = collective if info.broadcast_from_rank0 else naming.together
    with scope("set_model_state_dict"):
        if info.broadcast_from_rank0:
            state = _from_rank_0(state, naming.device)
        # Full tensors are cut as they are loaded. Ranks that pass nothing are said not to handle the model.
        told = replace(info, full_state_dict=False, broadcast_from_rank0=False, handle_model=True)
        return theirs(model, state, told)


def _from_rank_0(value: Any, device: torch.device) -> Any:
    """Rank 0's value on all ranks; a collective."""
    described = [mapped(value, None, lambda item, _: item.to("meta"))]
    dist.broadcast_object_list(described, src=0, device=device)

    def give(item: Tensor, _: Any) -> Tensor:
        dist.broadcast(item.to(device).contiguous(), src=0)
        return item

    def receive(item: Tensor, _: Any) -> Tensor:
        full = torch.empty_like(item, device=device, memory_format=torch.contiguous_format)
        dist.broadcast(full, src=0)
        return full.cpu()

    return mapped(value, None, give) if dist.get_rank() == 0 else mapped(described[0], None, receive)


# -- optimizers ---------------------------------------------------------------------------------


def _get_optimizers(
    theirs: Callable[..., Any],
    naming: Naming,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    info: Any,
) -> Any:
    if not info.handle_optim:
        return {}
    collected: dict[str, Any] = {"state": {}, "param_groups": []}
    with naming.together("get_optimizer_state_dict"), sharded_state(not info.full_state_dict):
        for optimizer in optimizers:
            _make_state(optimizer)
            names = [first for first, *_ in _serial_names(optimizer, model, naming)]
            packed = optimizer.state_dict()
            collected["state"] |= {
                names[key] if isinstance(key, int) else key: value for key, value in packed["state"].items()
            }
            collected["param_groups"] += [
                {**group, PARAMETERS: [names[number] for number in group[PARAMETERS]]}
                for group in packed["param_groups"]
            ]
        if info.flatten_optimizer_state_dict:
            collected = flattened(collected)
        return gathered(collected, info)


def _serial_names(optimizer: Optimizer, model: nn.Module, naming: Naming) -> list[list[str]]:
    """The names in `model` of all parameters of the serial optimizer, by their numbers; all of each."""
    slots = Slots(optimizer)
    others = {id(item): name for name, item in model.named_parameters()}
    here = {slot.member: others[id(slot.parameter)] for slot in slots if id(slot.parameter) in others}

    def names_of(member: Member) -> list[str]:
        names = [] if isinstance(member, int) else naming.names(*member)
        if not names and member in here:
            names = [here[member]]
        if names:
            return names
        raise InputError(
            where=f"state dict of {type(optimizer).__name__} by names",
            found="a parameter that the model hasn't got",
            wanted="optimizers of the model's own parameters",
            remedy="pass the model that has them all",
        )

    return [names_of(member) for member in serial_groups(slots, optimizer.param_groups).numbers]


def _set_optimizers(
    theirs: Callable[..., Any],
    naming: Naming,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    state: Mapping[str, Any],
    info: Any,
) -> None:
    if not info.handle_optim:
        return
    scope = collective if info.broadcast_from_rank0 else naming.together
    with scope("set_optimizer_state_dict"):
        if info.broadcast_from_rank0:
            state = _from_rank_0(state, naming.device)
        for optimizer in optimizers:
            _make_room(optimizer)
            names = _serial_names(optimizer, model, naming)
            optimizer.load_state_dict(
                _numbered(state, optimizer, names, strict=info.strict) if _is_by_names(state) else dict(state)
            )


def _make_state(optimizer: Optimizer) -> None:
    """Let an optimizer without state make it, as torch does, by a step at rate 0."""
    with state_only():
        init_state(optimizer)


def _make_room(optimizer: Optimizer) -> None:
    """Let a new optimizer make its state, as torch does where there are no gradients."""
    parameters = [item for group in optimizer.param_groups for item in group[PARAMETERS]]
    gradients = [item.grad for item in parameters]
    for item in parameters:
        item.grad = None
    _make_state(optimizer)
    for item, gradient in zip(parameters, gradients, strict=True):
        item.grad = gradient


def _is_by_names(state: Mapping[str, Any]) -> bool:
    if "param_groups" not in state:
        return True  # flattened
    return not all(isinstance(key, int) for group in state["param_groups"] for key in group[PARAMETERS])


def _numbered(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    *,
    strict: bool,
) -> dict[str, Any]:
    """The serial optimizer's state dict, of one by names."""
    slots = Slots(optimizer)
    groups = serial_groups(slots, optimizer.param_groups)
    given = _FlatState(state) if "param_groups" not in state else _Nested(state)
    numbers = groups.numbers
    # Another plan may have saved a tied parameter by any of its names.
    known = [next((name for name in tied if name in given.names), tied[0]) for tied in names]
    states = {}
    for slot in slots:
        number = numbers[slot.member]
        values = given.state(known[number])
        if values is not None:
            states[number] = values
        elif strict and slot.parameter.requires_grad and optimizer.state.get(slot.parameter):
            raise InputError(
                where=f"state of {known[number]} for {type(optimizer).__name__}",
                found="none in what is loaded",
                wanted="state of every parameter that learns",
                remedy="call zero_grad() before get_optimizer_state_dict, which else makes no room for state "
                "to load, or StateDictOptions(strict=False) to begin it anew",
            )
    packed = []
    for group in groups.serial:
        members = [numbers[member] for member in group.members]
        options = given.options(known[members[0]], group.options) if members else None
        packed.append({**(group.options if options is None else options), PARAMETERS: members})
    return {"state": states, "param_groups": packed}


class _Nested:
    """A state dict by names with entries for each parameter and group."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state.get("state", {})
        self._groups = {name: group for group in state["param_groups"] for name in group[PARAMETERS]}
        self.names = {*self._groups}

    def state(self, name: str) -> Mapping[str, Any] | None:
        """Optimizer state of a parameter."""
        values: Mapping[str, Any] | None = self._state.get(name)
        return values

    def options(self, name: str, _: Mapping[str, Any]) -> dict[str, Any] | None:
        """The options of the group that holds a parameter; None if no group does."""
        group = self._groups.get(name)
        return None if group is None else {k: v for k, v in group.items() if k not in (PARAMETERS, NAMES)}


class _FlatState:
    """A state dict by names in one level: state.NAME.VALUE and param_groups.NAME.OPTION."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._entries = state
        self._by_prefix: dict[str, list[str]] = {}
        for key in state:
            words = key.split(".")
            for count in range(2, len(words)):
                self._by_prefix.setdefault(".".join(words[:count]), []).append(key)
        self.names = {
            prefix.partition(".")[2] for prefix in self._by_prefix if prefix.startswith("param_groups.")
        }

    def state(self, name: str) -> Mapping[str, Any] | None:
        """Optimizer state of a parameter, nested where names of values have dots."""
        prefix = f"state.{name}"
        values: dict[str, Any] = {}
        for key in self._by_prefix.get(prefix, ()):
            *path, last = key[len(prefix) + 1 :].split(".")
            inner = values
            for word in path:
                inner = inner.setdefault(word, {})
            inner[last] = self._entries[key]
        return values or None

    def options(self, name: str, known: Mapping[str, Any]) -> dict[str, Any] | None:
        """The options of the group that a parameter is in."""
        prefix = f"param_groups.{name}."
        options = {key: self._entries[prefix + key] for key in known if prefix + key in self._entries}
        return {**known, **options} if options else None
