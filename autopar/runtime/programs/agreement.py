"""What ranks must have in common is compared: the batch, constants, modes, random states, whole parameters.

    rank 0   digest of everything --.
    rank 1   digest of everything ---+-> equal: 7 bytes, nothing more
             different: names and digests of all, and an error on every rank that names the first

Every call compares what is cheap: shapes, modes, what optimizers have done, a sample of inputs in main
memory. The first calls of each shape, and every `STRIDE`-th one, compare all bytes of whole parameters and
inputs, too. Kernels that are chosen by trial, as a GPU's may be, can leave replicas of a parameter or buffer
apart by a rounding: then rank 0's stands.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import InputError
from autopar.runtime.collectives import roll_call, transport
from autopar.runtime.collectives.statements import Statement, StatementPart, unlike
from autopar.runtime.programs.parameter_changes import ParameterChanges
from autopar.trace.call.call_signature import PLAIN, Arguments, Leaf
from autopar.trace.call.user_source import calling_line
from autopar.trace.forward.autocast import Autocast
from autopar.trace.values.structure import parts_of

FIRST_CALLS = 3  # calls of each shape that compare everything
STRIDE = 64  # calls from one that compares everything to the next
SAMPLED = 64  # elements of a tensor in a sample
SHORT_BYTES = 4096  # of a tensor that is compared byte by byte
_WORD = 8  # bytes
REPLICA_EPSILONS = 8  # epsilons of a tensor's largest number, by which replicas may differ

Copy = tuple[str, str, Tensor]  # a tensor's name, which rows of it some ranks have, and these
_Key = tuple[str, str]
T = TypeVar("T")

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object that says nothing else of itself

_BATCH = (
    "pass the same whole batches, and as many, on every rank, "
    'or parallelize with inputs="local" and pass its samples'
)
_GRAPH = "pass the same graph, whole, on every rank"
_CALL = "make the same calls on all ranks, in the same modes"
_STATE = "change it on all ranks alike, or call load_state_dict of the parallel module"
_DRAWN = "write the same values on all ranks: seed them alike, or broadcast what one of them draws"
_STATE_READ = "change what forward reads, and what learns, on every rank alike"
_RANDOM = "seed all ranks alike, which exact_random needs"


class Agreement:
    """Compares what ranks pass and hold. All ranks make the same calls in the same order."""

    def __init__(self, device: torch.device, *, local_inputs: bool) -> None:
        self._device, self._local = device, local_inputs
        self._calls: Counter[Hashable] = Counter()
        self._count = 0
        self._kinds: dict[Hashable, tuple[StatementPart, ...]] = {}  # the kind of call that was made last

    def check(
        self,
        call: Arguments,
        modes: Iterable[bool],
        held: Iterable[tuple[str, Tensor]],
        *,
        random: bytes = b"",
        structure: Iterable[tuple[str, bytes]] = (),
        changes: ParameterChanges | None = None,
        program: str = "",
        copies: Iterable[Copy] | None = None,
    ) -> None:
        """Compare a call; `held` are tensors that every rank has whole, `random` is what its masks follow
        from, `structure` tells of inputs that are equal where others are parts, `program` says whether
        one is there, `copies` are what some other ranks have too, None if nobody has such. Collective.

        Raises InputError on every rank where they differ.
        """
        if dist.get_world_size() == 1:
            return
        autocast = Autocast.now(self._device.type)
        kind = (torch.is_grad_enabled(), autocast, *(tensor.shape for tensor in call.tensors))
        count = self._count + 1
        all_values = count <= FIRST_CALLS or count % STRIDE == 0
        whole = self._calls[kind] < FIRST_CALLS or count % STRIDE == 0
        if not whole and not roll_call.meets():
            self._count = count
            return
        known = dict(held) if all_values else {}
        parts = (
            *self._parts(call, modes, known.items(), random, whole=whole),
            StatementPart("the program of this call", _STATE_READ, program.encode()),
        )
        graphs = map(_graph, structure)
        free = changes.free if changes else set()
        told = tuple(changes.parts()) if changes else ()
        written = _written(held, changes.written) if changes and changes.written and not known else {}
        values = (StatementPart(name, _DRAWN, _bytes(item, whole=True)) for name, item in written.items())
        if compare((*parts, *told, *values, *graphs), known | written, free=free):
            assert changes is not None
            changes.let_differ()
        # On all ranks: of a call that is refused they may know other kinds, or not know at all.
        self._calls[kind] += 1
        self._count = count
        if copies is not None and all_values:
            compare_copies(copies)

    def check_state(
        self,
        held: Iterable[tuple[str, Tensor]],
        changes: ParameterChanges | None,
        copies: Iterable[Copy] | None,
    ) -> None:
        """Compare parameters and buffers before they are saved, as a call does; collective."""
        known = dict(held)
        parts = [StatementPart(name, _STATE, _bytes(tensor, whole=True)) for name, tensor in known.items()]
        free = changes.free if changes else set()
        if compare((*parts, *(changes.parts() if changes else ())), known, free=free):
            assert changes is not None
            changes.let_differ()
        if copies is not None:
            compare_copies(copies)

    def check_change(self, name: str, values: str) -> None:
        """Compare what has changed of all that forward reads, and the numbers of now; collective."""
        if dist.get_world_size() > 1:
            parts = ("what forward reads and has changed", name), (f"{name}, which forward reads,", values)
            compare(StatementPart(part, _STATE, text.encode()) for part, text in parts)

    def check_structure(self, structure: Iterable[tuple[str, bytes]]) -> None:
        """Compare the graphs of a call that is prepared; collective."""
        if dist.get_world_size() > 1:
            compare(map(_graph, structure))

    def check_shapes(self, call: Arguments) -> None:
        """Compare a call that is prepared, but for its values; collective."""
        if dist.get_world_size() > 1:
            compare(_signature(call, shapes=True))

    def _parts(
        self,
        call: Arguments,
        modes: Iterable[bool],
        held: Iterable[tuple[str, Tensor]],
        random: bytes,
        *,
        whole: bool,
    ) -> Iterator[StatementPart]:
        yield from self._kind_of(call, tuple(modes))
        if not self._local:
            for path, tensor in zip(call.paths, call.tensors, strict=True):
                if whole or tensor.is_cpu:  # a GPU would be waited for
                    yield StatementPart(f"input {path}", _BATCH, _bytes(tensor, whole=whole))
        for name, tensor in held:
            yield StatementPart(name, _STATE, _bytes(tensor, whole=whole))
        yield StatementPart("the default generator", _RANDOM, random)

    def _kind_of(self, call: Arguments, modes: tuple[bool, ...]) -> tuple[StatementPart, ...]:
        """What is alike in all calls of a kind, which is written out once."""
        autocast = Autocast.now(self._device.type)
        flags = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        learns = tuple(tensor.requires_grad for tensor in call.tensors)
        kind = (call.key, modes, flags, autocast, learns)
        if (known := self._kinds.get(kind)) is not None:
            return known
        parts = (
            *_signature(call, shapes=not self._local),
            StatementPart("train or eval mode of the modules", _CALL, bytes(modes)),
            StatementPart("torch.is_grad_enabled()", _CALL, str(flags[0]).encode()),
            StatementPart("torch.is_inference_mode_enabled()", _CALL, str(flags[1]).encode()),
            StatementPart("autocast", _CALL, str(autocast).encode()),
        )
        if all(
            isinstance(item, (Leaf, *PLAIN)) for item in call.constants
        ):  # others may say more of themselves
            self._kinds.clear()
            self._kinds[kind] = parts
        return parts


def _written(held: Iterable[tuple[str, Tensor]], names: Collection[str]) -> dict[str, Tensor]:
    """Tensors that have been written, by what messages call them."""
    return {name: tensor for name, tensor in held if name.rpartition(" ")[2] in names}


def _graph(named: tuple[str, bytes]) -> StatementPart:
    """A graph by its digest, which tells nobody anything."""
    name, digest = named
    return StatementPart(name, _GRAPH, b"\0" + digest)


def _signature(call: Arguments, *, shapes: bool) -> Iterator[StatementPart]:
    yield StatementPart("the structure of the arguments", _CALL, str(call.structure).encode())
    for constant in call.constants:
        yield StatementPart("a constant argument", _CALL, _ADDRESS.sub("", repr(constant)).encode())
    for path, tensor in zip(call.paths, call.tensors, strict=True) if shapes else ():
        form = f"{tuple(tensor.shape)} {tensor.dtype}{' with a gradient' if tensor.requires_grad else ''}"
        yield StatementPart(f"input {path}", _BATCH, form.encode())


def whole_bytes(tensor: Tensor) -> bytes:
    """Bytes that stand for all of a tensor, for `compare`."""
    return _bytes(tensor, whole=True)


def _bytes(tensor: Tensor, *, whole: bool) -> bytes:
    """Bytes that stand for a tensor: a long one by a sample and, for the `whole` of it, a sum."""
    if tensor.layout is not torch.strided:
        return b"".join(_bytes(part, whole=whole) for part in parts_of(tensor))
    flat = tensor.detach().reshape(-1)
    long = flat.nbytes > SHORT_BYTES
    sample = flat[:: max(1, len(flat) // SAMPLED)] if long or not whole else flat
    raw = sample.resolve_conj().contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return raw + checksum(flat) if whole and long else raw


def checksum(flat: Tensor) -> bytes:
    """The sum of a vector's bits, by eight bytes, modulo 2^64: 60 GB/s on a CPU, where a digest does one."""
    flat = flat.resolve_conj().contiguous()
    if flat.storage_offset() * flat.itemsize % _WORD:
        flat = flat.clone()
    raw = flat.view(torch.uint8)
    words, rest = raw[: len(raw) // _WORD * _WORD], raw[len(raw) // _WORD * _WORD :]
    return f"{words.view(torch.int64).sum().item()} {rest.tolist()}".encode()


def compare(
    parts: Iterable[StatementPart],
    held: Mapping[str, Tensor] | None = None,
    *,
    free: Collection[str] = (),
) -> bool:
    """Raise InputError on every rank where they differ in one of the parts; collective.

    Those that are `held` may differ by a rounding, `free` ones anyhow; whether some of these do.
    """
    statements = roll_call.compare(tuple(parts))
    if statements is None:
        return False
    apart = _apart(statements)
    if not apart or not _settled(apart - set(free), held or {}):
        raise unlike(statements, calling_line())
    return not apart.isdisjoint(free)


def compare_copies(copies: Iterable[Copy]) -> None:
    """Raise InputError on every rank where copies of the same rows differ beyond roundings; collective."""
    mine = {(name, rows): tensor for name, rows, tensor in copies}
    sums = {key: _bytes(tensor, whole=True) for key, tensor in mine.items()}
    told = _by_key(roll_call.everybody(sums))
    apart = {key for key, values in told.items() if len(set(values.values())) > 1}
    if not apart:
        return
    sizes = {key: _size(tensor) for key, tensor in mine.items() if key in apart}
    for key, found in sorted(_by_key(roll_call.everybody(sizes)).items()):
        usual, *others = found
        for rank in others:
            if not _are_near(found[rank], found[usual]):
                raise InputError(
                    where=calling_line(),
                    found=f"{key[0]} on rank {rank} unlike that on rank {usual}",
                    wanted="the same on all ranks that have it",
                    remedy=_STATE,
                )


def _by_key(told: Sequence[Mapping[_Key, T]]) -> dict[_Key, dict[int, T]]:
    """Reports of each key, by rank."""
    found: dict[_Key, dict[int, T]] = {}
    for rank, items in enumerate(told):
        for key, value in items.items():
            found.setdefault(key, {})[rank] = value
    return found


def _size(tensor: Tensor) -> tuple[float, float, float]:
    """The sum, the largest element, and how far sums may lie apart by roundings; nothing where one is NaN."""
    values = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
    largest = float(values.abs().max()) if values.numel() else 0.0
    rounding = (
        REPLICA_EPSILONS * torch.finfo(tensor.dtype).eps * largest if tensor.is_floating_point() else 0.0
    )
    return float(values.sum().real), largest, rounding * values.numel()


def _are_near(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    return abs(one[0] - other[0]) <= other[2] and abs(one[1] - other[1]) <= other[2] and other[2] > 0


def _apart(statements: Sequence[Statement]) -> set[str]:
    """Names of parts in which ranks differ; none where they don't have the same ones."""
    first = statements[0].parts
    if any([part.name for part in each.parts] != [part.name for part in first] for each in statements):
        return set()
    pairs = (zip(each.parts, first, strict=True) for each in statements)
    return {one.name for pair in pairs for one, other in pair if one.digest != other.digest}


def _settled(apart: Collection[str], held: Mapping[str, Tensor]) -> bool:
    """Whether ranks differ in nothing but roundings of what they hold, which then is rank 0's; collective."""
    floats = {name for name, tensor in held.items() if tensor.is_floating_point()}
    return floats.issuperset(apart) and all(_is_rounding(held[name]) for name in sorted(apart))


@torch.no_grad()
def _is_rounding(tensor: Tensor) -> bool:
    """Whether a tensor is rank 0's but for a rounding; then it becomes that; collective."""
    theirs = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(theirs, src=0)
    limit = REPLICA_EPSILONS * torch.finfo(tensor.dtype).eps * theirs.abs().max()
    is_apart = ~((tensor - theirs).abs().max() <= limit)  # where one is no number, too
    flag = is_apart.to(torch.int64).reshape(1)
    assert dist.group.WORLD is not None
    transport.all_reduce(flag, dist.group.WORLD, dist.ReduceOp.MAX)
    if flag.item():
        return False
    tensor.copy_(theirs)
    return True
