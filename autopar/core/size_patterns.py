"""Calls that differ by the sizes of their operands alone, of which one tells what all give.

    linear(f32[64,1024], f32[512,1024])    ->    linear(f32[a,b], f32[c,b]),  a, b, c = 64, 1024, 512

Results are looked at for two choices of sizes, small primes and large ones, which have no number in common
and opposite orders. A dim that is the size a in both is a at all sizes; one that is the same number in both
is that number. Anything else, a sum or a product of sizes, makes the call one of its own. So does a whole
number among the arguments, which could be a size, too. Sizes of 1 are broadcast, and those of 0 are empty:
they are part of the pattern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from autopar.core.graph import Call, TensorSpec, Tree

SMALL = (3, 5, 7, 11, 13, 17, 19, 23)
LARGE = (1031, 1021, 1019, 1013, 1009, 997, 991, 983)
PROBES = (SMALL, LARGE)

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SizePattern:
    """A call without its sizes: `key` is equal for calls that differ by them alone; `sizes` are those that
    differ, each once."""

    call: Call
    key: str
    sizes: tuple[int, ...]

    def probes(self) -> tuple[Call, Call]:
        """The call at small sizes and at large ones."""
        small, large = (_with_sizes(self.call, dict(zip(self.sizes, each, strict=False))) for each in PROBES)
        return small, large


def pattern_of(call: Call) -> SizePattern | None:
    """The pattern of a call; None if it has a whole number among its arguments, or too many sizes."""
    numbers: dict[int, str] = {}
    if not _is_free(call.args, numbers) or not _is_free(call.kwargs, numbers):
        return None
    if not numbers or len(numbers) > len(SMALL):
        return None
    return SizePattern(call, _with_sizes(call, numbers).key(), tuple(numbers))


def _is_free(tree: Tree, numbers: dict[int, str]) -> bool:
    """Whether no leaf is a whole number or a sparse operand; sizes are noted, each by a letter."""
    match tree:
        case TensorSpec():
            for size in tree.shape:
                if size > 1:
                    numbers.setdefault(size, chr(ord("a") + len(numbers)))
            return tree.layout is torch.strided
        case tuple() | list():
            return all(_is_free(item, numbers) for item in tree)
        case dict():
            return all(_is_free(item, numbers) for item in tree.values())
        case _:
            return isinstance(tree, bool) or not isinstance(tree, int)


def _with_sizes(call: Call, sizes: Mapping[int, Any]) -> Call:
    """The call with other sizes, or letters, in place of its own."""

    def resized(tree: Tree) -> Tree:
        match tree:
            case TensorSpec():
                return replace(tree, shape=tuple(sizes.get(size, size) for size in tree.shape))
            case tuple() | list():
                return type(tree)(map(resized, tree))
            case dict():
                return {name: resized(item) for name, item in tree.items()}
            case _:
                return tree

    return Call(call.target, resized(call.args), resized(call.kwargs))


@dataclass(frozen=True, slots=True)
class ResultShapes:
    """The shapes of a pattern's results: each dim a number, or which of the pattern's sizes it is."""

    dims: tuple[tuple[tuple[bool, int], ...], ...]

    def at(self, sizes: Sequence[int]) -> tuple[Shape, ...]:
        return tuple(
            tuple(sizes[number] if is_size else number for is_size, number in shape) for shape in self.dims
        )


def result_shapes(small: Sequence[Shape], large: Sequence[Shape]) -> ResultShapes | None:
    """The shapes at all sizes of results that have these at the two probes; None if they don't tell."""
    if list(map(len, small)) != list(map(len, large)):
        return None
    pairs = [list(zip(*shapes, strict=True)) for shapes in zip(small, large, strict=True)]
    known = {pair: (True, number) for number, pair in enumerate(zip(*PROBES, strict=True))}
    found = [
        [known.get(pair, (False, pair[0]) if pair[0] == pair[1] else None) for pair in each] for each in pairs
    ]
    if any(dim is None for shape in found for dim in shape):
        return None
    return ResultShapes(tuple(tuple(dim for dim in shape if dim is not None) for shape in found))
