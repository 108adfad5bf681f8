"""Process groups by group key.

A key such as "b@2x3" (see `autopar.core.mesh`) names one group for each rank of the world; which
one, and the rank's place in it, follow from the key and the rank alone. So `size` and `index`
need no process group, and shapes can be computed on meta tensors for any rank (`as_rank`).

    rank 4 of      b:  0   1   2
            a = 0     r0  r1  r2         "b@2x3" -> {3, 4, 5}, index 1
            a = 1     r3 [r4] r5         "a@2x3" -> {1, 4},    index 1

A pipeline's ranks each hold a copy of the mesh, one after the other: a key names its groups in every
copy. The groups belong to the world that they were set up in: when `destroy_process_group` ends it,
nothing here keeps them alive.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from itertools import combinations
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autopar.core.mesh import Mesh, parse_key
from autopar.errors import AutoparError, InputError
from autopar.runtime.collectives.local_sockets import Wires, connect

_groups: WeakKeyDictionary[ProcessGroup, WeakValueDictionary[str, ProcessGroup]] = WeakKeyDictionary()
_listed: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup | None]] = WeakKeyDictionary()
# All groups of each key, also those of other ranks: alike on all.
_made: WeakKeyDictionary[ProcessGroup, dict[str, list[tuple[int, ...]]]] = WeakKeyDictionary()
_blocks: WeakKeyDictionary[ProcessGroup, tuple[tuple[Mesh, int], ...]] = WeakKeyDictionary()
_wires: WeakKeyDictionary[ProcessGroup, Wires | None] = WeakKeyDictionary()
_viewpoint: ContextVar[int | None] = ContextVar("rank", default=None)


class GroupError(AutoparError):
    """A process group is used that was not set up."""


def setup(mesh: Mesh, keys: Iterable[str], *, timeout: timedelta, copies: int = 1) -> None:
    """Create the process groups of `keys`, all keys of `mesh`; every rank of the world calls this.

    Groups that exist are kept, and "everybody" is the world group itself (with its own timeout). A
    pipeline has several `copies` of the mesh, one after the other: one for each of its ranks.
    """
    world = dist.group.WORLD
    if world is None or dist.get_world_size() != mesh.num_devices * copies:
        raise InputError(
            where=f"mesh {mesh}",
            found="no process group" if world is None else f"{dist.get_world_size()} ranks",
            wanted=f"a world of {mesh.num_devices * copies} ranks",
            remedy="start one process for each device, e.g. with torchrun, and initialise torch.distributed",
        )
    firsts = range(0, dist.get_world_size(), mesh.num_devices)
    for key in sorted(set(keys)):
        if parse_key(key)[0] != mesh.even:
            raise InputError(
                where="groups.setup", found=key, wanted=f"keys of mesh {mesh}", remedy="use Mesh.key"
            )
        _create(key, firsts, world, timeout)


def setup_unlike(meshes: Sequence[Mesh], *, timeout: timedelta) -> None:
    """Create all process groups of meshes that follow each other in the world; every rank calls this."""
    world = dist.group.WORLD
    if world is None or dist.get_world_size() != sum(mesh.num_devices for mesh in meshes):
        raise InputError(
            where=f"meshes {' + '.join(map(str, meshes))}",
            found="no process group" if world is None else f"{dist.get_world_size()} ranks",
            wanted=f"a world of {sum(mesh.num_devices for mesh in meshes)} ranks",
            remedy="start one process for each device, e.g. with torchrun, and initialise torch.distributed",
        )
    first, blocks = 0, list[tuple[Mesh, int]]()
    for mesh in meshes:
        blocks.append((mesh.even, first))
        first += mesh.num_devices
    for mesh in dict.fromkeys(mesh for mesh, _ in blocks):
        firsts = [start for block, start in blocks if block == mesh]
        for key in (mesh.key(axes) for count in mesh.axes for axes in combinations(mesh.axes, count + 1)):
            _create(key, firsts, world, timeout)
    _blocks[world] = tuple(blocks)


def first_of(mesh: Mesh) -> int:
    """The first rank of the world in this rank's copy of a mesh."""
    return _first(mesh, dist.get_rank())


def _first(mesh: Mesh, rank: int) -> int:
    world = dist.group.WORLD
    for block, first in _blocks.get(world, ()) if world is not None else ():
        if block == mesh.even and first <= rank < first + block.num_devices:
            return first
    return rank // mesh.num_devices * mesh.num_devices


def _create(key: str, firsts: Sequence[int], world: ProcessGroup, timeout: timedelta) -> None:
    """Make the groups of a key, unless they exist, in copies of its mesh that begin at `firsts`.

    Every rank makes every group, in the same order: new_group is collective. Raises InputError on all ranks
    where another plan's groups of the key lie across these: a rank has one group of a key.
    """
    made = _made.setdefault(world, {}).setdefault(key, [])
    places = range(parse_key(key)[0].num_devices)
    wanted = sorted({_ranks(key, first + place, first) for first in firsts for place in places})
    missing = [ranks for ranks in wanted if ranks not in made]
    if across := [ranks for ranks in made if any({*ranks} & {*other} for other in missing)]:
        raise InputError(
            where=f"process groups {key}",
            found=f"ranks {across[0]} in one group, by another plan in the same processes",
            wanted=f"{missing[0]}, where this plan's stages have their meshes",
            remedy="run one of the two plans in processes of its own",
        )
    for ranks in missing:
        group = world if len(ranks) == dist.get_world_size() else dist.new_group(list(ranks), timeout=timeout)
        made.append(ranks)
        if dist.get_rank() in ranks:
            _keep(key, group, world, timeout)


def _keep(key: str, group: ProcessGroup, world: ProcessGroup, timeout: timedelta) -> None:
    """Have a group of this rank's, ready for messages."""
    _groups.setdefault(world, WeakValueDictionary())[key] = group
    if dist.get_backend(group) == dist.Backend.NCCL:
        # NCCL builds a communicator at its first use, which must be by all of its ranks; in a
        # halo exchange some may have nothing to say.
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    elif group not in _wires:
        _wires[group] = connect(group, timeout)


def of_ranks(ranks: Sequence[int], *, timeout: timedelta) -> ProcessGroup | None:
    """The group of these ranks of the world, made at the first call; None on other ranks.

    Every rank of the world calls this, for the same ranks in the same order.
    """
    world = dist.group.WORLD
    assert world is not None
    known = _listed.setdefault(world, {})
    if tuple(ranks) not in known:
        made: Any = dist.new_group(list(ranks), timeout=timeout)
        known[tuple(ranks)] = made if dist.get_rank() in ranks else None
    return known[tuple(ranks)]


def group(key: str) -> ProcessGroup:
    """The process group of `key` that this rank is in."""
    world = dist.group.WORLD
    found = _groups[world].get(key) if world is not None and world in _groups else None
    if found is None:
        raise GroupError(
            where=f"process group {key}",
            found="no process group" if world is None else "a key that was not set up",
            wanted="groups.setup(mesh, keys) on every rank before the first collective",
            remedy="initialise torch.distributed and name this key in setup",
        )
    return found


def wires(group: ProcessGroup) -> Wires | None:
    """The streams between this group's ranks, where it has any: those that `setup` made, of one machine."""
    return _wires.get(group)


def size(key: str) -> int:
    """The number of ranks in each group of `key`."""
    mesh, axes = parse_key(key)
    return math.prod(mesh.shape[axis] for axis in axes)


def index(key: str) -> int:
    """The place that this rank has in its group of `key`, in major-minor order."""
    rank, mesh = _rank(), parse_key(key)[0]
    chosen = _viewpoint.get() is not None  # a place in a mesh, wherever that lies
    first = rank // mesh.num_devices * mesh.num_devices if chosen else _first(mesh, rank)
    return _ranks(key, rank, first).index(rank)


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Context in which shapes are those of `rank`: its program can be made on meta tensors anywhere."""
    token = _viewpoint.set(rank)
    try:
        yield
    finally:
        _viewpoint.reset(token)


def _rank() -> int:
    chosen = _viewpoint.get()
    if chosen is not None:
        return chosen
    world = dist.group.WORLD
    return 0 if world is None else world.rank()


@functools.cache
def _ranks(key: str, rank: int, first: int) -> tuple[int, ...]:
    """The ranks of the world that meet `rank` in `key`: all of its own copy of the mesh, from `first` on."""
    mesh, axes = parse_key(key)
    return tuple(first + each for each in mesh.group(axes, rank - first))
