"""Masks for random operators on ranks: the serial mask, or one for each shard.

What a program draws depends on a seed that ranks share and the number of its call, never on how much a rank
has drawn elsewhere (augmentation, a seed of its own):

    the user's draws     ---- a ---- b ------------------- c ----     the default generator
    a program's draws              '-- seed(module, call 0) --'       the same, set and put back
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.core.operator_facts import is_random
from autopar.runtime import registry
from autopar.torch_seams.autograd import graph_task
from autopar.torch_seams.schemas import schema_of
from autopar.trace.micro_batches import seed_after

REPEATED = 1024  # calls between a checkpoint's forward and its backward
_streams = itertools.count()
_library = torch.library.Library("autopar", "FRAGMENT")


def _dropout_mask(shape: Sequence[int], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask that the serial F.dropout draws: 0 or 1 / (1 - p), from the default generator."""
    if p >= 1.0:
        return torch.zeros(shape, dtype=dtype, device=device)
    if device.type == "cuda":  # which draws in a kernel of its own
        return torch.native_dropout(torch.ones(shape, dtype=dtype, device=device), p, True)[0]
    return torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - p).div_(1 - p)


def _serial_mask(
    number: int, shape: Sequence[int], p: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Draw a `_dropout_mask` for the draw with this number among a program's."""
    return _dropout_mask(shape, p, dtype, device)


def _shard_mask(
    shape: Sequence[int], p: float, dtype: torch.dtype, shard: int, device: torch.device
) -> Tensor:
    """Draw a mask of one shard; replicas of a shard draw one mask.

    The seed comes from the default generator, which stands alike on all ranks, and from the shard's number.
    """
    if device.type == "meta":  # has no generators, and a shape must not move the default one
        return torch.empty(shape, dtype=dtype, device=device)
    return _mask_of(_mask_seed(0), shape, p, dtype, shard, device)


def _mask_seed(number: int) -> Tensor:
    """The seed of draw `number` of a program."""
    return torch.randint(2**31, ())


def _mask_of(
    seed: Tensor, shape: Sequence[int], p: float, dtype: torch.dtype, shard: int, device: torch.device
) -> Tensor:
    """The mask of a shard that follows from a seed."""
    generator = torch.Generator(device=device).manual_seed(int(seed) * 65_537 + shard)
    if p >= 1.0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - p, generator=generator).div_(1 - p)


class Stream:
    """The seeds of one module's calls that draw. All ranks make the same calls in the same order."""

    def __init__(self, seed: int) -> None:
        self._seed, self._count = seed, 0
        self._known: dict[int, int] = {}  # seeds by what the default generator drew before the call

    def next(self) -> int:
        """The seed of the next call, or of one that a checkpoint repeats inside backward: that is known by
        the state of the default generator, which moves at each call and which checkpoints put back."""
        ticket = int(torch.randint(2**62, ()))
        if graph_task() == -1 or ticket not in self._known:
            self._known[ticket] = mixed(self._seed, self._count)
            self._count += 1
        if len(self._known) > REPEATED:
            del self._known[next(iter(self._known))]
        return self._known[ticket]

    @property
    def place(self) -> tuple[int, int]:
        """The seed and the number of calls so far, from which all later seeds follow."""
        return self._seed, self._count

    def go_to(self, place: tuple[int, int]) -> None:
        """Go on as a stream at that `place` would."""
        self._seed, self._count = place
        self._known.clear()


def shared_stream() -> Stream:
    """Open a random stream for a module, from rank 0's random state; collective."""
    state = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=7)
    box = [mixed(int.from_bytes(state.digest()), next(_streams))]
    dist.broadcast_object_list(box, src=0)
    return Stream(box[0])


def mixed(*numbers: int) -> int:
    """A seed for torch that depends on all the numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=7)
    return int.from_bytes(digest.digest())


@contextmanager
def drawing_apart(device: torch.device) -> Iterator[None]:
    """Put the default generators back where they were, whatever is drawn within."""
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        yield


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Context in which what is drawn follows from `seed`; then the default generators stand as before."""
    with drawing_apart(device):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class ExactDraws:
    """Where exact masks of a step are drawn from: in micro-batch 0 where the serial model would draw them.

    default generator   start --- 0 ---> after    where the step leaves it, on all ranks
                          '-- 1, '-- 2            seeds of micro-batches 1 and 2

    With a `seed` the step starts as one that follows `torch.manual_seed(seed)`.
    """

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._start = self._after = self._states() if seed is None else self._seeded(seed)

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self._on_gpu else [])]

    def _seeded(self, seed: int) -> list[Tensor]:
        devices = ["cpu", *(["cuda"] if self._on_gpu else [])]
        return [torch.Generator(device).manual_seed(seed).get_state() for device in devices]

    def _put(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._on_gpu:
            torch.cuda.set_rng_state(states[1])

    @contextmanager
    def drawing(self, number: int) -> Iterator[None]:
        """Context in which the program of a micro-batch draws."""
        if number:
            torch.manual_seed(seed_after(self._start[0], number))
        else:
            self._put(self._start)
        yield
        if not number:
            self._after = self._states()

    def end(self, share: Callable[[Tensor], object] = lambda _: None) -> None:
        """Leave the generators where the serial model would; `share` has all ranks take the last stage's."""
        sizes, state = [len(each) for each in self._after], torch.cat(self._after)
        state = state.cuda() if self._on_gpu else state
        share(state)
        self._put(state.cpu().split(sizes))


def draws(program: fx.GraphModule) -> bool:
    """Whether some operator of the program is random."""
    return any(
        is_draw(node)
        for module in program.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )


def is_draw(node: fx.Node) -> bool:
    """Whether a node of a program draws random numbers; attention without dropout draws none."""
    if not is_random(node.target):
        return False
    names = [argument.name for argument in schema_of(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def share_state() -> None:
    """All ranks go on with rank 0's generators, GPUs' too: replicas must draw one mask; collective."""
    on_gpus = dist.get_backend() == dist.Backend.NCCL
    box = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpus else [])]
    dist.broadcast_object_list(box, src=0)
    torch.set_rng_state(box[0])
    if on_gpus:
        torch.cuda.set_rng_state(box[1])


def _register(name: str, schema: str, kernel: object) -> None:
    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
    _library.define(f"{name}{schema}", tags=tags)
    _library.impl(name, kernel, "CompositeExplicitAutograd")


_register(
    "dropout_mask", "(SymInt[] shape, float p, ScalarType dtype, Device device) -> Tensor", _dropout_mask
)
_register(
    "shard_mask",
    "(SymInt[] shape, float p, ScalarType dtype, int shard, Device device) -> Tensor",
    _shard_mask,
)

# In compiled programs draws are numbered, or two that look alike would be one. A shard's mask is made of its
# seed, which stays for backward in its place.
_DRAWN = (torch.Tag.nondeterministic_seeded,)


def _mask_shape(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


for _name, _schema, _kernel, _shape in (
    (
        "serial_mask",
        "(int number, int[] shape, float p, ScalarType dtype, Device device) -> Tensor",
        _serial_mask,
        lambda number, shape, p, dtype, device: _mask_shape(shape, dtype, device),
    ),
    ("mask_seed", "(int number) -> Tensor", _mask_seed, lambda number: torch.empty((), dtype=torch.int64)),
):
    registry.define(_name, _schema, _kernel, shape=_shape, tags=_DRAWN)
    registry.keep_order(_name, _schema, _kernel, shape=_shape)
registry.define(
    "mask_of",
    "(Tensor seed, int[] shape, float p, ScalarType dtype, int shard, Device device) -> Tensor",
    _mask_of,
    shape=lambda seed, shape, p, dtype, shard, device: _mask_shape(shape, dtype, device),
)
