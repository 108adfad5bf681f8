"""Random calls of the moves on every rank of a mesh, and what they must give.

What a rank holds follows from the placement: S its own part, R and B the same as the others, P its
own addend. Gradients likewise, by the placement's other column: S and B each its own, R and P the
same everywhere. The expected gradients come from autograd through the simulated meaning.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from autopar.core.mesh import Mesh, parse_key
from autopar.proof.simulated import simulate
from autopar.runtime.collectives import groups, placement_moves

assert placement_moves  # its import registers the operators
TIMEOUT = timedelta(seconds=30)
MARGIN = 3  # rows that a random window may reach outside the tensor
DIM = 1  # the split dim of SHAPE
SHAPE = (2, 0, 3)


@dataclass(frozen=True)
class Case:
    """One operator on all ranks of the world; every rank passes the same `arguments`."""

    name: str
    key: str
    arguments: tuple[Any, ...]
    inputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...] | None

    @property
    def target(self) -> Any:
        return getattr(torch.ops.autopar, self.name).default

    @property
    def groups(self) -> list[tuple[int, ...]]:
        return groups_of(self.key)


def groups_of(key: str) -> list[tuple[int, ...]]:
    """The world ranks of every group of `key`."""
    mesh, axes = parse_key(key)
    return sorted({mesh.group(axes, rank) for rank in range(mesh.num_devices)})


def all_keys(mesh: Mesh) -> list[str]:
    """Each axis alone and all of them."""
    return sorted({mesh.key(axes) for axes in (*((axis,) for axis in mesh.axes), mesh.axes)})


def execute(cases: Sequence[Case]) -> list[tuple[Tensor, Tensor | None]]:
    """On a worker: this rank's result and input gradient for each case."""
    mesh = parse_key(cases[0].key)[0]
    groups.setup(mesh, all_keys(mesh), timeout=TIMEOUT)
    rank = torch.distributed.get_rank()
    return [_execute(case, rank) for case in cases]


def _execute(case: Case, rank: int) -> tuple[Tensor, Tensor | None]:
    x = case.inputs[rank]
    if case.gradients is None:
        return case.target(x, case.key, *case.arguments), None
    x = x.clone().requires_grad_()
    y = case.target(x, case.key, *case.arguments)
    y.backward(case.gradients[rank])
    return y.detach(), x.grad


def expected(case: Case, source: str, target: str) -> list[tuple[Tensor, Tensor]]:
    """By world rank: the result, and the input gradient laid as `source` says."""
    results: dict[int, tuple[Tensor, Tensor]] = {}
    for ranks in case.groups:
        leaves = [case.inputs[rank].clone().requires_grad_() for rank in ranks]
        outputs = simulate(case.target, [((x, case.key, *case.arguments), {}) for x in leaves])
        assert case.gradients is not None
        seeds = [case.gradients[rank] for rank in ranks]
        paired(target, outputs, seeds).backward()
        slopes = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        if source == "R":
            slopes = [torch.stack(slopes).sum(0)] * len(slopes)
        for rank, y, slope in zip(ranks, outputs, slopes, strict=True):
            results[rank] = y.detach(), slope
    return [results[rank] for rank in sorted(results)]


def paired(placement: str, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """<value, gradient> over ranks: the mean for R, else the sum."""
    total = torch.stack([(x * g).sum() for x, g in zip(values, gradients, strict=True)]).sum()
    return total / len(values) if placement == "R" else total


Draw = Callable[[random.Random, int], tuple[tuple[Any, ...], list[int], list[int]]]


def whole(draw: random.Random, size: int) -> tuple[tuple[Any, ...], list[int], list[int]]:
    """Arguments, and each rank's length of DIM before and after."""
    return (), [4] * size, [4] * size


def partition(draw: random.Random, size: int) -> list[int]:
    return [draw.choice((0, 1, 2, 2, 3, 4)) for _ in range(size - 1)] + [draw.randint(1, 4)]


def gathering(draw: random.Random, size: int) -> tuple[tuple[Any, ...], list[int], list[int]]:
    blocks, sizes = draw.randint(1, 3), partition(draw, size)
    local, full = [blocks * size for size in sizes], [blocks * sum(sizes)] * size
    return (DIM, blocks, sizes), local, full


def slicing(draw: random.Random, size: int) -> tuple[tuple[Any, ...], list[int], list[int]]:
    arguments, local, full = gathering(draw, size)
    return arguments, full, local


def windows(draw: random.Random, size: int) -> tuple[list[int], list[int], list[int]]:
    """A cut, and random windows: of any length, over several neighbours, past both ends."""
    sizes = partition(draw, size)
    owned = [sum(sizes[:rank]) for rank in range(size + 1)]
    pairs = [sorted(draw.randint(-MARGIN, owned[-1] + MARGIN) for _ in "ab") for _ in range(size)]
    return owned, [first for first, _ in pairs], [stop for _, stop in pairs]


def exchanging(draw: random.Random, size: int) -> tuple[tuple[Any, ...], list[int], list[int]]:
    blocks, (owned, starts, stops) = draw.randint(1, 2), windows(draw, size)
    local = [blocks * (stop - first) for first, stop in zip(owned, owned[1:], strict=False)]
    wide = [blocks * (stop - first) for first, stop in zip(starts, stops, strict=True)]
    return (DIM, blocks, owned, starts, stops, 0.0), local, wide


def draw_case(name: str, key: str, source: str, target: str, draw_arguments: Draw, seed: int) -> Case:
    mesh, axes = parse_key(key)
    arguments, before, after = draw_arguments(random.Random(seed), len(mesh.group(axes, 0)))
    generator = torch.Generator().manual_seed(seed)
    same_values, same_gradients = source in "RB", target in "RP"
    inputs = _lay(key, same_values, before, generator)
    return Case(name, key, arguments, inputs, _lay(key, same_gradients, after, generator))


def _lay(key: str, same: bool, lengths: list[int], generator: torch.Generator) -> tuple[Tensor, ...]:
    """A tensor for each rank of the world, `same` within each group or not."""
    placed: dict[int, Tensor] = {}
    for ranks in groups_of(key):
        for index, rank in enumerate(ranks):
            shape = (SHAPE[0], lengths[index], SHAPE[2])
            fresh = torch.randn(shape, dtype=torch.float64, generator=generator)
            placed[rank] = placed[ranks[0]] if same and index else fresh
    return tuple(placed[rank] for rank in sorted(placed))


def draw_all_to_all(key: str, dims: tuple[int, int], seed: int) -> Case:
    """From a split of dims[0] to a split of dims[1]; each rank's tensors are its own."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    size = len(groups_of(key)[0])
    blocks, sizes = [draw.randint(1, 2) for _ in dims], [partition(draw, size) for _ in dims]
    inputs: dict[int, Tensor] = {}
    gradients: dict[int, Tensor] = {}
    for ranks in groups_of(key):
        for index, rank in enumerate(ranks):
            for split, tensors in ((0, inputs), (1, gradients)):
                shape = [2, 2, 2]
                shape[dims[split]] = blocks[split] * sizes[split][index]
                shape[dims[1 - split]] = blocks[1 - split] * sum(sizes[1 - split])
                tensors[rank] = torch.randn(shape, dtype=torch.float64, generator=generator)
    arguments = (dims[0], blocks[0], sizes[0], dims[1], blocks[1], sizes[1])
    world = sorted(inputs)
    return Case("s_to_s", key, arguments, tuple(inputs[r] for r in world), tuple(gradients[r] for r in world))
