"""Sums of products in Einstein's notation.

bixy, ioxy -> boxy      b: samples, o: filter, i: channel parallelism, x and y: space
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from string import ascii_letters

import torch

from autopar.core.operator_facts import declare
from autopar.sharding.equation import Equation, Kind
from autopar.sharding.rule import Instance, Rule, Sample, register

aten = torch.ops.aten

Letters = tuple[str, ...]
_DIMS = ("dims_self", "dims_other")


@register
class Einsum(Rule):
    """Each letter is a factor, contracted where the result lacks it; one that a term has twice is its
    diagonal and stays whole. A dim of length 1 that others stretch has no factor."""

    targets = (aten.einsum.default,)

    def equation(self, op: Instance) -> Equation:
        shapes = [op.shape(place) for place in range(len(op.operands))]
        terms, result = read(op["equation"], [len(shape) for shape in shapes])
        sizes: dict[str, int] = {}
        for term, shape in zip(terms, shapes, strict=True):
            for letter, size in zip(term, shape, strict=True):
                sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
        kinds = {letter: Kind.CONTRACTED for letter in sizes if letter not in result}
        for term in terms:
            kinds |= {letter: Kind.WHOLE for letter in term if term.count(letter) > 1}
        labels = [
            tuple(letter if size == sizes[letter] else None for letter, size in zip(term, shape, strict=True))
            for term, shape in zip(terms, shapes, strict=True)
        ]
        return Equation(tuple(labels), (tuple(result),), kinds)

    def samples(self) -> Iterable[Sample]:
        x, w = torch.randn(5, 3, 4, 6), torch.randn(3, 7, 4, 6)
        yield Sample(aten.einsum.default, ("bixy,ioxy->boxy", [x, w]))
        yield Sample(aten.einsum.default, ("bixy,ioxy->boxy", [x.to(torch.cfloat), w.to(torch.cfloat)]))
        yield Sample(aten.einsum.default, ("b h i d, b h j d -> b h i j", [x, torch.randn(5, 3, 5, 6)]))
        yield Sample(aten.einsum.default, ("...ij,...jk->...ik", [x, torch.randn(1, 6, 5)]))
        yield Sample(aten.einsum.default, ("ba,cb", [torch.randn(4, 5), torch.randn(6, 4)]))
        yield Sample(aten.einsum.default, ("ij,i->", [torch.randn(4, 5), torch.randn(1)]))
        yield Sample(aten.einsum.default, ("iij,j->i", [torch.randn(4, 4, 5), torch.randn(5)]))


@register
class TensorDot(Rule):
    """Sums of products over pairs of dims: i j, k j -> i k."""

    targets = (aten.tensordot.default,)

    def equation(self, op: Instance) -> Equation:
        ours, theirs = ([op.dim(dim, place) for dim in op[name]] for place, name in enumerate(_DIMS))
        pairs = list(zip(ours, theirs, strict=True))
        same = [op.shape()[one] == op.shape(1)[other] for one, other in pairs]  # else one of length 1
        first: list[str | None] = [f"a{dim}" for dim in range(len(op.shape()))]
        second: list[str | None] = [f"b{dim}" for dim in range(len(op.shape(1)))]
        result = [label for dim, label in enumerate(first) if dim not in ours]
        result += [label for dim, label in enumerate(second) if dim not in theirs]
        for number, ((one, other), alike) in enumerate(zip(pairs, same, strict=True)):
            first[one] = second[other] = f"c{number}" if alike else None
        kinds = {f"c{number}": Kind.CONTRACTED for number, alike in enumerate(same) if alike}
        return Equation((tuple(first), tuple(second)), (tuple(result),), kinds)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(5, 3, 4)
        yield Sample(aten.tensordot.default, (x, torch.randn(4, 6), [-1], [0]))
        yield Sample(aten.tensordot.default, (x, torch.randn(7, 4, 3), [1, 2], [2, 1]))
        yield Sample(aten.tensordot.default, (x, torch.randn(6, 1), [2], [1]))
        yield Sample(aten.tensordot.default, (x, torch.randn(2), [], []))


def read(equation: str, ranks: Sequence[int]) -> tuple[list[Letters], Letters]:
    """The letters of each term's dims and of the result's, of terms with so many dims; those of an
    ellipsis are numbers, counted from its right. Without an arrow the result has the letters that occur
    once, in alphabetical order.

    Source: the documentation of torch.einsum.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    hidden = [rank - len(text.replace("...", "")) for text, rank in zip(texts, ranks, strict=True)]

    def letters(text: str, hidden: int) -> Letters:
        before, dots, after = text.partition("...")
        return (*before, *(map(str, reversed(range(hidden))) if dots else ()), *after)

    terms = [letters(*each) for each in zip(texts, hidden, strict=True)]
    if not arrow:
        right = "..." + "".join(letter for letter in sorted(ascii_letters) if left.count(letter) == 1)
    return terms, letters(right, max(hidden))


declare(aten.einsum, aten.tensordot, sum_of=2)
declare(aten.tensordot, casts_inside=True)
