"""What a call with a custom backward does, found out on random values of its operands' shapes.

    is its backward the derivative of its forward?    gradients of both are compared
    along which dims may it be cut?                   for parts of indices: f(x[part]) = f(x)[part], gradients
                                                      likewise, and those of operands without the dim add up

In float64, on several draws: with zeros and ties, tiny and huge values, and one that is no number.
Operands of more than `MOST_ELEMENTS` elements are made shorter in their first dims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import TensorSpec
from autopar.torch_seams import pytree
from autopar.torch_seams.fakes import FakeTensor, FakeTensorMode, FunctionalTensor
from autopar.torch_seams.modes import TorchDispatchMode, without_functions, without_modes
from autopar.torch_seams.tensors import version_of
from autopar.trace.backwards.custom_operator import Run

MOST_ELEMENTS = 1 << 18  # of all operands: a draw takes about a millisecond then
FEWEST_ROWS = 4  # of a dim that is made shorter
_SCALES = (1.0, 30.0, 1e4, 1e-2, 1.0, 1.0, 1.0)  # of values in each draw
_GRADIENT_SCALES = (1.0, 1e8, 1e-8, 30.0, 1e15, 1.0, 1.0)
# What is special in a draw; values that are no numbers tell parts from wholes, and forwards from nothing.
_ZEROS, _NAN_GRADIENT, _POSITIVE, _INTEGERS, _NAN_VALUE = 1, 3, 4, 5, 6
_RELATIVE, _ABSOLUTE = 1e-9, 1e-11  # differences that are rounding; the latter of the largest value
_MOST_MATCHES = 12  # ways to match dims of operands with one of the results that are tried

Specs = Sequence[TensorSpec]
Split = tuple[dict[int, int], ...]  # for each operand: dims of results -> its own dim


class ForeignTensorError(RuntimeError):
    """A custom call computes with a tensor that is none of its operands."""


class WrittenOperandError(RuntimeError):
    """A custom call writes to an operand in place."""


@dataclass(frozen=True, slots=True)
class Behavior:
    """Behaviour of a call, observed in a first run.

    `operands` are those on which the call can be tried, None where it runs on these very shapes only.
    """

    results: tuple[TensorSpec, ...]
    reads_values: bool  # in Python
    draws: bool  # random numbers
    draws_backward: bool  # in its backward
    operands: tuple[TensorSpec, ...] | None


@contextmanager
def outside_of_trace() -> Iterator[None]:
    """Leave the trace: tensors have values, nothing is recorded, and the generators stay as they are.

    One thread does: these tensors are small, and others wait for a core if ranks share the machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            without_modes(),
            without_functions(),
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
        ):
            yield
    finally:
        torch.set_num_threads(threads)


def observe(run: Run, operands: Specs, numbers: Sequence[float]) -> Behavior:
    """Run a call once, forward and backward; raises what the user's code raises.

    Raises ForeignTensorError and WrittenOperandError.
    """
    shrunk = _shorter(operands)
    whole = shrunk == tuple(operands)
    leaves, state = _leaves(shrunk, 0, raised=False), torch.get_rng_state()
    watch = _Watch()
    try:
        with watch:
            results = run(leaves, numbers)
            drawn = torch.get_rng_state()
            _gradients(results, leaves, [torch.ones_like(item) for item in results if item.requires_grad])
    except Exception:  # the user's code raises anything
        if not watch.foreign and whole:
            raise
        if not watch.foreign:
            return Behavior(_shapes_of(run, operands, numbers), True, True, False, None)
    if watch.foreign:
        raise ForeignTensorError
    if any(version_of(leaf) for leaf in leaves):
        raise WrittenOperandError
    after = torch.get_rng_state()
    specs = _specs(results) if whole else _shapes_of(run, operands, numbers)
    return Behavior(
        specs,
        watch.reads_values,
        draws=not torch.equal(state, drawn),
        draws_backward=not torch.equal(drawn, after),
        operands=shrunk,
    )


def is_derivative(run: Run, forward: Run, operands: Specs, numbers: Sequence[float]) -> bool:
    """Whether the call's backward gives the gradients that autograd derives from `forward`, on random values
    and NaN."""
    for draw in range(_NAN_VALUE):
        try:
            ours = _Evaluation.of(run, _leaves(operands, draw), numbers, draw)
            theirs = _Evaluation.of(forward, _leaves(operands, draw), numbers, draw)
        except Exception:  # the user's code raises anything, for example in another dtype
            return False
        if not ours.equals(theirs):
            return False
    return True


def cuts(run: Run, operands: Specs, numbers: Sequence[float]) -> Split:
    """The dims of results along which parts need nothing of each other."""
    whole: Split = tuple({} for _ in operands)
    try:
        results = _Evaluation.of(run, _leaves(operands, 0), numbers, 0).values
    except Exception:  # the user's code raises anything, for example in another dtype
        return whole
    found: list[Split] = []
    for dim in range(min(item.dim() for item in results)):
        sizes = {item.shape[dim] for item in results}
        if len(sizes) == 1 and sizes.pop() > 1:
            matches = _matches(operands, results[0].shape, dim, found)
            found += [match for match in matches if _is_cut(run, operands, numbers, [match])][:1]
    if len(found) > 1 and not _is_cut(run, operands, numbers, found):
        del found[1:]
    return tuple(
        {key: dim for match in found for key, dim in match[place].items()} for place in range(len(whole))
    )


# -- one evaluation -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Evaluation:
    values: list[Tensor]
    gradients: list[Tensor]  # zeros where there is none
    learning: list[bool]

    @staticmethod
    def of(
        run: Run,
        leaves: Sequence[Tensor],
        numbers: Sequence[float],
        draw: int,
        part: Mapping[int, Tensor] | None = None,
        like: Sequence[Tensor] = (),
    ) -> _Evaluation:
        """On the gradients of results of draw `draw`, those of results `like` in their `part` by dims."""
        torch.default_generator.manual_seed(draw)
        results = run(leaves, numbers)
        learning = [item.requires_grad for item in results]
        wholes = [
            item for item, requires_grad in zip(like or results, learning, strict=True) if requires_grad
        ]
        seeds = [_seed(item, draw, place) for place, item in enumerate(wholes)]
        for dim, indices in (part or {}).items():
            seeds = [seed.index_select(dim, indices) for seed in seeds]
        return _Evaluation([item.detach() for item in results], _gradients(results, leaves, seeds), learning)

    def equals(self, other: _Evaluation) -> bool:
        pairs = zip((*self.values, *self.gradients), (*other.values, *other.gradients), strict=True)
        return self.learning == other.learning and all(_alike(*pair) for pair in pairs)


def _gradients(results: Sequence[Tensor], leaves: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor]:
    roots = [item for item in results if item.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not roots or not wanted:
        return [torch.zeros_like(leaf) for leaf in wanted]
    found = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    pairs = zip(wanted, found, strict=True)
    return [torch.zeros_like(leaf) if item is None else item.detach() for leaf, item in pairs]


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if not ours.is_floating_point() and not ours.is_complex():
        return torch.equal(ours, theirs)
    finite = theirs.abs().nan_to_num(0.0, 0.0, 0.0)
    largest = float(finite.max()) if theirs.numel() else 0.0
    return torch.allclose(ours, theirs, rtol=_RELATIVE, atol=_ABSOLUTE * largest, equal_nan=True)


# -- parts --------------------------------------------------------------------------------------


def _is_cut(run: Run, operands: Specs, numbers: Sequence[float], splits: Sequence[Split]) -> bool:
    """Whether parts along the dims of all `splits` at once are those of the whole."""
    for draw in range(len(_SCALES)):
        leaves = _leaves(operands, draw)
        whole = _Evaluation.of(run, leaves, numbers, draw)
        sums: dict[int, Tensor] = {}
        for part in _partition(splits, whole.values[0].shape, draw):
            try:
                mine = _Evaluation.of(run, _taken(leaves, splits, part), numbers, draw, part, whole.values)
            except Exception:  # the user's code raises anything: of other shapes here
                return False
            if not _is_part(mine, whole, leaves, splits, part, sums):
                return False
        if len(splits) == 1 and not all(_alike(sums[place], whole.gradients[place]) for place in sums):
            return False
    return True


def _partition(splits: Sequence[Split], shape: Sequence[int], draw: int) -> list[dict[int, Tensor]]:
    """Two parts of the indices of one dim, mixed; of several dims the first part of each."""
    dims = [_dim_of(split) for split in splits]
    torch.default_generator.manual_seed(draw)
    orders = {dim: torch.randperm(shape[dim]) for dim in dims}
    first = {dim: order[: max(1, len(order) // 3)].sort().values for dim, order in orders.items()}
    if len(dims) > 1:
        return [first]
    return [first, {dim: order[max(1, len(order) // 3) :] for dim, order in orders.items()}]


def _dim_of(split: Split) -> int:
    return next(dim for own in split for dim in own)


def _taken(leaves: Sequence[Tensor], splits: Sequence[Split], part: Mapping[int, Tensor]) -> list[Tensor]:
    parts = []
    for place, leaf in enumerate(leaves):
        taken = _cut(leaf.detach(), [split[place] for split in splits], part).clone()
        parts.append(taken.requires_grad_(leaf.requires_grad))
    return parts


def _cut(tensor: Tensor, dims: Sequence[Mapping[int, int]], part: Mapping[int, Tensor]) -> Tensor:
    for own in dims:
        for factor, dim in own.items():
            tensor = tensor.index_select(dim, part[factor])
    return tensor


def _is_part(
    mine: _Evaluation,
    whole: _Evaluation,
    leaves: Sequence[Tensor],
    splits: Sequence[Split],
    part: Mapping[int, Tensor],
    sums: dict[int, Tensor],
) -> bool:
    """Whether a part's results are that part of the whole's; adds gradients of operands that aren't cut to
    `sums`."""
    everywhere = [{dim: dim} for dim in part]
    pairs = zip(mine.values, whole.values, strict=True)
    if mine.learning != whole.learning or not all(
        _alike(ours, _cut(it, everywhere, part)) for ours, it in pairs
    ):
        return False
    wanted = [place for place, leaf in enumerate(leaves) if leaf.requires_grad]
    for number, place in enumerate(wanted):
        dims = [split[place] for split in splits]
        gradient = mine.gradients[number]
        if not all(dims):
            sums[number] = sums.get(number, torch.zeros_like(gradient)) + gradient
        elif not _alike(gradient, _cut(whole.gradients[number], dims, part)):
            return False
    return True


def _matches(operands: Specs, shape: Sequence[int], dim: int, taken: Sequence[Split]) -> Iterator[Split]:
    """Ways in which operands may have dim `dim` of the results, the likeliest first."""
    choices = []
    for place, spec in enumerate(operands):
        used = {own for split in taken for own in split[place].values()}
        aligned = dict.fromkeys((dim, len(spec.shape) - len(shape) + dim))
        fit = [own for own in aligned if 0 <= own < len(spec.shape) and own not in used]
        choices.append([*(own for own in fit if spec.shape[own] == shape[dim]), None])
    for match in itertools.islice(itertools.product(*choices), _MOST_MATCHES):
        if any(own is not None for own in match):
            yield tuple({} if own is None else {dim: own} for own in match)


# -- values -------------------------------------------------------------------------------------


def _leaves(operands: Specs, draw: int, *, raised: bool = True) -> list[Tensor]:
    """Operands of draw `draw`, in float64 where they are `raised`."""
    leaves = []
    for place, spec in enumerate(operands):
        generator = torch.Generator().manual_seed(1000 * draw + place)
        value = _value(spec, draw, generator)
        dtype = value.dtype if raised and spec.dtype.is_floating_point | spec.dtype.is_complex else spec.dtype
        leaves.append(value.to(dtype).requires_grad_(spec.requires_grad))
    return leaves


def _value(spec: TensorSpec, draw: int, generator: torch.Generator) -> Tensor:
    if not spec.dtype.is_floating_point and not spec.dtype.is_complex:
        return torch.randint(2, spec.shape, generator=generator)  # valid as rows, classes and masks
    dtype = torch.complex128 if spec.dtype.is_complex else torch.float64
    value = torch.randn(spec.shape, generator=generator, dtype=dtype) * _SCALES[draw]
    if draw == _ZEROS:
        return value * (torch.rand(spec.shape, generator=generator) > 0.25)
    if draw == _POSITIVE:
        return value.abs().to(dtype) + 0.1
    if draw == _INTEGERS and not dtype.is_complex:
        return value.mul(2).round()
    if draw == _NAN_VALUE:
        return _with_nan(value, generator)
    return value


def _seed(result: Tensor, draw: int, place: int) -> Tensor:
    """The gradient of a result of draw `draw`, some rows of it far larger than others. In one draw a single
    element is no number: whatever mixes gradients spreads that."""
    generator = torch.Generator().manual_seed(1000 * draw + 500 + place)
    value = torch.randn(result.shape, generator=generator, dtype=result.dtype) * _GRADIENT_SCALES[draw]
    if value.dim() and value.numel():
        value *= (10.0 ** torch.arange(-2, 3))[torch.arange(len(value)) % 5].view(
            -1, *[1] * (value.dim() - 1)
        )
    return _with_nan(value, generator) if draw == _NAN_GRADIENT else value


def _with_nan(value: Tensor, generator: torch.Generator) -> Tensor:
    """The tensor with one element that is no number."""
    if value.numel():
        value.view(-1)[int(torch.randint(value.numel(), (), generator=generator))] = torch.nan
    return value


def _shorter(operands: Specs) -> tuple[TensorSpec, ...]:
    """The operands with sizes made shorter, equal ones alike, until there are few elements enough."""
    sizes = {size: size for spec in operands for size in spec.shape}
    largest = max(operands, key=lambda spec: spec.numel)
    for number, size in enumerate(dict.fromkeys(largest.shape)):
        if sum(math.prod(sizes[item] for item in spec.shape) for spec in operands) <= MOST_ELEMENTS:
            break
        sizes[size] = min(size, FEWEST_ROWS + number)
    return tuple(replace(spec, shape=tuple(sizes[size] for size in spec.shape)) for spec in operands)


def _shapes_of(run: Run, operands: Specs, numbers: Sequence[float]) -> tuple[TensorSpec, ...]:
    with FakeTensorMode():
        return _specs(
            run(
                [
                    torch.empty(spec.shape, dtype=spec.dtype).requires_grad_(spec.requires_grad)
                    for spec in operands
                ],
                numbers,
            )
        )


def _specs(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tuple(item.shape), item.dtype, item.requires_grad) for item in tensors)


class _Watch(TorchDispatchMode):
    """Notices what a call computes with: tensors of the trace are none of its operands."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.foreign = self.reads_values = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = pytree.tree_leaves((args, kwargs or {}))
        self.foreign |= any(isinstance(item, (FakeTensor, FunctionalTensor)) for item in tensors)
        self.reads_values |= func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
