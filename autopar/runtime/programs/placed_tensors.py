"""The parameters and buffers of a parallel module: where its first program put them, and what a rank has.

    first program    serial tensors --cut--> this rank's parts, in the user's modules; the rest goes
    later programs   take them as they lie

With pipeline stages a rank holds those of its stages, and knows dtypes and needs of gradients of all.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.core.graph import InputKind
from autopar.core.mesh import Mesh
from autopar.core.part import Part
from autopar.core.pipeline import Pipeline
from autopar.core.placement import Layout, Shard, show
from autopar.errors import CheckError, InputError
from autopar.results.plan.plan import Plan
from autopar.runtime.checkpoints.named_states import speak_by_names
from autopar.runtime.checkpoints.optimizer_states import speak_serial_order
from autopar.runtime.checkpoints.rank_states import RankStates, State
from autopar.runtime.collectives.roll_call import collective
from autopar.runtime.dtensors.beside_plain_tensors import take_plain_tensors
from autopar.runtime.dtensors.global_scalars import read_whole_scalars
from autopar.runtime.executable import Executable, InputPart, PinnedLayouts, StagedExecutable
from autopar.runtime.execute.bound_program import gradient_key
from autopar.runtime.optimizers.clipping import refuse_torch_clipping
from autopar.runtime.optimizers.empty_lists import take_empty_lists
from autopar.runtime.optimizers.loss_scaling import computes_in_half, refuse_infinite, share_infinities
from autopar.runtime.optimizers.optimizers import refuse_together, step_fast, take_over
from autopar.runtime.optimizers.whole_steps import step_whole
from autopar.runtime.parameters.parameters import (
    device_mesh,
    distribute,
    local,
    nothing,
    sharding_key,
)
from autopar.runtime.programs.missing_values import MissingValues, placeholder
from autopar.runtime.programs.parameter_changes import ParameterChanges
from autopar.runtime.saved.host_weights import in_host_memory
from autopar.runtime.tree import serial_model
from autopar.runtime.tree.stored import SerialOrder, Stored, chunk_of, out_of_order
from autopar.runtime.tree.user_tree import UserTree, came_later, placed_parameters
from autopar.torch_seams.dtensors import with_part
from autopar.trace.values.structure import parts_of


class PlacedTensors:
    """Parameters and buffers in `tree`, and their parts on this rank, once a program has placed them.

    `from_rank_0` takes the values of rank 0. With `of_samples` each rank passes samples of its own, which
    plain tensors outside of the program follow.
    """

    def __init__(
        self, tree: UserTree, device: torch.device, *, from_rank_0: bool, of_samples: bool, tells: bool
    ) -> None:
        self.tree = tree
        self._device, self._from_rank_0, self._of_samples = device, from_rank_0, of_samples
        self._tells = tells
        self._mesh: tuple[Mesh, DeviceMesh] | None = None
        self._parts: dict[str, InputPart] = {}
        self._serial: dict[str, SerialOrder] = {}
        self._holders: Mapping[str, tuple[int, ...]] = {}  # pipeline ranks of each tensor, with stages
        self._stages_of_uses: Mapping[str, tuple[int, ...]] = {}  # with stages
        self.pipeline = Pipeline()
        self._plan: Plan | None = None  # with stages on unlike meshes
        self._held: RankStates | None = None  # with stages
        self.nothing: tuple[nn.Parameter, ...] = ()  # with stages
        self.changes: ParameterChanges | None = None  # once they are placed, of several ranks
        self.has_copies = False  # on some ranks, but not whole on all
        self.missing = MissingValues()
        self.are_plain = False  # parameters: torch's own, since each rank has them whole
        self._writes_parameters = False  # whether a program does, those that don't learn
        self._is_half = [False]  # whether a program that learns computes in float16; shared with hooks

    @property
    def is_placed(self) -> bool:
        """Whether a program has cut the serial model's tensors."""
        return self._mesh is not None

    def place(self, made: Executable | StagedExecutable) -> DeviceMesh:
        """Cut the serial model's tensors to this rank's parts, and free the model; a collective."""
        mesh = device_mesh(made.mesh, self._device)
        self._parts = {
            name: item
            for item in made.inputs
            if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)
            for name in (item.target, *item.aliases)
        }
        self._mesh = (made.mesh, mesh)
        serial_mesh = device_mesh(made.mesh, self._device, prefix="serial_")
        apart = out_of_order(self._parts, mesh, self._device)
        self._serial = {
            name: SerialOrder(chunk_of(part, mesh), serial_mesh, name in apart)
            for name, part in self._parts.items()
        }
        if isinstance(made, StagedExecutable):
            self._holders = dict.fromkeys(self._parts, (0,)) | dict(made.holders)
            self._stages_of_uses, self.pipeline = made.stages_of_uses, made.pipeline
            self._plan = made.plan if made.pipeline.meshes else None
            self._held, self.nothing = RankStates(self._device), (nothing(mesh),)
            self.tree.nothing = self.nothing
            take_empty_lists()
            refuse_torch_clipping(mesh)
            share_infinities(mesh)
        unlike = bool(self.pipeline.meshes)  # of which some may have copies
        self.has_copies = unlike or any(map(self._is_shared, self._parts.values()))
        self.are_plain = self.tree.is_plain = self._can_be_plain()
        self._look_at_writes(made)
        serial_model.check_plain(self.tree.root, placed_parameters())
        placed = self.tree.place(self._store)
        parameters = [item for item in placed if isinstance(item.whole, nn.Parameter)]
        take_over(self, parameters, mesh, self.nothing, tell=self._tells)
        self.tree.retire()
        self.missing.count(dict(self.named()))
        if any(isinstance(item.part, DTensor) for item in placed):
            numbers = any(not item.spec.shape for item in self._parts.values())
            read_whole_scalars(mesh, staged=isinstance(made, StagedExecutable), with_numbers=numbers)
            self._take_plain_tensors(self, mesh)
        self.look_at_steps(mesh)
        speak_serial_order()
        speak_by_names()
        return mesh

    def _can_be_plain(self) -> bool:
        """Whether parameters can be torch's own: each rank has all of them whole, and what a user computes
        beside them from the same whole batch."""
        if self.pipeline.is_staged or (self._of_samples and dist.get_world_size() > 1):
            return False
        parameters = [item for item in self._parts.values() if item.kind is InputKind.PARAMETER]
        return not any(isinstance(each, Shard) for item in parameters for each in item.layout)

    def note(self, made: Executable | StagedExecutable) -> None:
        """Look at gradients from now on if this program, which learns, computes in float16."""
        self._is_half[0] = self._is_half[0] or computes_in_half(made)

    def look_at_steps(self, mesh: DeviceMesh) -> None:
        """Let optimizers step these parameters in the way that is right and fast, or be refused."""
        is_half = self._is_half
        refuse_infinite(self.tree, lambda: is_half[0])
        step_fast(self)
        if not self.are_plain:
            refuse_together(self, mesh, staged=self.pipeline.is_staged)
            step_whole(self, mesh, staged=self.pipeline.is_staged)
        if dist.get_world_size() > 1:
            self.changes = ParameterChanges(self.tree, staged=self.pipeline.is_staged)

    def _take_plain_tensors(self, owner: PlacedTensors, mesh: DeviceMesh) -> None:
        """Let parameters meet plain tensors outside of the program while `owner` lives."""
        in_blocks, staged = self._is_in_blocks(), self.pipeline.ranks > 1
        take_plain_tensors(owner, mesh, self._obstacle(), in_blocks=in_blocks, staged=staged)

    def _obstacle(self) -> str:
        """Why plain tensors outside the program don't lie as parameters do; empty where they do."""
        if self._of_samples:
            return "of this rank's samples"
        blocks = self._is_in_blocks()
        return "whose rows lie in another order than that of weights in blocks" if blocks else ""

    def _is_in_blocks(self) -> bool:
        """Whether a weight is stored block by block."""
        layouts = [placement for item in self._parts.values() for placement in item.layout]
        return any(isinstance(placement, Shard) and placement.atom for placement in layouts)

    def _store(self, name: str, full: Tensor) -> tuple[Tensor | None, Stored]:
        assert self._mesh is not None
        part = self._parts.get(name)
        if part is None:
            raise CheckError(
                where=f"{name} of the model",
                found="no input of the program",
                wanted="every parameter and buffer among the program's inputs",
                remedy="report this model",
            )
        key = sharding_key(self._mesh[0], part.layout)
        devices = self._mesh[0].num_devices
        holders = self._holders.get(part.target, ())
        holder = self.pipeline.first(holders[0], devices) if holders else None
        stored = Stored(part, key, self._device, self._serial[name], holder)
        if full.is_meta:
            self.missing.names.add(name)
        values = self._values(full)
        if holders and self.pipeline.placed(dist.get_rank(), devices)[0] not in holders:
            return None, stored
        mine = part.part.take(values)
        if mine.layout is not torch.strided:
            return mine.to(self._device), stored
        mine = self._copy(part, mine)  # a view would keep the whole
        if isinstance(full, nn.Parameter):
            outer = nn.Parameter(self._laid(part, mine), requires_grad=full.requires_grad)
            if full.grad is not None and not full.is_meta:  # of steps before parallelize
                outer.grad = self._laid(part, self._copy(part, part.part.take(full.grad.detach())))
            return outer, stored
        return (mine if key is None else distribute(part, mine, self._mesh[1])), stored

    def _copy(self, part: InputPart, mine: Tensor) -> Tensor:
        """A copy of this rank's part, in the memory in which it lies."""
        if part.on_host:
            return in_host_memory(mine, self._device)
        return mine.to(self._device).clone(memory_format=torch.contiguous_format)

    def _laid(self, part: InputPart, mine: Tensor) -> Tensor:
        """What a user has of a parameter, of which this rank has `mine`."""
        assert self._mesh is not None
        if self.are_plain:
            return mine
        # On the meta device, since DTensors would take what lies on the host to the mesh's.
        laid = distribute(part, mine.to("meta") if part.on_host else mine, self._mesh[1])
        return with_part(mine, laid) if part.on_host else laid

    def _values(self, full: Tensor) -> Tensor:
        """A copy of the tensor's values, rank 0's if asked for."""
        if full.is_meta:
            return placeholder(full.dtype).expand(full.shape)  # which takes no memory
        dense = {"memory_format": torch.contiguous_format} if full.layout is torch.strided else {}
        values = full.detach().clone(**dense)
        if self._from_rank_0:
            values = values.to(self._device)
            for part in parts_of(values):
                dist.broadcast(part, src=0)
        return values

    def check(self, made: Executable | StagedExecutable) -> DeviceMesh:
        """Raise CheckError where a later program doesn't take the parameters as they lie, InputError where it
        takes others."""
        assert self._mesh is not None
        states = [item for item in made.inputs if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
        if new := [item.target for item in states if item.target not in self._parts]:
            raise came_later(new)
        moved = [
            f"{item.target} as {show(item.layout)}"
            for item in states
            if not _lie_alike(item.part, self._parts[item.target].part)
            or item.on_host != self._parts[item.target].on_host
        ]
        self._look_at_writes(made)
        if isinstance(made, StagedExecutable) and made.mesh.even == self._mesh[0].even and not moved:
            self._check_stages(made)
        if moved or made.mesh.even != self._mesh[0].even:
            raise CheckError(
                where="a second program of the parallel module",
                found=f"mesh {made.mesh}" + "".join(f", {name}" for name in moved),
                wanted=f"mesh {self._mesh[0]} and parameters where they are",
                remedy="report this model: the planner must keep to the layouts that are pinned",
            )
        return self._mesh[1]

    def _check_stages(self, made: StagedExecutable) -> None:
        """Raise InputError where a program uses parameters on other pipeline ranks than hold them.

        What learns is used by all ranks that have a copy, or by none of these.
        """
        elsewhere = {
            name: ranks
            for name, ranks in made.holders.items()
            if not set(ranks) <= set(self._holders[name])
            or (torch.is_grad_enabled() and ranks != self._holders[name])
        }
        if elsewhere:
            name, ranks = next(iter(elsewhere.items()))
            others = f", and {len(elsewhere) - 1} more" if len(elsewhere) > 1 else ""
            raise InputError(
                where=f"{name} of the parallel module{others}",
                found=f"used on pipeline rank {_listed(ranks)} by this call, "
                f"held by {_listed(self._holders[name])}",
                wanted="a use on the same ranks as by the call that was planned first; weights don't move",
                remedy="parallelize with an example and in a state (flags, modes) where every weight is used "
                "as later, or plan without stages",
            )

    def pinned(self, users: Mapping[str, Layout]) -> PinnedLayouts | None:
        """Constraints on later programs, with the layouts of `users`, the user's inputs; None before any
        program."""
        if self._mesh is None:
            return None
        stored = {name: item.layout for name, item in self._parts.items()}
        on_host = frozenset(item.target for item in self._parts.values() if item.on_host)
        return PinnedLayouts(
            self._mesh[0], stored, users, self._stages_of_uses, self.pipeline, self._plan, on_host
        )

    def of(self, tree: UserTree) -> PlacedTensors:
        """The tensors of a copy of the module, which lie alike."""
        twin = copy.copy(self)
        twin.tree = tree
        if self._held is not None:
            vars(twin).update(_held=RankStates(self._device))
        if self._mesh is not None:
            if any(isinstance(item, DTensor) for _, item in tree.named_tensors()):
                self._take_plain_tensors(twin, self._mesh[1])
            twin.look_at_steps(self._mesh[1])
        return twin

    def _look_at_writes(self, made: Executable | StagedExecutable) -> None:
        """Remember whether a program's buffers are parameters of the model, which its forward writes."""
        names = {name for name, _ in self.tree.root.named_parameters()}
        buffers = (item.target for item in made.inputs if item.kind is InputKind.BUFFER)
        self._writes_parameters = self._writes_parameters or not names.isdisjoint(buffers)

    def end_call(self) -> None:
        """Take what a program has written to parameters for written by all ranks alike."""
        if self._writes_parameters:
            self.accept_changes()

    def accept_changes(self) -> None:
        """Take what has been written to parameters for written by all ranks alike."""
        if self.changes is not None:
            self.changes.accept()

    # -- what ranks hold --------------------------------------------------------------------------

    def update_states(self) -> None:
        """With stages, learn what other ranks hold; a collective."""
        if self._held is not None:
            self._held.update(self.named())

    def states(self) -> Mapping[str, State]:
        """Dtypes and need of gradients of all parameters and buffers, also of other stages."""
        if self._held is not None:
            return self._held.states
        return {name: (tensor.dtype, tensor.requires_grad) for name, tensor in self.named()}

    @property
    def states_of_stages(self) -> tuple[tuple[str, State], ...] | None:
        """States of all stages' ranks, as they were told last; None without stages."""
        return tuple(self._held.states.items()) if self._held else None

    def whole_states(self) -> Mapping[str, State]:
        """The states of all parameters and buffers as they are now; collective with stages."""
        self.tree.check()
        self.update_states()
        return self.states()

    def require_values(self) -> None:
        """Raise InputError for what was on the meta device and isn't loaded; collective where any was."""
        if self.missing.names:
            self.missing.require_none(dict(self.named()))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers of this rank, by their serial names."""
        return itertools.chain(self.tree.root.named_parameters(), self.tree.root.named_buffers())

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters and buffers that every rank of the world has, whole."""
        if self._mesh is None or self.pipeline.is_staged:
            return
        for name, tensor in self.named():
            if not isinstance(tensor, DTensor) or not any(item.is_shard() for item in tensor.placements):
                yield f"parameter or buffer {name}", local(tensor)

    def copies(self) -> Iterator[tuple[str, str, Tensor]]:
        """Parameters and buffers that some other ranks have too, with the rows that these have.

        Those that every rank has whole are left out.
        """
        everywhere = {name for name, _ in self.whole()}
        for name, tensor in self.named():
            part = self._parts.get(name)
            named = f"parameter or buffer {name}"
            if part is not None and named not in everywhere and self._is_shared(part):
                yield named, repr(part.part.rows), local(tensor)

    def _is_shared(self, part: InputPart) -> bool:
        """Whether some of several ranks hold the same rows: of an axis, or of several pipeline ranks."""
        assert self._mesh is not None
        axes = zip(self._mesh[0].shape, part.layout, strict=True)
        along = any(size > 1 and not isinstance(placement, Shard) for size, placement in axes)
        whole = not self.pipeline.is_staged and not any(isinstance(each, Shard) for each in part.layout)
        return (along and not whole) or len(self._holders.get(part.target, ())) > 1

    def counts(self, name: str) -> bool:
        """Whether this pipeline rank counts the parameter; of several that hold it, the first one does."""
        if not self._holders or self._mesh is None:
            return True
        return self._holders[name][0] == self._pipeline_rank()

    def writes(self, name: str) -> bool:
        """Whether this rank saves what it has of a tensor; of unlike stages with it the first does."""
        part = self._parts.get(name)
        holders = self._holders.get(part.target, ()) if part and self.pipeline.meshes else ()
        return not holders or self._mesh is None or holders[0] == self._pipeline_rank()

    def _pipeline_rank(self) -> int:
        assert self._mesh is not None
        return self.pipeline.placed(dist.get_rank(), self._mesh[0].num_devices)[0]

    def require_placed(self) -> None:
        """Raise InputError before a plan has said where parameters lie."""
        if self._mesh is None:
            raise InputError(
                where="parameters of the parallel module",
                found="no plan yet",
                wanted="parameters that are placed by a plan",
                remedy="pass example_inputs to parallelize, or call the module once first",
            )

    def gather(self, name: str, tensor: Tensor | None) -> Tensor:
        """The full tensor of what lies as parameter or buffer `name` does; a collective."""
        stored = self.tree.stored[name]
        with collective("gather") if stored.is_shared else nullcontext():
            return stored.gather(tensor)

    def gathering(self, what: str) -> AbstractContextManager[None]:
        """Context in which all parameters and buffers are gathered, which is collective where any is
        shared."""
        return collective(what) if self.is_gathered else nullcontext()

    @property
    def is_gathered(self) -> bool:
        """Whether making parameters and buffers whole takes several ranks."""
        return dist.get_world_size() > 1 and any(item.is_shared for item in self.tree.stored.values())


def group_keys(made: Executable | StagedExecutable) -> set[str]:
    """Keys of the program's groups, and of those of every axis and of everything that is sharded."""
    stored = [item.layout for item in made.inputs if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
    joint = {key for layout in stored if (key := sharding_key(made.mesh, layout)) is not None}
    sums = {item.sync for item in made.inputs if item.sync is not None}
    sums |= {
        key
        for item in made.inputs
        if item.kind is InputKind.USER and item.spec.requires_grad
        if (key := gradient_key(item, made.mesh)) is not None
    }
    return {*made.groups, *joint, *sums, *(made.mesh.key((axis,)) for axis in made.mesh.axes)}


def _listed(ranks: tuple[int, ...]) -> str:
    return " and ".join(map(str, ranks))


def _lie_alike(part: Part, other: Part) -> bool:
    """Whether two parts are the same rows; whole ones are, whatever their dims are products of."""
    return part == other or (part.is_whole and other.is_whole)
