"""State dicts of optimizers in serial order: what the serial model's own optimizer would give and take.

state_dict         this rank's moments  --gather-->  full tensors by serial numbers, on all ranks
load_state_dict    the same, or chunks in serial order  --cut-->  this rank's moments

A parameter's number is its place among all parameters of an optimizer. With pipeline stages a rank's
optimizer has those of its stages alone, so ranks first tell each other which, by their names:

    serial       group 0: a b c d      numbers 0 1 2 3
    stage 0      group 0: a b          0 1
    stage 1      group 0: c d          0 1, serial 2 3

Torch's class is wrapped once. Users' hooks and subclasses stay: ours is the first hook of those after saving,
and the last of those before loading.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.errors import InputError
from autopar.runtime.checkpoints.optimizer_values import (
    Subject,
    loaded,
    mapped,
    part_of_parameter,
    saved,
    whole,
)
from autopar.runtime.collectives.roll_call import collective
from autopar.runtime.tree.stored import Stored, is_sharded_state
from autopar.runtime.tree.user_tree import ParameterOwner, UserTree, placed_trees

Member = (
    tuple[int, str] | int
)  # a parameter by its tree's number and name, or by its place here if it is no tree's
PARAMETERS, NAMES = "params", "param_names"


class ParameterSlot(NamedTuple):
    """A parameter in a group of an optimizer, and its number on this rank."""

    parameter: Tensor
    number: int
    owner: ParameterOwner | None

    @property
    def member(self) -> Member:
        """The parameter's name that is the same on all ranks."""
        return self.number if self.owner is None else (self.owner.tree.number, self.owner.name)


class SerialGroup(NamedTuple):
    """A group of a serial optimizer."""

    members: tuple[Member, ...]
    options: Mapping[str, Any]  # rates and the like; None in the place of names


class OptimizerGroups(NamedTuple):
    """The serial optimizer's groups, and which of them each group of this rank is a part of."""

    serial: Sequence[SerialGroup]
    own: Sequence[int | None]

    @property
    def numbers(self) -> dict[Member, int]:
        """The place of each parameter among all."""
        members = itertools.chain.from_iterable(group.members for group in self.serial)
        return {member: number for number, member in enumerate(members)}


class Slots:
    """The parameters of an optimizer on this rank, by its groups; without those that stand for others'."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.trees = {tree.number: tree for tree in placed_trees()}
        owners = {key: owner for tree in self.trees.values() for key, owner in tree.owned().items()}
        stand_ins = {id(item): tree for tree in self.trees.values() for item in tree.nothing}
        numbers = itertools.count()
        self.groups: list[list[ParameterSlot]] = []
        self.all: list[
            list[int]
        ] = []  # the numbers of each group's parameters, those that stand for others' too
        used: set[int] = set()
        for group in optimizer.param_groups:
            held = [(item, next(numbers)) for item in group[PARAMETERS]]
            used |= {stand_ins[id(item)].number for item, _ in held if id(item) in stand_ins}
            self.all.append([number for _, number in held])
            self.groups.append(
                [
                    ParameterSlot(item, number, owners.get(id(item)))
                    for item, number in held
                    if id(item) not in stand_ins
                ]
            )
        used |= {slot.owner.tree.number for slot in self if slot.owner is not None}
        # Whether some parameter isn't stored in serial order.
        self.is_apart = any(slot.owner is not None and slot.owner.stored.serial.is_apart for slot in self)
        self.used = [self.trees[number] for number in sorted(used)]

    def __iter__(self) -> Iterator[ParameterSlot]:
        return itertools.chain.from_iterable(self.groups)

    @property
    def is_staged(self) -> bool:
        """Whether some pipeline rank has parameters that this one lacks."""
        return any(stored.holder is not None for tree in self.used for stored in tree.stored.values())

    @property
    def is_shared(self) -> bool:
        """Whether saving the state is a collective: some parameter is in parts or on other ranks."""
        return self.is_staged or any(slot.owner is not None and slot.owner.stored.is_shared for slot in self)

    def together(self, what: str) -> AbstractContextManager[None]:
        """Around what is collective where anything is shared."""
        return collective(what) if self.is_shared else nullcontext()


def subject_of(slot: ParameterSlot, state: str, *, beside_apart: bool) -> Subject | None:
    """The subject of a value of the optimizer's state; None for a parameter of no tree."""
    if slot.owner is None or not isinstance(slot.parameter, DTensor):
        return None
    return Subject(slot.parameter, slot.owner.stored, slot.owner.name, state, beside_apart)


# -- groups -------------------------------------------------------------------------------------


def serial_groups(slots: Slots, groups: Sequence[Mapping[str, Any]]) -> OptimizerGroups:
    """The serial optimizer's groups, of this rank's; a collective where there are stages."""
    mine = [
        SerialGroup(
            tuple(slot.member for slot in held),
            {key: None if key == NAMES else value for key, value in group.items() if key != PARAMETERS},
        )
        for held, group in zip(slots.groups, groups, strict=True)
    ]
    if not slots.is_staged:
        return OptimizerGroups(mine, range(len(mine)))
    _require_known(slots)
    return _merged(_exchanged(mine), dist.get_rank(), _order(slots.trees))


def _exchanged(mine: Any) -> list[Any]:
    """Objects of all ranks of the world, on all ranks."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return everywhere


def _order(trees: Mapping[int, UserTree]) -> dict[Member, int]:
    """The serial order of all parameters of these trees."""
    names = ((number, name) for number, tree in sorted(trees.items()) for name in tree.stored)
    return {member: place for place, member in enumerate(names)}


def _require_known(slots: Slots) -> None:
    """Raise InputError where the serial numbers of parameters don't follow from their names."""
    order = _order(slots.trees)
    strange = [slot for slot in slots if slot.owner is None]
    if strange:
        raise InputError(
            where="state dict of an optimizer",
            found=f"a parameter of shape {tuple(strange[0].parameter.shape)} that no parallel module has",
            wanted="parameters of a parallel module alone, where it has pipeline stages",
            remedy="give the others an optimizer of their own",
        )
    for held in slots.groups:
        places = [order[slot.member] for slot in held]
        turned = next((i for i, (a, b) in enumerate(itertools.pairwise(places)) if a > b), None)
        if turned is not None:
            first, second = (slot.owner.name for slot in held[turned : turned + 2] if slot.owner)
            raise InputError(
                where="state dict of an optimizer",
                found=f"{first} before {second}, and other stages' parameters somewhere between",
                wanted="the model's order, from which the serial numbers follow",
                remedy="make groups in the order of parallel.named_parameters()",
            )


def _merged(
    ranks: Sequence[Sequence[SerialGroup]], rank: int, order: Mapping[Member, int]
) -> OptimizerGroups:
    """The serial groups, of what the groups of each rank are.

    Groups with the same place and options on all ranks are parts of one. Otherwise each is one by itself, of
    a layer, say; but for those that share a tied parameter.
    """
    shapes = {tuple(repr(group.options) for group in groups) for groups in ranks}
    if len(shapes) == 1:
        joined = [_joined(parts, order) for parts in zip(*ranks, strict=True)]
        return OptimizerGroups(joined, range(len(joined)))
    joined = []
    for group in itertools.chain.from_iterable(ranks):
        touching = [known for known in joined if {*known.members} & {*group.members}]
        joined = [known for known in joined if known not in touching]
        if group.members:
            joined.append(_joined([*touching, group], order))
    joined.sort(key=lambda group: order[group.members[0]])
    return OptimizerGroups(joined, [_place_of(group, joined) for group in ranks[rank]])


def _joined(parts: Sequence[SerialGroup], order: Mapping[Member, int]) -> SerialGroup:
    members = {member for group in parts for member in group.members}
    return SerialGroup(tuple(sorted(members, key=order.__getitem__)), parts[0].options)


def _place_of(group: SerialGroup, groups: Sequence[SerialGroup]) -> int | None:
    return next((place for place, known in enumerate(groups) if {*group.members} & {*known.members}), None)


# -- saving -------------------------------------------------------------------------------------


def _after_saving(slots: Slots, optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """The serial optimizer's state dict, of this rank's."""
    groups = serial_groups(slots, packed["param_groups"])
    own = {slot.member: packed["state"][slot.number] for slot in slots if slot.number in packed["state"]}
    if slots.is_staged and not is_sharded_state():
        states = _collected(slots, own, groups)
    else:
        save = functools.partial(saved, sharded=is_sharded_state())
        states = {
            slot.member: _each(slots, slot, own[slot.member], {}, save)
            for slot in slots
            if slot.member in own
        }
    numbers = groups.numbers
    known = set(itertools.chain.from_iterable(slots.all))
    return {
        **packed,
        "state": {numbers[member]: states[member] for member in numbers if member in states}
        | {key: value for key, value in packed["state"].items() if key not in known},
        "param_groups": _packed_groups(groups, numbers, _names(slots, packed["param_groups"])),
    }


def _each(
    slots: Slots,
    slot: ParameterSlot,
    values: Mapping[str, Any],
    templates: Mapping[str, Any],
    change: Callable[..., Any],
) -> dict[str, Any]:
    """A parameter's state with its tensors changed, beside the templates of the same names."""
    changed = {}
    for name, value in values.items():
        subject = subject_of(slot, str(name), beside_apart=slots.is_apart)
        if subject is None:
            changed[name] = value
        else:
            changed[name] = mapped(value, templates.get(name), functools.partial(change, subject=subject))
    return changed


class _GatheredEntry(NamedTuple):
    """Stands for a tensor that its holders gather, by its place among those of a parameter."""

    place: int


def _collected(
    slots: Slots, own: Mapping[Member, Mapping[str, Any]], groups: OptimizerGroups
) -> dict[Member, dict[str, Any]]:
    """The full state of all stages' parameters, on all ranks; a collective."""
    parts: dict[Member, list[DTensor]] = {}
    sent: dict[Member, dict[str, Any]] = {}
    for slot in slots:
        if slot.member not in own:
            continue
        held = parts.setdefault(slot.member, [])

        def give(value: Tensor, _: Tensor | None, *, subject: Subject, held: list[DTensor] = held) -> Any:
            part = part_of_parameter(value, subject)
            if part is None:
                return whole(value, subject).cpu()
            held.append(part)
            return _GatheredEntry(len(held) - 1)

        sent[slot.member] = _each(slots, slot, own[slot.member], {}, give)
    everywhere: list[dict[Member, dict[str, Any]]] = _exchanged(sent)
    collected = {}
    for member in groups.numbers:
        source = next((rank for rank, states in enumerate(everywhere) if member in states), None)
        if source is not None:
            state = everywhere[source][member]
            full = _gathered(_stored(slots, member), source, state, parts.get(member, []))
            collected[member] = {name: _put_in(value, full) for name, value in state.items()}
    return collected


def _gathered(stored: Stored, source: int, state: Any, parts: Sequence[DTensor]) -> list[Tensor]:
    """The full tensors of one parameter, from the stage of `source`."""
    shared = Stored(stored.part, stored.key, stored.device, stored.serial, holder=source)
    count = _count(state)
    return [shared.gather(parts[place] if parts else None) for place in range(count)]


def _stored(slots: Slots, member: Member) -> Stored:
    assert not isinstance(member, int)
    number, name = member
    return slots.trees[number].stored[name]


def _count(value: Any) -> int:
    """How many tensors of a parameter's state are gathered."""
    if isinstance(value, _GatheredEntry):
        return 1
    items: Iterable[Any] = value.values() if isinstance(value, dict) else ()
    items = value if isinstance(value, (list, tuple)) else items
    return sum(map(_count, items))


def _put_in(value: Any, full: Sequence[Tensor]) -> Any:
    """A state with full tensors in the places that were left for them."""
    if isinstance(value, _GatheredEntry):
        return full[value.place]
    if isinstance(value, dict):
        return {key: _put_in(item, full) for key, item in value.items()}
    return type(value)([_put_in(item, full) for item in value]) if isinstance(value, (list, tuple)) else value


def _names(slots: Slots, groups: Sequence[Mapping[str, Any]]) -> dict[Member, str]:
    """The names that the user has given with the parameters; a collective where there are stages."""
    names = {
        slot.member: name
        for held, numbers, group in zip(slots.groups, slots.all, groups, strict=True)
        for slot in held
        if (name := dict(zip(numbers, group.get(NAMES, ()), strict=False)).get(slot.number)) is not None
    }
    if not slots.is_staged:
        return names
    return {member: name for known in _exchanged(names) for member, name in known.items()}


def _packed_groups(
    groups: OptimizerGroups, numbers: Mapping[Member, int], names: Mapping[Member, str]
) -> list[dict[str, Any]]:
    return [
        {
            **group.options,
            **({NAMES: [names[member] for member in group.members]} if NAMES in group.options else {}),
            PARAMETERS: [numbers[member] for member in group.members],
        }
        for group in groups.serial
    ]


# -- loading ------------------------------------------------------------------------------------


def _before_loading(slots: Slots, optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
    """The rank's part of a serial state dict; None leaves one that doesn't fit to torch's own words."""
    groups = serial_groups(slots, optimizer.param_groups)
    sizes = [len(group.members) for group in groups.serial]
    found = [len(group[PARAMETERS]) for group in given["param_groups"]]
    if sizes != found:
        if not slots.is_staged:
            return None
        raise InputError(
            where=f"load_state_dict of {type(optimizer).__name__}",
            found=f"{len(found)} groups of {_few(found)} parameters",
            wanted=f"{len(sizes)} of {_few(sizes)}, of all stages together",
            remedy="make groups as the optimizer that was saved, all options equal on every rank",
        )
    ids = list(itertools.chain.from_iterable(group[PARAMETERS] for group in given["param_groups"]))
    numbers = groups.numbers
    state = {key: value for key, value in given["state"].items() if key not in {*ids}}
    for slot in slots:
        if (values := given["state"].get(ids[numbers[slot.member]])) is not None:
            state[slot.number] = _each(slots, slot, values, optimizer.state.get(slot.parameter, {}), loaded)
    return {**given, "state": state, "param_groups": list(_own_groups(slots, optimizer, given, groups))}


def _own_groups(
    slots: Slots, optimizer: Optimizer, given: Mapping[str, Any], groups: OptimizerGroups
) -> Iterator[dict[str, Any]]:
    """The groups of this rank, with what is given for those that they are parts of."""
    for place, held, all_of_it, own in zip(
        groups.own, slots.groups, slots.all, optimizer.param_groups, strict=True
    ):
        packed = dict(own if place is None else given["param_groups"][place])
        if place is not None and NAMES in packed:
            names = dict(zip(groups.serial[place].members, packed[NAMES], strict=True))
            packed[NAMES] = [names[slot.member] for slot in held]
        yield {**packed, PARAMETERS: all_of_it}


def _few(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:4])) + (", ..." if len(sizes) > 4 else "")


# -- the class ----------------------------------------------------------------------------------

_MARK = "_autopar_speaks_serial_order"


def speak_serial_order() -> None:
    """Make state dicts of optimizers with parameters of parallel modules use serial order from now on."""
    if hasattr(Optimizer, _MARK):
        return
    save, load = Optimizer.state_dict, Optimizer.load_state_dict

    @functools.wraps(save)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        slots = Slots(self)
        if not slots.used:
            return save(self)
        handle = self.register_state_dict_post_hook(functools.partial(_after_saving, slots), prepend=True)
        try:
            with slots.together(f"{type(self).__name__}.state_dict"), torch.no_grad():
                return save(self)
        finally:
            handle.remove()

    @functools.wraps(load)
    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        slots = Slots(self)
        if not slots.used:
            return load(self, state_dict)
        handle = self.register_load_state_dict_pre_hook(functools.partial(_before_loading, slots))
        try:
            with slots.together(f"{type(self).__name__}.load_state_dict"), torch.no_grad():
                return load(self, state_dict)
        finally:
            handle.remove()

    setattr(Optimizer, _MARK, True)
    Optimizer.state_dict, Optimizer.load_state_dict = state_dict, load_state_dict  # type: ignore[method-assign]
