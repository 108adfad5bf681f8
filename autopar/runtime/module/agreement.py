"""What ranks must have in common is compared: the batch, constants, modes, random states, whole parameters.

    rank 0   digest of everything --.
    rank 1   digest of everything ---+-> equal: 16 bytes, nothing more
             different: names and digests of all, and an error on every rank that names the first

The first calls of each shape compare all bytes, every `STRIDE`-th one after them a sample of them. Kernels
that are chosen by trial, as a GPU's may be, can leave replicas of a parameter or buffer apart by a rounding:
then rank 0's stands.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import InputError
from autopar.runtime.collectives import transport
from autopar.trace.autocast import Autocast
from autopar.trace.call_signature import Arguments
from autopar.trace.structure import parts_of
from autopar.trace.user_source import calling_line

FIRST = 3  # calls of each shape that compare everything
STRIDE = 64  # calls from one sample to the next
SAMPLED = 64  # elements of a tensor in a sample
ROUNDING = 8  # epsilons of a tensor's largest number, by which replicas may differ

Part = tuple[str, str, bytes]  # its name, what to do where ranks differ in it, and its bytes

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object that says nothing else of itself

_BATCH = 'pass the whole batch on every rank, or parallelize with inputs="local" and pass its samples'
_GRAPH = "pass the same graph, whole, on every rank"
_CALL = "make the same calls on all ranks, in the same modes"
_STATE = "change it on all ranks alike, or call load_state_dict of the parallel module"
_RANDOM = "seed all ranks alike, which exact_random needs"


class Agreement:
    """Compares what ranks pass and hold. All ranks make the same calls in the same order."""

    def __init__(self, device: torch.device, *, local_inputs: bool) -> None:
        self._device, self._local = device, local_inputs
        self._calls: Counter[Hashable] = Counter()
        self._count = 0

    def check(
        self,
        call: Arguments,
        modes: Iterable[bool],
        held: Iterable[tuple[str, Tensor]],
        *,
        random: bytes = b"",
        structure: Iterable[tuple[str, bytes]] = (),
    ) -> None:
        """Compare a call if it is its turn; `held` are tensors that every rank has whole, `random` is what
        its masks follow from, `structure` tells of inputs that are equal where others are parts. Collective
        then.

        Raises InputError on every rank where they differ.
        """
        autocast = Autocast.now(self._device.type)
        kind = (torch.is_grad_enabled(), autocast, *(tensor.shape for tensor in call.tensors))
        self._calls[kind] += 1
        self._count += 1
        whole = self._calls[kind] <= FIRST
        if dist.get_world_size() > 1 and (whole or self._count % STRIDE == 0):
            known = dict(held) if self._count <= FIRST else {}
            parts = self._parts(call, modes, known.items(), random, whole=whole)
            graphs = ((name, _GRAPH, digest) for name, digest in structure)
            compare((*parts, *graphs), self._device, known)

    def check_change(self, name: str, values: str) -> None:
        """Compare what has changed of all that forward reads, and the numbers of now; collective."""
        if dist.get_world_size() > 1:
            parts = ("what forward reads and has changed", name), (f"{name}, which forward reads,", values)
            compare(((part, _STATE, text.encode()) for part, text in parts), self._device)

    def check_structure(self, structure: Iterable[tuple[str, bytes]]) -> None:
        """Compare the graphs of a call that is prepared; collective."""
        if dist.get_world_size() > 1:
            compare(((name, _GRAPH, digest) for name, digest in structure), self._device)

    def check_shapes(self, call: Arguments) -> None:
        """Compare a call that is prepared, but for its values; collective."""
        if dist.get_world_size() > 1:
            compare(_signature(call, shapes=True), self._device)

    def _parts(
        self,
        call: Arguments,
        modes: Iterable[bool],
        held: Iterable[tuple[str, Tensor]],
        random: bytes,
        *,
        whole: bool,
    ) -> Iterator[Part]:
        yield from _signature(call, shapes=not self._local)
        yield "train or eval mode of the modules", _CALL, bytes(modes)
        yield "torch.is_grad_enabled()", _CALL, bytes([torch.is_grad_enabled()])
        yield "autocast", _CALL, str(Autocast.now(self._device.type)).encode()
        if not self._local:
            for path, tensor in zip(call.paths, call.tensors, strict=True):
                yield f"input {path}", _BATCH, _bytes(tensor, whole=whole)
        for name, tensor in held:
            yield name, _STATE, _bytes(tensor, whole=whole)
        yield "the default generator", _RANDOM, random


def _signature(call: Arguments, *, shapes: bool) -> Iterator[Part]:
    yield "the structure of the arguments", _CALL, str(call.structure).encode()
    for constant in call.constants:
        yield "a constant argument", _CALL, _ADDRESS.sub("", repr(constant)).encode()
    for path, tensor in zip(call.paths, call.tensors, strict=True) if shapes else ():
        yield f"input {path}", _BATCH, repr((tensor.shape, tensor.dtype, tensor.requires_grad)).encode()


def whole_bytes(tensor: Tensor) -> bytes:
    """All of a tensor, for `compare`."""
    return _bytes(tensor, whole=True)


def _bytes(tensor: Tensor, *, whole: bool) -> bytes:
    if tensor.layout is not torch.strided:
        return b"".join(_bytes(part, whole=whole) for part in parts_of(tensor))
    flat = tensor.detach().reshape(-1)
    if not whole:
        flat = flat[:: max(1, len(flat) // SAMPLED)]
    return flat.resolve_conj().contiguous().cpu().view(torch.uint8).numpy().tobytes()


def compare(parts: Iterable[Part], device: torch.device, held: Mapping[str, Tensor] | None = None) -> None:
    """Raise InputError on every rank where they differ in one of the parts; collective.

    Those that are `held` may differ by a rounding."""
    mine = [(name, remedy, hashlib.blake2b(value, digest_size=7).digest()) for name, remedy, value in parts]
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=7).digest()
    number = int.from_bytes(digest)
    extremes = torch.tensor([number, -number], device=device)
    assert dist.group.WORLD is not None
    transport.all_reduce(extremes, dist.group.WORLD, dist.ReduceOp.MAX)
    largest, negative = extremes.tolist()
    if largest != -negative:
        everywhere: list[list[Part]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, mine)
        if not _settled(everywhere, held or {}):
            raise _different(everywhere)


def _settled(everywhere: list[list[Part]], held: Mapping[str, Tensor]) -> bool:
    """Whether ranks differ in nothing but roundings of what they hold, which then is rank 0's; collective."""
    first = everywhere[0]
    if any(len(parts) != len(first) for parts in everywhere):
        return False
    apart = {one[0] for parts in everywhere for one, other in zip(parts, first, strict=True) if one != other}
    floats = {name for name, tensor in held.items() if tensor.is_floating_point()}
    return apart <= floats and all(_is_rounding(held[name]) for name in sorted(apart))


@torch.no_grad()
def _is_rounding(tensor: Tensor) -> bool:
    """Whether a tensor is rank 0's but for a rounding; then it becomes that; collective."""
    theirs = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(theirs, src=0)
    limit = ROUNDING * torch.finfo(tensor.dtype).eps * theirs.abs().max()
    is_apart = ~((tensor - theirs).abs().max() <= limit)  # where one is no number, too
    flag = is_apart.to(torch.int64).reshape(1)
    assert dist.group.WORLD is not None
    transport.all_reduce(flag, dist.group.WORLD, dist.ReduceOp.MAX)
    if flag.item():
        return False
    tensor.copy_(theirs)
    return True


def _different(everywhere: list[list[Part]]) -> InputError:
    first, *others = everywhere
    for rank, parts in enumerate(others, 1):
        for one, other in zip(first, parts, strict=False):
            if one != other:
                return _unlike(rank, other[0], other[1])
    rank = next(rank for rank, parts in enumerate(everywhere) if len(parts) != len(first))
    return _unlike(rank, "the number of arguments", _CALL)


def _unlike(rank: int, name: str, remedy: str) -> InputError:
    return InputError(
        where=calling_line(),
        found=f"{name} on rank {rank} unlike that on rank 0",
        wanted="the same on all ranks",
        remedy=remedy,
    )
